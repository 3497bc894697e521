"""Contracts: promises of a protocol, the findings on them, and the comparisons that promises use.

A contract is a class per kind of part, a promise one of its methods. The first paragraph of the
method's docstring says what is promised, the second names the usual cause if it is broken. It
raises `ContractBroken`, or returns advice, `INAPPLICABLE` or None.
"""

import copy
import functools
import inspect
import math
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from flowrl.core.errors import require

T = TypeVar("T")
P = ParamSpec("P")
Promise = Any
"""A method of a contract, marked by `promise` or `basic`, that returns advice or None."""
TestFunction = Callable[..., None]

INAPPLICABLE = "n/a"
"""What a promise returns that concerns only other parts of the kind."""
OVER = "not tried: the time limit was reached"
BROKEN, UNTRIED = "BROKEN", "untried"
RETURNS = """

Returns:
    From `check_...`: the `Findings`, one for each promise. From `..._contract`: a pytest function
    with one case for each promise.

Raises:
    ConfigError: an option is not allowed.
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
        return self.mark not in (BROKEN, UNTRIED)


class Findings(list[Finding]):
    """The findings on one part; `str()` shows them as a table.

    Args:
        part: name of the part.
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
        counts = Counter(finding.mark for finding in self)
        lines = [f"{self.part}: " + ", ".join(f"{n} {mark}" for mark, n in counts.items())]
        for finding in self:
            lines.append(f"{finding.mark:<7}  {finding.promise}")
            reason = finding.message.rpartition(f" breaks the promise {finding.promise!r} ")[2]
            lines.append(textwrap.indent(textwrap.fill(reason, 111), " " * 9))
        return "\n".join(filter(None, lines))

    __repr__ = __str__


def promise(method: Promise) -> Promise:
    """Mark a method of a contract as a promise."""
    method.is_basic = False
    return method


def basic(method: Promise) -> Promise:
    """Mark a method as a promise that comes first; if it is broken, others are not tried, because
    they would fail for the same reason.
    """
    method.is_basic = True
    return method


@dataclass(frozen=True)
class Contract:
    """The promises of a kind of part, which are the class's marked methods, with the data on which
    they are tried.

    Args:
        part: an object, which is copied for every promise, a class, or a function that makes a
            part.
        without: names of promises that the part breaks on purpose.

    Raises:
        ConfigError: `without` has an unknown name.
    """

    part: Any
    without: Sequence[str] = field(default=(), kw_only=True)
    shared: ClassVar[bool] = False
    """Whether all promises are tried on one object, because parts are large models."""

    def __post_init__(self) -> None:
        names = [promise.__name__ for promise in self.promises()]
        require(set(self.without) <= set(names), "without", self.without, ", ".join(names))

    @classmethod
    def promises(cls) -> list[Promise]:
        """All promises of the kind."""
        methods = [method for owner in cls.__mro__ for method in vars(owner).values()]
        return [method for method in methods if hasattr(method, "is_basic")]

    def tried(self, first: Collection[str] = (), deadline: float = math.inf) -> Iterator[Finding]:
        """The findings: on basic promises, on those named `first`, on the others. None is tried
        after the `deadline` (`time.monotonic`).
        """
        make = functools.cache(self.fresh) if self.shared else self.fresh
        obstacle = ""
        order = sorted(self.promises(), key=lambda p: (not p.is_basic, p.__name__ not in first))
        for promise in order:
            name = promise.__name__
            if name in self.without:
                continue
            if time.monotonic() > deadline:
                obstacle = obstacle or OVER
            finding = Finding(name, UNTRIED, obstacle) if obstacle else self._try(promise, make())
            if finding.mark == BROKEN and promise.is_basic:
                obstacle = f"not tried, because {name!r} is broken"
            yield finding

    def findings(self) -> Findings:
        """The findings on all promises."""
        return Findings(getattr(self.part, "__name__", type(self.part).__name__), self.tried())

    def fresh(self) -> Any:
        """A part for a promise."""
        if inspect.isclass(self.part) or inspect.isroutine(self.part):
            return self.part()
        try:
            return self.part if self.shared else copy.deepcopy(self.part)
        except Exception:  # it cannot be copied
            return self.part

    def _try(self, promise: Promise, part: Any) -> Finding:
        name = promise.__name__
        says, _, hint = inspect.cleandoc(promise.__doc__ or "").partition("\n\n")
        try:
            advice = promise(replace(self, part=part))
        except Exception as error:
            broken = isinstance(error, ContractBroken)
            reason = error if broken else f"it raised {type(error).__name__}: {error}"
            head = f"{type(part).__name__} breaks the promise {name!r} ({says.rstrip('.')})"
            message = " ".join(f"{head}: {str(reason).rstrip('.')}. {hint}".split())
            return Finding(name, BROKEN, message, error)
        if advice == INAPPLICABLE:
            return Finding(name, INAPPLICABLE)
        return Finding(name, "advice" if advice else "kept", advice or "")

    def as_test(self) -> TestFunction:
        """A pytest function with one case per promise."""
        import pytest

        findings = functools.cache(lambda: {finding.promise: finding for finding in self.tried()})

        @pytest.mark.parametrize(
            "promise", [p.__name__ for p in self.promises() if p.__name__ not in self.without]
        )
        def test_contract(promise: str) -> None:
            __tracebackhide__ = True
            finding = findings()[promise]
            if finding.mark in (UNTRIED, INAPPLICABLE):
                pytest.skip(finding.message or "it concerns other parts")
            if finding.mark == BROKEN:
                raise ContractBroken(finding.message) from finding.cause
            if finding.message:
                warnings.warn(f"{promise}: {finding.message}", ContractAdvice, stacklevel=1)

        return test_contract


