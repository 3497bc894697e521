"""The command line: `flowrl compare`, `train`, `pretrain`, `sample`, `explain`, `parts`."""

import ast
import dataclasses
import inspect
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from flowrl.errors import ConfigError, FlowrlError, require
from flowrl.registry import KINDS, available, build, options_of, summary_of
from flowrl.training.config import PRESETS, RunConfig, load_config, preset

if TYPE_CHECKING:
    from flowrl.training.compare import CompareConfig


def _field_help() -> dict[str, str]:
    """The docstring under each field of `RunConfig`, so that the help says what the class says."""
    tree = ast.parse(inspect.getsource(RunConfig)).body[0]
    assert isinstance(tree, ast.ClassDef)
    helps: dict[str, str] = {}
    for item, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr):
            if isinstance(following.value, ast.Constant):
                helps[item.target.id] = str(following.value.value)
    return helps


def _settings_class(name: str, leave_out: tuple[str, ...]) -> type[Any]:
    """The fields of `RunConfig` as options that default to the preset's value."""
    helps = _field_help()
    columns = []
    for item in dataclasses.fields(RunConfig):
        if item.name not in leave_out:
            text = helps.get(item.name, item.name.replace("_", " ").capitalize() + ".")
            kind: Any = item.type
            shown = tyro.conf.arg(help=text, metavar=kind.__name__.upper(), help_behavior_hint=f"(default: {item.default})")
            columns.append((item.name, Annotated[kind | None, shown], None))
    return dataclasses.make_dataclass(name, columns, frozen=True)


TrainSettings = _settings_class("TrainSettings", ())
CompareSettings = _settings_class("CompareSettings", ("method", "credit", "seed"))


def _changes(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}


def _preset_names() -> str:
    return ", ".join(PRESETS)


@dataclass(frozen=True)
class Compare:
    """Compare credit rules on a built-in world: train every method with every seed, print a table, write report.html.

    Example: flowrl compare --task text --seeds 0 1 --credit my_rules.py:MyRule --out runs/mine
    """

    methods: tuple[str, ...] = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
    """Built-in methods: flow-grpo, stepwise-flow-grpo, tp-grpo, dance-grpo, noise-weighted, dense-grpo. The first is the
    baseline."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run per method and seed."""
    credit: tuple[str, ...] = ()
    """Credit rules to add: path/to/file.py:Class, NAME or NAME(option=value); `flowrl parts` lists names."""
    preset: str = "default"
    """default (about five minutes on 2 cores), long (about 15 minutes per method) or tiny (seconds, for a first look)."""
    out: Path | None = None
    """Folder for the results; default runs/compare-DATE."""
    resume: Path | None = None
    """Go on with the comparison in this folder (other options are then ignored)."""
    config: Path | None = None
    """Repeat a comparison from its saved config.json (other options but --out are then ignored)."""
    workers: int = 0
    """Runs at a time; 0 = one per core. Every run uses one thread, so the numbers do not depend on this."""
    run: Annotated[CompareSettings, tyro.conf.arg(name="")] = field(default_factory=CompareSettings)  # pyright: ignore[reportInvalidTypeForm]

    def configuration(self) -> "CompareConfig":
        """The comparison that these options describe."""
        from flowrl.training.compare import CompareConfig

        if self.config is not None:
            return dataclasses.replace(CompareConfig.from_dict(load_config(self.config)), command=_command())
        run = preset(self.preset).apply(**_changes(self.run))
        return CompareConfig(run, self.methods, self.seeds, self.credit, self.preset, _command())

    def main(self) -> int:
        """Run, show, report."""
        from flowrl.training.compare import compare, load_compare

        require(self.workers >= 0, "workers", self.workers, "0 or more")
        out = self.resume or self.out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        config = load_compare(out) if self.resume else self.configuration()
        config.jobs()
        from flowrl.display import Display

        display = Display(config)
        display.start(out)
        finished = display.during(lambda: compare(config, out, self.resume is not None, self.workers, display.watch))
        if not finished:
            display.say(f"Paused; nothing is lost. Go on with: flowrl compare --resume {shlex.quote(str(out))}")
            return 130
        display.finish(out)
        return 0


@dataclass(frozen=True)
class Train:
    """Train one method with one seed. Example: flowrl train --method tp-grpo --task text --iterations 40"""

    preset: str = "default"
    """default, long or tiny."""
    out: Path | None = None
    """Folder for the run; default runs/train-DATE."""
    resume: Path | None = None
    """Go on with the run in this folder."""
    config: Path | None = None
    """Repeat a run from its saved config.json."""
    run: Annotated[TrainSettings, tyro.conf.arg(name="")] = field(default_factory=TrainSettings)  # pyright: ignore[reportInvalidTypeForm]

    def main(self) -> int:
        """Train, printing every evaluation."""
        import torch

        from flowrl.display import train_line
        from flowrl.training.run import Run

        out = self.resume or self.out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
        if self.resume or self.config:
            config = RunConfig.from_dict(load_config(self.config or out / "config.json"))
        else:
            config = preset(self.preset).apply(**_changes(self.run))
        config.make_method()
        torch.set_num_threads(1)
        asked = False

        def ask(*_: object) -> None:
            nonlocal asked
            asked = True
            print("Stopping after this iteration ...", flush=True)

        previous = signal.signal(signal.SIGINT, ask)
        try:
            print(f"{config.method} on {config.world}/{config.task}, seed {config.seed} -> {out}", flush=True)
            finished = Run(config, out, train_line(out), lambda: asked).execute(self.resume is not None)
        finally:
            signal.signal(signal.SIGINT, previous)
        if not finished:
            print(f"Paused; nothing is lost. Go on with: flowrl train --resume {shlex.quote(str(out))}")
            return 130
        print(f"Done. Weights and metrics in {out}; see its pictures with: flowrl sample --weights {shlex.quote(str(out))}")
        return 0


