"""`flowrl train`."""

import json
import multiprocessing
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from flowrl.cli.options import (
    Base,
    Typed,
    base_of,
    changes,
    early,
    named_file,
    options_class,
    options_with,
    refuse_options,
    refuse_settings,
    rule_name,
    run_name,
    with_rules,
)
from flowrl.cli.origins import origins_beside, origins_of, typed_settings
from flowrl.cli.terminal import fitted
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count, Whole
from flowrl.run.config import RunConfig, load_config
from flowrl.run.parts.registry import shadowed
from flowrl.run.parts.trust import PARTS, own_text, trust_option
from flowrl.run.presets import tuned_text
from flowrl.run.reading import read_text
from flowrl.run.signals import APART, ignore_stops, on_repeated_stop, on_stop
from flowrl.run.workers import launch_rank

if TYPE_CHECKING:
    from flowrl.cli.panel import RunPanel
    from flowrl.run.distributed import Distributed
    from flowrl.run.job import Run


FROM = (
    "With --resume: the checkpoint to continue from (best, last or a number, such as 10); later"
    " ones are deleted."
)
PLANNED = ("trust", "trial", "plan", "check", "card", "processes", "launch")
RULES = ("stop_on", "keep_best")
SHOWN = ("print_every", "notify")
READ = {
    "resume": ("start", "change", "changed_code", "profile", *RULES, *PLANNED, *SHOWN),
    "config": ("out", *PLANNED, *SHOWN),
}
"""Options that are read together with one that names a run."""
SPECS = tuple(name for name in PARTS if name not in ("heldout_rewards", "observe"))
"""Settings with the spec of one part."""
GRACE = 4.0
"""Seconds in which a second signal ends the process."""
PLAN_INDENT = 21
"""Columns of the labels of a plan."""
CHECK_INDENT = 10
"""Columns of the labels of `check`."""
TrainOptions = options_class("TrainOptions")


