"""The scoring thread, which merges simultaneous requests into one call of the reward model, and a
server's metrics.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from torch import Tensor

from flowrl.core.errors import FlowrlError, PartError, RewardContractError
from flowrl.core.protocols import RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import ComponentScores
from flowrl.rollout import score
from flowrl.serving.request import RequestError
from flowrl.serving.server_settings import ServerSettings
from flowrl.serving.wire_format import TransientError

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LASTING = (
    *(ValueError, FileNotFoundError, PermissionError),
    *(NotADirectoryError, IsADirectoryError),
)
"""Errors that the same call raises again, although some are `OSError`s."""
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Requests by status, scored samples, calls of the model with their sizes and seconds, for
    Prometheus.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"flowrl_reward_{name}", text, labels, registry=registry, **options)

        self._requests = metric(Counter, "requests", "Requests for scores", "status")
        self._samples = metric(Counter, "samples", "Scored images")
        self._invalid = metric(Counter, "invalid", "Images that the reward marked invalid")
        self._waiting = metric(Gauge, "waiting_samples", "Images in the queue")
        self._memory = metric(Gauge, "memory_bytes", "Bytes of all requests in memory")
        sizes, seconds = {"buckets": BATCH_BUCKETS}, {"buckets": SECONDS_BUCKETS}
        self._batch = metric(Histogram, "batch_samples", "Images in a call of the model", **sizes)
        self._model = metric(Histogram, "model_seconds", "Seconds of a call", **seconds)

    def count_request(self, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(status).inc()

    def count_batch(self, size: int, seconds: float, invalid: int) -> None:
        """Count a call of the model with `size` images, of which it marked `invalid`."""
        self._samples.inc(size)
        self._invalid.inc(invalid)
        self._batch.observe(size)
        self._model.observe(seconds)

    def text(self, waiting_samples: int, memory_bytes: int) -> bytes:
        """All metrics in Prometheus' text format, with the current length of the queue and the
        current memory.
        """
        self._waiting.set(waiting_samples)
        self._memory.set(memory_bytes)
        return generate_latest(self._registry)


@dataclass
class ScoringJob:
    """The images and prompts of a request, and the future for its scores.

    Args:
        images: images [sample, channel, height, width].
        prompts: one prompt per image.
        future: the scores, in the same order, on the CPU.
    """

    images: Tensor
    prompts: Sequence[Prompt]
    future: "Future[ComponentScores]" = field(default_factory=Future)


class Batcher:
    """Scores jobs in a separate thread, in order of arrival.

    A call of the model has images of one shape, from one or several jobs. Larger jobs are split. If
    a shared call fails, its jobs are scored separately, so that an error reaches only the request
    that causes it.

    Args:
        model: the reward model.
        metrics: counters to update.
        settings: settings of the server.
    """

    def __init__(self, model: RewardModel, metrics: Metrics, settings: ServerSettings) -> None:
        self.model, self.metrics, self.settings = model, metrics, settings
        self._jobs: deque[ScoringJob] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="flowrl-reward", daemon=True)
        self._thread.start()

    def submit(self, images: Tensor, prompts: Sequence[Prompt]) -> "Future[ComponentScores]":
        """Queue a job. Raises `RequestError` (503) if the queue is full or the server stops."""
        job = ScoringJob(images, prompts)
        with self._changed:
            if self._closed:
                raise _stopping()
            waiting, most = self.waiting, self.settings.limits.queue
            if waiting and waiting + len(prompts) > most:
                message = f"{waiting} samples are already queued; allowed: {most}"
                raise RequestError(503, "busy", message, retry=True)
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    @property
    def waiting(self) -> int:
        """Images in the queue, without those in the current call."""
        return sum(len(job.prompts) for job in tuple(self._jobs))

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy_seconds(self) -> float:
        """Duration of the current call so far; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Refuse all queued and later jobs; the current call may finish."""
        with self._changed:
            self._closed = True
            left, self._jobs = self._jobs, deque()
            self._changed.notify()
        for job in left:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_stopping())

    def _work(self) -> None:
        while (jobs := self._next_jobs()) is not None:
            self._busy_since = time.monotonic()
            self._score(jobs)
            self._busy_since = None

    def _next_jobs(self) -> list[ScoringJob] | None:
        """The jobs of the next call, none of them cancelled; None when closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self.settings.merge:
                self._changed.wait_for(self._is_full, self.settings.wait)
            return None if self._closed else self._take_jobs()

    def _is_full(self) -> bool:
        return self._closed or self.waiting >= self.settings.max_batch

    def _take_jobs(self) -> list[ScoringJob]:
        """The first job, and all of its shape that fit into the same call; cancelled jobs are
        dropped.
        """
        chosen: list[ScoringJob] = []
        kept: deque[ScoringJob] = deque()
        count = 0
        for job in self._jobs:
            fits = not chosen
            if chosen and self.settings.merge:
                same = job.images.shape[1:] == chosen[0].images.shape[1:]
                fits = same and count + len(job.prompts) <= self.settings.max_batch
            if not fits:
                kept.append(job)
            elif job.future.set_running_or_notify_cancel():
                chosen.append(job)
                count += len(job.prompts)
        self._jobs = kept
        return chosen

    def _score(self, jobs: list[ScoringJob]) -> None:
        if not jobs:  # all cancelled
            return
        try:
            images = jobs[0].images if len(jobs) == 1 else torch.cat([job.images for job in jobs])
            scores = self._call(images, [prompt for job in jobs for prompt in job.prompts])
        # no exception of a model, not even SystemExit, may end the thread
        except BaseException as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._score([job])
            else:
                jobs[0].future.set_exception(_request_error(error))
            return
        start = 0
        for job in jobs:
            stop = start + len(job.prompts)
            parts = {name: values[start:stop] for name, values in scores.parts.items()}
            job.future.set_result(ComponentScores(scores.total[start:stop], parts))
            start = stop

    def _call(self, images: Tensor, prompts: list[Prompt]) -> ComponentScores:
        """The checked scores of any number of images, at most `max_batch` in a call of the model,
        on the CPU.
        """
        pieces: list[ComponentScores] = []
        size = self.settings.max_batch
        for start in range(0, len(prompts), size):
            piece = prompts[start : start + size]
            began = time.monotonic()
            scores = score(self.model, images[start : start + size], piece)
            # copies, because a model may return the same tensor at every call
            parts = {name: values.to("cpu", copy=True) for name, values in scores.parts.items()}
            pieces.append(ComponentScores(scores.total.to("cpu", copy=True), parts))
            seconds = time.monotonic() - began
            self.metrics.count_batch(len(piece), seconds, int(pieces[-1].invalid.sum()))
        names = pieces[0].parts
        parts = {name: torch.cat([piece.parts[name] for piece in pieces]) for name in names}
        return ComponentScores(torch.cat([piece.total for piece in pieces]), parts)


