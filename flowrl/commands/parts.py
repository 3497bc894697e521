"""`flowrl explain` and `flowrl parts`."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from flowrl.errors import FlowrlError, require
from flowrl.registry import KINDS, available, build, options_of, summary_of

OPTIONS = {"features": "diversity"}
"""Kinds of parts whose option of `flowrl train` has another name."""


@dataclass(frozen=True)
class Explain:
    """Show what a credit rule does with a reward table: gains, turning points and advantages, as a table and a figure.

    Example: flowrl explain turning-point "turning-point(consistent=False)" --rewards table.csv
    """

    rules: tyro.conf.Positional[tuple[str, ...]] = ("turning-point",)
    """Rules: NAME, NAME(option=value) or path/to/file.py:Class; `flowrl parts` lists names."""
    rewards: Path | None = None
    """CSV: one line per trajectory, one column per node; optional columns prompt and member. Default: a small example."""
    sampler: str = "flow-sde"
    """Kernel whose stds a rule sees that depends on the noise."""
    noise_level: float = 0.7
    out: Path = Path("explain.png")
    """The figure to write; with several rules or prompts, numbers are added to its name."""

    def main(self) -> int:
        """Assign, print, draw."""
        from flowrl.diagnostics.explain import EXAMPLE, explain, parse_rewards, read_rewards
        from flowrl.plots.figures import explanation
        from flowrl.plots.style import save
        from flowrl.training.build import even_schedule

        table = read_rewards(self.rewards) if self.rewards else parse_rewards(EXAMPLE)
        schedule = even_schedule(table.rewards.shape[-1] - 1, self.sampler, self.noise_level, "all")
        shown = [explain(build("credit", spec), table, schedule, spec) for spec in self.rules]
        several = len(shown) * len(table.prompts) > 1
        for number, (one, prompt) in enumerate((s, p) for s in shown for p in range(len(table.prompts))):
            if prompt == 0:
                print(one)
            name = f"{self.out.stem}-{number + 1}{self.out.suffix}" if several else self.out.name
            save(explanation(one, prompt), self.out.with_name(name))
            print(f"Wrote {self.out.with_name(name)}")
        return 0


@dataclass(frozen=True)
class Parts:
    """List the credit rules, samplers, losses, rewards and features that can be named, with their options, plug-ins included."""

    kind: str = ""
    """credit, sampler, loss, reward or features; default all."""

    def main(self) -> int:
        """Print one line per part, its options below it."""
        require(self.kind in ("", *KINDS), "kind", self.kind, f"one of {', '.join(KINDS)}")
        for kind in (self.kind,) if self.kind else KINDS:
            print(f"{kind} (--{OPTIONS.get(kind, kind)})")
            for name, origin in sorted(available(kind).items()):
                title = f"  {name}{'' if origin == 'flowrl' else f'  [{origin}]'}"
                try:
                    summary, choices = summary_of(kind, name), options_of(kind, name)
                except FlowrlError as error:
                    print(f"{title}: unusable, {error}")
                    continue
                print(f"{title}: {summary}")
                if choices:
                    print(f"      {', '.join(f'{n}={_shown(v)}' for n, v in choices.items())}")
            if not available(kind):
                print("  none by name: a task brings its own, and a plug-in or path/to/file.py:Class replaces it")
        return 0


def _shown(value: Any) -> str:
    return "..." if value is inspect.Parameter.empty else repr(value)
