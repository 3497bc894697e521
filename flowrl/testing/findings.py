"""Promises, findings on them, and the comparisons that checks use."""

import copy
import functools
import inspect
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.types import unit_means

T = TypeVar("T")
Check = Callable[[Any], str | None]
Maker = Callable[[], Any]
Place = Callable[[tuple[int, ...]], str]
"""A function from an index of a tensor to words such as " at sample 3"."""


INAPPLICABLE = "does not apply"
"""What a check returns if its promise concerns only other parts of the kind."""


OVER = "not tried: the time was over"


class ContractBroken(AssertionError):
    """A part breaks a promise of its protocol; the message names the promise, the observed value,
    and the usual cause.
    """


class ContractAdvice(UserWarning):
    """A part keeps its promises, but is likely to cause trouble."""


@dataclass(frozen=True)
class Promise:
    """One promise of a protocol.

    Args:
        name: a short name.
        says: the content of the promise.
        check: raises `ContractBroken`, or returns advice or `INAPPLICABLE`.
        basic: if this promise is broken, later ones are not tried, because they would fail for the
            same reason.
    """

    name: str
    says: str
    check: Check
    basic: bool = False


@dataclass(frozen=True)
class Finding:
    """The finding on one promise.

    Args:
        promise: name of the promise.
        ok: whether it was kept, or does not apply.
        message: reason, advice or `INAPPLICABLE`; empty for a kept promise without advice.
        tried: False if an earlier basic promise was broken, or the time was over.
    """

    promise: str
    ok: bool
    message: str = ""
    tried: bool = True

    @property
    def mark(self) -> str:
        """One word: kept, advice, n/a, BROKEN or untried."""
        if self.message == INAPPLICABLE:
            return "n/a"
        if self.ok:
            return "advice" if self.message else "kept"
        return "BROKEN" if self.tried else "untried"


@dataclass(frozen=True, repr=False)
class Findings(Sequence[Finding]):
    """The findings on one part, a sequence; `str()` shows them as a table.

    Args:
        part: description of the part.
        findings: one finding per promise.
    """

    part: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return all(finding.ok for finding in self.findings)

    @property
    def broken(self) -> list[str]:
        """Names of the promises that were tried and not kept."""
        return [finding.promise for finding in self.findings if finding.tried and not finding.ok]

    @property
    def untried(self) -> list[str]:
        """Names of the promises that were not tried."""
        return [finding.promise for finding in self.findings if not finding.tried]

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        idle, untried = (
            sum(finding.message == INAPPLICABLE for finding in self.findings),
            len(self.untried),
        )
        kept, applicable = (
            sum(finding.ok for finding in self.findings) - idle,
            len(self.findings) - idle,
        )
        note = f"; {untried} {'was' if untried == 1 else 'were'} not tried" if untried else ""
        note += f"; {idle} {'does' if idle == 1 else 'do'} not apply" if idle else ""
        lines = [f"{self.part}: {kept} of {applicable} promises kept{note}"]
        for finding in self.findings:
            lines.append(f"{finding.mark:<7}  {finding.promise}")
            if finding.message == INAPPLICABLE:
                continue
            _, _, reason = finding.message.rpartition(f" breaks the promise {finding.promise!r} ")
            lines.extend(
                textwrap.wrap(reason, 120, initial_indent=" " * 9, subsequent_indent=" " * 9)
            )
        return "\n".join(lines)

    __repr__ = __str__


