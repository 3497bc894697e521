"""A comparison: every arm with every seed, one process per core, resumable."""

import inspect
import platform
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, FlowrlError, PartError, require
from flowrl.core.protocols import World
from flowrl.io import folder_lock, new_folder, write_json
from flowrl.methods import METHODS
from flowrl.parts.plugins import versions
from flowrl.parts.registry import build
from flowrl.parts.sources import first_paragraph
from flowrl.parts.trust import code_of, trust_option, trusted
from flowrl.probes import NoProbe
from flowrl.reading import as_kind, load_document, reading
from flowrl.training.arms import Arms, arm_run, check_arms, of_arm
from flowrl.training.build import check, make_method, make_world, method_parts
from flowrl.training.config import RunConfig
from flowrl.training.format import FORMAT, check_format, current_comparison
from flowrl.training.plan import Plan, plan
from flowrl.training.results import has_progress, holds, run_folder
from flowrl.training.run import Run
from flowrl.training.trial import try_parts
from flowrl.workers import Worker, run_jobs, usable_cores


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of arms x seeds.

    Args:
        run: the settings that arms do not change.
        arms: the settings of each arm by its name, named without their groups; the first arm is the
            baseline. `method_arms` and `credit_arms` make those of methods and of credit rules.
        seeds: one or more seeds.
        preset: name of the preset, for the record.
        command: the command line, for the record.

    Raises:
        ConfigError: there are no arms or seeds, a seed occurs twice, or an arm is not allowed
            (`arms.check_arms`).
    """

    run: RunConfig
    arms: Arms
    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "default"
    command: str = ""

    def __post_init__(self) -> None:
        require(
            len(self.arms) >= 1,
            "arms",
            self.arms,
            "one or more, such as those of methods or credit rules",
        )
        require(len(self.seeds) >= 1, "seeds", self.seeds, "one or more seeds")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each seed once")
        check_arms(self.run, self.arms, self.seeds)
        plain = {
            arm: {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in settings.items()
            }
            for arm, settings in self.arms.items()
        }
        object.__setattr__(self, "arms", plain)

    def arm_of(self) -> dict[str, str]:
        """The arm of every run by the run's folder name."""
        return {run_folder(arm, seed): arm for seed in self.seeds for arm in self.arms}

    def jobs(self) -> dict[str, RunConfig]:
        """Run configurations by folder name; building them checks every method and setting."""
        result = {}
        for seed in self.seeds:
            for arm, settings in self.arms.items():
                config = arm_run(self.run, settings).replace(seed=seed)
                if settings.keys() <= {"method"}:
                    check(config)
                else:
                    with of_arm(arm):
                        check(config)
                result[run_folder(arm, seed)] = config
        return result

    def examples(self) -> dict[str, RunConfig]:
        """The run of the first seed by arm."""
        return {
            arm: arm_run(self.run, settings).replace(seed=self.seeds[0])
            for arm, settings in self.arms.items()
        }

    def descriptions(self) -> dict[str, str]:
        """The first line of the docstring of every arm's credit rule if it names one, else of its
        method; "" without one.
        """
        self.allowed()
        found = {}
        for arm, config in self.examples().items():
            credit, method = config.algorithm.credit, config.algorithm.method
            found[arm] = _first_line(
                type(build("credit", credit)) if credit else METHODS.get(method)
            )
        return found

    def allowed(self) -> None:
        """Raise `ConfigError` if the comparison was read without trust and has settings that need
        consent (`flowrl.parts.trust`).
        """
        for settings in (self.run.flat(), *self.arms.values()):
            trusted(dict(settings), self.run.source, not self.run.source)

    def parts(self) -> dict[str, dict[str, str]]:
        """What every arm's method consists of in this comparison
        (`flowrl.training.build.method_parts`).
        """
        return {arm: method_parts(config) for arm, config in self.examples().items()}

    def costs(self) -> dict[str, Plan | None]:
        """The plan of an iteration by arm; None for an arm whose probe does not state its cost."""
        return {arm: _plan(config) for arm, config in self.examples().items()}

    def equal_cost(self) -> "CompareConfig":
        """This comparison with as many iterations of each arm as need the network evaluations of
        the baseline's run.

        Evaluations of sampling, probes and update count alike, those with guidance twice; held-out
        evaluations do not count.

        Raises:
            ConfigError: an arm sets `iterations`, or the cost of a probe is unknown.
        """
        runs, arms, total = self.examples(), dict[str, Mapping[str, Any]](), 0.0
        for arm, settings in self.arms.items():
            with of_arm(arm):
                given = settings.get("iterations")
                require(
                    given is None,
                    "iterations",
                    given,
                    "left out: they are chosen so that all arms cost the same",
                )
                found = plan(runs[arm])
            total = total or self.run.iterations * found.passes
            iterations = max(1, round(total / found.passes))
            arms[arm] = {
                **settings,
                **({} if iterations == self.run.iterations else {"iterations": iterations}),
            }
        return replace(self, arms=arms)

    def as_dict(self) -> dict[str, Any]:
        """The content of config.json, which `from_dict` reads."""
        return {
            "format": FORMAT,
            "arms": self.arms,
            "seeds": list(self.seeds),
            "preset": self.preset,
            "command": self.command,
            "versions": versions(),
            "hardware": (
                f"{usable_cores()} CPU cores ({platform.machine()}), Python"
                f" {platform.python_version()}"
            ),
            "run": self.run.as_dict(),
        }

    @staticmethod
    def from_dict(
        values: dict[str, Any], trust: bool = False, source: Path | str = "config.json"
    ) -> "CompareConfig":
        """The inverse of `as_dict`; also reads what earlier versions wrote.

        Raises `ConfigError` if entries are missing. Without `trust`, parts are built only from
        settings that the file `source` may contain (`allowed`).
        """
        check_format(source, values)
        values = current_comparison(values, source)
        missing = sorted({"arms", "seeds", "run"} - set(values))
        if missing:
            raise ConfigError(
                f"config: no entry {', '.join(missing)}; a comparison's config.json is needed"
            )
        run = RunConfig.from_dict(values["run"], trust, source)
        preset, command = values.get("preset", "default"), values.get("command", "")
        return CompareConfig(run, values["arms"], tuple(values["seeds"]), preset, command)


