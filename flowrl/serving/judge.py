"""A vision-language model as a judge, behind any endpoint with OpenAI's chat protocol (vLLM,
SGLang, ...).

Requires the extra `remote`; see `flowrl.serving.connections`.
"""

import base64
import io
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.options import Count, NonNegative, Positive, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.images import Images, to_pillow
from flowrl.serving.connections import Connections, check_endpoint, last_error
from flowrl.serving.wire_format import TransientError

if TYPE_CHECKING:
    from PIL.Image import Image
    from tenacity import RetryCallState

__all__ = ["Judge", "parse_score"]

QUESTION = """A picture was made for this caption: [{prompt}]
Judge it by two criteria.
1. Alignment: are the objects, their numbers, attributes and relations those of the caption?
2. Quality: is the picture clear, detailed, natural in its colours, and without artefacts?
Think briefly, then end with one line: Final Score: X, where X is a number from {low:g} (bad) \
to {high:g} (perfect)."""
EDIT_QUESTION = """The last picture was made from the one before by this instruction: [{prompt}]
Judge it by two criteria.
1. Instruction: was all that it asks for done, and nothing else changed?
2. Quality: is the picture clear, natural in its colours, and without artefacts?
Think briefly, then end with one line: Final Score: X, where X is a number from {low:g} (bad) \
to {high:g} (perfect)."""
SCORE = re.compile(
    r"final\s+score\s*\**\s*:\s*\**\s*"
    # no 3,5, no 1-5 or 1 to 5, no 4%
    r"(-?\d+(?:\.\d+)?)(?![\d.,]*\d)(?!\s*(?:[-\u2013~]|to\b)\s*\d)(?!\s*%)"
    r"\s*(?:(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?",
    re.IGNORECASE,
)
TRANSIENT_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which the request is repeated."""

MAX_BYTES = 1 << 22
"""Largest response in bytes."""


class _Unusable(RewardError):
    """A response without a valid score."""


@checked_options
@dataclass(frozen=True)
class Judge:
    """The judge's score divided by `high`: with the defaults 0.2 (bad) to 1 (perfect).

    Every image is one request at temperature 0, with the image as PNG. The answer must contain
    "Final Score: X" with one X from `low` to `high`. An attempt fails without a connection, without
    an answer within `timeout` seconds, at an overloaded server, or by an unusable answer. The next
    attempt follows after `pause`, 2 `pause`, ... seconds, or a longer pause that the endpoint
    requests, up to `timeout`. After `attempts` failures `score` raises `RewardError`.

    The question follows UnifiedReward (arXiv 2503.05236), as in Flow-GRPO's public code.

    Args:
        url: the endpoint's base, such as http://localhost:8000/v1.
        model: name of the model at the endpoint.
        question: text of the request; {prompt}, {low:g} and {high:g} are filled in. The default
            asks about the edit if a prompt has reference images, which are sent before the picture.
        low: smallest score.
        high: largest score.
        attempts: attempts per image.
        timeout: longest wait for an answer, in seconds.
        pause: first pause between attempts, in seconds.
        workers: simultaneous requests.
        tokens: largest length of an answer.
        key: environment variable with the endpoint's key, which is sent only to `url` and never
            shown.
        mark_invalid: mark a sample whose last answer was unusable as invalid instead of raising an
            error.

    Raises:
        ConfigError: an option is out of range, or the extra `remote` is not installed.
    """

    url: str
    model: str
    question: str = QUESTION
    low: NonNegative = 1.0
    high: NonNegative = 5.0
    attempts: Count = 4
    timeout: Positive = 60.0
    pause: NonNegative = 0.5
    workers: Count = 8
    tokens: Count = 512
    key: str = "OPENAI_API_KEY"
    mark_invalid: bool = False
    connects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_endpoint("judge", self.url)
        allowed = "a text with {prompt} in it"
        require("{prompt}" in self.question, "question", self.question, allowed)
        require(self.low < self.high, "low, high", (self.low, self.high), "low below high")

    @cached_property
    def _connections(self) -> Connections:
        return Connections("judge", self.url, self.workers, self.key)

    @property
    def marks_invalid(self) -> bool:
        """Whether NaN among the scores marks samples that could not be judged."""
        return self.mark_invalid

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [`low` / `high`, 1]; NaN where a sample is marked invalid."""
        with ThreadPoolExecutor(self.workers) as pool:
            scores = list(pool.map(self._score_one, to_pillow(images), prompts))
        return torch.tensor(scores) / self.high

    def _score_one(self, image: "Image", prompt: Prompt) -> float:
        """The score of one image, after up to `attempts` attempts."""
        import tenacity

        def give_up(state: "RetryCallState") -> float:
            last = last_error(state)
            if self.mark_invalid and isinstance(last, _Unusable):
                return float("nan")
            raise RewardError(
                f"judge: no score for the prompt {prompt.text!r} after {self.attempts} attempts at"
                f" {self.url}: {last}"
            ) from last

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((TransientError, _Unusable)),
            wait=self._pause,
            stop=tenacity.stop_after_attempt(self.attempts),
            retry_error_callback=give_up,
        )
        body = self._body(image, prompt)
        return retrying(lambda: parse_score(self._request(body), self.low, self.high))

    def _pause(self, state: "RetryCallState") -> float:
        """Seconds before the next attempt."""
        requested = getattr(last_error(state), "retry_after", 0.0)
        return max(self.pause * 2 ** (state.attempt_number - 1), min(requested, self.timeout))

    def _body(self, image: "Image", prompt: Prompt) -> bytes:
        values = {"{prompt}": prompt.text, "{low:g}": f"{self.low:g}", "{high:g}": f"{self.high:g}"}
        edits = prompt.images and self.question == QUESTION
        question = re.sub(
            r"\{prompt\}|\{low:g\}|\{high:g\}",
            lambda match: values[match[0]],
            EDIT_QUESTION if edits else self.question,
        )
        pictures = [*(reference.pillow() for reference in prompt.images), image]
        content = [
            *({"type": "image_url", "image_url": {"url": _encoded(one)}} for one in pictures),
            {"type": "text", "text": question},
        ]
        messages = [{"role": "user", "content": content}]
        return json.dumps(
            {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.tokens}
        ).encode()

    def _request(self, body: bytes) -> str:
        """The text of the answer. Raises `TransientError` for temporary failures and `RewardError`
        for others.
        """
        headers = {"Content-Type": "application/json"}
        answer = self._connections.post("/chat/completions", body, headers, self.timeout, MAX_BYTES)
        if answer.status in TRANSIENT_STATUS:
            raise TransientError(f"HTTP error {answer.status}", answer.retry_after)
        if not 200 <= answer.status < 300:
            raise RewardError(
                f"judge: {self.url} answered with HTTP status {answer.status}; redirects are not"
                " followed"
            )
        try:
            content: Any = json.loads(answer.content)
            text = content["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise TransientError("the answer has no text")
        return text


def _encoded(image: "Image") -> str:
    """An image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def parse_score(answer: str, low: float, high: float) -> float:
    """The number after "Final Score:" in an answer, such as "Final Score: 4", "**Final Score:**
    4.5/5" or "4 out of 5".

    A range ("1-5"), a decimal comma and a percentage do not count as numbers.

    Args:
        answer: the judge's answer.
        low: smallest score.
        high: largest score, and the only maximum that an answer may state.

    Returns:
        The score in [`low`, `high`].

    Raises:
        RewardError: there is no number, there are different numbers, or the number is out of range
            or relative to another maximum.
    """
    scores = {(float(number), float(maximum or high)) for number, maximum in SCORE.findall(answer)}
    shown = f"the answer {answer[-120:]!r}"
    if len(scores) != 1:
        raise _Unusable(f'{shown} has {len(scores)} different "Final Score: X"')
    score, maximum = scores.pop()
    if maximum != high or not low <= score <= high:
        raise _Unusable(f"{shown} has a score that is not from {low:g} to {high:g}")
    return score
