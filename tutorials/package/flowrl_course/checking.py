"""Checks of exercises, which name the likely mistake.

A check is a function of the student's answer, decorated with `check`. It calls `expect` and
`close`, each with the mistake that most likely explains a failure. In a notebook the result is one
line: at first the symptom, after another failed attempt the cause, then how to mend it. The
notebook continues with the solution in place of the answer, so that *Run All* reaches its end. With
``FLOWRL_COURSE=strict`` in the environment, which the build of the lessons sets, a failed check
raises `Unsolved`.
"""

import functools
import html
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


class Unsolved(AssertionError):
    """An exercise's check did not pass; the message says what is likely wrong.

    `symptom` says how the value differs, without the cause. A message of the form "cause: remedy"
    is shown in two steps.
    """

    def __init__(self, message: str, symptom: str = "") -> None:
        super().__init__(message)
        cause = message.partition(": ")[0]
        if len(cause.split()) < 4 or cause.count("{") > cause.count("}"):
            cause = ""
        self.steps = [step for step in (symptom, cause) if step not in ("", message)] + [message]

    def _render_traceback_(self) -> list[str]:
        """IPython shows the message alone."""
        return [f"✗ {self}"]


OPEN = ("the dots", "return a value yet", "answered yet")
"""What the messages of checks say of an answer that is still missing."""


class Verdict:
    """The result of a check, shown as one line of text, coloured in a notebook.

    `problem` is the whole message, of which `shown` is displayed.
    """

    def __init__(self, name: str, problem: str | None, shown: str = "") -> None:
        self.name, self.problem, self.shown = name, problem, shown or problem

    @property
    def passed(self) -> bool:
        """Whether the answer was accepted."""
        return self.problem is None

    @property
    def open(self) -> bool:
        """Whether there is no answer yet: its dots are still there."""
        return any(text in (self.problem or "") for text in OPEN)

    def __repr__(self) -> str:
        if self.passed:
            return f"✓ {self.name}: correct"
        return f"{'○' if self.open else '✗'} {self.name}: {self.shown}"

    def _repr_html_(self) -> str:
        colour, ground = ("#0b6b4f", "#e6f4ef") if self.passed else ("#9c2b00", "#fdeee6")
        if self.open:
            colour, ground = "#6b7280", "#f1f2f4"
        style = (
            "padding:.5em .8em;border-left:4px solid"
            f" {colour};background:{ground};color:#22252b;max-width:60em"
        )
        return f'<div style="{style}">{html.escape(repr(self))}</div>'


_met: Counter[tuple[str, str]] = Counter()
"""How often each problem of each check was met."""

_given: dict[str, list[Any]] = {}
"""What the solution of an exercise defined in the notebook, by check."""

_own: dict[str, tuple[Any, ...]] = {}
"""The student's last answer, by check: a check that is repeated without it judges it again."""


class _Text(str):
    """A text of a solution, which differs from an equal text of the student by its identity."""


class _Whole(int):
    """An integer of a solution."""


class _Real(float):
    """A number of a solution."""


