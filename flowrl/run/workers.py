"""Jobs in worker processes, here or on a cluster: a process and a torch thread for each, with
messages and results passed on as they arrive.
"""

import gc
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowrlError, require
from flowrl.run.signals import STOPPING, watch_output

MOST_WORKERS = 16
"""Default limit of the number of processes."""
REFRESH = 0.5
"""Largest delay of messages in seconds."""


@dataclass(frozen=True)
class Worker:
    """The first argument of every job: the connection to the process that started the jobs.

    Args:
        stop: event that stops all jobs.
        outbox: has `send` for the job's messages.
        sent: messages of an earlier attempt at the same job, whose machine was lost.
    """

    stop: Any
    outbox: Any
    sent: Sequence[Any] = ()

    def send(self, message: Any) -> None:
        """Send a message (anything that can be pickled), which arrives before the job's result."""
        self.outbox.send(("message", message))

    def stopped(self) -> bool:
        """Whether the job should end soon: a signal was received, or another job failed."""
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


LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "SLURM_LOCALID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Variables of srun and of Open MPI's mpirun: the number of processes; the rank, and that on the
node.
"""


def launch_rank() -> int:
    """The rank of this process by torchrun's environment variables, which `accelerate launch` sets,
    too; 0 without a launcher.

    In a process of srun or mpirun they are set here from the launcher's own: WORLD_SIZE, RANK,
    LOCAL_RANK, LOCAL_WORLD_SIZE, and for srun MASTER_ADDR and MASTER_PORT unless they are given:
    the step's first node, and a port that depends on the job. A WORLD_SIZE that is given, such as
    1, is kept.
    """
    values, given = os.environ, "WORLD_SIZE" in os.environ
    for size, (rank, local_rank) in LAUNCHERS.items():
        if given or int(values.get(size, "1")) <= 1:
            continue
        if size.startswith("SLURM"):
            # such as gpu[03-04,09],big1 with 8(x2),4(x2) tasks
            first = re.sub(r"\[(\w+)[^]]*\]", r"\1", values["SLURM_STEP_NODELIST"]).split(",")[0]
            values.setdefault("MASTER_ADDR", first)
            values.setdefault("MASTER_PORT", str(15000 + int(values["SLURM_JOB_ID"]) % 15000))
            parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", values["SLURM_STEP_TASKS_PER_NODE"])
            tasks = [count for count, nodes in parts for _ in range(int(nodes or 1))]
            local_size = tasks[int(values["SLURM_NODEID"])]
        else:
            local_size = values["OMPI_COMM_WORLD_LOCAL_SIZE"]
            need = "the host name of rank 0, as in mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"
            require("MASTER_ADDR" in values, "MASTER_ADDR", "", need)
        values |= {
            "WORLD_SIZE": values[size],
            "RANK": values[rank],
            "LOCAL_RANK": values[local_rank],
            "LOCAL_WORLD_SIZE": local_size,
        }
    return int(values.get("RANK", "0"))


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


class Processes:
    """Jobs in processes of this machine; a job is identified by the pipe from its process."""

    def __init__(self, count: int, modules: Sequence[str]) -> None:
        self.count, self.context = count, process_context(*modules)
        with signals_blocked():  # multiprocessing starts a further process here
            self.stop = self.context.Event()
        self.running = dict[Any, Any]()

    def start(self, *call: Any) -> Any:
        """Start a job: its name, function and arguments."""
        inbox, outbox = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_work, args=(Worker(self.stop, outbox), *call))
        with signals_blocked():
            process.start()
        outbox.close()  # so that the pipe ends with the process
        self.running[inbox] = process
        return inbox

    def events(self) -> Iterator[tuple[Any, str, Any]]:
        """The jobs' events within the next `REFRESH` seconds: (job, kind, content)."""
        ready: list[Any] = wait(list(self.running), REFRESH)
        for inbox in ready:
            kind, content = "end", None
            with suppress(EOFError, OSError):  # the latter in the middle of a message
                kind, content = inbox.recv()
            if kind != "message":
                self.running.pop(inbox).join()
            yield inbox, kind, content

    def close(self, stop: bool) -> None:
        """No job starts from now on; `stop`: those that are running should end."""
        if stop:
            self.stop.set()

    def end(self) -> None:
        """End all jobs at once."""
        for process in self.running.values():
            process.kill()


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


def _work(worker: Worker, *call: Any) -> None:
    """The process of a job."""
    begin_worker()
    do_job(worker, *call)


def do_job(worker: Worker, name: str, function: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Do a job and send its result or its error; the last checkpoint is always complete. Returns
    the events that its outbox has kept, if it does not send them.
    """
    try:
        if not worker.stopped():
            worker.outbox.send(("result", function(worker, *arguments)))
    except FlowrlError as error:
        worker.outbox.send(("error", error))
    except BaseException as error:  # perhaps one that cannot be pickled
        failure = RuntimeError(f"{name} failed: {error!r}")
        failure.add_note(traceback.format_exc())
        worker.outbox.send(("error", failure))
    return getattr(worker.outbox, "events", [])


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
