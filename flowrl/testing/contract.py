"""Contracts: promises of a protocol, the findings on them, and the comparisons that promises use.

A promise is a function of a case, that is a part with test data. Its name is the promise's name,
its docstring says what is promised. It raises `ContractBroken`, or returns advice, `INAPPLICABLE`
or None.
"""

import copy
import functools
import inspect
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, require

T = TypeVar("T")
P = ParamSpec("P")
Promise = Callable[[Any], str | None]
TestFunction = Callable[..., None]

INAPPLICABLE = "does not apply"
"""What a promise returns that concerns only other parts of the kind."""
OVER = "not tried: the time was over"
BROKEN, UNTRIED = "BROKEN", "untried"
RETURNS = """

Returns:
    From `check_...`: the `Findings`, one for each promise. From `..._contract`: a pytest function
    with one case for each promise.

Raises:
    ConfigError: an option is not allowed, or (`..._contract`) pytest is not installed.
"""


class ContractBroken(AssertionError):
    """A part breaks a promise of its protocol; the message names the promise, the observed value,
    and the usual cause.
    """


class ContractAdvice(UserWarning):
    """A part keeps its promises, but is likely to cause trouble."""


@dataclass(frozen=True)
class Finding:
    """The finding on one promise.

    Args:
        promise: name of the promise.
        mark: "kept", "advice", "n/a", "BROKEN", or "untried" if an earlier basic promise was
            broken, or the time was over.
        message: the reason or the advice; empty for a kept promise without advice.
        cause: the exception that the part raised, if any.
    """

    promise: str
    mark: str
    message: str = ""
    cause: Exception | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the promise was kept, or does not apply."""
        return self.tried and self.mark != BROKEN

    @property
    def tried(self) -> bool:
        """Whether the promise was tried."""
        return self.mark != UNTRIED


class Findings(list[Finding]):
    """The findings on one part; `str()` shows them as a table.

    Args:
        part: description of the part.
        findings: one finding per promise.
    """

    def __init__(self, part: str, findings: Iterable[Finding]) -> None:
        super().__init__(findings)
        self.part = part

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return all(finding.ok for finding in self)

    def marked(self, mark: str) -> list[str]:
        """Names of the promises with this mark."""
        return [finding.promise for finding in self if finding.mark == mark]

    @property
    def broken(self) -> list[str]:
        """Names of the promises that were tried and not kept."""
        return self.marked(BROKEN)

    def __str__(self) -> str:
        untried, idle = len(self.marked(UNTRIED)), len(self.marked("n/a"))
        kept, applicable = sum(finding.ok for finding in self) - idle, len(self) - idle
        lines = [
            f"{self.part}: {kept} of {applicable} promises kept"
            + f"; {untried} not tried" * (untried > 0)
            + f"; {idle} not applicable" * (idle > 0)
        ]
        for finding in self:
            lines.append(f"{finding.mark:<7}  {finding.promise}")
            if finding.mark != "n/a":
                reason = finding.message.rpartition(f" breaks the promise {finding.promise!r} ")[2]
                lines.append(textwrap.indent(textwrap.fill(reason, 111), " " * 9))
        return "\n".join(filter(None, lines))

    __repr__ = __str__


@dataclass(frozen=True)
class Contract:
    """The promises of a kind of part, to be tried on one part.

    Args:
        kind: the kind, for messages.
        basic: promises that come first; if one is broken, later promises are not tried, because
            they would fail for the same reason.
        others: all other promises.
        make: makes the part, anew for every promise.
        case: makes the argument of the promises from the part.
        without: names of promises to leave out.

    Raises:
        ConfigError: `without` has an unknown name.
    """

    kind: str
    basic: Sequence[Promise]
    others: Sequence[Promise]
    make: Callable[[], Any]
    case: Callable[[Any], Any]
    without: Sequence[str] = ()
    known: dict[str, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [promise.__name__ for promise in (*self.basic, *self.others)]
        for name in self.without:
            allowed = f"promises of a {self.kind} are {', '.join(names)}"
            require(name in names, "without", name, allowed)

    @property
    def promises(self) -> list[Promise]:
        """The promises, except those left out."""
        return [p for p in (*self.basic, *self.others) if p.__name__ not in self.without]

    def findings(self, deadline: float = math.inf) -> Findings:
        """The findings on all promises; none is begun after the `deadline` (`time.monotonic`)."""
        tried = [self.finding(promise, deadline) for promise in self.promises]
        return Findings(name_of(self.make()), tried)

    def finding(self, promise: Promise, deadline: float = math.inf) -> Finding:
        """The finding on one promise, which is tried once."""
        name = promise.__name__
        if name not in self.known:
            self.known[name] = self._obstacle(promise, deadline) or self._try(promise)
        return self.known[name]

    def _obstacle(self, promise: Promise, deadline: float) -> Finding | None:
        for earlier in self.promises[: self.promises.index(promise)]:
            if earlier in self.basic and self.finding(earlier, deadline).mark == BROKEN:
                reason = f"not tried, because {earlier.__name__!r} is broken"
                return Finding(promise.__name__, UNTRIED, reason)
        over = time.monotonic() > deadline
        return Finding(promise.__name__, UNTRIED, OVER) if over else None

    def _try(self, promise: Promise) -> Finding:
        name, part = promise.__name__, self.make()
        try:
            advice = promise(self.case(part))
        except Exception as error:
            broken = isinstance(error, ContractBroken)
            reason = error if broken else f"it raised {type(error).__name__}: {error}"
            says = " ".join((promise.__doc__ or "").split()).rstrip(".")
            message = f"{name_of(part)} breaks the promise {name!r} ({says}): {reason}"
            return Finding(name, BROKEN, message, error)
        mark = "n/a" if advice == INAPPLICABLE else "advice" if advice else "kept"
        return Finding(name, mark, advice or "")

    def as_test(self) -> TestFunction:
        """A pytest function with one case per promise."""
        try:
            import pytest
        except ImportError as error:
            raise ConfigError("flowrl.testing makes pytest tests: pip install pytest") from error

        @pytest.mark.parametrize("promise", self.promises, ids=lambda promise: promise.__name__)
        def test_contract(promise: Promise) -> None:
            __tracebackhide__ = True
            finding = self.finding(promise)
            if finding.mark in (UNTRIED, "n/a"):
                pytest.skip(finding.message)
            if finding.mark == BROKEN:
                raise ContractBroken(finding.message) from finding.cause
            if finding.message:
                warnings.warn(f"{finding.promise}: {finding.message}", ContractAdvice, stacklevel=1)

        return test_contract


def entry_points(
    contract: Callable[P, Contract],
) -> tuple[Callable[P, Findings], Callable[P, TestFunction]]:
    """The functions `check_...` and `..._contract` with the arguments of `contract`."""

    @functools.wraps(contract)
    def check(*args: P.args, **kwargs: P.kwargs) -> Findings:
        return contract(*args, **kwargs).findings()

    @functools.wraps(contract)
    def test(*args: P.args, **kwargs: P.kwargs) -> TestFunction:
        return contract(*args, **kwargs).as_test()

    check.__doc__ = test.__doc__ = inspect.cleandoc(contract.__doc__ or "") + RETURNS
    return check, test


def maker(part: Any, share: bool = False) -> Callable[[], Any]:
    """A function that returns a fresh part: a call of `part` if it is a class or a function, else a
    copy of it.

    With `share` it returns the same part every time, for large models that the promises do not
    change. A part that cannot be copied is shared, too.
    """
    if inspect.isclass(part) or inspect.isroutine(part) or isinstance(part, functools.partial):
        return functools.cache(part) if share else part

    def fresh() -> Any:
        try:
            return part if share else copy.deepcopy(part)
        except Exception:
            return part

    return fresh


def expect(condition: object, message: str) -> None:
    """Raise `ContractBroken` with `message` unless `condition`."""
    if not condition:
        raise ContractBroken(message.strip())


def same(
    got: Tensor,
    expected: Tensor,
    what: str,
    hint: str = "",
    tolerance: float = 0.0,
    floor: float = 1.0,
) -> None:
    """Raise `ContractBroken` if an entry differs by more than `tolerance` times (`floor` + the
    largest expected entry). NaN equals NaN.
    """
    got, expected = got.detach(), expected.detach()
    shapes = f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    expect(got.shape == expected.shape, f"{what} has shape {shapes}. {hint}")
    equal = (got == expected) | (got.isnan() & expected.isnan())
    gap = (got - expected).abs().double().nan_to_num(torch.inf, posinf=torch.inf)
    gap = gap.masked_fill(equal, 0.0)
    index = tuple(int(place) for place in torch.unravel_index(gap.argmax(), gap.shape))
    place = f" at index {index}" if index else ""
    values = f"{float(got[index]):.7g} instead of {float(expected[index]):.7g}"
    limit = tolerance * (floor + float(expected.abs().nan_to_num().max()))
    expect(float(gap[index]) <= limit, f"{what}{place} is {values}. {hint}")


def twice(call: Callable[[], T]) -> tuple[T, T]:
    """The results of two calls, with PyTorch's global generator in different states."""
    torch.manual_seed(1)
    first = call()
    torch.manual_seed(2)
    return first, call()


