"""A comparison: every method with every seed, one process per core, resumable."""

import inspect
import platform
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, PartError, require
from flowrl.io import folder_lock, new_folder, write_json
from flowrl.methods import METHODS
from flowrl.plugins import versions
from flowrl.probes import NoProbe
from flowrl.reading import as_kind, load_document, reading
from flowrl.registry import build
from flowrl.specs import identity
from flowrl.training.build import check, make_method, method_parts
from flowrl.training.config import RunConfig
from flowrl.training.format import FORMAT, FORWARD, OLDER, OWN_WORDS, check_format, current
from flowrl.training.results import has_progress, holds, run_folder
from flowrl.training.run import Run
from flowrl.training.trial import try_parts
from flowrl.trust import trust_option, trusted
from flowrl.workers import Worker, run_jobs, usable_cores

LONGEST = 200
"""Bytes in the name of a run's folder; file systems allow 255."""
IMPORTS = {"shapes": ("diffusers.models.transformers.transformer_sd3", "peft")}
"""Modules that a world's policy imports when it is built."""
PAPERS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of methods x seeds with equal settings.

    Args:
        run: settings of all runs.
        methods: names of methods.
        seeds: one or more seeds.
        credit: further credit rules by spec (`flowrl.registry`).
        preset: name of the preset, for the record.
        command: the command line, for the record.
        method_settings: settings by method, in addition to `run`.

    Raises:
        ConfigError: there are no methods or seeds, or one of them occurs twice.
    """

    run: RunConfig
    methods: tuple[str, ...] = PAPERS
    seeds: tuple[int, ...] = (0, 1, 2)
    credit: tuple[str, ...] = ()
    preset: str = "default"
    command: str = ""
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.methods) + len(self.credit) >= 1, "methods", self.methods, "one or more methods")
        require(len(self.seeds) >= 1, "seeds", self.seeds, "one or more seeds")
        names = self.names()
        require(len(set(self.methods)) == len(self.methods), "methods", self.methods, "each method once")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each seed once")
        known: dict[str, str] = {}
        for spec in self.credit:
            same = known.setdefault(identity(spec), spec)
            require(same is spec, "credit", spec, f"another rule: this is the one of {same!r}; name each rule once")
        specs: dict[str, str] = {name: f"the method {name}" for name in self.methods}
        for spec in self.credit:
            other = specs.setdefault(rule_name(spec), spec)
            require(other is spec, "credit", spec, f"a rule with a name of its own, which is not that of {other}: rename a class")
        folders: dict[str, str] = {}
        for name in names:
            folder = run_folder(name, max(self.seeds)).casefold()
            require(len(folder.encode()) <= LONGEST, "methods", name, f"a name for a folder, of {LONGEST} bytes or fewer")
            other = folders.setdefault(folder, name)
            require(other is name, "methods", name, f"a rule whose folder is not that of {other!r}, {folder}")

    def names(self) -> list[str]:
        """Names of the methods in tables: built-in names, then the added rules (a file's rule by its class)."""
        return [*self.methods, *map(rule_name, self.credit)]

    def jobs(self) -> dict[str, RunConfig]:
        """Run configurations by folder name; building them checks every method and setting."""
        specs = [(name, "") for name in self.methods] + [(rule_name(spec), spec) for spec in self.credit]
        result = {}
        for seed in self.seeds:
            for name, credit in specs:
                config = self.run.replace(method=name, credit=credit, seed=seed, **self.method_settings.get(name, {}))
                check(config)
                result[run_folder(name, seed)] = config
        return result

    def allowed(self) -> None:
        """Raise `ConfigError` if the comparison was read without trust and has settings that need consent (`flowrl.trust`)."""
        for settings in (self.run.flat(), *({"credit": spec} for spec in self.credit), *self.method_settings.values()):
            trusted(settings, self.run.source, not self.run.source)

    def descriptions(self) -> dict[str, str]:
        """The first line of the docstring of every method, and of the class of every added rule; "" without a docstring."""
        self.allowed()
        rules = {rule_name(spec): type(build("credit", spec)) for spec in self.credit}
        return {name: _first_line(rules.get(name) or METHODS.get(name)) for name in self.names()}

    def parts(self) -> dict[str, dict[str, str]]:
        """What every method consists of in this comparison (`flowrl.training.build.method_parts`)."""
        seed = self.seeds[0]
        return {name: method_parts(self.jobs()[run_folder(name, seed)]) for name in self.names()}

    def as_dict(self) -> dict[str, Any]:
        """The content of config.json, which `from_dict` reads."""
        return {
            "format": FORMAT,
            "methods": self.names(),
            "seeds": list(self.seeds),
            "credit": list(self.credit),
            "baseline": self.names()[0],
            "preset": self.preset,
            "command": self.command,
            "method_settings": self.method_settings,
            "versions": versions(),
            "hardware": f"{usable_cores()} CPU cores ({platform.machine()}), Python {platform.python_version()}",
            "run": self.run.as_dict(),
        }

    @staticmethod
    def from_dict(values: dict[str, Any], trust: bool = False, source: Path | str = "config.json") -> "CompareConfig":
        """The inverse of `as_dict`.

        Raises `ConfigError` if entries are missing. Without `trust`, parts are built only from settings that the file `source`
        may contain (`allowed`).
        """
        missing = sorted({"methods", "seeds", "run"} - set(values))
        if missing:
            raise ConfigError(f"config: no entry {', '.join(missing)}; a comparison's config.json is needed")
        check_format(source, values)
        older = values.get("format", OLDER) == OLDER
        values = current(values, values.get("format", OLDER), source)
        if older:  # the run's words for sampler and loss had another meaning for these methods
            own = {name: dict.fromkeys(OWN_WORDS, "") for name in values["methods"] if name in FORWARD}
            given = values.get("method_settings", {})
            values = values | {"method_settings": given | {name: {**own[name], **given.get(name, {})} for name in own}}
        credit, run = tuple(values.get("credit", ())), RunConfig.from_dict(values["run"], trust, source)
        return CompareConfig(
            run,
            tuple(values["methods"][: len(values["methods"]) - len(credit)]),
            tuple(values["seeds"]),
            credit,
            values.get("preset", "default"),
            values.get("command", ""),
            values.get("method_settings", {}),
        )


def _first_line(part: Any) -> str:
    """The first line of a docstring; "" without one, also if a data class has made one of its fields."""
    line = (inspect.getdoc(part) or "").partition("\n")[0].strip()
    return "" if line.startswith(f"{getattr(part, '__name__', '')}(") else line.rstrip(".")


def rule_name(spec: str) -> str:
    """A rule's name in tables: its spec, without the path of a file."""
    path, mark, rest = spec.partition(".py:")
    return rest if mark and "(" not in path else spec


Watcher = Callable[[dict[str, dict[str, Any]]], None]
"""Called about twice a second with the state of every job: {"phase", "iteration", "reward", "nfe_total", "seconds"}."""


def _run_job(worker: Worker, config: RunConfig, folder: Path, resume: bool, changed_code: bool, trial: bool) -> bool | str:
    """Whether the run is finished, or the message of the error that ended it; the other runs continue."""
    run = Run(config, folder, worker.send, worker.stopped, shared=folder.parent, changed_code=changed_code, trial=trial)
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
        raise ConfigError(f"out: {out} already holds a comparison; choose another folder, or continue it with --resume {out}")


def compare(
    config: CompareConfig,
    out: Path,
    resume: bool = False,
    workers: int = 0,
    watch: Watcher | None = None,
    changed_code: bool = False,
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
        trial: as for `Run`.

    Returns:
        Whether all runs are finished; False if Ctrl-C paused them. `resume` then continues with the same results.

    Raises:
        ConfigError: another process works in `out`, which the message names, or `out` contains another comparison.
        PartError: some runs failed.
    """

    def started() -> bool:
        return any(map(has_progress, out.glob("runs/*")))

    config.allowed()
    if not resume:
        require_free(out)
    with folder_lock(out) if resume else new_folder(out, "comparison", lambda folder: holds(folder, "methods"), started):
        return _compare(config, out, resume, workers, watch, changed_code, trial)


def _compare(
    config: CompareConfig, out: Path, resume: bool, workers: int, watch: Watcher | None, changed_code: bool, trial: bool
) -> bool:
    jobs = config.jobs()
    notes: list[str] = []
    if trial and (changed_code or not resume):
        try_parts(jobs.values(), notes.append)
    if not resume:
        written = {"descriptions": config.descriptions(), "parts": config.parts()}
        write_json(out / "config.json", config.as_dict() | written)
    states: dict[str, dict[str, Any]] = {name: {"phase": "waiting", "iteration": 0} for name in jobs}
    if notes and watch:
        first = next(iter(jobs))
        watch(
            states | {first: {**states[first], "warning": "\n".join(notes), "kinds": [f"trial {n}" for n in range(len(notes))]}}
        )
    ended: dict[str, bool | str] = {}

    def received(name: str, state: dict[str, Any]) -> None:
        began = states[name].setdefault("began", time.monotonic())
        states[name] |= {**state, "seconds": time.monotonic() - began}

    def finished(name: str, done: bool | str) -> None:
        ended[name] = done
        received(name, {"phase": "failed" if isinstance(done, str) else "done" if done else "paused"})
        if isinstance(done, str):
            received(name, {"warning": f"the run failed: {done}", "kinds": ["failed"]})

    on_cpu = config.run.policy.device == "cpu"  # forks of a process that has used a GPU cannot use it
    completed = run_jobs(
        _run_job,
        {name: (jobs[name], out / "runs" / name, resume, changed_code, trial) for name in start_order(jobs)},
        workers,
        finished=finished,
        received=received,
        watch=lambda: watch(states) if watch else None,
        describe=lambda name: f"the run {_label(jobs[name])}",
        preload=("flowrl.training.compare", *IMPORTS.get(config.run.environment.world, ())) if on_cpu else (),
    )
    failed = {name: text for name, text in ended.items() if isinstance(text, str)}
    if failed and completed:
        name, text = next(iter(failed.items()))
        words = "".join({trust_option(jobs[one].flat()) for one in failed})
        words += " --changed-code" if any(jobs[one].algorithm.credit for one in failed) else ""
        raise PartError(
            f"{len(failed)} of {len(jobs)} runs failed, and the others are complete. {_label(jobs[name])}: {text}. Correct the "
            f"cause, then run the missing ones with: flowrl compare --resume {shlex.quote(str(out))}{words}"
        )
    return completed and not failed and all(ended.values())


def run_label(name: str, seed: int) -> str:
    """Name of a run in tables, figures and messages.

    Args:
        name: name of the method.
        seed: seed of the run.

    Returns:
        The name.
    """
    return f"{name}, seed {seed}"


def _label(config: RunConfig) -> str:
    return run_label(config.algorithm.method, config.seed)


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
    """The entries of a comparison's config.json, all optional here."""

    methods: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    credit: list[str] = field(default_factory=list)
    preset: str = ""
    command: str = ""
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
