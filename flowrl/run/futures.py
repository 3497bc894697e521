"""Jobs on an executor of the interface of `concurrent.futures`."""

import math
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from flowrl.core.errors import FlowrlError
from flowrl.run.workers import REFRESH, Worker, do_job


@dataclass
class _Collected:
    """Of a job on an executor without a connection: its events, returned at its end; no stop."""

    events: list[Any] = field(default_factory=list)

    def send(self, event: Any) -> None:
        self.events.append(event)

    def is_set(self) -> bool:
        return False

    set = is_set


class Futures:
    """The pool of `flowrl.run.jobs.run_jobs` on an executor, to which it submits all jobs at
    once. A job is identified by its number.

    An executor may have a method `worker(receive)` that makes the first argument of a job, whose
    `outbox` passes its events to `receive` at once, the first of them ("started", None). Without
    it, messages arrive with the result, and a pause waits for the jobs that have started.

    Args:
        workers: an executor of the interface of `concurrent.futures`, or the address or file of a
            Dask scheduler.
    """

    count = math.inf

    def __init__(self, workers: str | Executor) -> None:
        self.connected = isinstance(workers, str)
        if isinstance(workers, str):
            from flowrl.run.cluster import DaskExecutor

            workers = DaskExecutor(workers)
        self.executor: Any = workers
        self.inbox, self.futures, self.started = SimpleQueue[Any](), list[Future[Any]](), set[int]()

    def start(self, name: str, *call: Any) -> int:
        """Submit a job: its name, function and arguments."""
        job, collected = len(self.futures), _Collected()
        connect = getattr(self.executor, "worker", lambda receive: Worker(collected, collected))
        worker = connect(lambda event: self.inbox.put((job, *event)))

        def done(future: Future[Any]) -> None:
            kind, content = "end", None
            if future.cancelled():
                kind = "withdrawn"
            elif error := future.exception():
                failed = RuntimeError(f"{name} failed: {error!r}")
                kind, content = "error", error if isinstance(error, FlowrlError) else failed
            else:
                for event in future.result():
                    self.inbox.put((job, *event))
            self.inbox.put((job, kind, content))

        self.stop = worker.stop
        self.futures.append(self.executor.submit(do_job, worker, name, *call))
        self.futures[job].add_done_callback(done)
        return job

    def events(self) -> Iterator[tuple[int, str, Any]]:
        """The jobs' events within the next `REFRESH` seconds: (job, kind, content)."""
        for _ in range(self.inbox.qsize() or 1):
            with suppress(Empty):
                job, kind, content = self.inbox.get(timeout=REFRESH)
                self.started.add(job)
                if kind in ("result", "error"):  # or a lost worker would cause another attempt
                    self.futures[job].cancel()
                if kind != "started":
                    yield job, kind, content

    def close(self, stop: bool) -> None:
        """No job starts from now on; `stop`: those that are running should end."""
        for job, future in enumerate(self.futures):
            if job not in self.started and not future.done():
                future.cancel()
        if stop:
            self.stop.set()

    def end(self) -> None:
        """Leave the jobs: those that are running end by themselves."""
        for future in self.futures:
            if not future.done():
                future.cancel()
        if self.connected:
            self.executor.shutdown(wait=False)