def is_pure(case: Any) -> None:
    """The same input gives the same result, and is not changed."""
    hint = "Keep no state, draw nothing, and use networks in eval mode without dropout."
    with unchanged(**case.inputs):
        first, second = twice(case.result)
    same(second, first, "in a second call, the result", hint, case.repeats)


def treats_samples_separately(case: Any) -> None:
    """The result of a sample (of a prompt's group) does not depend on the others of its batch,
    their order or number.
    """
    result = case.result()
    count = len(result)
    parts = [[i] for i in range(count)] + [range(count)[::-1], range(1, count), range(count // 2)]
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    for rows in (*parts, shuffled):
        index = torch.tensor(list(rows))
        hint = "Is something normalised, sorted or padded over the batch, or an axis mixed up?"
        what = f"with the samples {index.tolist()} of {count} only, the result"
        same(case.result(index), result[index], what, hint, case.tolerance)


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in data classes and mappings, by their dotted names."""
    if isinstance(value, Tensor):
        return {name: value}
    inner = vars(value) if is_dataclass(value) else value if isinstance(value, Mapping) else {}
    prefix = f"{name}." if name else ""
    named = [tensors(item, f"{prefix}{key}") for key, item in inner.items()]
    return {key: tensor for group in named for key, tensor in group.items()}


@contextmanager
def unchanged(**inputs: Any) -> Iterator[None]:
    """Within this context the tensors in `inputs` must keep their values."""
    before = {name: (t, t.detach().clone()) for name, t in tensors(inputs).items()}
    yield
    for name, (tensor, old) in before.items():
        changed = ~((tensor == old) | (tensor.isnan() & old.isnan()))
        expect(
            not changed.any(),
            f"{name} was modified in place: {int(changed.sum())} of its numbers changed. Work on a"
            " clone; operations that end in _ and += change their tensor.",
        )


def name_of(part: Any) -> str:
    """A part on one short line; for a data class with the fields that differ from their
    defaults.
    """
    if is_dataclass(part) and hasattr(type(part).__repr__, "__wrapped__"):  # the generated repr
        shown = [(f, getattr(part, f.name)) for f in fields(part) if f.init and f.repr]
        options = [f"{f.name}={name_of(v)}" for f, v in shown if repr(v) != repr(f.default)]
        text = f"{type(part).__name__}({', '.join(options)})"
    else:
        text = repr(part)
    line = type(part).__name__ if text.startswith("<") else " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."