def check(name: str) -> Callable[[Callable[..., None]], Callable[..., Verdict]]:
    """Make a check of the decorated function; `name` is the name of the exercise in the verdict.

    An exception of the student's code becomes a failed check that names the exception. The
    undecorated function, which raises `Unsolved`, is available as ``__wrapped__``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., Verdict]:
        key = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

        @functools.wraps(function)
        def run(*answer: Any) -> Verdict:
            if any(part is item for part in answer for item in _given.get(key, ())):
                answer = _own[key]
            _own[key] = answer
            try:
                function(*(_guarded(part) for part in answer))
                return Verdict(name, None)
            except Unsolved as error:
                problem, cause = error, error
            except Exception as error:
                problem, cause = Unsolved(_explain(error, answer)), error
            if os.environ.get("FLOWRL_COURSE") == "strict":
                raise Unsolved(f"{name}: {problem}") from cause
            steps = problem.steps if cause is problem else problem.steps[-1:]
            step = min(_met[key, str(problem)], len(steps) - 1)
            _met[key, str(problem)] += 1
            shown = [steps[step]]
            if step < len(steps) - 1:
                shown.append("Run the check again for more")
            if use_solution(key, sys._getframe(1).f_globals):
                shown.append("Until it is correct, the notebook uses the solution in its place")
            sentences = (text if text.endswith((".", "?", "!")) else f"{text}." for text in shown)
            return Verdict(name, str(problem), " ".join(sentences))

        return run

    return decorate


def _guarded(answer: Any) -> Any:
    """`answer`; a function fails the check if it changes a tensor that it was given."""
    if not isinstance(answer, FunctionType):
        return answer

    @functools.wraps(answer)
    def run(*given: Any, **named: Any) -> Any:
        tensors = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
        before = [value._version for value in tensors]
        result = answer(*given, **named)
        expect(
            [value._version for value in tensors] == before,
            f"{answer.__name__} changes a tensor that it was given: use x = x + 1, not x += 1, and"
            " functions without a final underscore",
        )
        return result

    return run


@functools.cache
def _solutions() -> dict[str, str]:
    return json.loads(Path(__file__).with_name("solutions.json").read_text())


def use_solution(key: str, namespace: dict[str, Any]) -> bool:
    """Execute the solution of the exercise with check `key`, such as "lesson_03.check_kl", in a
    notebook's `namespace`; False if it is no notebook or there is no solution.
    """
    if namespace.get("__name__") != "__main__" or key not in _solutions():
        return False
    before = dict(namespace)
    exec(_solutions()[key], namespace)
    kinds = {str: _Text, int: _Whole, float: _Real}
    for name, value in namespace.items():
        if before.get(name, _given) is not value and type(value) in kinds:
            namespace[name] = kinds[type(value)](value)
    _given[key] = [
        value for name, value in namespace.items() if before.get(name, _given) is not value
    ]
    return True


def quiz(
    module: str, *questions: tuple[str, dict[str, str]]
) -> Callable[[dict[int, str]], Verdict]:
    """The check of a quiz: for each question the letter of its right answer, and for every wrong
    letter the reason against it.
    """

    def check_quiz(answer: dict[int, str]) -> None:
        places = range(1, len(questions) + 1)
        expect(
            isinstance(answer, dict) and set(answer) == set(places),
            f"answer with a dict from the numbers 1 to {len(questions)} to letters",
        )
        wrong = []
        for number, (right, reasons) in zip(places, questions, strict=True):
            letter = choice(
                answer[number], "".join(sorted([right, *reasons])), f"question {number}"
            )
            if letter != right:
                wrong.append((number, reasons[letter]))
        if wrong:
            raise Unsolved(
                "; ".join(f"{number}. {reason}" for number, reason in wrong),
                f"not yet right: question {', '.join(str(number) for number, _ in wrong)}",
            )

    check_quiz.__module__ = module
    return check("Quiz")(check_quiz)


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
    expect(value is not ... and value is not None, f"no answer yet for {what}; replace the dots")
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
    expect(not isinstance(value, str), f"{what} is a text; write a number, without quotes")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise Unsolved(f"{what} is a {type(value).__name__}; it must be one number") from None


def whole(value: Any, what: str = "the answer") -> int:
    """`value` as an integer, or `Unsolved`."""
    found = number(value, what)
    expect(found.is_integer(), f"{what} is {found:g}; it must be a whole number")
    return int(found)


def numbers(value: Any, count: int, mistake: str) -> list[float]:
    """`value`, a sequence or tensor of `count` numbers, as floats, or `Unsolved` with `mistake`."""
    answered(value)
    several = isinstance(value, tuple | list) or (isinstance(value, Tensor) and value.ndim == 1)
    expect(several and len(value) == count, mistake)
    return [number(part, "each of them") for part in value]


def choice(value: Any, letters: str, what: str = "the question") -> str:
    """`value` as one of `letters`, or `Unsolved`."""
    answered(None if value == "..." else value, what)
    letter = str(value).strip(" ().").lower()
    expect(
        len(letter) == 1 and letter in letters,
        f"answer with one of the letters {', '.join(letters)}",
    )
    return letter


def decide(value: Any, right: str, reasons: dict[str, str], what: str = "the question") -> None:
    """Raise `Unsolved` with the reason against `value`, a letter, unless it is `right`."""
    letter = choice(value, "".join(sorted([right, *reasons])), what)
    expect(letter == right, reasons.get(letter, ""))


def same(got: Any, wanted: Any, tolerance: float = 1e-4) -> bool:
    """Whether two tensors or numbers agree to `tolerance`, relative to the largest wanted value (or
    1).
    """
    got, wanted = torch.as_tensor(got).detach().double(), torch.as_tensor(wanted).detach().double()
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return False
    return bool((got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max())))


def same_gradient(got: Tensor, wanted: Tensor, leaf: Tensor) -> None:
    """Raise `Unsolved` unless both results, summed, have the same derivative by `leaf`."""
    expect(
        got.requires_grad,
        "the value is right, but carries no gradient: leave out detach, no_grad and item",
    )
    grown, right = (
        torch.autograd.grad(result.sum(), leaf, allow_unused=True)[0] for result in (got, wanted)
    )
    expect(
        grown is not None and same(grown, right, 1e-5),
        "the value is right, but not its gradient: is a part detached?",
    )


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
    symptom = _symptom(torch.as_tensor(got).detach(), torch.as_tensor(wanted).detach(), tolerance)
    for message, value in (mistakes or {}).items():
        if same(got, value, tolerance):
            raise Unsolved(message, symptom)
    raise Unsolved(otherwise, symptom)


def _symptom(got: Tensor, wanted: Tensor, tolerance: float) -> str:
    """How two tensors differ, in words: the number of wrong values, and the worst of them."""
    if got.shape != wanted.shape:
        return f"the result has shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if not bool(torch.isfinite(got).all()):
        return "the result contains nan or infinity"
    if not wanted.ndim:
        return f"the value is too {'large' if got > wanted else 'small'}"
    got, wanted = got.double(), wanted.double()
    off = (got - wanted).abs()
    count = int((off > tolerance * max(1.0, float(wanted.abs().max()))).sum())
    worst = tuple(int(place) for place in torch.unravel_index(off.argmax(), off.shape))
    digits = next(n for n in (4, 7, 17) if f"{got[worst]:.{n}g}" != f"{wanted[worst]:.{n}g}")
    return (
        f"{count} of {off.numel()} values are wrong; at {list(worst)} you have"
        f" {got[worst]:.{digits}g} instead of {wanted[worst]:.{digits}g}"
    )