def _plan(config: RunConfig) -> Plan | None:
    try:
        return plan(config)
    except ConfigError:
        return None


def _first_line(part: Any) -> str:
    """The first paragraph of a docstring; "" without one, also if a data class has made one of its
    fields.
    """
    line = first_paragraph(inspect.getdoc(part) or "")
    return "" if line.startswith(f"{getattr(part, '__name__', '')}(") else line.rstrip(".")


Watcher = Callable[[dict[str, dict[str, Any]]], None]
"""Called about twice a second with the state of every job: {"phase", "iteration", "reward",
"nfe_total", "seconds"}.
"""


def _run_job(
    worker: Worker, config: RunConfig, folder: Path, resume: bool, changed_code: bool, trial: bool
) -> bool | str:
    """Whether the run is finished, or the message of the error that ended it; the other runs
    continue.
    """
    run = Run(
        config,
        folder,
        worker.send,
        worker.stopped,
        shared=folder.parent,
        changed_code=changed_code,
        trial=trial,
    )
    run.parts_tried = True
    try:
        return run.execute(resume)
    except ConfigError:
        raise
    except FlowrlError as error:
        return str(error) or type(error).__name__


def require_free(out: Path) -> None:
    """Raise `ConfigError` if `out` holds a comparison that has begun."""
    if any(map(has_progress, out.glob("runs/*"))):
        raise ConfigError(
            f"out: {out} already holds a comparison; choose another folder, or continue it with"
            f" --resume {out}"
        )


def compare(
    config: CompareConfig,
    out: Path,
    resume: bool = False,
    workers: int = 0,
    watch: Watcher | None = None,
    changed_code: bool = False,
    world: World | None = None,
    trial: bool = True,
) -> bool:
    """Run all jobs in `out`/runs, resumable.

    Each worker has one thread, so results do not depend on the number of cores.

    Args:
        config: the comparison.
        out: its folder.
        resume: continue the comparison in `out` instead of starting one.
        workers: number of processes; 0: one per core, at most 16.
        watch: called with the states of all jobs.
        changed_code: as for `Run`.
        world: as for `Run`; the processes get copies.
        trial: as for `Run`.

    Returns:
        Whether all runs are finished; False if Ctrl-C paused them. `resume` then continues with the
        same results.

    Raises:
        ConfigError: another process works in `out`, which the message names, or `out` contains
            another comparison.
        PartError: some runs failed.
    """

    def started() -> bool:
        return any(map(has_progress, out.glob("runs/*")))

    config.allowed()
    if world is not None:
        config = replace(config, run=config.run.replace(world=world))
    if not resume:
        require_free(out)
    with (
        folder_lock(out)
        if resume
        else new_folder(out, "comparison", lambda folder: holds(folder, "arms", "methods"), started)
    ):
        return _compare(config, out, resume, workers, watch, changed_code, trial)


