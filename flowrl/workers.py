"""Jobs in worker processes: a process and a torch thread for each, with messages and results passed
on as they arrive.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowrlError, require
from flowrl.signals import STOPPING, on_stop, watch_output

MOST_WORKERS = 16
"""Default limit of the number of processes."""
REFRESH = 0.5
"""Largest delay of messages in seconds."""


@dataclass(frozen=True)
class Worker:
    """The first argument of every job: the connection to the parent process.

    Args:
        stop: event that stops all jobs.
        outbox: pipe to the parent.
    """

    stop: Any
    outbox: Any

    def send(self, message: Any) -> None:
        """Send a message (anything that can be pickled) to the parent, which receives it before the
        job's result.
        """
        self.outbox.send(("message", message))

    def stopped(self) -> bool:
        """Whether the job should end soon: the parent was interrupted, or another job failed."""
        return self.stop.is_set()


def worker_count(workers: int, jobs: int) -> int:
    """The number of worker processes, at most one per job.

    Args:
        workers: the requested number; 0: one per usable core, at most `MOST_WORKERS`.
        jobs: number of jobs.

    Returns:
        The number of processes.

    Raises:
        ConfigError: `workers` is negative.
    """
    require(workers >= 0, "workers", workers, "1 or more, or 0 for one per core")
    return max(1, min(jobs, workers or min(usable_cores(), MOST_WORKERS)))


def usable_cores(
    cgroup: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """The number of cores that this process may use: those of its affinity, or fewer under a
    container's quota (cpu.max of its control group, version 2, or of a parent group).

    Args:
        cgroup: the file with the process's control groups.
        mounted: the folder with the mounted control groups.

    Returns:
        The number of cores, 1 or more; a fraction of a core counts as a core.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # In a container the process's group is often the root of the mounted folder, whatever path
    # /proc contains; therefore the root's limit is read, too.
    group = mounted / _text(cgroup).rpartition("0::")[2].strip().strip("/")
    for folder in (group, *group.parents):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():  # no limit: "max 100000"
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


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
    preload: Sequence[str] = (),
) -> bool:
    """Call `function(worker, *arguments)` for every job, in the order of `jobs`, each in a process.

    Ctrl-C, SIGTERM and SIGHUP pause: running jobs are stopped through `Worker.stopped`, and their
    results are passed on; a second Ctrl-C ends them at once. If this process is killed, its workers
    end with it. The first error stops all jobs.

    On Linux a server process imports the module of `function` and those of `preload` once, and the
    workers are its forks. It keeps the environment variables of the first call.

    Args:
        function: an importable function of a module.
        jobs: arguments of each job, by key.
        workers: number of processes; 0: one per usable core.
        finished: called in this process as `finished(key, result)` when a job has finished.
        received: called in this process as `received(key, message)` for every message of a job.
        watch: called in this process after these, at least every `REFRESH` seconds.
        seconds: time after the call until which jobs may start.
        describe: name of a job, from its key, for messages.
        preload: further modules that all jobs need; importing them must not use a GPU.

    Returns:
        Whether all jobs were completed; False after a pause or if the time was too short.

    Raises:
        FlowrlError: a job raised it.
        RuntimeError: a job raised another error, or its process was killed; the message names the
            job.
    """
    count, deadline = worker_count(workers, len(jobs)), time.monotonic() + seconds
    # torch.optim imports torch._dynamo at its first use, which takes a second
    context = process_context(function.__module__, "torch._dynamo", *preload)
    with signals_blocked():  # multiprocessing starts a further process here
        stop = context.Event()
    waiting, running = list(jobs.items())[::-1], dict[Any, tuple[Any, Any]]()
    signals, errors = list[int](), list[Exception]()

    def may_start() -> bool:
        return bool(waiting) and not stop.is_set() and time.monotonic() < deadline

    def start() -> None:
        key, arguments = waiting.pop()
        inbox, outbox = context.Pipe(duplex=False)
        call = Worker(stop, outbox), describe(key), function, arguments
        process = context.Process(target=_work, args=call)
        with signals_blocked():
            process.start()
        outbox.close()  # so that the pipe ends with the process
        running[inbox] = key, process

    def receive(inbox: Any) -> None:
        key, process = running[inbox]
        content: Any = None
        try:
            kind, content = inbox.recv()
        except (EOFError, OSError):  # the latter in the middle of a message
            kind = "end"
        if kind == "message":
            received(key, content)
            return
        del running[inbox]
        process.join()
        if kind == "result":
            finished(key, content)
        elif kind == "error":
            raise content
        elif not stop.is_set():
            raise RuntimeError(f"the process of {describe(key)} was killed (out of memory?)")

    try:
        with on_stop(signals.append):
            while running or may_start():
                while len(running) < count and may_start():
                    start()
                try:
                    for inbox in wait(list(running), REFRESH):
                        receive(inbox)
                    watch()
                except Exception as error:
                    errors.append(error)
                if signals or errors:
                    stop.set()
                if signals.count(signal.SIGINT) > 1:
                    raise KeyboardInterrupt
    finally:
        for _, process in running.values():
            process.kill()
    if errors:
        raise errors[0]
    return not waiting and not signals


def process_context(*preload: str) -> Any:
    """The context of multiprocessing for further processes. On Linux they are forks of a server
    process that has imported the modules `preload`.
    """
    # not forks of this process: they would inherit locked locks of its other threads
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(list(preload))
    return context


def begin_worker() -> None:
    """The start of a worker process. It ignores signals, because the parent controls pauses, ends
    with the parent, and uses one torch thread.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    watch_output()
    gc.freeze()  # collections ignore what the server has imported
    import torch

    torch.set_num_threads(1)


def _work(worker: Worker, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
    """The process of the job `name`; the last checkpoint is always complete."""
    begin_worker()
    try:
        if not worker.stopped():
            worker.outbox.send(("result", function(worker, *arguments)))
    except FlowrlError as error:
        worker.outbox.send(("error", error))
    except BaseException as error:  # perhaps one that cannot be pickled
        failure = RuntimeError(f"{name} failed: {error!r}")
        failure.add_note(traceback.format_exc())
        worker.outbox.send(("error", failure))


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started in this context never receive a signal of `STOPPING`, not even during
    imports: the parent controls pauses.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
