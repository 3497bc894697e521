"""Jobs on a Dask cluster. Dask's adaptors start its workers on SLURM, PBS, LSF, Kubernetes and
other systems.
"""

import os
import pickle
import platform
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import psutil
import torch

from flowrl.core.errors import OWN_PACKAGES, ConfigError, require
from flowrl.run.parts.plugins import versions
from flowrl.run.workers import Worker

try:
    from distributed import Client, Event, get_client, get_worker
except ImportError as error:
    need = 'a cluster as workers needs Dask: pip install "flowrl-lab[cluster]"'
    raise ConfigError(need) from error

SECONDS = 10.0
"""How long a scheduler may take to answer."""
ALLOWED = "a number of processes, or a Dask scheduler: tcp://HOST:PORT, or its file NAME.json"


class DaskExecutor(Executor):
    """An executor for `flowrl.run.jobs.run_jobs`: jobs on the workers of a Dask cluster, one
    thread each.

    If a worker is lost, Dask runs its job again on another one, three times at most.

    Args:
        client: a connected client, or the scheduler's address or file.

    Raises:
        ConfigError: there is no such scheduler.
    """

    def __init__(self, client: Client | str) -> None:
        if isinstance(client, str):
            named = "address" if "://" in client else "scheduler_file"
            # Dask waits for a file that does not exist
            require(named == "address" or os.path.isfile(client), "workers", client, ALLOWED)
            try:
                client = Client(**{named: client}, timeout=SECONDS)  # pyright: ignore
            except (OSError, ValueError) as error:
                raise ConfigError(f"workers = {client!r}: no scheduler answers: {error}") from error
        self.client, self.numbers = client, count()
        self.study = f"flowrl-{uuid.uuid4().hex}"

    def worker(self, receive: Callable[[Any], None]) -> Worker:
        """The first argument of a job, whose events are passed to `receive`."""
        connection = _Connection(self.study, f"{self.study}-{next(self.numbers)}")
        self.client.subscribe_topic(connection.topic, lambda event: receive(_loads(event)))
        return Worker(connection, connection)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As in `concurrent.futures`, with a future of Dask, which has the same methods."""
        here = (versions(), os.getcwd())
        return self.client.submit(_on_worker, here, fn, *args, **kwargs, pure=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect; Dask forgets jobs that nothing waits for."""
        self.client.close()


def _loads(event: tuple[float, bytes]) -> Any:
    """The content of an event of Dask, which has a time and a message. Whoever reaches the
    scheduler can run code on its workers anyway.
    """
    return pickle.loads(event[1])


@dataclass(frozen=True)
class _Connection:
    """A job's connection to the process that started it, through the scheduler: `send` on the
    worker, `set` in that process.
    """

    study: str
    topic: str

    def send(self, event: Any) -> None:
        get_worker().log_event(self.topic, pickle.dumps(event))

    def set(self) -> None:
        Event(self.study).set()

    def is_set(self) -> bool:
        """Whether the job should end: after a pause, or if nothing waits for it any more."""
        worker = get_worker()
        task = worker.state.tasks.get(worker.get_current_task())
        return task is None or task.state != "executing" or bool(Event(self.study).is_set())


def _on_worker(
    here: tuple[dict[str, str], str], function: Callable[..., Any], worker: Worker, *rest: Any
) -> Any:
    """Call `function(worker, *rest)` on a worker of Dask, in the folder of `here` if it exists.

    Raises `ConfigError` if this worker would give other numbers than the process with the versions
    `here`.
    """
    place = get_worker()
    name = f"the Dask worker {place.address} on {platform.node()}"
    (expected, folder), installed = here, versions()
    other = {key: number for key, number in installed.items() if number != expected[key]}
    if other:
        raise ConfigError(f"{name} has {other}, this process {expected}: install the same versions")
    if place.state.nthreads != 1:
        threads = place.state.nthreads
        raise ConfigError(f"{name} has {threads} threads; start it with --nthreads 1")
    began = psutil.Process().create_time()
    files = (getattr(m, "__file__", None) for n, m in [*sys.modules.items()] if _is_own(n))
    if changed := [file for file in files if file and os.stat(file).st_mtime > began]:
        raise ConfigError(f"{changed[0]} has changed since the start of {name}: restart it")
    with suppress(OSError):  # a folder of this machine only
        os.chdir(folder)
    torch.set_num_threads(1)
    events: Any = get_client().get_events(worker.outbox.topic)
    earlier = map(_loads, events)
    worker.outbox.send(("started", None))
    sent = [content for kind, content in earlier if kind == "message"]
    return function(replace(worker, sent=sent), *rest)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in OWN_PACKAGES
