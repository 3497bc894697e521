"""Jobs for the tests of the worker pool: functions that a worker process can import."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.run.io import folder_lock
from flowrl.run.jobs import run_jobs


def describe(worker, argument):
    worker.send("started")
    worker.send("x" * 200_000)  # more than a pipe holds
    return {"argument": argument, "threads": torch.get_num_threads(), "process": os.getpid()}


def fail(worker, kind):
    if kind == "flowrl":
        raise ConfigError("the job's own words")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "other":
        raise ValueError("what went wrong")
    if kind == "not pickled":
        return lambda: None
    until_stopped(worker)


def described(pool):
    """The results of three jobs `describe`, whose messages arrive before them."""
    messages, results = [], {}

    def received(key, message):
        messages.append((key, len(message), key in results))

    jobs, finished = {"a": (1,), "b": (2,), "c": (3,)}, results.__setitem__
    assert run_jobs(describe, jobs, pool, finished=finished, received=received)
    assert {key: (result["argument"],) for key, result in results.items()} == jobs
    assert {result["threads"] for result in results.values()} == {1}
    assert sorted(messages) == [(key, length, False) for key in "abc" for length in (7, 200_000)]
    return results


def runs(process):
    """Whether there is such a process that has not ended."""
    stat = Path("/proc", process, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def have_ended(*processes):
    """Whether they end within half a minute."""
    ends = time.monotonic() + 30
    while any(map(runs, processes)) and time.monotonic() < ends:
        time.sleep(0.02)
    return not any(map(runs, processes))


ERRORS = {
    "flowrl": (ConfigError, "^the job's own words$"),
    "other": (RuntimeError, r"job bad failed: ValueError\('what went wrong'\)"),
    "not pickled": (RuntimeError, "job bad failed: .*ickle"),
}
"""The error of a job that fails in this way."""


def first_error(pool, kind, expected, alone=False):
    """A job fails beside one that would take a minute, or alone."""
    jobs, results = {"bad": (kind,)}, {}
    if not alone:
        jobs = {"long": ("none",), **jobs, "never": ("none",)}
    named = dict(finished=results.__setitem__, describe=lambda key: f"job {key}")
    with pytest.raises(expected[0], match=expected[1]):
        run_jobs(fail, jobs, pool, **named)
    assert "never" not in results


def until_stopped(worker):
    worker.send("running")
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if worker.stopped():
            return "stopped"
        time.sleep(0.02)
    return "not stopped"


def server(worker):
    """Whether a module was imported before the job; the process of which this one is a fork."""
    return "xml.dom.minidom" in sys.modules, os.getppid()


def until_killed(worker, held):
    """Ends with its process only; `held` is a folder that the parent has locked."""
    Path(held, f"{os.getpid()}.pid").touch()
    time.sleep(60)


def until_ended(worker, folder):
    """Leaves a file at its start and one at its end."""
    Path(folder, "started").touch()
    until_stopped(worker)
    Path(folder, "ended").touch()


def interrupt_everything(delay):
    """Ctrl-C for the whole process group, as a terminal sends it, once a worker exists."""
    while not multiprocessing.active_children():
        time.sleep(0.001)
    time.sleep(delay)
    os.killpg(0, signal.SIGINT)


# a script with its own process group: what it does, and for how long or where
if __name__ == "__main__":
    work, argument = sys.argv[1:]
    results = {}
    if work == "preload":
        jobs, names = {"a": (), "b": ()}, ("xml.dom.minidom",)
        run_jobs(server, jobs, 2, finished=results.__setitem__, preload=names)
        print(results["a"] == results["b"], results["a"][0], results["a"][1] != os.getpid())
    elif work == "cluster":
        folder, scheduler = argument.split(",")
        run_jobs(until_ended, {"a": (folder,)}, scheduler, finished=results.__setitem__)
    elif work == "lock":
        with folder_lock(Path(argument)):
            jobs = {"a": (argument,), "b": (argument,)}
            run_jobs(until_killed, jobs, 2, finished=results.__setitem__)
    else:
        threading.Thread(target=interrupt_everything, args=(float(argument),), daemon=True).start()
        jobs = {"a": (), "b": ()}
        print(run_jobs(until_stopped, jobs, 1, finished=results.__setitem__), results)
