"""Jobs in parallel: in processes of this machine, or on an executor."""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from flowrl.run.futures import Futures
from flowrl.run.signals import on_stop
from flowrl.run.workers import Processes, worker_count


def run_jobs(
    function: Callable[..., Any],
    jobs: Mapping[Any, tuple[Any, ...]],
    workers: int | str | Executor = 0,
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

    On an executor (`flowrl.run.futures`), a job whose machine is lost may be run again;
    `Worker.sent` then has the messages that have arrived.

    Args:
        function: an importable function of a module.
        jobs: arguments of each job, by key.
        workers: number of processes; 0: one per usable core. Or an executor of the interface of
            `concurrent.futures`, or the address of a cluster (`flowrl.run.futures`).
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
    deadline = time.monotonic() + seconds
    waiting, running = list(jobs.items())[::-1], dict[Any, Any]()
    signals, errors = list[int](), list[Exception]()
    if isinstance(workers, int):
        # torch.optim imports torch._dynamo at its first use, which takes a second
        modules = (function.__module__, "torch._dynamo", *preload)
        pool = Processes(worker_count(workers, len(jobs)), modules)
    else:
        pool = Futures(workers)

    def closing() -> bool:
        return bool(signals or errors) or time.monotonic() >= deadline

    def receive(job: Any, kind: str, content: Any) -> None:
        if job not in running:  # its result or error has arrived
            return
        if kind == "message":
            received(running[job], content)
        else:
            key = running.pop(job)
            if kind == "result":
                finished(key, content)
            elif kind == "error":
                raise content
            elif kind == "withdrawn" and closing():
                waiting.append((key, jobs[key]))
            elif not (signals or errors):
                raise RuntimeError(f"the process of {describe(key)} was killed (out of memory?)")

    try:
        with on_stop(signals.append):
            while running or (waiting and not closing()):
                while waiting and len(running) < pool.count and not closing():
                    key, arguments = waiting.pop()
                    running[pool.start(describe(key), function, arguments)] = key
                try:
                    for event in pool.events():
                        receive(*event)
                    watch()
                except Exception as error:
                    errors.append(error)
                if closing():
                    pool.close(stop=bool(signals or errors))
                if signals.count(signal.SIGINT) > 1:
                    raise KeyboardInterrupt
    finally:
        pool.end()
    if errors:
        raise errors[0]
    return not waiting and not signals