@contextmanager
def asked_to_stop(
    runs: Sequence["Run"] = (), panels: Sequence["RunPanel"] = ()
) -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set instead of ending the process
    (`flowrl.run.signals.on_stop`).

    The last complete iteration of `runs` is saved at once, in case that the process is killed. A
    second signal, at least `APART` seconds later, closes the `panels` and ends the process without
    the current iteration.
    """
    asked, since = threading.Event(), [0.0]

    def say() -> None:
        # the signal may have come while something was printed
        with suppress(RuntimeError, OSError):
            print("Stopping after this iteration (again: stop at once) ...", flush=True)

    def ask(_: int) -> None:
        if not asked.is_set():
            asked.set()
            since[0] = time.monotonic()
            say()
        # a part may be in code that gives the other threads no time
        time.sleep(GRACE if time.monotonic() - since[0] >= APART else 0.05)

    def keep() -> None:
        with suppress(OSError):  # a full disk is reported at the end of the iteration
            for run in runs:
                run.save_last()

    def save() -> None:
        keep()
        if not asked.wait(0.5):  # the main thread is outside Python
            say()

    def leave() -> None:
        keep()
        threading.Timer(GRACE / 4, os._exit, [130]).start()  # the output may be blocked
        for process in multiprocessing.active_children():
            process.kill()  # a hanging one may not notice the end of this process
        for panel in panels:
            panel.close()
        for run in runs:
            if run.distributed.is_main:
                print(_left(run), flush=True)
        os._exit(130)

    with on_stop(ask), on_repeated_stop(save, leave):
        yield asked


def _left(run: "Run") -> str:
    """What to print when a second signal ends `run`."""
    from flowrl.core.errors import calls_in_progress
    from flowrl.run.checkpoint import Checkpoints, to_resume

    calls = calls_in_progress()
    call = calls[-1][0] if calls else run.distributed.calls_of_others()
    reason = f"{call} did not return. " if call else ""
    newest = Checkpoints(run.folder).newest
    kept = f"Checkpoint {newest} is kept. Continue with: {to_resume(run.folder)}"
    return f"Stopped. {reason}{kept if newest else 'There is no checkpoint yet.'}"


@contextmanager
def _resume_hint(out: Path, distributed: "Distributed") -> Iterator[None]:
    """If an error (in a reward, on the disk) ends a long run, print how to resume it. One of a
    checkpoint says itself what is left.
    """
    from flowrl.core.errors import CheckpointError
    from flowrl.run.checkpoint import Checkpoints, to_resume

    try:
        yield
    except CheckpointError:
        raise
    except Exception:
        newest = Checkpoints(out).newest
        if distributed.is_main and newest and not (out / "done.json").exists():
            print(f"The run stopped; checkpoint {newest} is kept. Continue with: {to_resume(out)}")
        raise


@dataclass(frozen=True)
class Train:
    """Train one method with one seed, on a world or a diffusers model.

    Examples: flowrl train --method tp-grpo --task text --iterations 40

    flowrl train --model path/to/sd3.5-medium --prompts prompts.txt --reward my_rewards.py:Score
    --guidance-scale 4.5

    On several GPUs: accelerate launch --config_file "$(flowrl presets --accelerate ddp)" -m flowrl
    train ...; on several nodes of a SLURM cluster: srun flowrl train ...
    """

    preset: str = "default"
    """default, long or tiny; a model, a method and a task, as in sd3.5-medium,tp-grpo,ocr (see
    `flowrl presets`); or a .yaml file. Separate several with commas.
    """
    settings: Literal["world", "published"] = "world"
    """Default window and clip: those of the world, or the published ones of the method. A published
    clip is scaled to the number of elements in the world's latents.
    """
    out: Path | None = None
    """Folder for the run. Default: runs/NAME-DATE, in which NAME lists the method, the task and the
    settings that differ from the preset, as in tp-grpo,text,learning_rate=0.001,seed=1.
    """
    resume: Path | None = None
    """Resume the run in this folder. Options of memory, speed, logging and `iterations` may have
    other values than before, others only with `change`.
    """
    start: Annotated[str, tyro.conf.arg(name="from", help=FROM, help_behavior_hint="")] = ""
    config: Path | None = None
    """Repeat a run from its saved config.json or config.yaml. To change some of its settings, pass
    the .yaml file as `preset` instead.
    """
    profile: Path | None = None
    """Read batch sizes from this file instead of measuring them: a profile that an earlier run
    printed, or your own (micro_batch, max_batch, gradient_checkpointing, decode_batch, compile).
    """
    plan: bool = False
    """Print what one iteration needs (trajectories, pairs, batches, network evaluations, memory)
    without training. A model is planned in the precision that it would have on a GPU.
    """
    card: str = "H100"
    """The GPU for which `plan` estimates time and memory: B200, H100, H200, A100, A40, A10, L40S,
    L40, L4, RTX PRO 6000, RTX 6000 Ada, RTX A6000, RTX 5090, RTX 5080, RTX 5070 Ti, RTX 4090, RTX
    4080, RTX 4070 Ti Super, RTX 3090, RTX 3080 or RTX 3060; another by its memory, as in 16GB.
    """
    processes: Count | None = None
    """Number of processes that `plan` assumes [default: 1]; training takes it from `accelerate
    launch`.
    """
    launch: Literal["ddp", "fsdp2", "zero2"] = "ddp"
    """The launcher's config file (`flowrl presets --accelerate`) that `plan` assumes: with fsdp2
    and zero2, weights, gradients and moments are sharded across the processes.
    """
    check: bool = False
    """Check settings, packages, devices, files and prompts in seconds, list the results, and train
    nothing; returns 2 if a check fails. Training begins with the same checks.
    """
    stop_on: tuple[str, ...] = ()
    """Rules that stop the run: collapse, hacking, plateau or budget(hours=48). Short for `observe`
    stop-on-collapse, and so on, with the same options, as in collapse(drop=0.3).
    """
    keep_best: str = ""
    """Keep the checkpoint with the best mean of this score in evaluations: reward, or a held-out
    reward. Short for `observe` keep-best(score=...).
    """
    trust: bool = False
    """Run code that the settings file of `resume`, `config` or `preset` names, and use its
    addresses and keys.
    """
    changed_code: bool = False
    """With `resume`: continue although files of your own parts have changed since the run started.
    """
    change: bool = False
    """With `resume`: continue with other settings or training prompts than those of the start,
    which the run records with the iteration. Evaluations keep the held-out prompts unless
    `heldout_prompts` is changed. What can never change: docs/guides/resume.md.
    """
    trial: bool = True
    """Test your own parts before the first iteration, for at most 5 s (docs/guides/extend.md)."""
    print_every: Whole = 0
    """Iterations per printed line if the output is not a terminal; 0: one, and in runs of more than
    100 iterations as many as make about 50 lines. Lines with an evaluation or a warning, and the
    last one, are always printed.
    """
    notify: tuple[str, ...] = ()
    """Addresses or commands that are told when the run finishes, stops, pauses, fails or warns. An
    address, as of a webhook of Slack or Discord, gets JSON by POST; a command of the shell gets the
    JSON as its input, and FLOWRL_EVENT, FLOWRL_RUN and FLOWRL_TEXT in its environment. Never stored
    with the run, because a webhook's address is a secret: the environment variable FLOWRL_NOTIFY
    (one per line) hides it from the list of processes, too.
    """
    run: Annotated[TrainOptions, tyro.conf.arg(name="")] = field(  # pyright: ignore
        default_factory=TrainOptions
    )
    base: Base = field(default_factory=RunConfig)
    typed: Typed = ()

    @staticmethod
    def defaults(arguments: Sequence[str]) -> "Train":
        """The options start from the settings of the chosen preset, world or model, or from those
        of the run that is resumed or repeated. The main process alone reads their files.
        """
        if any(word.startswith("--changed-prompts") for word in arguments):
            raise ConfigError("--changed-prompts is now --change, which also allows other settings")
        if launch_rank() > 0:
            base = RunConfig()
        elif file := named_file(arguments):
            trust, planned = "--trust" in arguments, "--plan" in arguments
            # a resume with a part on the command line needs no --trust for the one in the file
            typed = early(arguments, *SPECS) if early(arguments, "resume") else {}
            base = load_config(file, trust, planned, **typed)
        else:
            base = base_of(arguments)
        typed = typed_settings(arguments)
        return Train(run=options_with(TrainOptions, base), base=base, typed=typed)

    def _origins(self, config: RunConfig) -> dict[str, str]:
        """Where the settings of a new run come from."""
        from flowrl.run.sizes import profile_of

        if self.config:
            return origins_beside(self.config, config)
        profile = profile_of(self.profile) if self.profile else ()
        published = self.settings == "published"
        return origins_of(config, self.preset, self.typed, published, profile)

    def configuration(self) -> RunConfig:
        """The settings of the run to repeat; or those of the run to resume, or of the preset, with
        the given ones on top.
        """
        from flowrl.run.reads import NAMED, require_read
        from flowrl.run.sizes import profile_of
        from flowrl.run.started import require_resumable

        if self.resume or self.config:
            mode = "resume" if self.resume else "config"
            refuse_options(self, mode, READ[mode])
        if self.config:
            refuse_settings(self, "config")
            return self.base
        chosen = changes(self.run, self.base)
        if "credit" in chosen:
            chosen.setdefault("method", rule_name(chosen["credit"]))
        if self.profile:
            chosen |= profile_of(self.profile)
        if self.stop_on or self.keep_best:
            given = chosen.get("observe", self.base.logging.observe)
            chosen["observe"] = with_rules(given, self.stop_on, self.keep_best)
        config = self.base.replace(**chosen)
        if self.resume and not self.plan:
            require_resumable(self.resume, config, self._start_name(), self.change)
        require_read(config, dict.fromkeys((*chosen, *(() if self.resume else NAMED))))
        return config

    def main(self) -> int:
        """Train, printing every evaluation."""
        from flowrl.run.build import check
        from flowrl.run.plan import card_of, memory_text, plan, plan_text, sized, times_text

        require(not self.start or bool(self.resume), "from", self.start, "only with --resume")
        require(not self.change or bool(self.resume), "change", True, "only with --resume")
        allowed = "only with --plan; `accelerate launch` sets it in training"
        require(self.plan or not self.processes, "processes", self.processes, allowed)
        require(self.plan or self.launch == "ddp", "launch", self.launch, allowed)
        require(self.plan or self.card == Train.card, "card", self.card, "only with --plan")
        require(not (self.check and self.plan), "check", True, "without --plan")
        if self.check:
            return self._check()
        if not self.plan:
            return self._train()
        card_of(self.card)
        config = self.configuration()
        check(config)
        processes = self.processes or 1
        config = sized(config, self.card, processes, self.launch)
        counted = plan(config, processes, self.launch)
        texts = (
            plan_text(counted, config),
            memory_text(counted, config),
            times_text(counted, config, self.card),
        )
        print(fitted("\n".join(filter(None, texts)), PLAN_INDENT))
        return 0

    @staticmethod
    def _say_times(config: RunConfig, out: Path, size: int, say: Callable[[str], None]) -> None:
        """The planned seconds of an iteration beside the measured ones, on a known card."""
        import torch

        from flowrl.run.plan import named_card, planned_and_measured

        device = torch.device(config.policy.device)
        card = named_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""
        if card:
            rows = [json.loads(row) for row in read_text(out / "metrics.jsonl").splitlines()]
            say(planned_and_measured(config, rows, card, size))

    def _check(self) -> int:
        """Print what is checked before training, and each result."""
        from flowrl.run.checks import findings

        config, failed = self.configuration(), False
        for finding in findings(config, None if self.resume else self._folder(config)):
            failed |= finding.error is not None
            text = f"{'error: ' if finding.error else ''}{finding.text}"
            print(fitted(f"{finding.subject:<{CHECK_INDENT}}{text}", CHECK_INDENT), flush=True)
        return 2 if failed else 0

    def _start_name(self) -> str:
        """The name of the checkpoint of `start`, or ""."""
        from flowrl.run.saved import checkpoint_name

        if self.resume and self.start:
            return checkpoint_name(self.resume, self.start, "from")
        return ""

    def _start(self, processes: int) -> tuple[RunConfig, Path, str]:
        """The settings, checked, the run's folder, and the name of the checkpoint of `start`."""
        from flowrl.run.checks import require_ready

        config = self.configuration()
        out = self._folder(config)
        require_ready(config, None if self.resume else out, processes)
        return config, out, self._start_name()

    def _folder(self, config: RunConfig) -> Path:
        """The run's folder."""
        name = run_name(config, self.base)
        new = Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
        return self.resume or self.out or new

    def _settings_text(self, config: RunConfig) -> str:
        """Which settings a new run in a built-in world has, if `flowrl compare` has others."""
        if self.resume or self.config or self.preset != "default":
            return ""
        source = "world" if self.settings == "world" else "method, as published"
        return tuned_text(config.environment.world, config.typed(), source)

    def _train(self) -> int:
        import torch
        from torch.distributed.elastic.multiprocessing.errors import record

        from flowrl.cli.log import library_log
        from flowrl.cli.notify import Notifier, hide, targets_of
        from flowrl.cli.panel import RunPanel, shown_run
        from flowrl.policies import device_of
        from flowrl.run.build import method_text
        from flowrl.run.checkpoint import to_resume
        from flowrl.run.distributed import Distributed
        from flowrl.run.io import disk_errors
        from flowrl.run.job import Run
        from flowrl.run.report.card import finish_run
        from flowrl.run.results import short, stopped_by
        from flowrl.run.reward_guard import failures_text
        from flowrl.run.stop_rules import exit_code

        targets = targets_of(self.notify)
        hide(targets)
        runs, panels = list[Run](), list[RunPanel]()
        with asked_to_stop(runs, panels) as asked, library_log() as log:
            with Distributed.join() as distributed:
                size = distributed.world_size
                config, out, start = distributed.in_main(lambda: self._start(size))
                device_of(config.policy.device)
                if config.policy.device == "cpu":
                    torch.set_num_threads(1)
                say = partial(print, flush=True) if distributed.is_main else lambda text: None
                algorithm = config.algorithm
                rule = f" with credit {algorithm.credit}" if algorithm.credit else ""
                subject = config.policy.model or config.environment.subject
                processes = f", {size} processes" if size > 1 else ""
                if heldout := config.evaluation.heldout_rewards:
                    processes += f", held out: {', '.join(map(short, heldout))}"
                say(
                    f"{algorithm.method}{rule} on {subject}, seed {config.seed}{processes}"
                    f"{own_text([config.flat()])} -> {out}"
                )
                for text in shadowed():
                    say(f"Warning: {text}")
                say(fitted(f"  {method_text(config)}", 2))
                if text := self._settings_text(config):
                    say(fitted(f"  {text}", 2))
                notifier = Notifier(targets if distributed.is_main else (), out, say)
                live = shown_run(out, config, self.print_every, panels)
                with notifier, _resume_hint(out, distributed), live as show:

                    def report(state: dict[str, Any]) -> None:
                        for receive in (log, notifier, show):
                            receive(state)

                    run = Run(
                        config,
                        out,
                        report,
                        asked.is_set,
                        distributed=distributed,
                        changed_code=self.changed_code,
                        change=self.change,
                        trial=self.trial,
                        page=True,
                        origins=None if self.resume else self._origins(config),
                    )
                    runs.append(run)
                    execute = record(run.execute) if size > 1 else run.execute
                    finished = bool(execute(self.resume is not None, start))
                    if distributed.is_main:  # others may be on machines without the files
                        ended = stopped_by(out) or "finished" if finished else "paused"
                        report({"ended": ended})
                # a launcher of several processes takes any other code than 0 for a failure
                code = exit_code(stopped_by(out)) if finished and size == 1 else 0
            if finished and distributed.is_main:
                with suppress(ConfigError):  # a probe of the user's may have no plan
                    self._say_times(run.config, out, size, say)
                rows = [json.loads(row) for row in read_text(out / "metrics.jsonl").splitlines()]
                if text := failures_text(rows):
                    say(text)
                with disk_errors(out, partial(to_resume, out)):
                    for line in finish_run(out):
                        say(line)
            ignore_stops()
            if log.count and distributed.is_main:
                say(f"Messages of libraries: {log.count} in {log.path}")
            if not finished:
                say(f"Paused; nothing is lost. Continue with: {to_resume(out)}")
                return 130
            sample = f"flowrl sample --weights {shlex.quote(str(out))}{trust_option(config.flat())}"
            say(f"Done. Weights and metrics in {out}; draw samples with: {sample}")
            return code