def _compare(
    config: CompareConfig,
    out: Path,
    resume: bool,
    workers: int,
    watch: Watcher | None,
    changed_code: bool,
    trial: bool,
) -> bool:
    jobs = config.jobs()
    notes: list[str] = []
    if trial and (changed_code or not resume):
        try_parts(jobs.values(), notes.append)
    if not resume:
        written = {"descriptions": config.descriptions(), "parts": config.parts()}
        write_json(out / "config.json", config.as_dict() | written)
    states: dict[str, dict[str, Any]] = {
        name: {"phase": "waiting", "iteration": 0} for name in jobs
    }
    if notes and watch:
        first = next(iter(jobs))
        watch(
            states
            | {
                first: {
                    **states[first],
                    "warning": "\n".join(notes),
                    "kinds": [f"trial {n}" for n in range(len(notes))],
                }
            }
        )
    ended: dict[str, bool | str] = {}

    def received(name: str, state: dict[str, Any]) -> None:
        began = states[name].setdefault("began", time.monotonic())
        states[name] |= {**state, "seconds": time.monotonic() - began}

    def finished(name: str, done: bool | str) -> None:
        ended[name] = done
        received(
            name, {"phase": "failed" if isinstance(done, str) else "done" if done else "paused"}
        )
        if isinstance(done, str):
            received(name, {"warning": f"the run failed: {done}", "kinds": ["failed"]})

    arms = config.arm_of()
    # forks of a process that has used a GPU cannot use it
    on_cpu = all(job.policy.device == "cpu" for job in jobs.values())
    completed = run_jobs(
        _run_job,
        {
            name: (jobs[name], out / "runs" / name, resume, changed_code, trial)
            for name in start_order(jobs)
        },
        workers,
        finished=finished,
        received=received,
        watch=lambda: watch(states) if watch else None,
        describe=lambda name: f"the run {run_label(arms[name], jobs[name].seed)}",
        preload=(
            (
                "flowrl.training.compare",
                *getattr(make_world(next(iter(jobs.values()))), "imports", ()),
            )
            if on_cpu
            else ()
        ),
    )
    failed = {name: text for name, text in ended.items() if isinstance(text, str)}
    if failed and completed:
        name, text = next(iter(failed.items()))
        words = "".join({trust_option(jobs[one].flat()) for one in failed})
        words += " --changed-code" if any(code_of(jobs[one].flat()) for one in failed) else ""
        label = run_label(arms[name], jobs[name].seed)
        raise PartError(
            f"{len(failed)} of {len(jobs)} runs failed, and the others are complete. {label}:"
            f" {text}. Correct the cause, then run the missing ones with: flowrl compare --resume"
            f" {shlex.quote(str(out))}{words}"
        )
    return completed and not failed and all(ended.values())


def run_label(name: str, seed: int) -> str:
    """Name of a run in tables, figures and messages.

    Args:
        name: name of the arm.
        seed: seed of the run.

    Returns:
        The name.
    """
    return f"{name}, seed {seed}"


def start_order(jobs: dict[str, RunConfig]) -> list[str]:
    """The runs in their starting order: runs with a probe, which take longest, first."""
    return sorted(jobs, key=lambda name: isinstance(make_method(jobs[name]).credit.probe, NoProbe))


def load_compare(path: Path, trust: bool = False) -> CompareConfig:
    """The comparison that a config.json describes.

    Args:
        path: the file.
        trust: as in `load_config`.

    Returns:
        The comparison.

    Raises:
        ConfigError: the file cannot be read, or contains an entry that is not allowed.
    """
    values, _ = load_document(path)
    with reading(path):
        as_kind(values, _File)
        return CompareConfig.from_dict(values, trust, path)


@dataclass(frozen=True)
class _File:
    """The entries of a comparison's config.json, all optional here; those of earlier versions at
    the end.
    """

    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    preset: str = ""
    command: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    credit: list[str] = field(default_factory=list)
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
