"""Rewards on the CPU in a pool of processes, which score images while the policy samples."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from flowrl.core.errors import FlowrlError, RewardError, part_call
from flowrl.core.protocols import AnyReward, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import checked_scores, load_reward
from flowrl.run.distributed import processes_here
from flowrl.run.parts.registry import USER_MODULE, file_module
from flowrl.run.workers import begin_worker, process_context, signals_blocked, usable_cores

MOST_PROCESSES = 61
"""Limit of `ProcessPoolExecutor` on Windows."""
TRIALS = 3
"""How often processes are started for a call."""
PIECES = 4
"""Pieces of a batch per process: uneven seconds per image leave no process idle for long."""


class RewardPool:
    """Processes that compute `rewards`, which start at the first call and end with this object or
    with this process.

    Args:
        processes: largest number of processes.
    """

    def __init__(self, processes: int) -> None:
        self.processes = min(processes, MOST_PROCESSES)
        self.rewards = list[RewardModel]()
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        """`function(*arguments)` in one of the processes."""
        with signals_blocked():  # this process controls pauses
            for _ in range(TRIALS - 1):
                try:
                    return self._started().submit(function, *arguments)
                # one of its processes was killed, earlier or just now, while its pipes are closed
                except (BrokenProcessPool, OSError):
                    self._executor = None
            return self._started().submit(function, *arguments)

    def _started(self) -> ProcessPoolExecutor:
        """The processes, which are started if there are none."""
        if self._executor is None:
            modules = {type(reward).__module__ for reward in self.rewards}
            files = [sys.modules[n].__file__ for n in modules if n.startswith(USER_MODULE)]
            given, context = (files, pickle.dumps(self.rewards)), process_context(__name__)
            self._executor = ProcessPoolExecutor(self.processes, context, _begin, given)
            finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        return self._executor

    def restart(self) -> None:
        """Kill the processes; the next call starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            for process in [*(executor._processes or {}).values()]:
                process.kill()
            executor.shutdown(wait=False, cancel_futures=True)


class PooledReward:
    """One of the rewards of a pool: the same scores as from `reward`, which a process computes for
    a few images at a time.

    Args:
        pool: the pool.
        reward: a reward whose score of an image does not depend on the batch.
    """

    def __init__(self, pool: RewardPool, reward: RewardModel) -> None:
        self.reward, self._pool, self._number = reward, pool, len(pool.rewards)
        pool.rewards.append(reward)

    def load(self) -> None:
        """Start the processes, each of which loads the reward's weights."""
        self._results(_load, [()] * self._pool.processes)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample], on the CPU. Raises the error of a process, or `RewardError` if one was
        killed.
        """
        pixels, count = images.detach().float().cpu().numpy(), len(prompts)
        size = max(1, count // (PIECES * self._pool.processes))
        pieces = [slice(start, start + size) for start in range(0, count, size)]
        calls = [(pixels[piece], list(prompts[piece])) for piece in pieces]
        return torch.cat(self._results(_score, calls))

    def restart(self) -> None:
        """Kill the processes, one of which hangs."""
        self._pool.restart()

    def _results(self, function: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        futures = list[Future[bytes]]()
        try:
            with part_call(type(self.reward).__name__ + function.__name__.replace("_", ".")):
                for call in calls:
                    futures.append(self._pool.submit(function, self._number, *call))
                return [pickle.loads(future.result()) for future in futures]
        except BrokenProcessPool as error:
            killed = f"a process that computes {type(self.reward).__name__} was killed"
            raise RewardError(f"{killed} (out of memory?)") from error
        finally:
            for future in futures:
                future.cancel()


def pooled(reward: AnyReward) -> AnyReward:
    """`reward`, of which every part with a true attribute `on_cpu` is computed in a common pool of
    processes: as many as this process has cores, which the processes of the run on this machine
    share.
    """
    pool = RewardPool(max(1, usable_cores() // processes_here()))

    def change(part: Any, name: str) -> Any:
        return PooledReward(pool, part) if getattr(type(part), "on_cpu", False) else part

    return replaced(reward, change)


def replaced(part: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """A reward, or rewards by name, in which every part is replaced by `change(part, name)`, if
    that is another object; `name` is that of the component, or "".
    """
    if (new := change(part, name)) is not part:
        return new
    if isinstance(part, Mapping):
        changed = {key: replaced(value, change, str(key)) for key, value in part.items()}
        return changed if any(changed[key] is not part[key] for key in part) else part
    if not is_dataclass(part) or not isinstance(part, AnyReward):
        return part
    given = {item.name: getattr(part, item.name) for item in fields(part)}
    changed = {key: replaced(value, change, name) for key, value in given.items()}
    if all(changed[key] is given[key] for key in given):
        return part
    whole = copy(part)  # the checks of its options were made
    for key in given:
        object.__setattr__(whole, key, changed[key])
    return whole


# ----- In a process of the pool

_given: list[Any] = []
"""The users' files and the pickled rewards."""


def _begin(*given: Any) -> None:
    begin_worker()
    if hasattr(os, "nice"):  # the thread that launches the policy's kernels goes first
        os.nice(5)
    _given[:] = given


@cache
def _rewards() -> list[Any]:
    files, pickled = _given
    for file in files:
        file_module(Path(file))
    return pickle.loads(pickled)


def _load(number: int) -> bytes:
    load_reward(_rewards()[number])
    return pickle.dumps(None)


def _score(number: int, pixels: Any, prompts: Sequence[Prompt]) -> bytes:
    """The pickled scores, because multiprocessing would send a tensor through shared memory."""
    name = type(reward := _rewards()[number]).__name__
    images = torch.from_numpy(pixels)
    try:
        with torch.no_grad(), part_call(f"{name}.score"):
            return pickle.dumps(checked_scores(reward, images, prompts, f"{name}.score"))
    except FlowrlError:
        raise
    except Exception as error:  # perhaps one that cannot be pickled
        raise RewardError(f"{name}.score failed: {type(error).__name__}: {error}") from error
