"""Runs in parallel, one line of the results file each, resumable: what is in the file is not run again."""

import json
import math
import multiprocessing
import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import torch

from flowrl.errors import ConfigError, FlowrlError, require
from flowrl.training.config import RunConfig
from flowrl_bench.claims import Claim
from flowrl_bench.evidence import Evidence
from flowrl_bench.lock import held
from flowrl_bench.measure import CURVE, measure
from flowrl_bench.records import Ledger, config_hash, make_line, require_unchanged, stamp

Progress = Callable[[int, int, Mapping[str, Any]], None]
"""Called with (runs in the file, runs in all, the line of the run that has just finished)."""


QUICK_QUESTIONS = ("random-points", "clip-own", "point-density")
"""Open questions of the quick suite, which has all claims."""


def quick(claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """The claims of the quick suite: those of the papers, and `QUICK_QUESTIONS`."""
    return {key: claim for key, claim in claims.items() if not claim.asks or key in QUICK_QUESTIONS}


def needed(claims: Mapping[str, Claim], world: str, seeds: Mapping[str, tuple[int, ...]]) -> dict[str, RunConfig]:
    """All runs that the claims need, by id; a run that several claims share appears once. `world`: its name, or "all"."""
    found: dict[str, RunConfig] = {}
    for claim in claims.values():
        for where in claim.worlds:
            if world in ("all", where):
                for _, _, _, config in claim.configs(where, seeds[where]):
                    found.setdefault(config_hash(config), config)
    return found


def seeded(config: RunConfig, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """`measure`, after the generators that everybody shares were seeded by the run: a part of the user's own that draws from them
    gives the same numbers in any process. Built-in parts have generators of their own."""
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)  # noqa: NPY002 - the shared generator is what is meant
    torch.manual_seed(config.seed)
    return measure(config, stop)


_stop: Event | None = None


def _start(stop: Event) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started in here never hear Ctrl-C, from before they can do anything about it: pausing is ours to say."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(values: dict[str, Any], key: str, command: str, made: dict[str, Any]) -> dict[str, Any] | None:
    config, parent = RunConfig.from_dict(values), os.getppid()
    assert _stop is not None
    stop = _stop
    if stop.is_set():
        return None
    found = seeded(config, lambda: stop.is_set() or os.getppid() != parent)
    if found is None:
        return None
    require_unchanged(config, key, made["code"])
    return make_line(config, found, command, key, made)


def processes(workers: int, jobs: int) -> int:
    """How many work at a time: `workers`, or one per core (16 at most), and no more than there are jobs."""
    require(workers >= 0, "workers", workers, "1 or more, or 0 for one per core")
    return max(1, min(jobs, workers or min(os.cpu_count() or 1, 16)))


@dataclass(frozen=True)
class Suite:
    """Runs by id, the file they go to, and the command that they are a part of (whoever wants the file too is told)."""

    runs: Mapping[str, RunConfig]
    ledger: Ledger
    allowed: Mapping[str, Any]
    command: str = "flowrl bench claims"

    def execute(self, workers: int = 0, progress: Progress | None = None, minutes: float = math.inf) -> bool:
        """Run what is missing, low seeds first; False where it stopped before the end.

        Ctrl-C stops at once: finished runs are in the file and are kept, the ones under way are given up and made again by the
        next call. After `minutes` no run is started any more, and the ones under way are finished. Raises `FlowrlError` of a run
        that failed, after the others have stopped; of a run whose code changed before it ended; and where another process
        works on the file.
        """
        processes(workers, 1)
        with held(self.ledger.path, self.command):
            done = self.ledger.read(self.allowed)
            todo = sorted(((key, config) for key, config in self.runs.items() if key not in done), key=lambda item: item[1].seed)
            return not todo or self._execute(todo, processes(workers, len(todo)), progress, time.monotonic() + 60 * minutes)

    def _execute(self, todo: list[tuple[str, RunConfig]], count: int, progress: Progress | None, deadline: float) -> bool:
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        waiting, finished, made = todo[::-1], len(self.runs) - len(todo), stamp()
        pending: dict[Future[Any], RunConfig] = {}
        with ProcessPoolExecutor(count, context, _start, (stop,)) as pool:
            try:
                while waiting or pending:
                    while waiting and len(pending) < count and time.monotonic() < deadline:
                        key, config = waiting.pop()
                        with _deaf():
                            pending[pool.submit(_work, config.as_dict(), key, self.again(key), made)] = config
                    if not pending:
                        return False
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        line = self._keep(future, pending.pop(future))
                        finished += 1
                        if progress and line is not None:
                            progress(finished, len(self.runs), line)
            except KeyboardInterrupt:
                stop.set()
                for future, config in pending.items():
                    if not isinstance(future.exception(), BrokenExecutor):  # a worker that Ctrl-C ended has nothing to keep
                        self._keep(future, config)
                return False
            except BaseException:
                stop.set()
                raise
        return True

    def again(self, key: str) -> str:
        """The command that makes a run again from its line, where the paths that it names lead to the same files."""
        return shlex.join(["flowrl", "bench", "claims", "--out", str(self.ledger.path), "--redo", key])

    def _keep(self, future: Future[Any], config: RunConfig) -> dict[str, Any] | None:
        try:
            line = future.result()
        except FlowrlError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"the run {config.algorithm.method} (seed {config.seed}, {config.environment.world}) failed: {error!r}"
            ) from error
        if line is not None:
            self.ledger.append(line)
        return line


