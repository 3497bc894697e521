"""A vision-language model as a judge, behind any endpoint with OpenAI's chat protocol (vLLM,
SGLang, ...).

Requires the extra `remote`; see `flowrl.serving.connections`.
"""

import base64
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.options import Count, NonNegative, Positive, Share, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.answers import (
    Question,
    UnusableAnswer,
    answer_probabilities,
    check_answers,
    check_question,
    expected_values,
    image_questions,
    usable,
)
from flowrl.rewards.images import Images
from flowrl.serving.connections import Connections, check_endpoint, last_error
from flowrl.serving.wire_format import TransientError

if TYPE_CHECKING:
    from PIL.Image import Image
    from tenacity import RetryCallState

__all__ = ["Judge", "parse_score"]

T = TypeVar("T")

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
REJECTED = (400, 422)
"""HTTP status codes of a request with a field or a value that the endpoint does not allow."""
MAX_BYTES = 1 << 24
"""Largest response in bytes."""
TOP = 20
"""Number of first tokens whose probabilities are requested: the most that OpenAI allows."""
THOUGHT, ENDED = "<think>", "</think>"
OWN = ("model", "messages", "stream", "n", "logprobs")
"""Fields of a request that `Judge.request` cannot set."""


@checked_options
@dataclass(frozen=True)
class Judge:
    """The judge's rating in words divided by `high`, with the defaults 0.2 (bad) to 1 (perfect);
    or, with `answers`, the expected value of its answer by the probability of the first token.

    Without `answers` the judge writes a text, which must contain "Final Score: X" with one X from
    `low` to `high`. Judges rarely answer with a fraction, so this reward has five values, and the
    members of a group often have the same: the metric "zero_spread_groups" is the fraction of such
    groups, which train nothing.

    With `answers`, as in ``{'yes': 1, 'no': 0}``, R = sum_a v_a P(a) / sum_a P(a) over the answers
    a with values v_a, any number between the smallest and the largest value. The judge gives one
    token and the log-probabilities of the 20 most probable ones (`logprobs`, `top_logprobs`), which
    are summed as described in `flowrl.rewards.answers`; tokens that are not sent count as 0. An
    endpoint that sends no log-probabilities is an error.

    `request` has fields of the protocol that are added to every request or replace its own; None
    removes one. An endpoint that allows fewer log-probabilities needs ``{'top_logprobs': 5}``.

    A model that thinks before it answers is an error with `answers`, unless its thinking is
    disabled, by ``{'chat_template_kwargs': {'enable_thinking': False}}`` (vLLM, SGLang) or
    ``{'reasoning_effort': 'none'}`` (OpenAI), or allowed some tokens, as in ``{'max_tokens':
    2048}``. Then the answer is the first token after ``</think>`` that is not white space, and its
    probabilities are conditioned on the thoughts. Thinking is noticed by ``<think>``, or by the
    fields `reasoning` or `reasoning_content` of an endpoint that separates it. If the chat template
    begins the thoughts and the endpoint does not separate them, it is not noticed: a first word
    such as "First" then counts as an answer.

    Every image is one request at temperature 0, with the image as PNG. An attempt fails without a
    connection, without an answer within `timeout` seconds, at an overloaded server, or by an
    unusable answer. The next attempt follows after `pause`, 2 `pause`, ... seconds, or a longer
    pause that the endpoint requests, up to `timeout`. After `attempts` failures `score` raises
    `RewardError`.

    The question in words follows UnifiedReward (arXiv 2503.05236), as in Flow-GRPO's public code.

    Args:
        url: the endpoint's base, such as http://localhost:8000/v1.
        model: name of the model at the endpoint.
        question: text of the request; {prompt}, {low:g} and {high:g} are filled in. "" for the
            default, which asks about the edit if a prompt has reference images, which are sent
            before the picture. With other `answers` than yes and no, there is no default.
        low: smallest score in words.
        high: largest score in words.
        attempts: attempts per image.
        timeout: longest wait for an answer, in seconds.
        pause: first pause between attempts, in seconds.
        workers: simultaneous requests.
        tokens: largest length of an answer in words.
        key: environment variable with the endpoint's key, which is sent only to `url` and never
            shown.
        mark_invalid: mark a sample whose last answer was unusable as invalid instead of raising an
            error.
        answers: value by answer, for two or more answers of one word, of which none begins with
            another; empty for a rating in words.
        mass: smallest total probability of the answers; below it an answer is unusable.
        request: fields of every request, in place of its own.

    Raises:
        ConfigError: an option is out of range, or the extra `remote` is not installed.
    """

    url: str
    model: str
    question: str = ""
    low: NonNegative = 1.0
    high: NonNegative = 5.0
    attempts: Count = 4
    timeout: Positive = 60.0
    pause: NonNegative = 0.5
    workers: Count = 8
    tokens: Count = 512
    key: str = "OPENAI_API_KEY"
    mark_invalid: bool = False
    answers: Mapping[Any, float] = field(default_factory=dict[Any, float])
    mass: Share = 0.5
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    connects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_endpoint("judge", self.url)
        require(self.low < self.high, "low, high", (self.low, self.high), "low below high")
        fits = not self.request.keys() & {*OWN}
        require(fits, "request", dict(self.request), f"fields other than {', '.join(OWN)}")
        if self.answers:
            check_question(self.question, check_answers(self.answers))
            words = self.low, self.high, self.tokens
            fits = words == (Judge.low, Judge.high, Judge.tokens)
            require(fits, "low, high, tokens", words, "the defaults: they are for scores in words")
        elif self.question:
            allowed = "a text with {prompt} in it"
            require("{prompt}" in self.question, "question", self.question, allowed)

    @cached_property
    def _connections(self) -> Connections:
        return Connections("judge", self.url, self.workers, self.key)

    @property
    def marks_invalid(self) -> bool:
        """Whether NaN among the scores marks samples that could not be judged."""
        return self.mark_invalid

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [`low` / `high`, 1], or in the range of the answers' values; NaN where
        a sample is marked invalid.
        """
        if self.answers:
            values = check_answers(self.answers)
            return expected_values(self, values, self.question, images, prompts)
        limits = {"low:g": f"{self.low:g}", "high:g": f"{self.high:g}"}
        defaults = self.question or QUESTION, self.question or EDIT_QUESTION
        asked = image_questions(images, prompts, *defaults, values=limits)
        found = self._answers(asked, self._rating, max_tokens=self.tokens)
        return torch.tensor([math.nan if one is None else one for one in found]) / self.high

    def ask(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """P(answer) for every question; see `flowrl.rewards.answers.AsksQuestions`."""
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        found = self._answers(questions, self._probabilities, **options)
        return [
            dict.fromkeys(question.answers, math.nan) if one is None else one
            for question, one in zip(questions, found, strict=True)
        ]

    def _answers(
        self, questions: Sequence[Question], read: Callable[[Question, Any], T], **options: Any
    ) -> list[T | None]:
        """What `read` finds in the answer to each question; None if it is unusable and samples are
        marked invalid. Each picture is encoded once.
        """
        pictures = {id(one): one for question in questions for one in question.pictures}
        with ThreadPoolExecutor(self.workers) as pool:
            urls = dict(zip(pictures, pool.map(_encoded, pictures.values()), strict=True))

            def answer(question: Question) -> T | None:
                content = [
                    *(
                        {"type": "image_url", "image_url": {"url": urls[id(one)]}}
                        for one in question.pictures
                    ),
                    {"type": "text", "text": question.text},
                ]
                messages = [{"role": "user", "content": content}]
                body = {"model": self.model, "messages": messages, "temperature": 0, **options}
                body = {name: v for name, v in {**body, **self.request}.items() if v is not None}
                return self._answer(question, json.dumps(body).encode(), read)

            return list(pool.map(answer, questions))

    def _answer(
        self, question: Question, body: bytes, read: Callable[[Question, Any], T]
    ) -> T | None:
        """What `read` finds in the answer to a request, after up to `attempts` attempts."""
        import tenacity

        def give_up(state: "RetryCallState") -> None:
            last = last_error(state)
            if self.mark_invalid and isinstance(last, UnusableAnswer):
                return
            raise RewardError(
                f"judge: no score for the prompt {question.prompt.text!r} after {self.attempts}"
                f" attempts at {self.url}: {last}"
            ) from last

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((TransientError, UnusableAnswer)),
            wait=self._pause,
            stop=tenacity.stop_after_attempt(self.attempts),
            retry_error_callback=give_up,
        )
        return retrying(lambda: self._request(question, body, read))

    def _pause(self, state: "RetryCallState") -> float:
        """Seconds before the next attempt."""
        requested = getattr(last_error(state), "retry_after", 0.0)
        return max(self.pause * 2 ** (state.attempt_number - 1), min(requested, self.timeout))

    def _rating(self, question: Question, choice: Any) -> float:
        """The rating in the judge's text."""
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise TransientError("the answer has no text")
        return parse_score(text, self.low, self.high)

    def _probabilities(self, question: Question, choice: Any) -> dict[str, float]:
        """P(answer) from the log-probabilities of the first token."""
        sent = (choice.get("logprobs") or {}).get("content") or []
        place = self._place(choice.get("message") or {}, [entry.get("token", "") for entry in sent])
        top = sent[place].get("top_logprobs") if sent else None
        if not top:
            raise RewardError(
                f"judge: {self.url} sent no log-probabilities; probabilities of answers need an"
                " endpoint with logprobs and top_logprobs in chat completions"
            )
        # some servers list the chosen token again
        tokens = {entry["token"]: math.exp(min(entry["logprob"], 0)) for entry in top}
        found = answer_probabilities(tokens.items(), question.answers)
        return usable(found, question, self.mass)

    def _place(self, message: Mapping[str, Any], tokens: Sequence[str]) -> int:
        """Which of an answer's tokens is the first after the thoughts."""
        text, answer = "".join(tokens), (message.get("content") or "").strip()
        apart = message.get("reasoning") or message.get("reasoning_content")
        begins = text.rfind(ENDED) + len(ENDED)
        if begins < len(ENDED):
            if not apart and not text.lstrip().startswith(THOUGHT):
                return 0
            # log-probabilities of the answer only, or other marks around the thoughts
            begins = text.rfind(answer) if apart and answer else -1
        if begins >= 0:
            for place, end in enumerate(accumulate(map(len, tokens))):
                if text[begins:end].strip():
                    return place
            raise UnusableAnswer("the model's thoughts ended without an answer")
        if "max_tokens" in self.request or "max_completion_tokens" in self.request:
            raise UnusableAnswer(f"the model's thoughts did not end: {text[-120:]!r}")
        raise RewardError(
            f"judge: {self.model} at {self.url} thinks before it answers: disable it, as in"
            " request={chat_template_kwargs: {enable_thinking: false}} or"
            " request={reasoning_effort: 'none'}, or allow for it, as in request={max_tokens: 2048}"
        )

    def _request(self, question: Question, body: bytes, read: Callable[[Question, Any], T]) -> T:
        """What `read` finds in the first choice of the answer. Raises `TransientError` for
        temporary failures and `RewardError` for others.
        """
        headers = {"Content-Type": "application/json"}
        answer = self._connections.post("/chat/completions", body, headers, self.timeout, MAX_BYTES)
        if answer.status in TRANSIENT_STATUS:
            raise TransientError(f"HTTP error {answer.status}", answer.retry_after)
        if answer.status in REJECTED:
            shown = answer.content[:500].decode(errors="replace")
            shown = shown.replace(os.environ.get(self.key) or "\0", "...")
            raise RewardError(
                f"judge: {self.url} rejects the request with HTTP status {answer.status}:"
                f" {shown!r}. Fields are added, replaced or removed as in"
                " request={top_logprobs: 5} and"
                " request={max_tokens: none, max_completion_tokens: 1}"
            )
        if not 200 <= answer.status < 300:
            raise RewardError(
                f"judge: {self.url} answered with HTTP status {answer.status}; redirects are not"
                " followed"
            )
        try:
            content: Any = json.loads(answer.content)
            return read(question, content["choices"][0])
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error


def _encoded(image: "Image") -> str:
    """An image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def parse_score(answer: str, low: float, high: float) -> float:
    """The number after "Final Score:" in an answer, such as "Final Score: 4", "**Final Score:**
    4.5/5" or "4 out of 5".

    A range ("1-5"), a decimal comma, a percentage and thoughts between <think> and </think> do not
    count.

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
    said = answer.rpartition(ENDED)[2].partition(THOUGHT)[0]
    scores = {(float(number), float(maximum or high)) for number, maximum in SCORE.findall(said)}
    shown = f"the answer {answer[-120:]!r}"
    if len(scores) != 1:
        raise UnusableAnswer(f'{shown} has {len(scores)} different "Final Score: X"')
    score, maximum = scores.pop()
    if maximum != high or not low <= score <= high:
        raise UnusableAnswer(f"{shown} has a score that is not from {low:g} to {high:g}")
    return score
