"""Checks of exercises, which name the likely mistake.

A check is a function of the student's answer, decorated with `check`. It calls `expect` and
`close`, each with the mistake that most likely explains a failure. In a notebook the result is one
line, so that the rest of the notebook still runs. With ``FLOWRL_COURSE=strict`` in the environment,
which the build of the lessons sets, a failed check raises `Unsolved`.
"""

import functools
import html
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Unsolved(AssertionError):
    """An exercise's check did not pass; the message says what is likely wrong."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows the message alone."""
        return [f"✗ {self}"]


class Verdict:
    """The result of a check, shown as one line of text, coloured in a notebook."""

    def __init__(self, name: str, problem: str | None) -> None:
        self.name, self.problem = name, problem

    @property
    def passed(self) -> bool:
        """Whether the answer was accepted."""
        return self.problem is None

    def __repr__(self) -> str:
        return f"✓ {self.name}: correct" if self.passed else f"✗ {self.name}: {self.problem}"

    def _repr_html_(self) -> str:
        colour, ground = ("#0b6b4f", "#e6f4ef") if self.passed else ("#9c2b00", "#fdeee6")
        style = (
            "padding:.5em .8em;border-left:4px solid"
            f" {colour};background:{ground};color:#22252b;max-width:60em"
        )
        return f'<div style="{style}">{html.escape(repr(self))}</div>'


def check(name: str) -> Callable[[Callable[..., None]], Callable[..., Verdict]]:
    """Make a check of the decorated function; `name` is the name of the exercise in the verdict.

    An exception of the student's code becomes a failed check that names the exception. The
    undecorated function, which raises `Unsolved`, is available as ``__wrapped__``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., Verdict]:
        @functools.wraps(function)
        def run(*answer: Any) -> Verdict:
            try:
                function(*answer)
                return Verdict(name, None)
            except Unsolved as error:
                problem, cause = str(error), error
            except Exception as error:
                problem, cause = _explain(error, answer), error
            if os.environ.get("FLOWRL_COURSE") == "strict":
                raise Unsolved(f"{name}: {problem}") from cause
            return Verdict(name, problem)

        return run

    return decorate


def _explain(error: Exception, answer: tuple[Any, ...]) -> str:
    if any(part is ... or part is None for part in answer):
        return "not answered yet: replace the dots"
    raised = f"your code raised {type(error).__name__}: {error}"
    if "must match the size of tensor" in str(error):
        return (
            f"{raised}. A [sample] tensor broadcasts to [sample, dim] as time[:, None]; a mean"
            " keeps its axis with keepdim=True"
        )
    if "must be Tensor, not float" in str(error):
        return f"{raised}. For plain numbers use the module math"
    if "Boolean value of Tensor" in str(error):
        return (
            f"{raised}. Python's max, min and if do not work element by element; torch.maximum,"
            " torch.minimum and torch.where do"
        )
    return (
        f"{raised}. Does it return a value yet?"
        if "ellipsis" in str(error) or "NoneType" in str(error)
        else raised
    )


def expect(condition: object, mistake: str) -> None:
    """Raise `Unsolved` with the likely mistake unless `condition`."""
    if not bool(condition):
        raise Unsolved(mistake)


def answered(value: Any, what: str = "the function") -> Any:
    """`value`, unless it is still the dots (or None) of the starting cell."""
    expect(value is not ... and value is not None, f"no answer yet for {what}: replace the dots")
    return value


def tensor(value: Any, shape: tuple[int, ...], what: str = "the result") -> Tensor:
    """`value` as a tensor of that shape; `Unsolved` names its type or shape otherwise."""
    answered(value, what)
    expect(
        isinstance(value, Tensor), f"{what} is a {type(value).__name__}; it must be a torch.Tensor"
    )
    expect(tuple(value.shape) == shape, f"{what} has shape {tuple(value.shape)} instead of {shape}")
    return value.detach()


def number(value: Any, what: str = "the answer") -> float:
    """`value` as a float, or `Unsolved`."""
    answered(value, what)
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise Unsolved(f"{what} is a {type(value).__name__}; it must be one number") from None


def same(got: Any, wanted: Any, tolerance: float = 1e-4) -> bool:
    """Whether two tensors or numbers agree to `tolerance`, relative to the largest wanted value (or
    1).
    """
    got, wanted = torch.as_tensor(got).detach().double(), torch.as_tensor(wanted).detach().double()
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return False
    return bool((got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max())))


def close(
    got: Any,
    wanted: Any,
    otherwise: str,
    mistakes: dict[str, Any] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Raise `Unsolved` unless `got` agrees with `wanted`: with the mistake whose value `got` agrees
    with, or with `otherwise`.

    `mistakes` maps a message to the value that this mistake gives.
    """
    if same(got, wanted, tolerance):
        return
    for message, value in (mistakes or {}).items():
        if same(got, value, tolerance):
            raise Unsolved(message)
    raise Unsolved(otherwise)
