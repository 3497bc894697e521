"""`flowrl compare` and `flowrl train`."""

import dataclasses
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from flowrl.cli.options import (
    base_of,
    changes,
    options_class,
    options_with,
    run_name,
    typed_command,
    unchecked_preset,
)
from flowrl.cli.terminal import fitted
from flowrl.core.errors import require
from flowrl.core.options import Count, Seed, Workers
from flowrl.parts.registry import shadowed
from flowrl.parts.trust import own_text, trust_option, trusted
from flowrl.signals import ignore_stops, on_stop
from flowrl.training.config import RunConfig, load_config
from flowrl.training.presets import method_overrides, origins
from flowrl.workers import import_modules

if TYPE_CHECKING:
    from flowrl.distributed import Distributed
    from flowrl.training.compare import CompareConfig


PAPERS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
"""The methods of a comparison for which no arm is given."""
FROM = "With --resume: the checkpoint to go on from, such as 000010; later ones are deleted."
PLAN_INDENT = 21
"""Columns of the labels of a plan."""
TrainOptions = options_class("TrainOptions")
CompareOptions = options_class("CompareOptions", ("method", "credit", "seed", "tracker"))
Base = tyro.conf.Suppress[tyro.conf.Fixed[RunConfig]]
"""The settings that the options of a command start from: no option."""