class Contract:
    """A list of promises, filled by the decorator `promise`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.promises: list[Promise] = []

    def promise(self, says: str, basic: bool = False) -> Callable[[Check], Check]:
        """Add a check; its function's name is the promise's name. Any exception breaks the
        promise.
        """

        def add(check: Check) -> Check:
            name = check.__name__

            @functools.wraps(check)
            def run(part: Any) -> str | None:
                __tracebackhide__ = True
                try:
                    return check(part)
                except ContractBroken as error:
                    raise ContractBroken(
                        f"{name_of(part)} breaks the promise {name!r} ({says}): {error}"
                    ) from None
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise ContractBroken(
                        f"{name_of(part)} breaks the promise {name!r} ({says}): it raised {reason}"
                    ) from error

            self.promises.append(Promise(name, says, run, basic))
            return run

        return add

    def chosen(self, without: Sequence[str]) -> list[Promise]:
        """The promises except those named in `without`. Raises `ConfigError` for an unknown
        name.
        """
        names = [promise.name for promise in self.promises]
        for name in without:
            require(
                name in names, "without", name, f"promises of a {self.kind} are {', '.join(names)}"
            )
        return [promise for promise in self.promises if promise.name not in without]

    def findings(
        self, make: Maker, without: Sequence[str] = (), deadline: float = math.inf
    ) -> Findings:
        """The findings on every promise, each with a fresh part; none is begun after the `deadline`
        (`time.monotonic`).
        """
        trial = _Trial(self.chosen(without), make, deadline)
        return Findings(
            name_of(make()), tuple(trial.finding(promise) for promise in trial.promises)
        )

    def as_test(self, make: Maker, without: Sequence[str] = ()) -> Callable[..., None]:
        """A pytest function with one case per promise. Raises `ConfigError` if pytest is not
        installed.
        """
        try:
            import pytest
        except ImportError as error:
            raise ConfigError(
                "flowrl.testing makes pytest tests, but pytest is not installed: pip install pytest"
            ) from error
        trial = _Trial(self.chosen(without), make)

        @pytest.mark.parametrize("promise", trial.promises, ids=lambda promise: promise.name)
        def test_contract(promise: Promise) -> None:
            __tracebackhide__ = True
            obstacle = trial.obstacle(promise)
            if obstacle:
                pytest.skip(obstacle)
            advice = promise.check(make())
            if advice == INAPPLICABLE:
                pytest.skip(INAPPLICABLE)
            if advice:
                warnings.warn(f"{promise.name}: {advice}", ContractAdvice, stacklevel=1)

        test_contract.__doc__ = f"The promises of a {self.kind}."
        return test_contract


@dataclass(frozen=True)
class _Trial:
    """The promises to try on fresh parts of `make`, and the findings so far."""

    promises: Sequence[Promise]
    make: Maker
    deadline: float = math.inf
    known: dict[str, Finding] = field(default_factory=dict)

    def finding(self, promise: Promise) -> Finding:
        """The finding on `promise`, tried once."""
        if promise.name not in self.known:
            self.known[promise.name] = self._try(promise)
        return self.known[promise.name]

    def _try(self, promise: Promise) -> Finding:
        obstacle = self.obstacle(promise)
        if obstacle:
            return Finding(promise.name, False, obstacle, tried=False)
        if time.monotonic() > self.deadline:
            return Finding(promise.name, False, OVER, tried=False)
        try:
            return Finding(promise.name, True, promise.check(self.make()) or "")
        except ContractBroken as error:
            return Finding(promise.name, False, str(error))

    def obstacle(self, promise: Promise) -> str:
        """Why `promise` cannot be tried: the first basic promise before it that is broken; "" if
        there is none.
        """
        for earlier in self.promises[: self.promises.index(promise)]:
            found = self.finding(earlier)
            if earlier.basic and not found.ok and found.message != OVER:
                return f"not tried, because {earlier.name!r} is broken"
        return ""


def maker(part: Any, share: bool = False) -> Maker:
    """A function that returns a fresh part: a call of `part` if it is a class or a function, else a
    copy of it.

    With `share` it returns the same part every time, for large models that the checks do not
    change. A part that cannot be copied is shared, too.
    """
    if inspect.isclass(part) or inspect.isroutine(part) or isinstance(part, functools.partial):
        return functools.cache(part) if share else part
    if share:
        return lambda: part

    def fresh() -> Any:
        try:
            return copy.deepcopy(part)
        except Exception:
            return part

    return fresh


Take = Callable[[Any, Tensor], Any]
"""The given rows of a loss's batch, with a separate leaf to differentiate."""
Gradient = Callable[[Any, Any], Tensor]
"""The gradient of a loss with respect to this leaf."""


def keeps_order(
    loss: Any, batch: Any, take: Take, gradient: Gradient, equal: Callable[..., None]
) -> None:
    """Check that the order of the rows has no effect."""
    order = torch.randperm(len(batch.time), generator=torch.Generator().manual_seed(1))
    mixed, hint = take(batch, order), "Group by numbers, not by place."
    equal(
        loss.loss(mixed).loss, loss.loss(batch).loss, "the loss of the rows in another order", hint
    )
    equal(
        gradient(loss, mixed),
        gradient(loss, batch)[order],
        "the gradient of the rows in another order",
        hint,
    )


def weighs_rows(
    loss: Any, batch: Any, take: Take, gradient: Gradient, equal: Callable[..., None]
) -> None:
    """Check that a row of weight n counts n times, and that a common factor of the weights has no
    effect.
    """
    rows = torch.arange(len(batch.time))
    hint, weight = (
        "Take sum(weight x terms) / sum(weight), also over units and for penalties.",
        1.0 + rows * 5 % 3,
    )
    equal(
        loss.loss(take(batch, rows.repeat(2))).loss,
        loss.loss(batch).loss,
        "the loss with every row twice",
        "Is it a sum?",
    )
    index = rows.repeat_interleave(weight.long())
    weighted, repeated = replace(batch, weight=weight), take(batch, index)
    equal(
        loss.loss(weighted).loss,
        loss.loss(repeated).loss,
        "the loss with weights, against repeated rows,",
        hint,
    )
    found, each = gradient(loss, weighted), gradient(loss, repeated)
    equal(
        found,
        torch.zeros_like(found).index_add(0, index, each),
        "the gradient with weights, against repeated rows,",
        hint,
    )
    scaled = replace(batch, weight=0.1 * weight)
    equal(loss.loss(scaled).loss, loss.loss(weighted).loss, "the loss with weights x 0.1", hint)


