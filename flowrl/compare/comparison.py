"""A comparison: every arm with every seed, one process per core, resumable."""

import hashlib
import inspect
import platform
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.compare.arms import Arms, arm_run, check_arms, of_arm
from flowrl.compare.results import ComparisonFile, run_folder
from flowrl.core.errors import ConfigError, FlowrlError, PartError, require
from flowrl.core.protocols import World
from flowrl.methods import METHODS
from flowrl.probes import NoProbe
from flowrl.run.build import check, make_method, make_world, method_parts
from flowrl.run.config import RunConfig
from flowrl.run.costs import prices_of
from flowrl.run.format import FORMAT, require_format
from flowrl.run.io import folder_lock, new_folder, write_json
from flowrl.run.job import Run
from flowrl.run.jobs import run_jobs
from flowrl.run.parts.plugins import versions
from flowrl.run.parts.registry import build
from flowrl.run.parts.sources import first_paragraph
from flowrl.run.parts.trust import code_of, require_trust, trust_option
from flowrl.run.plan import Plan, plan
from flowrl.run.reading import as_kind, load_document, read_bytes, reading
from flowrl.run.reads import require_read, unread
from flowrl.run.results import has_progress, holds
from flowrl.run.workers import Worker, usable_cores
from flowrl.testing.trial import try_parts


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
        points: of a sweep: by arm, the name of the arm that the grid varies ("arm") and the values
            of the grid.

    Raises:
        ConfigError: there are no arms or seeds, a seed occurs twice, or an arm is not allowed
            (`arms.check_arms`).
    """

    run: RunConfig
    arms: Arms
    seeds: tuple[int, ...] = (0, 1, 2)
    preset: str = "default"
    command: str = ""
    points: Arms = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, "arms", self.arms, "one or more")
        once = len(set(self.seeds)) == len(self.seeds) >= 1
        require(once and len(self.seeds) <= 1000, "seeds", self.seeds, "1 to 1000, each once")
        check_arms(self.run, self.arms, self.seeds)

    def examples(self) -> dict[str, RunConfig]:
        """The run of the first seed by arm."""
        return {
            arm: arm_run(self.run, settings).replace(seed=self.seeds[0])
            for arm, settings in self.arms.items()
        }

    def arm_of(self) -> dict[str, str]:
        """The arm of every run by the run's folder name."""
        return {run_folder(arm, seed): arm for seed in self.seeds for arm in self.arms}

    def jobs(self) -> dict[str, RunConfig]:
        """Run configurations by folder name; building them checks every method and setting."""
        examples = self.examples()
        for arm, config in examples.items():
            with of_arm(arm):
                check(config)
        return {
            run_folder(arm, seed): config.replace(seed=seed)
            for seed in self.seeds
            for arm, config in examples.items()
        }

    def descriptions(self) -> dict[str, str]:
        """By arm, the first paragraph of the docstring of its credit rule if it names one, else of
        its method; "" without one.
        """
        return {arm: _description(config) for arm, config in self.examples().items()}

    def parts(self) -> dict[str, dict[str, str]]:
        """What every arm's method consists of in this comparison
        (`flowrl.run.build.method_parts`).
        """
        return {arm: method_parts(config) for arm, config in self.examples().items()}

    def costs(self) -> dict[str, Plan | None]:
        """The plan of an iteration by arm; None for an arm whose probe does not state its cost."""
        plans: dict[str, Plan | None] = dict.fromkeys(self.arms)
        for arm, config in self.examples().items():
            with suppress(ConfigError):
                plans[arm] = plan(config)
        return plans

    def require_read(self, chosen: Iterable[str]) -> list[str]:
        """Raise `ConfigError` for a setting that nothing reads: one of an arm in its runs, or one
        of the `chosen` settings of all arms in any. Returns a line per setting that some arms do
        not read.
        """
        runs, notes = self.examples(), []
        for arm, config in runs.items():
            with of_arm(arm):
                require_read(config, self.arms[arm].keys() - set(chosen))
        without = {arm: unread(config, chosen) for arm, config in runs.items()}
        for name in dict.fromkeys(name for names in without.values() for name in names):
            arms = [arm for arm, names in without.items() if name in names]
            need = "left out: no arm reads it"
            require(len(arms) < len(runs), name, self.run.flat()[name], need)
            notes.append(f"{name} has no effect on {', '.join(arms)}")
        return notes

    def equal_cost(self) -> "CompareConfig":
        """This comparison with as many iterations of each arm as need the forward equivalents of
        the baseline's run (`flowrl.run.costs`); held-out evaluations do not count.

        Raises:
            ConfigError: an arm sets `iterations`, or the cost of a probe is unknown.
        """
        arms, costs = dict[str, dict[str, Any]](), dict[str, float]()
        for arm, config in self.examples().items():
            given, arms[arm] = self.arms[arm].get("iterations"), dict(self.arms[arm])
            with of_arm(arm):
                require(given is None, "iterations", given, "left out: all arms cost the same")
                costs[arm] = planned_cost(plan(config), config)
            total = self.run.iterations * next(iter(costs.values()))
            if (iterations := max(1, round(total / costs[arm]))) != self.run.iterations:
                arms[arm]["iterations"] = iterations
        return replace(self, arms=arms)

    def as_dict(self) -> dict[str, Any]:
        """The content of config.json, which `from_dict` reads."""
        machine = f"{usable_cores()} CPU cores ({platform.machine()})"
        return {
            "format": FORMAT,
            "arms": self.arms,
            "seeds": list(self.seeds),
            "preset": self.preset,
            "command": self.command,
            "versions": versions(),
            "hardware": f"{machine}, Python {platform.python_version()}",
            "run": self.run.as_dict(),
            **({"points": self.points} if self.points else {}),
        }

    @staticmethod
    def from_dict(
        values: dict[str, Any], trust: bool = False, source: Path | str = "config.json"
    ) -> "CompareConfig":
        """The inverse of `as_dict`.

        Raises `ConfigError` if entries are missing, and without `trust` for settings that need
        consent (`flowrl.run.parts.trust`).
        """
        require_format(source, values)
        with reading(source):
            file: ComparisonFile = as_kind(values, ComparisonFile)
        run = RunConfig.from_dict(
            {"format": values.get("format", FORMAT), **file.run}, trust, source
        )
        # JSON has no tuples
        arms = {
            arm: {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
            for arm, settings in file.arms.items()
        }
        for settings in arms.values():
            require_trust(settings, source, trust)
        seeds = tuple(file.seeds)
        return CompareConfig(run, arms, seeds, file.preset, file.command, file.points)


def planned_cost(counts: Plan | None, config: RunConfig) -> float:
    """Forward equivalents of an iteration; 1 without a plan."""
    return prices_of(config.as_dict()).parts(vars(counts)).total if counts else 1.0


def _description(config: RunConfig) -> str:
    credit, method = config.algorithm.credit, config.algorithm.method
    part = type(build("credit", credit)) if credit else METHODS.get(method)
    line = first_paragraph(inspect.getdoc(part) or "")
    # a data class without a docstring gets one of its fields
    return "" if line.startswith(f"{getattr(part, '__name__', '')}(") else line.rstrip(".")


Watcher = Callable[[dict[str, dict[str, Any]]], None]
"""Called about twice a second with the state of every job, as `Run` reports it."""


def _run_job(
    worker: Worker,
    config: RunConfig,
    folder: Path,
    comparison: str,
    changed_code: bool,
    trial: bool,
) -> bool | str:
    """Whether the run is finished, or the message of the error that ended it; the other runs
    continue. `comparison` is the digest of the comparison's config.json.
    """
    out = folder.parents[1]
    if not (out / "config.json").exists() or _digest(out) != comparison:
        raise ConfigError(
            f"out: {out} on {platform.node()} is not the folder of this comparison; choose --out"
            " on a file system that all workers share"
        )
    run = Run(
        config,
        folder,
        worker.send,
        worker.stopped,
        changed_code=changed_code,
        trial=trial,
        parts_tried=True,
    )
    try:
        # also after a worker of a cluster was lost
        return run.execute(resume=folder.exists())
    except ConfigError:
        raise
    except FlowrlError as error:
        return str(error) or type(error).__name__


def _digest(out: Path) -> str:
    return hashlib.sha256(read_bytes(out / "config.json")).hexdigest()


def _started(out: Path) -> bool:
    return any(map(has_progress, out.glob("runs/*")))


def require_free(out: Path) -> None:
    """Raise `ConfigError` if `out` holds a comparison that has begun."""
    need = f"another folder; to continue the comparison in this one: --resume {out}"
    require(not _started(out), "out", str(out), need)


def compare(
    config: CompareConfig,
    out: Path,
    resume: bool = False,
    workers: int | str | Executor = 0,
    watch: Watcher = lambda states: None,
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
        workers: number of processes, 0: one per core, at most 16; or as for
            `flowrl.run.jobs.run_jobs`. All workers need access to `out`.
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
    if world is not None:
        config = replace(config, run=config.run.replace(world=world))
    if not resume:
        require_free(out)
    lock = folder_lock(out)
    if not resume:
        lock = new_folder(
            out,
            "comparison",
            partial(holds, entry="arms"),
            partial(_started, out),
        )
    with lock:
        return _compare(config, out, resume, workers, watch, changed_code, trial)


def _compare(
    config: CompareConfig,
    out: Path,
    resume: bool,
    workers: int | str | Executor,
    watch: Watcher,
    changed_code: bool,
    trial: bool,
) -> bool:
    jobs, arms, notes = config.jobs(), config.arm_of(), list[str]()
    states = {name: dict[str, Any](phase="waiting", iteration=0) for name in jobs}
    results: dict[str, bool | str] = {}

    def finished(name: str, result: bool | str) -> None:
        results[name] = result
        states[name]["phase"] = "done" if result else "paused"
        if isinstance(result, str):
            warning = f"the run failed: {result}"
            states[name] |= {"phase": "failed", "warning": warning, "kinds": ["failed"]}

    if trial and (changed_code or not resume):
        try_parts(jobs.values(), notes.append)
    if not resume:
        # for the report, which does not run the user's code
        record = {"descriptions": config.descriptions(), "parts": config.parts()}
        write_json(out / "config.json", config.as_dict() | record)
    if notes:
        kinds = [f"trial {n}" for n in range(len(notes))]
        states[next(iter(jobs))] |= {"warning": "\n".join(notes), "kinds": kinds}
        watch(states)
    completed = run_jobs(
        _run_job,
        {
            name: (jobs[name], out / "runs" / name, _digest(out), changed_code, trial)
            for name in start_order(jobs)
        },
        workers,
        finished=finished,
        received=lambda name, state: states[name].update(state),
        watch=lambda: watch(states),
        describe=lambda name: f"the run {run_label(arms[name], jobs[name].seed)}",
        preload=getattr(make_world(config.run), "imports", ()),
    )
    failed = [name for name, result in results.items() if isinstance(result, str)]
    if failed and completed:
        label = run_label(arms[failed[0]], jobs[failed[0]].seed)
        has_code = any(code_of(jobs[name].flat()) for name in failed)
        options = trust_option(jobs[failed[0]].flat()) + " --changed-code" * has_code
        raise PartError(
            f"{len(failed)} of {len(jobs)} runs failed, and the others are complete. {label}:"
            f" {results[failed[0]]}. Correct the cause, then run the missing ones with:"
            f" flowrl compare --resume {shlex.quote(str(out))}{options}"
        )
    return completed and not failed and all(results.values())


def run_label(name: str, seed: int) -> str:
    """Name of the run of an arm in tables, figures and messages."""
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
        return CompareConfig.from_dict(values, trust, path)
