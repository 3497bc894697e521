"""Rewards behind a server: the client of `flowrl serve-reward` (docs/guides/reward-server.md).

Requires the extra `remote`; see `flowrl.serving.connections`.
"""

import contextlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.options import Count, NonNegative, Positive, Whole, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.combine import weighted_total
from flowrl.rewards.contract import ComponentScores
from flowrl.run.distributed import processes_here
from flowrl.serving.connections import (
    Answer,
    Connections,
    Endpoints,
    check_endpoint,
    last_error,
)
from flowrl.serving.server_settings import TOKEN_VARIABLE
from flowrl.serving.wire_format import (
    ImageFormat,
    TransientError,
    decode_error,
    decode_scores,
    encode_request,
)

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["TOKEN_VARIABLE", "RemoteReward", "RemoteSum"]

Scored = tuple[ComponentScores, dict[str, float]]
"""The scores of one request, and the weights of their components."""

MAX_BACKOFF = 20.0
"""Longest pause between two attempts in seconds, unless the server requests a longer pause."""


@checked_options
@dataclass(frozen=True)
class RemoteReward:
    """Scores from the reward server at `url` (docs/guides/reward-server.md), in the order of the
    images.

    An attempt fails if the server cannot be reached, answers with a temporary error (500, 503,
    ...), sends nothing for `timeout` seconds, or its response is cut off. The next attempt follows
    after `backoff` seconds, doubled each time up to 20; a longer pause in the server's Retry-After
    header takes precedence. With several addresses, another server is tried without a pause, and a
    server that failed is avoided for half a minute.

    `score` raises `RewardError` after `retries` repetitions of a request, or if the next pause
    would end after `deadline`. The trainer then stops with its last checkpoint, and the run can be
    resumed when the server is available. Permanent errors raise it immediately: a wrong token, an
    untrusted certificate, a request that is too large, a prompt that the reward refuses, or scores
    that break the contract (a wrong count, NaN). A sample that the served reward marks as invalid
    is NaN here (`protocols.RewardModel`).

    Metadata must be JSON; data classes in them become objects, and tuples lists. There is no option
    for the token itself, because a run records its options.

    Args:
        url: address of the server, or addresses of servers of the same reward, separated by commas
            or spaces.
        images: "safetensors": float32, with the same scores as in process; "uint8": 8 bits per
            channel, a quarter of the bytes; "png": the same, compressed, which costs the CPU more.
        batch: images per request.
        concurrency: simultaneous requests, over connections that stay open; the processes of a run
            on this machine share them, at least one each.
        timeout: longest wait for data, in seconds.
        deadline: longest duration of a call, in seconds.
        retries: repetitions of a request, 0 or more.
        backoff: first pause, in seconds.
        token_file: file with the token; "" for the environment variable FLOWRL_REWARD_TOKEN.
        certificate: file with the trusted certificates (PEM); "" for the system's.

    Raises:
        ConfigError: an option is out of range, or the extra `remote` is not installed.
    """

    url: str
    images: ImageFormat = "safetensors"
    batch: Count = 32
    concurrency: Count = 4
    timeout: Positive = 120.0
    deadline: Positive = 900.0
    retries: Whole = 40
    backoff: NonNegative = 0.5
    token_file: str = ""
    certificate: str = ""
    marks_invalid: ClassVar[bool] = True
    remote: ClassVar[bool] = True
    connects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for url in self._urls or [self.url]:
            check_endpoint("remote", url)

    @property
    def _urls(self) -> list[str]:
        return self.url.replace(",", " ").split()

    @property
    def _requests(self) -> int:
        """This process's share of the simultaneous requests."""
        return max(1, self.concurrency // processes_here())

    @cached_property
    def _endpoints(self) -> Endpoints:
        options = (TOKEN_VARIABLE, self.token_file, self.certificate)
        return Endpoints([Connections("remote", u, self._requests, *options) for u in self._urls])

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, channel, height, width] and as many prompts -> [sample], on the images' device.
        Raises `RewardError`.
        """
        totals = [scores.total for scores, _ in self._score(images, prompts)]
        return torch.cat([torch.empty(0), *totals]).to(images.device)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._endpoints.close()

    def _score(
        self, images: Tensor, prompts: Sequence[Prompt], with_parts: bool = False
    ) -> list[Scored]:
        """The scores of every request, in the order of the images."""
        if images.ndim != 4 or len(images) != len(prompts):
            raise RewardError(
                f"remote: got images {tuple(images.shape)} and {len(prompts)} prompts; allowed:"
                " one image per prompt; for videos, use frame-mean(reward=remote(...))"
            )
        return _Call(self, time.monotonic() + self.deadline, with_parts).score(images, prompts)


@checked_options
@dataclass(frozen=True)
class RemoteSum(RemoteReward):
    """A `remote` reward for a server of a weighted sum, with logged components that may be credited
    separately.

    A reward with components: `parts` are the scores of the components, `total` applies the server's
    weights. `parts` raises `RewardError` if the server has no `weighted-sum`, or if its components
    or weights change between two calls (after a restart with others); otherwise as `RemoteReward`.

    Args:
        url: see `RemoteReward`.
        images: see `RemoteReward`.
        batch: see `RemoteReward`.
        concurrency: see `RemoteReward`.
        timeout: see `RemoteReward`.
        deadline: see `RemoteReward`.
        retries: see `RemoteReward`.
        backoff: see `RemoteReward`.
        token_file: see `RemoteReward`.
        certificate: see `RemoteReward`.
    """

    _weights: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """The scores [sample] of every component, unweighted."""
        pieces = []
        for scores, weights in self._score(images, prompts, with_parts=True):
            known = self._weights or weights
            if weights != known:
                changed = f"were {known} and are now {weights}"
                raise RewardError(f"remote-sum: the weights at {self.url} {changed}")
            self._weights.update(known)
            pieces.append(scores.parts)
        return {
            n: torch.cat([torch.empty(0), *(piece[n] for piece in pieces)]).to(images.device)
            for n in self._weights
        }

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of `parts` from this server."""
        return weighted_total(parts, self._weights)