def with_options(name: str, base: RunConfig, chosen: dict[str, Any], trust: bool) -> RunConfig:
    """The settings `base` of preset `name` with the `chosen` ones and the world, which are the
    user's own word, on top.
    """
    own, values = unchecked_preset(name, trust).changes, base.flat()
    named = {setting: values[setting] for setting in own if setting not in chosen}
    if own.get("world") != values["world"]:
        named.pop("world", None)
    trusted(named, name, trust)
    return base.replace(**chosen)


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set instead of ending the process
    (`flowrl.signals.on_stop`).
    """
    asked = threading.Event()

    def ask(_: int) -> None:
        if not asked.is_set():
            asked.set()
            # the signal may have come while something was printed
            with suppress(RuntimeError, OSError):
                print("Stopping after this iteration ...", flush=True)

    with on_stop(ask):
        yield asked


@contextmanager
def _resume_hint(out: Path, distributed: "Distributed") -> Iterator[None]:
    """If an error (a reward's, the disk's) ends a run of many hours, say what is left of it."""
    from flowrl.training.checkpoint import Checkpoints, to_resume

    try:
        yield
    except Exception:
        names = Checkpoints(out).names()
        if distributed.is_main and names and not (out / "done.json").exists():
            print(f"The run stopped; checkpoint {names[-1]} is kept. Go on with: {to_resume(out)}")
        raise


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
    dense-grpo, branch-grpo, tempflow-grpo, granular-grpo, tree-grpo, diffusion-nft, awm, dgpo. The
    first arm of all is the baseline. With `arm` or `arms`, the default is none.
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
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """One run per arm and seed."""
    equal_cost: bool = False
    """Train every arm for as many iterations as need the network evaluations of the baseline's run
    (sampling, probes and update).
    """
    preset: str = "default"
    """default (about five minutes on 2 cores), long (about 15 minutes per method) or tiny (seconds,
    for a first look).
    """
    settings: Literal["world", "published"] = "world"
    """Window and clip that are not given: the world's, or the method's published ones. A published
    clip is scaled to the elements of the world's latents.
    """
    out: Path | None = None
    """Folder for the results; default runs/compare-DATE."""
    resume: Path | None = None
    """Go on with the comparison in this folder (other options are then ignored)."""
    config: Path | None = None
    """Repeat a comparison from its saved config.json (other options but --out are then ignored)."""
    workers: Workers = 0
    """Runs at a time; 0 = one per core. Every run uses one thread, so the numbers do not depend on
    this.
    """
    trust: bool = False
    """Run code that the file of `resume`, `config`, `preset` or `arms` names, and use its addresses
    and keys.
    """
    changed_code: bool = False
    """With `resume`: go on although the files of your own parts have changed since the start."""
    trial: bool = True
    """Try your own parts before the first iteration, for at most 5 s (docs/guides/extend.md)."""
    run: Annotated[CompareOptions, tyro.conf.arg(name="")] = field(default_factory=CompareOptions)  # pyright: ignore[reportInvalidTypeForm]
    base: Base = field(default_factory=RunConfig)

    @staticmethod
    def defaults(arguments: Sequence[str]) -> "Compare":
        """The options start from the settings of the chosen preset and world."""
        given = any(text.partition("=")[0] in ("--arm", "--arms") for text in arguments)
        base = base_of(arguments)
        return Compare(() if given else PAPERS, run=options_with(CompareOptions, base), base=base)

    def configuration(self) -> "CompareConfig":
        """The comparison that these options describe."""
        from flowrl.training.arms import credit_arms, load_arms, method_arms, parse_arm, together
        from flowrl.training.compare import CompareConfig, load_compare

        if self.config is not None:
            loaded = load_compare(self.config, self.trust)
            return dataclasses.replace(loaded, command=typed_command())
        base, usual = self.base, self.base.flat()
        chosen = changes(self.run, base)
        run = with_options(self.preset, base, chosen, self.trust)
        file = load_arms(self.arms, self.trust) if self.arms else {}
        given = together(
            method_arms(self.methods), *map(parse_arm, self.arm), file, credit_arms(self.credit)
        )
        for arm, settings in given.items():
            if isinstance(method := settings.get("method"), str):
                # what the preset needs for this method, unless an option gives another value
                needed = method_overrides(
                    self.preset, base.environment.world, method, self.settings == "published"
                )
                needed = {n: v for n, v in needed.items() if n not in chosen and v != usual[n]}
                given[arm] = {**needed, **settings}
        found = CompareConfig(run, given, self.seeds, self.preset, typed_command())
        return found.equal_cost() if self.equal_cost else found

    def main(self) -> int:
        """Run, show, report."""
        # runs have one thread, and `run_jobs` forks a process without others
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import_modules("flowrl.training.compare")
        from flowrl.cli.progress import Display
        from flowrl.io import disk_errors
        from flowrl.policies import device_of
        from flowrl.training.compare import compare, load_compare, require_free

        out = self.resume or self.out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        config = (
            load_compare(out / "config.json", self.trust) if self.resume else self.configuration()
        )
        runs = config.jobs().values()
        for device in {run.policy.device for run in runs}:
            device_of(device)
        if self.resume is None:
            require_free(out)

        def again() -> str:
            """The command that goes on."""
            words = "".join({trust_option(run.flat()) for run in runs})
            return f"flowrl compare --resume {shlex.quote(str(out))}{words}"

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
        kept = "Finished runs and checkpoints are kept"
        with on_stop(_interrupt), disk_errors(out, lambda: kept, again):
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
            resume = f"Paused; nothing is lost. Go on with: {again()}"
            display.say(resume if started else "Stopped before the first run; nothing was written.")
            return 130


@dataclass(frozen=True)
class Train:
    """Train one method with one seed, on a world or a diffusers model.

    Examples: flowrl train --method tp-grpo --task text --iterations 40

    flowrl train --model path/to/sd3.5-medium --prompts prompts.txt --reward my_rewards.py:Score
    --guidance-scale 4.5

    On several GPUs: accelerate launch --config_file "$(flowrl presets --accelerate ddp)" -m flowrl
    train ...
    """

    preset: str = "default"
    """default, long or tiny; a model, a method and a task, as in sd3.5-medium,tp-grpo,ocr (see
    `flowrl presets`); or a file that ends in .yaml. Several are separated by commas.
    """
    settings: Literal["world", "published"] = "world"
    """Window and clip that are not given: the world's, or the method's published ones. A published
    clip is scaled to the elements of the world's latents.
    """
    out: Path | None = None
    """Folder for the run; default runs/NAME-DATE, NAME being the method, the task and the settings
    that differ from the preset's, as in tp-grpo,text,learning_rate=0.001,seed=1.
    """
    resume: Path | None = None
    """Go on with the run in this folder."""
    start: Annotated[str, tyro.conf.arg(name="from", help=FROM, help_behavior_hint="")] = ""
    config: Path | None = None
    """Repeat a run from its saved config.json or config.yaml; to change some of its settings give
    the .yaml as `preset`.
    """
    plan: bool = False
    """Print what an iteration consists of (trajectories, pairs, batches, network evaluations,
    memory) and train nothing. A model counts in the precision that it would have on a GPU.
    """
    processes: Count | None = None
    """Processes that `plan` counts for [default: 1]; `accelerate launch` says how many train."""
    trust: bool = False
    """Run code that the settings file of `resume`, `config` or `preset` names, and use its
    addresses and keys.
    """
    changed_code: bool = False
    """With `resume`: go on although the files of your own parts have changed since the start."""
    trial: bool = True
    """Try your own parts before the first iteration, for at most 5 s (docs/guides/extend.md)."""
    run: Annotated[TrainOptions, tyro.conf.arg(name="")] = field(default_factory=TrainOptions)  # pyright: ignore[reportInvalidTypeForm]
    base: Base = field(default_factory=RunConfig)

    @staticmethod
    def defaults(arguments: Sequence[str]) -> "Train":
        """The options start from the settings of the chosen preset, world or model."""
        base = base_of(arguments)
        return Train(run=options_with(TrainOptions, base), base=base)

    def configuration(self) -> RunConfig:
        """The settings of the run to go on with or to repeat, or else the preset's with the given
        ones on top.
        """
        from flowrl.training.arms import rule_name

        chosen, source = changes(self.run, self.base), self.resume or self.config
        if source:
            given = ", ".join(f"--{setting.replace('_', '-')}" for setting in chosen)
            allowed = (
                f"without {given}: the run keeps its settings; --preset FILE.yaml takes changes"
            )
            require(not chosen, "resume" if self.resume else "config", str(source), allowed)
            path = self.config or source / "config.json"
            return load_config(path, self.trust, planned=self.plan)
        if "credit" in chosen:
            chosen.setdefault("method", rule_name(chosen["credit"]))
        return with_options(self.preset, self.base, chosen, self.trust)

    def origins(self) -> dict[str, str]:
        """Where the run's settings come from, by setting."""
        if source := self.resume or self.config:
            return dict.fromkeys(RunConfig().flat(), str(source))
        world, method = self.base.environment.world, self.base.algorithm.method
        chosen = tuple(changes(self.run, self.base))
        return origins(self.preset, RunConfig, world, method, chosen, self.settings == "published")

    def main(self) -> int:
        """Train, printing every evaluation."""
        from flowrl.training.build import check
        from flowrl.training.plan import memory_text, plan, plan_text

        require(not self.start or bool(self.resume), "from", self.start, "given with --resume only")
        allowed = "given with --plan only; `accelerate launch` starts several"
        require(self.plan or not self.processes, "processes", self.processes, allowed)
        config = self.configuration()
        check(config)
        if not self.plan:
            return self._train(config)
        counted = plan(config, self.processes or 1)
        texts = plan_text(counted, config, self.origins()), memory_text(counted, config)
        print(fitted("\n".join(filter(None, texts)), PLAN_INDENT))
        return 0

    def _train(self, config: RunConfig) -> int:
        import torch
        from torch.distributed.elastic.multiprocessing.errors import record

        from flowrl.cli.progress import train_line
        from flowrl.distributed import Distributed
        from flowrl.policies import device_of
        from flowrl.training.build import method_text
        from flowrl.training.checkpoint import to_resume
        from flowrl.training.run import Run

        name = run_name(config, config if self.config else self.base)
        out = self.resume or self.out or Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
        device_of(config.policy.device)
        if config.policy.device == "cpu":
            torch.set_num_threads(1)
        with asked_to_stop() as asked:
            with Distributed.join(config.policy.device, asked.is_set) as distributed:
                say = partial(print, flush=True) if distributed.is_main else lambda text: None
                out = distributed.gather(out)[0]  # the clock in its name may differ
                algorithm, size = config.algorithm, distributed.world_size
                rule = f" with credit {algorithm.credit}" if algorithm.credit else ""
                subject = config.policy.model or config.environment.subject
                processes = f", {size} processes" if size > 1 else ""
                say(
                    f"{algorithm.method}{rule} on {subject}, seed {config.seed}{processes}"
                    f"{own_text([config.flat()])} -> {out}"
                )
                for text in shadowed():
                    say(f"Warning: {text}")
                say(fitted(f"  {method_text(config, self.origins())}", 2))
                run = Run(
                    config,
                    out,
                    train_line(out, config),
                    asked.is_set,
                    distributed=distributed,
                    changed_code=self.changed_code,
                    trial=self.trial,
                )
                with _resume_hint(out, distributed):
                    execute = record(run.execute) if size > 1 else run.execute
                    finished = bool(execute(self.resume is not None, self.start))
            if finished and distributed.is_main:
                for path in _write_results(out, config):
                    say(f"Proxy and held-out metrics: {path}")
            ignore_stops()
            if not finished:
                say(f"Paused; nothing is lost. Go on with: {to_resume(out)}")
                return 130
            sample = f"flowrl sample --weights {shlex.quote(str(out))}{trust_option(config.flat())}"
            say(f"Done. Weights and metrics in {out}; draw samples with: {sample}")
            return 0


def _write_results(out: Path, config: RunConfig) -> list[Path]:
    """Write the card of a model's run, and proxy.png if the run has held-out metrics; returns its
    path.
    """
    from flowrl.cli.card import write_card
    from flowrl.cli.figures import proxy_and_heldout
    from flowrl.cli.style import save
    from flowrl.io import disk_errors
    from flowrl.training.checkpoint import to_resume
    from flowrl.training.results import load_run

    with disk_errors(out, lambda: "The run is complete", partial(to_resume, out)):
        if config.policy.model:
            write_card(out)
        run = load_run(out)
        figure = proxy_and_heldout({run.arm: [run]})
        if figure is None:
            return []
        save(figure, out / "proxy.png", dpi=130)
        return [out / "proxy.png"]
