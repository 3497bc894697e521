"""One thread that scores: requests that arrive together share a call of the reward model."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.protocols import RewardModel
from flowrl.rewards.combine import WeightedSum
from flowrl.serving.limits import Refusal
from flowrl.serving.metrics import Metrics
from flowrl.types import Prompt


@dataclass(frozen=True)
class Scored:
    """Scores in the order of the pictures and, for a weighted sum, those of every component; NaN marks what cannot be judged."""

    scores: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def invalid(self) -> list[bool]:
        """Which samples are marked, in any component."""
        return [any(map(math.isnan, values)) for values in zip(self.scores, *self.parts.values(), strict=True)]

    def slice(self, start: int, count: int) -> "Scored":
        """`count` of them from `start` on."""
        stop = start + count
        return Scored(self.scores[start:stop], {name: values[start:stop] for name, values in self.parts.items()})

    @staticmethod
    def join(pieces: "Sequence[Scored]") -> "Scored":
        """One after the other."""
        names = pieces[0].parts
        parts = {name: [value for piece in pieces for value in piece.parts[name]] for name in names}
        return Scored([value for piece in pieces for value in piece.scores], parts)


@dataclass
class Job:
    """A request's pictures and prompts, and the future that will hold its scores in their order."""

    images: Tensor
    prompts: Sequence[Prompt]
    future: "Future[Scored]" = field(default_factory=Future)


class Batcher:
    """Scores jobs in a thread of its own, first come, first served.

    A call of the model takes up to `max_batch` pictures of one shape, from one or several jobs; with fewer it waits up to
    `wait` seconds for company. Larger jobs are cut. `merge` = False gives every job calls of its own, so that its scores cannot
    depend on the traffic, not even in the last digit. Where a shared call fails, its jobs are scored one by one: an error
    reaches only the request that causes it.
    """

    def __init__(
        self,
        model: RewardModel,
        metrics: Metrics,
        max_batch: int = 64,
        wait: float = 0.005,
        queue: int = 8192,
        merge: bool = True,
    ) -> None:
        self.model, self.metrics = model, metrics
        self.max_batch, self.wait, self.queue, self.merge = max_batch, wait, queue, merge
        self._jobs: deque[Job] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._since: float | None = None
        self._thread = threading.Thread(target=self._work, name="flowrl-reward", daemon=True)
        self._thread.start()

    def submit(self, images: Tensor, prompts: Sequence[Prompt]) -> "Future[Scored]":
        """Ask for scores. Raises `Refusal` (503) where too many pictures wait already, or the server stops."""
        job = Job(images, prompts)
        with self._news:
            if self._closed:
                raise Refusal(503, "stopping", "the server is stopping", retry=True)
            waiting = self.waiting
            if waiting and waiting + len(prompts) > self.queue:
                raise Refusal(503, "busy", f"{waiting} samples wait already; allowed: {self.queue}", retry=True)
            self._jobs.append(job)
            self._news.notify()
        return job.future

    @property
    def waiting(self) -> int:
        """Pictures that wait for their scores (those being scored excluded)."""
        return sum(len(job.prompts) for job in tuple(self._jobs))

    @property
    def alive(self) -> bool:
        """Whether the thread still works."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy_seconds(self) -> float:
        """How long the call under way has taken so far; 0 where there is none."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Refuse what waits and take nothing more; the call under way may end."""
        with self._news:
            self._closed = True
            left, self._jobs = self._jobs, deque()
            self._news.notify()
        for job in left:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Refusal(503, "stopping", "the server is stopping", retry=True))

    def _work(self) -> None:
        while True:
            jobs = self._next()
            if jobs is None:
                return
            self._since = time.monotonic()
            self._score(jobs)
            self._since = None

    def _next(self) -> list[Job] | None:
        """The jobs of the next call, none of them cancelled; None when closed."""
        with self._news:
            while not self._jobs and not self._closed:
                self._news.wait()
            deadline = time.monotonic() + self.wait
            while self.merge and not self._closed and self.waiting < self.max_batch:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
            if self._closed:
                return None
            return self._take()

    def _take(self) -> list[Job]:
        """The first job and those of its shape that fit beside it; jobs that nobody waits for are dropped."""
        chosen: list[Job] = []
        kept: deque[Job] = deque()
        count = 0
        for job in self._jobs:
            if not chosen:
                fits = True
            else:
                same = job.images.shape[1:] == chosen[0].images.shape[1:]
                fits = self.merge and same and count + len(job.prompts) <= self.max_batch
            if not fits:
                kept.append(job)
            elif job.future.set_running_or_notify_cancel():
                chosen.append(job)
                count += len(job.prompts)
        self._jobs = kept
        return chosen

    def _score(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        try:
            images = jobs[0].images if len(jobs) == 1 else torch.cat([job.images for job in jobs])
            scored = self._call(images, [prompt for job in jobs for prompt in job.prompts])
        except BaseException as error:  # whatever a model raises, SystemExit included, must not end the thread
            if len(jobs) > 1:
                for job in jobs:
                    self._score([job])
            else:
                jobs[0].future.set_exception(_as_refusal(error))
            return
        start = 0
        for job in jobs:
            job.future.set_result(scored.slice(start, len(job.prompts)))
            start += len(job.prompts)

    def _call(self, images: Tensor, prompts: list[Prompt]) -> Scored:
        pieces: list[Scored] = []
        for start in range(0, len(prompts), self.max_batch):
            piece = prompts[start : start + self.max_batch]
            began = time.monotonic()
            with torch.no_grad():
                scored = self._scores(images[start : start + self.max_batch], piece)
            self.metrics.batch(len(piece), time.monotonic() - began, sum(scored.invalid))
            pieces.append(scored)
        return Scored.join(pieces)

    def _scores(self, images: Tensor, prompts: list[Prompt]) -> Scored:
        """One call of the model, checked; a weighted sum is evaluated once for its total and its components."""
        model, count = self.model, len(prompts)
        name, marks = type(model).__name__, bool(getattr(model, "marks_invalid", False))
        if not isinstance(model, WeightedSum):
            return Scored(_checked(model.score(images, prompts), count, f"{name}.score", marks))
        parts = model.parts(images, prompts)
        total = _checked(model.total(parts), count, f"{name}.total", marks)
        return Scored(total, {key: _checked(found, count, f"{name}.parts()[{key!r}]", marks) for key, found in parts.items()})


def _checked(scores: object, count: int, origin: str, marks: bool) -> list[float]:
    """The scores as numbers, or a `Refusal` (500) that says how the reward broke its contract. `marks`: NaN is allowed."""
    if not isinstance(scores, Tensor):
        raise Refusal(500, "reward_broken", f"{origin} returned a {type(scores).__name__}; allowed: a torch.Tensor")
    if scores.shape != (count,):
        raise Refusal(500, "reward_broken", f"{origin} returned shape {tuple(scores.shape)}; allowed: ({count},)")
    values = scores.detach().cpu().double()
    bad = int((values.isinf() if marks else ~values.isfinite()).sum())
    if bad:
        raise Refusal(500, "reward_broken", f"{origin} returned {bad} of {count} values that are not finite")
    return values.tolist()


def _as_refusal(error: BaseException) -> Refusal:
    """How a model's exception is told to the client: what it refuses on purpose is the request's fault (422)."""
    if isinstance(error, Refusal):
        return error
    message = f"{type(error).__name__}: {str(error)[:500]}"
    if isinstance(error, FlowrlError):
        return Refusal(422, "reward_refused", message)
    refusal = Refusal(500, "reward_failed", f"the reward failed: {message}", retry=True)
    refusal.__cause__ = error
    return refusal