def adds_up(
    loss: Any, batch: Any, take: Take, gradient: Gradient, equal: Callable[..., None]
) -> None:
    """Check that the gradients of parts add up: whole units and, for a loss with `row_terms`, any
    rows with `pooled`.
    """
    rows = torch.arange(len(batch.time))
    batch = replace(batch, weight=0.5 * (rows * 7 % 4))
    units, whole = batch.units(loss.unit), gradient(loss, batch)
    number = torch.stack([one.double() for one in units]).unique(dim=1, return_inverse=True)[1]
    cases = {f"whole units ({loss.unit})": (batch, number % 3)}
    if loss.unit != "transition":
        terms = loss.row_terms(batch)
        expect(not terms.requires_grad, "row_terms carries a gradient; use torch.no_grad()")
        cases["any rows, with `pooled` given"] = (
            replace(batch, pooled=unit_means(terms, units, batch.weight)),
            rows % 3,
        )
    hint = (
        "Which rows does a term depend on? `unit` must declare it, and `pooled` must replace the"
        " others."
    )
    for name, (given, parts) in cases.items():
        found = torch.zeros_like(whole)
        for part in range(3):
            index = (parts == part).nonzero().flatten()
            few = take(given, index)
            found[index] = gradient(loss, few) * few.weight.sum() / batch.weight.sum()
        equal(found, whole, f"the gradient in parts of {name}", hint)


def expect(condition: bool, message: str) -> None:
    """Raise `ContractBroken` with `message` unless `condition`."""
    __tracebackhide__ = True
    if not condition:
        raise ContractBroken(message)


def at_sample(index: tuple[int, ...]) -> str:
    """Words for the index of an entry whose first axis is the sample."""
    return f" at sample {index[0]}"


def same(
    got: Tensor,
    expected: Tensor,
    what: str,
    hint: str = "",
    tolerance: float = 0.0,
    place: Place = at_sample,
    floor: float = 1.0,
    invalid: bool = False,
) -> None:
    """Raise `ContractBroken` if an entry differs by more than `tolerance` times (`floor` + the
    largest expected entry).

    The message names the entry with the largest difference. `invalid`: NaN equals NaN.
    """
    got, expected = got.detach(), expected.detach()
    expect(
        got.shape == expected.shape,
        f"{what} has shape {tuple(got.shape)} instead of {tuple(expected.shape)}. {hint}",
    )
    equal = (got == expected) | (got.isnan() & expected.isnan() & invalid)
    gap = torch.where(
        equal, 0.0, (got - expected).abs().double().nan_to_num(torch.inf, posinf=torch.inf)
    )
    largest = expected.abs().nan_to_num(0.0, posinf=torch.inf).max()
    if not float(gap.max()) <= tolerance * (floor + float(largest)):
        index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
        digits = ".5g" if float(gap[index]) > 1e-3 * abs(float(expected[index])) else ".9g"
        values = f"{float(got[index]):{digits}} instead of {float(expected[index]):{digits}}"
        raise ContractBroken(f"{what}{place(index)} is {values}. {hint}".strip())


def finite(values: Tensor, what: str, hint: str = "", place: Place = at_sample) -> None:
    """Raise `ContractBroken` if an entry is not finite; the message has the number of such entries,
    and the first.
    """
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        found = (
            f"{len(bad)} of {values.numel()} are not finite, the first"
            f" {float(values[first])}{place(first)}"
        )
        raise ContractBroken(f"{what}: {found}. {hint}".strip())


def twice(call: Callable[[], T]) -> tuple[T, T]:
    """The results of two calls, with PyTorch's global generator in different states."""
    torch.manual_seed(1)
    first = call()
    torch.manual_seed(2)
    return first, call()


@contextmanager
def unchanged(tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Within this context the tensors must keep their values; `ContractBroken` names a tensor that
    was modified in place.
    """
    before = {
        name: (tensor, tensor.detach().clone())
        for name, tensor in tensors.items()
        if tensor is not None
    }
    yield
    for name, (tensor, old) in before.items():
        changed = ~((tensor == old) | (tensor.isnan() & old.isnan()))
        if bool(changed.any()):
            found = (
                f"{int(changed.sum())} of its numbers changed, the first at index"
                f" {tuple(changed.nonzero()[0].tolist())}"
            )
            hint = "Work on a clone; operations that end in _ and += change their tensor."
            raise ContractBroken(f"{name} was modified in place: {found}. {hint}")


def name_of(part: Any) -> str:
    """A part on one short line; for a data class with the fields that differ from their
    defaults.
    """
    # the generated repr
    if (
        is_dataclass(part)
        and not isinstance(part, type)
        and hasattr(type(part).__repr__, "__wrapped__")
    ):
        chosen = [
            f
            for f in fields(part)
            if f.init and f.repr and repr(getattr(part, f.name)) != repr(f.default)
        ]
        options = ", ".join(f"{f.name}={name_of(getattr(part, f.name))}" for f in chosen)
        text = f"{type(part).__name__}({options})"
    else:
        text = repr(part)
    line = type(part).__name__ if text.startswith("<") else " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."
