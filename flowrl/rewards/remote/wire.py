"""What travels between the client and a reward server: requests encoded, answers checked."""

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import RewardError
from flowrl.rewards.images import to_pillow
from flowrl.types import Prompt


class GiveUp(RewardError):
    """An attempt failed in a way that another one will not mend."""


class Again(Exception):
    """An attempt failed; `pause` is what the server asks for, in seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


@dataclass(frozen=True)
class Answer:
    """Scores in the order of the pictures, NaN where the server marks a sample invalid; with components and their weights."""

    scores: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def read_answer(content: bytes, name: str, count: int, url: str, parts: bool = False) -> Answer:
    """An answer, checked: of the request `name`, as many scores as pictures, each a finite number or marked invalid.

    `parts`: the components are wanted too. Raises `Again` where the answer cannot be read, `GiveUp` where it breaks the contract.
    """
    try:
        found = json.loads(content)
        request, scores, marks = found["request"], found["scores"], found.get("invalid")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Again(f"the answer cannot be read ({type(error).__name__}: {str(error)[:100]})") from error
    if request != name:
        raise Again("the answer belongs to another request")
    checks = _Checks(count, f"remote: the reward server at {url}")
    invalid = checks.marks(marks)
    values = checks.numbers(scores, invalid, "score")
    unmarked = [i for i, (value, mark) in enumerate(zip(values, invalid, strict=True)) if mark and not math.isnan(value)]
    if unmarked:
        raise GiveUp(f"{checks.who} marks sample {unmarked[0]} of {count} invalid, yet sends a score for it")
    if not parts:
        return Answer(values)
    if not isinstance(found.get("parts"), dict) or not found["parts"]:
        raise GiveUp(f"{checks.who} sends no components; remote-sum needs a weighted-sum there")
    weights = checks.weights(found.get("weights"), list(found["parts"]))
    return Answer(values, {n: checks.numbers(v, invalid, f"{n!r} component") for n, v in found["parts"].items()}, weights)


@dataclass(frozen=True)
class _Checks:
    """Checks of the lists in an answer about `count` pictures; `who` begins every message."""

    count: int
    who: str

    def marks(self, found: Any) -> list[bool]:
        """Which samples are marked invalid; none where a server does not say."""
        if found is None:
            return [False] * self.count
        if not isinstance(found, list) or len(found) != self.count or not all(isinstance(mark, bool) for mark in found):
            raise GiveUp(
                f"{self.who} sent {repr(found)[:60]} as invalid marks for {self.count} pictures; allowed: true or false each"
            )
        return found

    def numbers(self, found: Any, invalid: list[bool], what: str) -> list[float]:
        """As many finite numbers as pictures; null, read as NaN, where the sample is marked invalid."""
        if not isinstance(found, list) or len(found) != self.count:
            amount = len(found) if isinstance(found, list) else f"a {type(found).__name__} of"
            raise GiveUp(f"{self.who} sent {amount} {what}s for {self.count} pictures")
        for sample, (value, mark) in enumerate(zip(found, invalid, strict=True)):
            if not (_is_number(value) or (mark and value is None)):
                shown = f"{repr(value)[:40]} as {what} {sample} of {self.count}"
                raise GiveUp(f"{self.who} sent {shown}; {what}s must be finite, or marked invalid")
        return [math.nan if value is None else float(value) for value in found]

    def weights(self, found: Any, names: list[str]) -> dict[str, float]:
        """A finite number for every component."""
        if not isinstance(found, dict) or sorted(found) != sorted(names) or not all(map(_is_number, found.values())):
            raise GiveUp(f"{self.who} sent {repr(found)[:60]} as the weights of the components {', '.join(names)[:60]}")
        return {name: float(weight) for name, weight in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= torch.finfo(torch.float32).max


def read_problem(content: bytes) -> tuple[str, str, bool | None]:
    """Code, message and whether to try again (None: not said) of an answer that is an error."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(content)["error"]
        code, message, retry = error["code"], error["message"], error["retry"]
        return str(code)[:100], str(message)[:1000], retry if isinstance(retry, bool) else None
    return "", "", None


def encode(images: Tensor, prompts: Sequence[Prompt], kind: str) -> list[tuple[str, tuple[str, bytes, str]]]:
    """The parts of a request."""
    listed = [{"text": prompt.text, "metadata": _plain(prompt.metadata, prompt, "metadata")} for prompt in prompts]
    parts = [("prompts", ("prompts.json", json.dumps(listed).encode(), "application/json"))]
    pixels = images.detach().cpu().float().contiguous()
    if not bool(torch.isfinite(pixels).all()):
        raise RewardError("remote: the images hold values that are not finite; they are not sent")
    if kind == "safetensors":
        from safetensors.torch import save

        return [*parts, ("safetensors", ("images.safetensors", save({"images": pixels}), "application/octet-stream"))]
    return [*parts, *(("png", (f"{i}.png", data, "image/png")) for i, data in enumerate(_pngs(pixels)))]


def _pngs(images: Tensor) -> list[bytes]:
    """[sample, 3 or 1, height, width] in [0, 1] as 8-bit PNG files: round(255 x)."""
    if images.shape[1] not in (1, 3):
        raise RewardError(f"remote: images='png' needs 1 or 3 channels, got {images.shape[1]}; use images='safetensors'")
    files = [io.BytesIO() for _ in images]
    for file, picture in zip(files, to_pillow(images), strict=True):
        picture.save(file, "PNG", compress_level=1)
    return [file.getvalue() for file in files]


def _plain(value: Any, prompt: Prompt, where: str) -> Any:
    """Metadata as JSON has it. Raises `RewardError` naming the prompt and the entry that JSON does not have."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), prompt, f"{where}.{f.name}") for f in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, prompt, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, prompt, f"{where}[{number}]") for number, entry in enumerate(value)]
    raise RewardError(
        f"remote: {where} of prompt {prompt.text!r} is {repr(value)[:60]} ({type(value).__name__}), which cannot be sent; "
        "allowed: text, finite numbers, true, false, null, lists, and objects of them"
    )
