"""A comparison: every method with every seed, one process per core, resumable."""

import multiprocessing
import os
import platform
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, require
from flowrl.io import write_json
from flowrl.settings import load_document
from flowrl.training.build import check, make_method
from flowrl.training.config import RunConfig
from flowrl.training.results import run_folder
from flowrl.training.run import Run, versions
from flowrl.types import NoProbe

PAPERS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")


@dataclass(frozen=True)
class CompareConfig:
    """What is compared: methods x seeds, all else equal. `credit` adds rules by spec (`flowrl.registry`)."""

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
        require(len(set(names)) == len(names), "methods", names, "each method once")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each seed once")

    def names(self) -> list[str]:
        """Methods as they are called in tables: built-in names, then the added rules (a file's by their class)."""
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

    def as_dict(self) -> dict[str, Any]:
        """What config.json records; `from_dict` reads it back."""
        return {
            "methods": self.names(),
            "seeds": list(self.seeds),
            "credit": list(self.credit),
            "baseline": self.names()[0],
            "preset": self.preset,
            "command": self.command,
            "method_settings": self.method_settings,
            "versions": versions(),
            "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}",
            "run": self.run.as_dict(),
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "CompareConfig":
        """The inverse of `as_dict`. Raises `ConfigError` where entries are missing."""
        missing = sorted({"methods", "seeds", "run"} - set(values))
        if missing:
            raise ConfigError(f"config: no entry {', '.join(missing)}; a comparison's config.json is needed")
        credit = tuple(values.get("credit", ()))
        return CompareConfig(
            RunConfig.from_dict(values["run"]),
            tuple(values["methods"][: len(values["methods"]) - len(credit)]),
            tuple(values["seeds"]),
            credit,
            values.get("preset", "default"),
            values.get("command", ""),
            values.get("method_settings", {}),
        )


def rule_name(spec: str) -> str:
    """What tables call a rule: its spec, without the path of a file."""
    path, mark, rest = spec.partition(".py:")
    return rest if mark and "(" not in path else spec


Watcher = Callable[[dict[str, dict[str, Any]]], None]
"""Called about twice a second with the state of every job: {"phase", "iteration", "reward", "nfe_total", "seconds"}."""

_stop: Event | None = None
_messages: Any = None


def _start_worker(stop: Event, messages: Any) -> None:
    """In a worker: one thread, and Ctrl-C is the parent's business (it asks workers to pause)."""
    global _stop, _messages
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop, _messages = stop, messages


def _run_job(name: str, values: dict[str, Any], folder: str, resume: bool) -> bool:
    assert _stop is not None
    if _stop.is_set():
        return False
    parent = os.getppid()
    run = Run(
        RunConfig.from_dict(values),
        Path(folder),
        report=lambda state: _messages.put((name, state)),
        stop=lambda: _stop.is_set() or os.getppid() != parent,  # pyright: ignore[reportOptionalMemberAccess]
        shared=Path(folder).parent,
    )
    finished = run.execute(resume)
    _messages.put((name, {"phase": "done" if finished else "paused"}))
    return finished


def compare(config: CompareConfig, out: Path, resume: bool = False, workers: int = 0, watch: Watcher | None = None) -> bool:
    """Run all jobs in `out`/runs, `workers` at a time (0: one per core, at most 8), one thread each, so that the numbers do not
    depend on the machine's cores. Returns False when Ctrl-C paused it: `resume` then goes on with the same numbers."""
    jobs = config.jobs()
    if (out / "config.json").exists() and not resume:
        raise ConfigError(f"out: {out} already holds a run; choose another folder, or go on with --resume {out}")
    if not resume:
        write_json(out / "config.json", config.as_dict())
    count = min(len(jobs), workers or min(os.cpu_count() or 1, 8))
    context = multiprocessing.get_context("spawn")
    stop, messages = context.Event(), context.Queue()
    states: dict[str, dict[str, Any]] = {name: {"phase": "waiting", "iteration": 0} for name in jobs}
    with ProcessPoolExecutor(count, context, _start_worker, (stop, messages)) as pool:
        longest_first = sorted(jobs, key=lambda name: isinstance(make_method(jobs[name]).credit.probe, NoProbe))
        futures = {
            name: pool.submit(_run_job, name, jobs[name].as_dict(), str(out / "runs" / name), resume) for name in longest_first
        }
        try:
            _follow(futures, states, messages, watch)
        except KeyboardInterrupt:
            stop.set()
            wait(futures.values())
            return False
        except BaseException:
            stop.set()
            raise
    return all(future.result() for future in futures.values())


def _follow(futures: dict[str, Future[bool]], states: dict[str, dict[str, Any]], messages: Any, watch: Watcher | None) -> None:
    """Pass the workers' messages on until all are done; the first error ends the comparison."""
    while True:
        pending = [future for future in futures.values() if not future.done()]
        try:
            name, state = messages.get(timeout=0.5)
            while True:
                began = states[name].setdefault("began", time.monotonic())
                states[name] |= {**state, "seconds": time.monotonic() - began}
                name, state = messages.get_nowait()
        except queue.Empty:
            pass
        for future in futures.values():
            error = future.exception() if future.done() else None
            if error is not None:
                raise error if isinstance(error, FlowrlError) else RuntimeError(f"a run failed: {error!r}") from error
        if watch is not None:
            watch(states)
        if not pending:
            return


def load_compare(path: Path) -> CompareConfig:
    """The comparison that the file config.json at `path` describes."""
    return CompareConfig.from_dict(load_document(path)[0])
