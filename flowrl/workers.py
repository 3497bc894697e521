"""Jobs in worker processes: one torch thread each, with results and messages passed on as they arrive."""

import math
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from flowrl.errors import FlowrlError, require

MOST_WORKERS = 16
"""The number of processes that are started at most unless a number is given."""
REFRESH = 0.5
"""Seconds between two calls of `watch` while nothing else happens."""


@dataclass(frozen=True)
class Worker:
    """The first argument of every job: its way to talk to the parent process."""

    key: Hashable
    parent: int
    stop: Event
    messages: Any

    def send(self, message: Any) -> None:
        """Pass a message (anything that can be pickled) to the parent."""
        self.messages.put((self.key, message))

    def stopped(self) -> bool:
        """Whether the job should end soon: the parent was interrupted, another job failed, or the parent is gone."""
        return self.stop.is_set() or os.getppid() != self.parent


def worker_count(workers: int, jobs: int) -> int:
    """`workers`, or one per core (at most `MOST_WORKERS`) if it is 0, and never more than there are jobs.

    Raises `ConfigError` for a negative number.
    """
    require(workers >= 0, "workers", workers, "1 or more, or 0 for one per core")
    return max(1, min(jobs, workers or min(os.cpu_count() or 1, MOST_WORKERS)))


def run_jobs(
    function: Callable[..., Any],
    jobs: Mapping[Any, tuple[Any, ...]],
    workers: int = 0,
    *,
    finished: Callable[[Any, Any], None],
    received: Callable[[Any, Any], None] = lambda key, message: None,
    watch: Callable[[], None] = lambda: None,
    seconds: float = math.inf,
    describe: Callable[[Any], str] = str,
) -> bool:
    """Call `function(worker, *arguments)` for every job, in the order of `jobs`; True if all of them were completed.

    `function` must be importable (a module's own). In this process, `finished(key, result)` is called as jobs complete,
    `received(key, message)` for every message, and `watch()` after these and at least every `REFRESH` seconds.

    Ctrl-C pauses: jobs that run are asked to stop (`Worker.stopped`), their results are passed on, and False is returned. No
    job is started later than `seconds` after the call. The first error stops all jobs: a `FlowrlError` is raised as it is, any
    other as a `RuntimeError` that names the job by `describe(key)`; so is a worker process that was killed.
    """
    count, deadline = worker_count(workers, len(jobs)), time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    stop, messages = context.Event(), context.Queue()
    waiting, running = list(jobs.items())[::-1], dict[Future[Any], Any]()

    def pass_on(timeout: float) -> None:
        for key, message in _arrived(messages, timeout):
            received(key, message)
        for future in [future for future in running if future.done()]:
            names = describe(running[future]), ", ".join(map(describe, running.values()))
            key = running.pop(future)
            ran, result = _outcome(future, *names, paused=stop.is_set())
            if ran:
                finished(key, result)
        watch()

    with ProcessPoolExecutor(count, context, _start, (stop, messages)) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < count and time.monotonic() < deadline:
                    key, arguments = waiting.pop()
                    with _interrupts_blocked():
                        future = pool.submit(_call, function, key, os.getpid(), arguments)
                    running[future] = key
                    future.add_done_callback(lambda _: messages.put(None))
                    pool.submit(_nothing)  # concurrent.futures watches a process that it has started from the next call on
                if not running:
                    return False
                pass_on(REFRESH)
        except KeyboardInterrupt:
            stop.set()
            while running:
                pass_on(REFRESH)
            return False
        except BaseException:
            stop.set()
            while any(not future.done() for future in running):
                _arrived(messages, REFRESH)  # a full pipe would keep a worker from ending
            raise
    return True


_stop: Event | None = None
_messages: Any = None


def _start(stop: Event, messages: Any) -> None:
    """Prepare a worker process."""
    import torch

    global _stop, _messages
    _stop, _messages = stop, messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _nothing() -> None:
    """A job that does nothing."""


def _call(function: Callable[..., Any], key: Hashable, parent: int, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """(whether the job ran, its result); in a worker process."""
    assert _stop is not None
    worker = Worker(key, parent, _stop, _messages)
    return (False, None) if worker.stopped() else (True, function(worker, *arguments))


def _outcome(future: Future[Any], name: str, names: str, paused: bool) -> tuple[bool, Any]:
    """What `_call` returned for the job `name`, one of the `names` that run. While pausing, a killed worker is no error."""
    try:
        return future.result()
    except FlowrlError:
        raise
    except BrokenExecutor as error:
        if paused:
            return False, None
        raise RuntimeError(f"a worker process was killed (out of memory?) while these jobs ran: {names}") from error
    except Exception as error:
        raise RuntimeError(f"{name} failed: {error!r}") from error


def _arrived(messages: Any, timeout: float) -> list[tuple[Any, Any]]:
    """All messages there are; waits up to `timeout` seconds for the first. None wakes the parent when a job has ended."""
    found = []
    try:
        found.append(messages.get(timeout=timeout))
        while True:
            found.append(messages.get_nowait())
    except queue.Empty:
        return [message for message in found if message is not None]


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never receive Ctrl-C, not even while they import: pausing is up to the parent."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
