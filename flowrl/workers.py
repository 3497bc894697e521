"""Jobs in worker processes: one torch thread each, with results and messages passed on as they
arrive.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowrlError, require
from flowrl.signals import STOPPING, on_stop, watch_output

MOST_WORKERS = 16
"""Default limit of the number of processes."""
REFRESH = 0.5
"""Largest delay of messages in seconds."""


def import_modules(*names: str) -> None:
    """Import modules without garbage collection, which frees almost no memory during imports.

    In the process of a command, which has called `gc.freeze`, later collections ignore these
    objects, too.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            import_module(name)
    finally:
        if gc.get_freeze_count():
            gc.freeze()
        if collected:
            gc.enable()


@dataclass(frozen=True)
class Worker:
    """The first argument of every job: the connection to the parent process.

    Args:
        key: key of the job.
        stop: event that stops the job.
        messages: pipe to the parent.
        lock: lock of the pipe.
    """

    key: Hashable
    stop: Any
    messages: Any
    lock: Any

    def send(self, message: Any) -> None:
        """Send a message (anything that can be pickled) to the parent, which receives it before the
        job's result.
        """
        with self.lock:
            self.messages.send((self.key, message))

    def stopped(self) -> bool:
        """Whether the job should end soon: the parent was interrupted, another job failed, or the
        parent is gone.
        """
        parent = multiprocessing.parent_process()
        return self.stop.is_set() or (parent is not None and not parent.is_alive())


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
    """Call `function(worker, *arguments)` for every job, in the order of `jobs`, in worker
    processes.

    Ctrl-C, SIGTERM and SIGHUP pause: running jobs are stopped through `Worker.stopped`, and their
    results are passed on. If this process is killed, its workers end within a second or two. The
    first error stops all jobs.

    On Linux one process imports the modules of `preload` once, and the workers are its forks, which
    saves processor time and memory. It is this process if it has a single thread. Otherwise a
    server process is started, which keeps the environment variables of the first such call.

    Args:
        function: an importable function of a module.
        jobs: arguments of each job, by key.
        workers: number of processes; 0: one per usable core.
        finished: called in this process as `finished(key, result)` when a job has finished.
        received: called in this process as `received(key, message)` for every message of a job.
        watch: called in this process after these, at least every `REFRESH` seconds.
        seconds: time after the call until which jobs may start.
        describe: name of a job, from its key, for messages.
        preload: modules that all jobs need; importing them must not start threads or use a GPU.

    Returns:
        Whether all jobs were completed; False after a pause or if the time was too short.

    Raises:
        FlowrlError: a job raised it.
        RuntimeError: a job raised another error, or a worker process was killed; the message names
            the job.
    """
    count, deadline = worker_count(workers, len(jobs)), time.monotonic() + seconds
    context = _context(preload)
    with _signals_blocked():  # multiprocessing starts a further process here
        stop, (inbox, outbox) = context.Event(), context.Pipe(duplex=False)
    waiting, running = list(jobs.items())[::-1], dict[Future[Any], Any]()

    def pass_on() -> None:
        done = wait(running, REFRESH, FIRST_COMPLETED).done
        while inbox.poll():
            received(*inbox.recv())
        for future in done:
            names = describe(running[future]), ", ".join(map(describe, running.values()))
            key = running.pop(future)
            ran, result = _outcome(future, *names, paused=stop.is_set())
            if ran:
                finished(key, result)
        watch()

    def interrupt(number: int) -> None:
        if number == signal.SIGINT or not stop.is_set():  # a launcher may repeat its signal
            raise KeyboardInterrupt

    others, lock = set(multiprocessing.active_children()), context.Lock()
    with (
        ProcessPoolExecutor(count, context, _start, (stop, outbox, lock)) as pool,
        on_stop(interrupt),
    ):
        try:
            while waiting or running:
                while waiting and len(running) < count and time.monotonic() < deadline:
                    key, arguments = waiting.pop()
                    with _signals_blocked():
                        running[pool.submit(_call, function, key, arguments)] = key
                        # concurrent.futures monitors a process only from the next call on
                        pool.submit(_nothing)
                if not running:
                    return False
                pass_on()
        except KeyboardInterrupt:
            stop.set()
            while running:
                pass_on()
            return False
        except BaseException:
            stop.set()
            while wait(running, REFRESH).not_done:
                while inbox.poll():
                    inbox.recv()  # a full pipe would keep a worker from ending
            raise
        finally:
            # its other workers ignore the SIGTERM with which it would end them
            if _is_broken(pool):
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()
    return True


def _context(preload: Sequence[str]) -> BaseContext:
    """The start method of worker processes: spawned, or with `preload` forked from this process or
    from a server that has imported it.

    A fork has only the thread that forked, and locks of other threads remain locked: a pool of
    OpenMP then hangs. Threads are therefore counted by the system, before and after the imports.
    """
    if not preload or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    # no second import in a server: 2.9 s of processor time for a comparison in the shapes world
    if _has_one_thread():
        import_modules(*preload)
        if _has_one_thread():
            return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _has_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _is_broken(pool: ProcessPoolExecutor) -> bool:
    try:
        with _signals_blocked():
            pool.submit(_nothing)
    except (BrokenExecutor, RuntimeError):
        return True
    return False


_parts: list[Any] = []
"""In a worker process: the event that stops it, and the pipe to the parent with its lock."""


def _start(*parts: Any) -> None:
    """Prepare a worker process: it ignores signals, because the parent controls pauses, and ends
    with the parent.

    A fork of the parent prints past a progress display, and its garbage collection ignores
    inherited objects.
    """
    global _parts
    _parts = list(parts)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    watch_output()
    gc.freeze()
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """End this process when its parent has ended for any reason; the last checkpoint is always
    complete.
    """
    parent, started_by = multiprocessing.parent_process(), os.getppid()
    while (
        parent is not None and os.getppid() == started_by and not wait_for([parent.sentinel], 1.0)
    ):
        pass
    os._exit(1)


def _nothing() -> None:
    """A job that does nothing."""


def _call(
    function: Callable[..., Any], key: Hashable, arguments: tuple[Any, ...]
) -> tuple[bool, Any]:
    """(whether the job ran, its result); in a worker process."""
    worker = Worker(key, *_parts)
    return (False, None) if worker.stopped() else (True, function(worker, *arguments))


def _outcome(future: Future[Any], name: str, names: str, paused: bool) -> tuple[bool, Any]:
    """The result of `_call` for the job `name`, one of the running `names`. During a pause, a
    killed worker is not an error.
    """
    try:
        return future.result()
    except FlowrlError:
        raise
    except BrokenExecutor as error:
        if paused:
            return False, None
        raise RuntimeError(
            f"a worker process was killed (out of memory?) while these jobs ran: {names}"
        ) from error
    except Exception as error:
        raise RuntimeError(f"{name} failed: {error!r}") from error


@contextmanager
def _signals_blocked() -> Iterator[None]:
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
