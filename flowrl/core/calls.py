"""Calls of the user's parts: what they raise is named, and so is the call in progress."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flowrl.core.errors import FlowrlError, PartError, part_errors

_calls: dict[object, tuple[str, float]] = {}
"""The calls in progress, the longest first, and when each began."""


@contextmanager
def part_call(call: str) -> Iterator[None]:
    """The context of a call of a part of the user: what it raises is a `PartError` that names it
    and the line, and `call` is among the `calls_in_progress`.
    """
    key = object()
    _calls[key] = (call, time.monotonic())
    try:
        with part_errors():
            yield
    finally:
        del _calls[key]


def calls_in_progress() -> list[tuple[str, float]]:
    """The calls of parts that have not returned, the outermost first, and when each began
    (`time.monotonic`).
    """
    return [*_calls.copy().values()]


def state_of(name: str, part: Any, error: type[FlowrlError] = PartError) -> dict[str, Tensor]:
    """Copies of the memory of a part with `state_dict`. A part may return something else than
    tensors only after some iterations: then `error` has its `name`.
    """
    with part_call(f"{type(part).__name__}.state_dict"):
        state = part.state_dict()
    wrong = state
    if isinstance(state, Mapping):
        fits = {key: isinstance(key, str) and isinstance(state[key], Tensor) for key in state}
        if all(fits.values()):
            return {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
        wrong = {key: state[key] for key in state if not fits[key]}
    text = f"{name}.state_dict() = {wrong!r:.200} is not allowed"
    raise error(f"{text}; allowed: a dictionary of tensors by name")
