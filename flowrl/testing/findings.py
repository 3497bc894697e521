"""Promises, and what became of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError

Check = Callable[[Any], None]


class ContractBroken(AssertionError):
    """A part does not keep a promise of its protocol; the message names the promise, what was seen, and the usual cause."""


@dataclass(frozen=True)
class Promise:
    """One promise of a protocol: a short name, what it says, and the check that raises `ContractBroken`."""

    name: str
    says: str
    check: Check


@dataclass(frozen=True)
class Finding:
    """What became of one promise; `message` is empty where it was kept."""

    promise: str
    kept: bool
    message: str = ""


@dataclass(frozen=True)
class Findings:
    """The findings on one part; `str()` shows them as a list."""

    part: str
    findings: tuple[Finding, ...]

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return all(finding.kept for finding in self.findings)

    @property
    def broken(self) -> list[str]:
        """Names of the promises that were not kept."""
        return [finding.promise for finding in self.findings if not finding.kept]

    def __str__(self) -> str:
        width = max(len(f.promise) for f in self.findings)
        lines = [f"{'kept  ' if f.kept else 'BROKEN'}  {f.promise:<{width}}  {f.message}".rstrip() for f in self.findings]
        return "\n".join([f"{self.part}: {sum(f.kept for f in self.findings)} of {len(self.findings)} promises kept", *lines])

    def __repr__(self) -> str:
        return str(self)


class Contract:
    """A list of promises, filled by the decorator `promise`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.promises: list[Promise] = []

    def promise(self, says: str) -> Callable[[Check], Check]:
        """Add a check; its function's name is the promise's name. Any exception breaks the promise."""

        def add(check: Check) -> Check:
            name = check.__name__

            @functools.wraps(check)
            def run(part: Any) -> None:
                try:
                    check(part)
                except ContractBroken as error:
                    raise ContractBroken(f"{_name(part)} breaks the promise {name!r} ({says}): {error}") from None
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise ContractBroken(f"{_name(part)} breaks the promise {name!r} ({says}): it raised {reason}") from error

            self.promises.append(Promise(name, says, run))
            return run

        return add

    def findings(self, make: Callable[[], Any]) -> Findings:
        """Every promise, each on a part of its own."""
        found = []
        for promise in self.promises:
            try:
                promise.check(make())
                found.append(Finding(promise.name, True))
            except ContractBroken as error:
                found.append(Finding(promise.name, False, str(error)))
        return Findings(_name(make()), tuple(found))

    def as_test(self, make: Callable[[], Any]) -> Callable[..., None]:
        """A pytest function with one case per promise. Raises `ConfigError` where pytest is not installed."""
        try:
            import pytest
        except ImportError as error:
            raise ConfigError("flowrl.testing makes pytest tests, but pytest is not installed: pip install pytest") from error

        @pytest.mark.parametrize("promise", self.promises, ids=lambda promise: promise.name)
        def test_contract(promise: Promise) -> None:
            promise.check(make())

        test_contract.__doc__ = f"The promises of a {self.kind}."
        return test_contract


def maker(part: Any) -> Callable[[], Any]:
    """A function that gives a fresh part: `part` itself where it is a class or a function without `self`, else copies of it."""
    import copy
    import inspect

    if inspect.isclass(part) or inspect.isfunction(part) or isinstance(part, functools.partial):
        return part
    return lambda: copy.deepcopy(part)


def expect(condition: bool, message: str) -> None:
    """Raise `ContractBroken` with `message` unless `condition`."""
    if not condition:
        raise ContractBroken(message)


def _name(part: Any) -> str:
    text = repr(part)
    return type(part).__name__ if text.startswith("<") else text
