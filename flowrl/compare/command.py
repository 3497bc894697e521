"""`flowrl compare`."""

import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from flowrl.cli.options import (
    Base,
    base_of,
    changes,
    named_file,
    options_class,
    options_with,
    refuse_options,
    refuse_settings,
    resumed_file,
    typed_command,
)
from flowrl.core.errors import require
from flowrl.core.options import Workers
from flowrl.run.config import TRACKER, RunConfig
from flowrl.run.parts.trust import trust_option
from flowrl.run.presets import method_overrides, require_method, tuned
from flowrl.run.signals import ignore_stops, on_stop

if TYPE_CHECKING:
    from flowrl.compare.comparison import CompareConfig


PAPERS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
"""The methods of a comparison for which no arm is given."""
CompareOptions = options_class("CompareOptions", ("method", "credit", "seed", *TRACKER))


def _interrupt(_: int) -> None:
    """Raise `KeyboardInterrupt` once; a launcher or an impatient user may send more signals."""
    ignore_stops()
    raise KeyboardInterrupt


@dataclass(frozen=True)
class Compare:
    """Compare credit rules: train every method with every seed, write a report.

    An arm of the comparison is a method or any other difference in settings.

    Example: flowrl compare --task text --seeds 0 1 --arm "base:" --arm "gspo: loss=my_loss.py:GSPO,
    clip_range=0.1"
    """

    methods: tuple[str, ...] = PAPERS
    """Methods, each an arm: flow-grpo, stepwise-flow-grpo, tp-grpo, dance-grpo, noise-weighted,
    dense-grpo, branch-grpo, tempflow-grpo, granular-grpo, tree-grpo, diffusion-nft, awm, dgpo,
    v-grpo, epg, fdfo, rsm, step-nft, value-grpo. The first arm of all is the baseline. With `arm`
    or `arms`, the default is none.
    """
    arm: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An arm as "NAME: setting=value, ..."; can be repeated. The settings are the options below,
    `method` and `credit`, with underscores; "NAME:" has no difference.
    """
    arms: Path | None = None
    """A YAML file with further arms: below "arms:", lines of "NAME: {setting: value}"."""
    credit: tuple[str, ...] = ()
    """Credit rules, each an arm after the others: path/to/file.py:Class, NAME or
    NAME(option=value), as `flowrl parts` lists.
    """
    seeds: tuple[str, ...] = ("0-2",)
    """One run per arm and seed, as in 0 1 2 or 0-2."""
    bound: bool = False
    """Add an oracle, which knows the exact value of every state (2-D world; half a minute a seed).
    The report has a shipped curve for the default settings.
    """
    equal_cost: bool = False
    """Train every arm for as many iterations as need the network evaluations of the baseline's run
    (sampling, probes and update).
    """
    preset: str = "default"
    """default (two to five minutes on 2 cores), long (about 15 minutes per method) or tiny
    (seconds, for a first look).
    """
    settings: Literal["tuned", "published", "world"] | None = None
    """Settings that are not given. tuned: found for each method in the built-in worlds with the
    same number of runs (`flowrl bench tune`), the default of the preset default there; published:
    each method's window and clip, scaled to the elements of the world's latents; world: the same
    for all methods.
    """
    out: Path | None = None
    """Folder for the results; default runs/compare-DATE."""
    resume: Path | None = None
    """Resume the comparison in this folder, which has arms and settings."""
    config: Path | None = None
    """Repeat a comparison from its saved config.json, which has arms and settings."""
    weights: tuple[str, ...] = ()
    """Compare these weights on the same prompts and noise, without training: as `flowrl evaluate
    --weights`, which has further options.
    """
    workers: Workers = 0
    """Runs at a time, 0 = one per core, or the scheduler of a Dask cluster (tcp://HOST:PORT or its
    file, docs/guides/cluster.md). Every run uses one thread, so the numbers do not depend on this.
    """
    trust: bool = False
    """Run code that the file of `resume`, `config`, `preset` or `arms` names, and use its addresses
    and keys.
    """
    changed_code: bool = False
    """With `resume`: go on although the files of your own parts have changed since the start."""
    trial: bool = True
    """Try your own parts before the first iteration, for at most 5 s (docs/guides/extend.md)."""
    run: Annotated[CompareOptions, tyro.conf.arg(name="")] = field(  # pyright: ignore
        default_factory=CompareOptions
    )
    base: Base = field(default_factory=RunConfig)

    @staticmethod
    def defaults(arguments: Sequence[str]) -> "Compare":
        """The options start from the settings of the chosen preset and world, or from those of the
        comparison that is resumed or repeated.
        """
        given = any(text.partition("=")[0] in ("--arm", "--arms") for text in arguments)
        if file := named_file(arguments, "arms"):
            from flowrl.compare.comparison import load_compare

            base = load_compare(file, "--trust" in arguments).run
        else:
            base = base_of(arguments)
        return Compare(() if given else PAPERS, run=options_with(CompareOptions, base), base=base)

    def configuration(self, grid: str = "") -> "CompareConfig":
        """The comparison that these options and the `grid` of a sweep describe."""
        from flowrl.compare.arms import (
            credit_arms,
            grid_arms,
            load_arms,
            method_arms,
            parse_arm,
            parse_grid,
            parse_seeds,
            require_apart,
            together,
        )
        from flowrl.compare.bounds import ARM, bound_settings
        from flowrl.compare.comparison import CompareConfig, load_compare
        from flowrl.compare.tuned import tuned_arms
        from flowrl.methods import METHODS

        if self.config is not None:
            refuse_settings(self, "config")
            refuse_options(self, "config", ("out", "workers", "trust", "trial"))
            loaded = load_compare(self.config, self.trust)
            return dataclasses.replace(loaded, run=self.base, command=typed_command())
        for name in self.methods:
            require(name in METHODS, "methods", name, ", ".join(METHODS))
        base, usual = self.base, self.base.typed()
        chosen = changes(self.run, base)
        run = base.replace(**chosen)
        file = load_arms(self.arms, self.trust) if self.arms else {}
        arms = map(parse_arm, self.arm)
        given = together(method_arms(self.methods), *arms, file, credit_arms(self.credit))
        values = parse_grid(grid) if grid else {}
        require_apart({"the command": chosen, **given}, values)
        usual_run = self.preset == "default" and base.environment.world in tuned()
        if self.settings == "tuned" or (self.settings is None and usual_run):
            require(
                usual_run, "settings", "tuned", f"with --preset default in {', '.join(tuned())}"
            )
            given, untuned = tuned_arms(run, given, chosen)
            if untuned:
                print(f"Note: not tuned here, with the settings of flow-grpo: {', '.join(untuned)}")
        for arm, settings in given.items():
            if isinstance(method := settings.get("method"), str):
                if "credit" not in settings:
                    require_method(self.preset, method)
                # what the preset needs for this method, unless an option gives another value
                needed = method_overrides(
                    self.preset, base.environment.world, method, self.settings == "published"
                )
                needed = {n: v for n, v in needed.items() if n not in chosen and v != usual[n]}
                given[arm] = {**needed, **settings}
        given, points = grid_arms(given, values) if grid else (given, {})
        if self.bound:
            given = together(given, {ARM: bound_settings(str(base.environment.world), chosen)})
        seeds = parse_seeds(self.seeds)
        compared = CompareConfig(run, given, seeds, self.preset, typed_command(), points)
        for text in compared.require_read(chosen):
            print(f"Note: {text}")
        return compared.equal_cost() if self.equal_cost else compared

    def main(self, grid: str = "") -> int:
        """Run, show, report; with the `grid` of a sweep."""
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # runs have one thread
        from flowrl.compare.comparison import compare, load_compare, require_free
        from flowrl.compare.progress import Display
        from flowrl.policies import device_of
        from flowrl.run.io import disk_errors

        if self.weights:
            from flowrl.cli.evaluate import Evaluate

            require(not grid, "weights", self.weights, "left out in a sweep")
            refuse_settings(self, "weights")
            refuse_options(self, "weights", ("out", "trust"))
            return Evaluate(self.weights, trust=self.trust, out=self.out).main()
        if self.resume is not None:
            refuse_settings(self, "resume")
            refuse_options(self, "resume", ("workers", "trust", "changed_code", "trial"))
        name = f"{'sweep' if grid else 'compare'}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = self.resume or self.out or Path("runs") / name
        if self.resume:
            loaded = load_compare(resumed_file(out, "arms"), self.trust)
            config = dataclasses.replace(loaded, run=self.base)
        else:
            config = self.configuration(grid)
        runs = config.jobs().values()
        for device in {run.policy.device for run in runs}:
            device_of(device)
        if self.resume is None:
            require_free(out)

        def again() -> str:
            """The command that goes on."""
            words = "".join({trust_option(run.flat()) for run in runs})
            if isinstance(self.workers, str):
                words += f" --workers {shlex.quote(self.workers)}"
            name = "sweep" if config.points else "compare"
            return f"flowrl {name} --resume {shlex.quote(str(out))}{words}"

        display = Display(config, out)
        work = partial(
            compare,
            config,
            out,
            self.resume is not None,
            self.workers,
            display.watch,
            changed_code=self.changed_code,
            trial=self.trial,
        )
        with on_stop(_interrupt), disk_errors(out, again):
            try:
                display.start()
                if display.during(work):
                    last = display.finish()
                    ignore_stops()
                    display.say(last)
                    return 0
            except KeyboardInterrupt:
                pass  # also after the last run: the report is drawn again
            ignore_stops()
            started = (out / "config.json").exists()
            resume = f"Paused; nothing is lost. Continue with: {again()}"
            display.say(resume if started else "Stopped before the first run; nothing was written.")
            return 130


@dataclass(frozen=True)
class Sweep:
    """Train every arm at every point of a grid of settings, with every seed; write the report of a
    comparison, the results as a table, a figure, and the best settings as YAML.

    Example: flowrl sweep --world mixture --arm flow-grpo --grid "learning_rate=0.01,0.02
    clip_range=0.03,0.06" --seeds 0-4
    """

    grid: str = ""
    """Settings with their values, as in "learning_rate=1e-4,3e-4 clip_range=1e-4,1e-3"; all
    combinations are trained.
    """
    compare: Annotated[Compare, tyro.conf.arg(name="")] = field(default_factory=Compare)

    @staticmethod
    def defaults(arguments: Sequence[str]) -> "Sweep":
        """As for `Compare`, with the first method only."""
        compare = Compare.defaults(arguments)
        methods = compare.methods if named_file(arguments, "arms") else compare.methods[:1]
        return Sweep(compare=dataclasses.replace(compare, methods=methods))

    def main(self) -> int:
        """Run, show, report."""
        kept = self.compare.resume or self.compare.config
        need = "left out with --resume and --config" if kept else "'setting=value,value,... ...'"
        require(bool(self.grid) != bool(kept), "grid", self.grid, need)
        return self.compare.main(self.grid)