@dataclass(frozen=True)
class Pretrain:
    """Make the built-in weights of the shapes world again (about 50 minutes; one core is enough)."""

    out: Path = Path("shapes.safetensors")
    """Where to write the weights; a card with their hash is written beside them."""
    updates: int | None = None
    """Optimiser steps of the base model [default: those of the weights that ship]."""
    seed: int = 0
    threads: int = 1
    """Threads; the weights depend on it in the last digits, and the ones that ship were made with one."""

    def main(self) -> int:
        """Train the autoencoder and the base model; write weights and card."""
        from flowrl.training.pretrain import PretrainConfig, pretrain_to_file

        changes = {} if self.updates is None else {"updates": self.updates}
        config = PretrainConfig(seed=self.seed, **changes)
        require(self.threads >= 1, "threads", self.threads, "1 or more")
        from flowrl.display import pretrain_progress

        pretrain_to_file(config, self.out, self.threads, pretrain_progress(), _command())
        print(f"Wrote {self.out} and {self.out.with_suffix('.json')}; use them with --weights {self.out}")
        return 0


@dataclass(frozen=True)
class Sample:
    """Draw pictures for prompts from the base model, or from a finished run, as one PNG grid.

    Example: flowrl sample --prompts "three red circles" 'text "K72"' --weights runs/mine/runs/flow-grpo-seed0
    """

    prompts: tuple[str, ...] = (
        "three red circles",
        "blue square left of green triangle",
        'text "K72"',
        "lively red and blue pattern",
    )
    """Prompts in the world's language."""
    weights: Path | None = None
    """Folder of a finished run; without it, the base model."""
    out: Path = Path("samples.png")
    """The picture to write."""
    world: str = "shapes"
    """The world of the base model."""
    count: int = 8
    """Pictures per prompt."""
    steps: int = 20
    """ODE steps."""
    seed: int = 0

    def main(self) -> int:
        """Sample and draw."""
        from flowrl.training.sampling import sample_grid

        require(self.count >= 1, "count", self.count, "1 or more")
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(len(self.prompts) >= 1, "prompts", self.prompts, "one or more prompts")
        grid = sample_grid(self.prompts, self.weights, self.world, self.count, self.steps, self.seed)
        from flowrl.plots.grid import save_grid

        save_grid(grid, self.out)
        print(f"Wrote {self.out}: {len(self.prompts)} prompts x {self.count} pictures")
        return 0


@dataclass(frozen=True)
class Explain:
    """Show what a credit rule does with a reward table: gains, turning points and advantages, as a table and a picture.

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
    """The picture to write; with several rules or prompts, numbers are added to its name."""

    def main(self) -> int:
        """Assign, print, draw."""
        from flowrl.diagnostics.explain import EXAMPLE, explain, parse_rewards, read_rewards
        from flowrl.plots.explain import explanation
        from flowrl.training.config import even_schedule

        table = read_rewards(self.rewards) if self.rewards else parse_rewards(EXAMPLE)
        schedule = even_schedule(table.rewards.shape[-1] - 1, self.sampler, self.noise_level, "all")
        shown = [explain(build("credit", spec), table, schedule, spec) for spec in self.rules]
        several = len(shown) * len(table.prompts) > 1
        for number, (one, prompt) in enumerate((s, p) for s in shown for p in range(len(table.prompts))):
            if prompt == 0:
                print(one)
            name = f"{self.out.stem}-{number + 1}{self.out.suffix}" if several else self.out.name
            explanation(one, prompt).savefig(self.out.with_name(name), dpi=150)
            print(f"Wrote {self.out.with_name(name)}")
        return 0


@dataclass(frozen=True)
class Parts:
    """List the credit rules, samplers, losses and rewards that can be named, with their options, plug-ins included."""

    kind: str = ""
    """credit, sampler, loss or reward; default all."""

    def main(self) -> int:
        """Print one line per part, its options below it."""
        require(self.kind in ("", *KINDS), "kind", self.kind, f"one of {', '.join(KINDS)}")
        for kind in (self.kind,) if self.kind else KINDS:
            print(f"{kind} (--{kind})")
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


def _command() -> str:
    """The command line as typed, for the record."""
    return shlex.join(["flowrl", *sys.argv[1:]])


COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": Compare,
    "train": Train,
    "pretrain": Pretrain,
    "sample": Sample,
    "explain": Explain,
    "parts": Parts,
}

DESCRIPTION = (
    "Reinforcement learning for flow-matching image models: compare credit rules (Flow-GRPO, Stepwise-Flow-GRPO, TP-GRPO, "
    "or your own) on a laptop. Start with `flowrl compare`; every command explains itself with --help."
)


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Errors of the user's making print one line and return 2; Ctrl-C returns 130."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="flowrl",
            description=DESCRIPTION,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        return command.main()
    except FlowrlError as error:
        print(f"flowrl: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("flowrl: interrupted", file=sys.stderr)
        return 130


def entry() -> None:
    """Console script."""
    sys.exit(main())


__all__ = ["ConfigError", "entry", "main"]
