"""Jobs for the tests of the worker pool: functions that a worker process can import."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from flowrl.core.errors import ConfigError
from flowrl.io import folder_lock
from flowrl.workers import Worker, run_jobs


def describe(worker: Worker, argument: int) -> dict:
    worker.send("started")
    worker.send("x" * 200_000)  # more than a pipe holds
    return {"argument": argument, "threads": torch.get_num_threads(), "process": os.getpid()}


def fail(worker: Worker, kind: str) -> None:
    if kind == "flowrl":
        raise ConfigError("the job's own words")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "other":
        raise ValueError("what went wrong")
    until_stopped(worker)


def until_stopped(worker: Worker, seconds: float = 60.0) -> str:
    worker.send("running")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if worker.stopped():
            return "stopped"
        time.sleep(0.02)
    return "not stopped"


def preloaded(worker: Worker) -> tuple[bool, int]:
    """Whether the module was there before the job; the number of processes that imported it."""
    return "xml.dom.minidom" in sys.modules, os.getppid()


def until_killed(worker: Worker, held: str) -> None:
    """Ends with its process only; `held` is a folder that the parent has locked."""
    Path(held, f"{os.getpid()}.pid").touch()
    time.sleep(60)


def interrupt_everything(delay: float) -> None:
    """Ctrl-C for the whole process group, as a terminal sends it, once a worker exists."""
    import multiprocessing

    while not multiprocessing.active_children():
        time.sleep(0.001)
    time.sleep(delay)
    os.killpg(0, signal.SIGINT)


# a script with its own process group: sys.argv says when the interrupt comes
if __name__ == "__main__":
    if sys.argv[1] in ("preload", "preload-with-threads"):
        if sys.argv[1] != "preload":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        seen: dict[str, tuple[bool, int]] = {}
        done = run_jobs(
            preloaded,
            {"a": (), "b": ()},
            2,
            finished=seen.__setitem__,
            preload=("xml.dom.minidom",),
        )
        servers = {server for _, server in seen.values()}
        print(done, [there for there, _ in seen.values()], len(servers), os.getpid() in servers)
        sys.exit()
    if sys.argv[1] == "lock":
        with folder_lock(Path(sys.argv[2])):
            jobs = {"a": (sys.argv[2],), "b": (sys.argv[2],)}
            run_jobs(until_killed, jobs, 2, finished=lambda *_: None, preload=("xml.dom.minidom",))
    threading.Thread(target=interrupt_everything, args=(float(sys.argv[1]),), daemon=True).start()
    results: dict[str, str] = {}
    completed = run_jobs(until_stopped, {"a": (), "b": ()}, 1, finished=results.__setitem__)
    print(completed, results, Path(__file__).name)
