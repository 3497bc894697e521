"""A vision-language model as a judge, behind any endpoint that speaks OpenAI's chat protocol (vLLM, SGLang, ...)."""

import base64
import io
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import RewardError, require
from flowrl.rewards.images import to_pillow
from flowrl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

QUESTION = """A picture was made for this caption: [{prompt}]
Judge it by two criteria.
1. Alignment: are the objects, their numbers, attributes and relations those of the caption?
2. Quality: is the picture clear, detailed, natural in its colours, and without artefacts?
Think briefly, then end with one line: Final Score: X, where X is a number from {low:g} (bad) to {high:g} (perfect)."""
SCORE = re.compile(
    r"final\s+score\s*\**\s*:\s*\**\s*"
    r"(-?\d+(?:\.\d+)?)(?![\d.,]*\d)(?!\s*(?:[-\u2013~]|to\b)\s*\d)(?!\s*%)"  # no 3,5, no 1-5 or 1 to 5, no 4%
    r"\s*(?:(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?",
    re.IGNORECASE,
)
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP errors that a later attempt may not meet."""


class _Again(Exception):
    """An attempt failed in a way that another may not; the endpoint may have said how many seconds to wait."""

    wait: float = 0.0


class _Final(RewardError):
    """No further attempt would help."""


@dataclass(frozen=True)
class Judge:
    """The judge's score divided by `high`: with its defaults 0.2 (bad) to 1 (perfect).

    Every picture is a request of its own: the picture as PNG and `question` (with {prompt}, {low:g} and {high:g} filled in),
    temperature 0, `workers` at a time. The answer must hold "Final Score: X" with one X from `low` to `high`; anything else is
    refused. After `attempts` failures (no connection, no answer within `timeout` seconds, an overloaded server, an answer that is
    refused; with pauses of `pause`, 2 `pause`, ... seconds, longer where the endpoint asks for it, up to `timeout`) a
    `RewardError` ends the scoring; with `mark_invalid` a sample whose answer is refused is marked invalid instead. `url` is the
    endpoint's base, such as http://localhost:8000/v1; its key is read from the environment variable `key`, and never shown.

    The question is after UnifiedReward's (arXiv 2503.05236), in whose form Flow-GRPO's public code asks it.
    """

    url: str
    model: str
    question: str = QUESTION
    low: float = 1.0
    high: float = 5.0
    attempts: int = 4
    timeout: float = 60.0
    pause: float = 0.5
    workers: int = 8
    tokens: int = 512
    key: str = "OPENAI_API_KEY"
    mark_invalid: bool = False

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "url", self.url, "an address that starts with http:// or https://")
        require("{prompt}" in self.question, "question", self.question, "a text with {prompt} in it")
        require(0 <= self.low < self.high, "low, high", (self.low, self.high), "0 <= low < high")
        for name in ("attempts", "workers", "tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.timeout > 0, "timeout", self.timeout, "above 0")
        require(self.pause >= 0, "pause", self.pause, "0 or more")

    @property
    def marks_invalid(self) -> bool:
        """Whether NaN among the scores means that a sample could not be judged."""
        return self.mark_invalid

    @torch.no_grad()
    def score(self, images: Float[Tensor, "sample channel height width"], prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [`low` / `high`, 1]; NaN where a sample is marked invalid."""
        with ThreadPoolExecutor(self.workers) as pool:
            scores = list(pool.map(self._one, to_pillow(images), prompts))
        return torch.tensor(scores) / self.high

    def _one(self, picture: "Image", prompt: Prompt) -> float:
        """One picture's score: as many attempts as allowed."""
        body = self._body(picture, prompt)
        refused = False
        last: Exception | None = None
        asked = 0.0
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(max(self.pause * 2 ** (attempt - 1), min(asked, self.timeout)))
            try:
                return parse_score(self._ask(body), self.low, self.high)
            except _Final:
                raise
            except _Again as error:
                last, refused, asked = error, False, error.wait
            except RewardError as error:
                last, refused, asked = error, True, 0.0
        if refused and self.mark_invalid:
            return float("nan")
        raise RewardError(f"judge: no score for the prompt {prompt.text!r} after {self.attempts} attempts at {self.url}: {last}")

    def _body(self, picture: "Image", prompt: Prompt) -> bytes:
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        address = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        values = {"{prompt}": prompt.text, "{low:g}": f"{self.low:g}", "{high:g}": f"{self.high:g}"}
        question = re.sub(r"\{prompt\}|\{low:g\}|\{high:g\}", lambda match: values[match[0]], self.question)
        content = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.tokens}).encode()

    def _ask(self, body: bytes) -> str:
        """The answer's text. `_Again` for failures that may pass, `_Final` for those that will not."""
        headers = {"Content-Type": "application/json"}
        if os.environ.get(self.key):
            headers["Authorization"] = f"Bearer {os.environ[self.key]}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer: Any = json.loads(response.read())
            text = answer["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code in PASSING:
                again = _Again(f"HTTP error {error.code}")
                again.wait = _seconds(error.headers.get("Retry-After"))
                raise again from error
            raise _Final(f"judge: {self.url} answered with HTTP error {error.code} ({error.reason})") from error
        except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise _Again("the answer has no text")
        return text


def _seconds(header: str | None) -> float:
    """What a Retry-After header asks for; 0 where it is missing or a date."""
    return float(header) if header and re.fullmatch(r"\d{1,6}", header.strip()) else 0.0


def parse_score(answer: str, low: float, high: float) -> float:
    """The number after "Final Score:" in `answer`, in [`low`, `high`]: "Final Score: 4", "**Final Score:** 4.5/5", "4 out of 5".

    Raises `RewardError` where there is none, where there are different ones, or where it is out of range (or out of another range
    than `high`, as in 8/10). A range ("1-5"), a decimal comma and a percentage are no numbers.
    """
    found = {(float(number), float(of) if of else high) for number, of in SCORE.findall(answer)}
    shown = answer if len(answer) <= 120 else f"...{answer[-120:]}"
    if len(found) != 1:
        raise RewardError(f'the answer {shown!r} has {"no" if not found else "more than one"} "Final Score: X"')
    score, of = found.pop()
    if of != high or not low <= score <= high:
        raise RewardError(f"the answer {shown!r} has a score that is not from {low:g} to {high:g}")
    return score
