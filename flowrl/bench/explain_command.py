"""`flowrl explain`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from flowrl.core.errors import require


@dataclass(frozen=True)
class Explain:
    """Show what a credit rule does with a value table: gains, turning points and advantages, as a
    table and a figure.

    Example: flowrl explain turning-point "turning-point(consistent=False)" --rewards table.csv
    """

    rules: tyro.conf.Positional[tuple[str, ...]] = ("turning-point",)
    """Rules: NAME, NAME(option=value) or path/to/file.py:Class; `flowrl parts` lists names."""
    rewards: Path | None = None
    """CSV: one line per trajectory with the columns value_0, value_1, ... (the value before each
    decision) and reward; optional columns prompt and member. Default: a small example.
    """
    decisions: tuple[int, ...] = ()
    """Stochastic steps, for a table with one column per node, node_0 to node_T: only the nodes
    where these steps start and the last node are used.
    """
    sampler: str = "flow-sde"
    """Sampler whose standard deviations are used by rules that depend on the noise, such as
    `weighted`.
    """
    noise_level: float = 0.7
    """Noise level of this sampler."""
    out: Path = Path("runs/explain.png")
    """The figure to write, or a folder for it; with several rules or prompts, numbers are appended
    to its name.
    """

    def main(self) -> int:
        """Assign, print, draw."""
        from flowrl.bench.explain import EXAMPLE, explain, parse_rewards, read_rewards
        from flowrl.bench.explain_figure import explanation
        from flowrl.core.experience import Decisions
        from flowrl.flow import uniform_schedule
        from flowrl.run.parts.registry import build
        from flowrl.run.report.style import require_figure, save
        from flowrl.samplers import transition_stds

        table = (
            read_rewards(self.rewards, self.decisions) if self.rewards else parse_rewards(EXAMPLE)
        )
        columns = table.values.shape[-1]
        if not table.header and not self.decisions:
            print(f"{columns} columns read as {columns - 1} decisions")

        def with_sampler(spec: str, noise_level: float) -> list[Any]:
            sampler = build("sampler", spec, noise_level=noise_level)
            stds = transition_stds(sampler, uniform_schedule(columns - 1))
            decisions = Decisions.like(table.values, stds.tolist())
            return [explain(build("credit", spec), table, decisions, spec) for spec in self.rules]

        usual = (Explain.sampler, Explain.noise_level)
        shown = with_sampler(self.sampler, self.noise_level)
        if (self.sampler, self.noise_level) != usual:
            acts = list(map(str, shown)) != list(map(str, with_sampler(*usual)))
            name = "sampler" if self.sampler != usual[0] else "noise_level"
            require(acts, name, getattr(self, name), "left out: these rules do not read the noise")
        parts = [(rule, prompt) for rule in shown for prompt in range(len(table.prompts))]
        first = (
            self.out / "explain.png" if os.path.isdir(self.out) or not self.out.suffix else self.out
        )
        numbered = [first.with_stem(f"{first.stem}-{number + 1}") for number in range(len(parts))]
        paths = numbered if len(parts) > 1 else [first]
        for path in paths:
            require_figure(path)
        first.parent.resolve().mkdir(parents=True, exist_ok=True)
        for (one, prompt), path in zip(parts, paths, strict=True):
            if prompt == 0:
                print(one)
            save(explanation(one, prompt), path)
            print(f"Wrote {path}")
        return 0
