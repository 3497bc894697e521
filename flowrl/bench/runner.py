"""Runs in parallel, one line of the results file each, resumable: what is in the file is not run again."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import torch

from flowrl.bench.claims import Claim
from flowrl.bench.evidence import Evidence
from flowrl.bench.measure import measure
from flowrl.bench.records import Ledger, config_hash, make_line
from flowrl.errors import ConfigError, FlowrlError
from flowrl.training.config import RunConfig

Progress = Callable[[int, int, RunConfig], None]
"""Called with (runs in the file, runs in all, the run that has just finished)."""


def needed(claims: Mapping[str, Claim], world: str, seeds: Mapping[str, tuple[int, ...]]) -> dict[str, RunConfig]:
    """All runs that the claims need, by id; a run that several claims share appears once. `world`: its name, or "all"."""
    found: dict[str, RunConfig] = {}
    for claim in claims.values():
        for where in claim.worlds:
            if world in ("all", where):
                for _, _, _, config in claim.configs(where, seeds[where]):
                    found.setdefault(config_hash(config), config)
    return found


_stop: Event | None = None


def _start(stop: Event) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _work(values: dict[str, Any], command: str) -> dict[str, Any] | None:
    config, parent = RunConfig.from_dict(values), os.getppid()
    assert _stop is not None
    stop = _stop
    if stop.is_set():
        return None
    found = measure(config, lambda: stop.is_set() or os.getppid() != parent)
    return None if found is None else make_line(config, found, command)


@dataclass(frozen=True)
class Suite:
    """Runs by id, the file they go to, and the command that a line names for making it again."""

    runs: Mapping[str, RunConfig]
    ledger: Ledger
    allowed: Mapping[str, Any]
    command: str = "flowrl bench claims"

    def execute(self, workers: int = 0, progress: Progress | None = None, minutes: float = math.inf) -> bool:
        """Run what is missing, low seeds first; False where it stopped before the end.

        Ctrl-C stops at once: finished runs are in the file and are kept, the ones under way are given up and made again by the
        next call. After `minutes` no run is started any more, and the ones under way are finished. Raises `FlowrlError` of a run
        that failed, after the others have stopped.
        """
        done = self.ledger.read(self.allowed)
        todo = {key: config for key, config in self.runs.items() if key not in done}
        todo = dict(sorted(todo.items(), key=lambda item: item[1].seed))
        deadline = time.monotonic() + 60 * minutes
        if not todo:
            return True
        count = min(len(todo), workers or min(os.cpu_count() or 1, 16))
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        waiting = list(todo.items())[::-1]
        finished = len(self.runs) - len(todo)
        pending: dict[Future[Any], RunConfig] = {}
        with ProcessPoolExecutor(count, context, _start, (stop,)) as pool:
            try:
                while waiting or pending:
                    while waiting and len(pending) < count and time.monotonic() < deadline:
                        key, config = waiting.pop()
                        pending[pool.submit(_work, config.as_dict(), f"{self.command} --redo {key}")] = config
                    if not pending:
                        return False
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        config = pending.pop(future)
                        self._keep(future, config)
                        finished += 1
                        if progress:
                            progress(finished, len(self.runs), config)
            except KeyboardInterrupt:
                stop.set()
                for future, config in pending.items():
                    self._keep(future, config)
                return False
            except BaseException:
                stop.set()
                raise
        return True

    def _keep(self, future: Future[Any], config: RunConfig) -> None:
        try:
            line = future.result()
        except FlowrlError:
            raise
        except Exception as error:
            raise RuntimeError(f"the run {config.method} (seed {config.seed}, {config.world}) failed: {error!r}") from error
        if line is not None:
            self.ledger.append(line)


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
    """A run made again: whether its curve (but for seconds) is the same, and the largest difference."""

    same: bool
    largest: float


def redo(key: str, ledger: Ledger) -> Repeat:
    """Run the line with id `key` again from its own settings, by today's code, and compare. `ConfigError`: no such line."""
    lines = ledger.read(any_code=True)
    if key not in lines:
        raise ConfigError(f"redo = {key!r} is not allowed: an id in {ledger.path}")
    found = measure(RunConfig.from_dict(lines[key]["config"]))
    assert found is not None
    seconds = 3
    largest = 0.0
    for old, new in zip(lines[key]["curve"], found["curve"], strict=True):
        for place, (a, b) in enumerate(zip(old, new, strict=True)):
            if place != seconds and a is not None:
                largest = max(largest, abs(a - b))
    return Repeat(largest == 0.0, largest)