def _stopping() -> RequestError:
    return RequestError(503, "stopping", "the server is stopping", retry=True)


def is_transient(error: BaseException | None) -> bool:
    """Whether the same call may succeed later: out of memory, connection failure or time-out,
    directly or as the stated cause.

    Every other exception counts as the result of these inputs, which a repetition would not change.
    """
    for _ in range(10):  # an error can be its own cause
        if isinstance(error, LASTING):
            return False
        if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | TransientError):
            return True
        error = error.__cause__ if error else None
    return False


def _request_error(error: BaseException) -> RequestError:
    """The response to an exception in the model; a deliberate refusal by the model is the request's
    fault (422).
    """
    if isinstance(error, PartError) and error.__cause__ is not None:
        error = error.__cause__  # the reward's own exception
    kind, transient = type(error).__name__, is_transient(error)
    if isinstance(error, RewardContractError):
        failure = RequestError(
            500, "reward_broken", "the scores of the reward violate its contract"
        )
    elif isinstance(error, FlowrlError) and not transient:
        message = f"the reward rejects these prompts or images ({kind})"
        failure = RequestError(422, "reward_refused", message)
    else:
        failure = RequestError(500, "reward_failed", f"the reward failed ({kind})", retry=transient)
    failure.__cause__ = error
    return failure
