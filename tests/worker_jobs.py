"""Jobs for the tests of the worker pool: functions that a worker process can import."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from flowrl.core.errors import ConfigError
from flowrl.io import folder_lock
from flowrl.workers import run_jobs


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