def evidence(claim: Claim, world: str, lines: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...]) -> Evidence | None:
    """The claim's runs in a world: every seed that all its arms and tasks have (with samples, if it asks for them), or None."""
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {arm: {} for arm in claim.arms}
    for arm, task, seed, config in claim.configs(world, seeds):
        line = lines.get(config_hash(config))
        cell = found[arm].setdefault(task, {})
        if line is not None and ("samples" in line or arm not in claim.samples):
            cell[seed] = line
    complete = [s for s in seeds if all(s in cell for tasks in found.values() for cell in tasks.values())]
    if not complete:
        return None
    runs = {arm: {task: [cell[s] for s in complete] for task, cell in tasks.items()} for arm, tasks in found.items()}
    return Evidence(runs, tuple(complete))


@dataclass(frozen=True)
class Repeat:
    """A run made again: which numbers differ (but for seconds), and by how much at most; infinite where one is no number."""

    differing: tuple[str, ...]
    largest: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differing


def redo(key: str, ledger: Ledger) -> Repeat:
    """Run the line with id `key` again from its own settings, by today's code, and compare all that was measured.

    `ConfigError`: no such line."""
    lines = ledger.read(any_code=True)
    if key not in lines:
        raise ConfigError(f"redo = {key!r} is not allowed: an id in {ledger.path}")
    found = json.loads(json.dumps(seeded(RunConfig.from_dict(lines[key]["config"]))))
    differences = dict(_differences(_named({name: lines[key].get(name, ...) for name in found}), _named(found)))
    return Repeat(tuple(differences), max(differences.values(), default=0.0))


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """A run's numbers with the curve's columns by name."""
    return {**found, "curve": [dict(zip(CURVE, row, strict=False)) | {"columns": len(row)} for row in found["curve"]]}


def _differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """(name, size) of what differs between two nests of numbers, but for seconds. NaN is the same as NaN, and as nothing else."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            if name not in ("seconds", "phases"):
                yield from _differences(old.get(name, ...), new.get(name, ...), f"{where}.{name}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{where}[{place}]")
    elif isinstance(old, int | float) and isinstance(new, int | float):
        if old != new and not (math.isnan(old) and math.isnan(new)):
            size = abs(old - new)
            yield where, math.inf if math.isnan(size) else size
    elif old != new:
        yield where, math.inf