def entry_points(
    contract: Callable[P, Contract],
) -> tuple[Callable[P, Findings], Callable[P, TestFunction]]:
    """The functions `check_...` and `..._contract` with the arguments of `contract`."""

    @functools.wraps(contract, updated=())
    def check(*args: P.args, **kwargs: P.kwargs) -> Findings:
        return contract(*args, **kwargs).findings()

    @functools.wraps(contract, updated=())
    def test(*args: P.args, **kwargs: P.kwargs) -> TestFunction:
        return contract(*args, **kwargs).as_test()

    check.__doc__ = test.__doc__ = inspect.cleandoc(contract.__doc__ or "") + RETURNS
    return check, test


def expect(condition: object, message: str) -> None:
    """Raise `ContractBroken` with `message` unless `condition`."""
    if not condition:
        raise ContractBroken(message)


def same(
    got: Tensor, expected: Tensor, what: str, tolerance: float = 0.0, floor: float = 1.0
) -> None:
    """Raise `ContractBroken` if an entry differs by more than `tolerance` times (`floor` + the
    largest expected entry). NaN equals NaN.
    """
    got, expected = got.detach().double(), expected.detach().double()
    shapes = f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    expect(got.shape == expected.shape, f"{what} has shape {shapes}")
    limit = tolerance * (floor + float(expected.abs().nan_to_num().max()))
    wrong = ~torch.isclose(got, expected, rtol=0.0, atol=limit, equal_nan=True)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        place = f" at index {index}" if index else ""
        raise ContractBroken(f"{what}{place} is {got[index]:.7g} instead of {expected[index]:.7g}")


def twice(call: Callable[[], T]) -> tuple[T, T]:
    """The results of two calls, with PyTorch's global generator in different states."""
    torch.manual_seed(1)
    first = call()
    torch.manual_seed(2)
    return first, call()


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
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors(inputs).items()}
    yield
    for name, (tensor, old) in before.items():
        same(tensor, old, f"{name} was modified in place; work on a clone: its value")


class Pure(Contract):
    """A contract with a `result` of `inputs`."""

    inputs: Any
    result: Any

    @basic
    def is_pure(self) -> None:
        """The same input gives the same result, and is not changed.

        Keep no state, draw nothing, and use networks in eval mode without dropout.
        """
        with unchanged(**self.inputs):
            first, second = twice(self.result)
        same(second, first, "in a second call, the result", 1e-6, floor=0.0)


class Separate(Contract):
    """A contract with a `result` per sample, or for a group reward per group."""

    result: Any
    tolerance: Any

    @promise
    def treats_samples_separately(self) -> None:
        """The result of a sample (of a prompt's group) does not depend on the others of its batch,
        their order or number.

        Is something normalised, sorted or padded over the batch, or an axis mixed up?
        """
        result = self.result()
        order = torch.arange(len(result)).roll(1)
        for rows in (order, *order[:, None]):
            what = f"with the samples {rows.tolist()} of {len(result)} only, the result"
            same(self.result(rows), result[rows], what, self.tolerance)