@dataclass
class _Call:
    """The requests of one call of a reward, with a common deadline (monotonic seconds). If one
    fails, all stop.
    """

    reward: RemoteReward
    deadline: float
    with_parts: bool
    stopped: threading.Event = field(default_factory=threading.Event)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> list[Scored]:
        """The scores of every request, several at a time."""
        batch = self.reward.batch
        pieces = [slice(start, start + batch) for start in range(0, len(prompts), batch)]
        if len(pieces) <= 1:
            return [self._request(images[piece], prompts[piece]) for piece in pieces]
        futures: list[Future[Scored]] = [Future() for _ in pieces]
        todo = deque(zip(pieces, futures, strict=True))

        def work() -> None:
            while todo and not self.stopped.is_set():
                with contextlib.suppress(IndexError):  # another thread has taken the last one
                    piece, future = todo.popleft()
                    try:
                        future.set_result(self._request(images[piece], prompts[piece]))
                    except BaseException as error:
                        future.set_exception(error)

        # daemons: an interrupted program need not wait for them
        for _ in range(min(self.reward._requests, len(pieces))):
            threading.Thread(target=work, name="flowrl-remote", daemon=True).start()
        try:
            done, _ = wait(futures, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            self.stopped.set()

    def _request(self, images: Tensor, prompts: Sequence[Prompt]) -> Scored:
        """The scores of one request, repeated after temporary failures. Raises `RewardError`."""
        import httpx
        import tenacity

        files = encode_request(images, prompts, self.reward.images)
        form = httpx.Request("POST", self.reward._urls[0], files=files)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            wait=self._pause,
            stop=tenacity.stop_after_attempt(self.reward.retries + 1)
            | tenacity.stop_before_delay(self.deadline - time.monotonic()),
            sleep=self._sleep,
            retry_error_callback=self._give_up,
        )
        return retrying(self._attempt, form.read(), form.headers["Content-Type"], prompts)

    def _pause(self, state: "RetryCallState") -> float:
        """Seconds before the next attempt; 0 if it is the first one of another server."""
        if state.attempt_number < len(self.reward._urls):
            return 0.0
        from tenacity import wait_exponential

        pause = wait_exponential(multiplier=self.reward.backoff, max=MAX_BACKOFF)(state)
        return max(pause, getattr(last_error(state), "retry_after", 0.0))

    def _sleep(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise RewardError("remote: another request of this call has failed")

    def _give_up(self, state: "RetryCallState") -> NoReturn:
        error, seconds = last_error(state), state.seconds_since_start or 0
        raise RewardError(
            f"remote: the reward server at {self.reward.url} returned no scores in"
            f" {state.attempt_number} attempts over {seconds:.0f} seconds; the last error: {error}."
            " Restart the server, then resume the run from its last checkpoint"
        ) from error

    def _attempt(self, body: bytes, content_type: str, prompts: Sequence[Prompt]) -> Scored:
        """One HTTP request. Raises `TransientError` for temporary failures, `RewardError` for
        others.
        """
        reward, request_id = self.reward, uuid.uuid4().hex
        seconds = min(reward.timeout, max(self.deadline - time.monotonic(), 0.001))
        path = "/v1/score?parts=true" if self.with_parts else "/v1/score"
        max_bytes = 65536 + (2048 if self.with_parts else 64) * len(prompts)
        headers = {"Content-Type": content_type, "X-Request-Id": request_id}
        with reward._endpoints.choose() as server:
            answer = server.post(path, body, headers, seconds, max_bytes)
            if answer.status != 200:
                raise self._status_error(answer, server.url)
            origin = f"remote: the reward server at {server.url}"
            return decode_scores(answer.content, request_id, prompts, origin, self.with_parts)

    def _status_error(self, answer: Answer, url: str) -> Exception:
        """The error for a response without scores."""
        status, error = answer.status, decode_error(answer.content)
        reason = f"status {status}"
        if error is not None:
            reason += f", {error.code[:100]}: {error.message[:1000]}"
        if status in (408, 425, 429) or status >= 500 if error is None else error.retry:
            return TransientError(reason, answer.retry_after)
        hints = {
            401: f"; set {TOKEN_VARIABLE} or token_file to the server's token",
            413: f"; lower remote's batch (now {self.reward.batch}) or raise the server's limits",
        }
        hint = hints.get(status, "")
        return RewardError(
            f"remote: the reward server at {url} rejected the request: {reason}{hint}"
        )
