"""Exported functions with more than one parameter document each of them, and what they return."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from reference_pages import modules_of, public_names  # noqa: E402

PACKAGES = (
    "flow", "samplers", "credit", "losses", "probes", "rollout", "rewards", "policies", "prompts", "diagnostics", "worlds",
    "testing", "serving", "types", "protocols", "errors", "registry", "methods", "io", "distributed", "workers",
)  # fmt: skip
HEADINGS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def exported(package: str) -> Iterator[tuple[str, Callable]]:
    """The functions of a package's documented names, once each."""
    seen: set[int] = set()
    for module in modules_of(package):
        for name in public_names(module):
            function = getattr(module, name)
            ours = inspect.isfunction(function) and function.__module__.startswith("flowrl.")
            if ours and id(function) not in seen:
                seen.add(id(function))
                yield f"{module.__name__}.{name}", function


def sections(docstring: str) -> dict[str, list[str]]:
    """The indented lines below each heading; a heading is a line of its own."""
    found: dict[str, list[str]] = {}
    inside = None
    for line in docstring.splitlines():
        heading = line.removesuffix(":")
        if line.endswith(":") and heading in HEADINGS:
            inside = found.setdefault(heading, [])
        elif line and not line.startswith("    "):
            inside = None
        elif line and inside is not None:
            inside.append(line.removeprefix("    "))
    return found


def parameters(function: Callable) -> list[str]:
    """Parameters as an Args section names them."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(p.kind, "") + name for name, p in inspect.signature(function).parameters.items() if name != "self"]


def faults(function: Callable) -> list[str]:
    """What the docstring lacks; empty for functions of one parameter."""
    expected = parameters(function)
    if len(expected) < 2:
        return []
    parts = sections(inspect.getdoc(function) or "")
    named = [found.group(1) for line in parts.get("Args", []) if (found := re.match(r"(\*{0,2}\w+): \S", line))]
    wrong = [] if named == expected else [f"Args names {named}, not {expected}"]
    silent = inspect.signature(function).return_annotation in (None, "None", Iterator[None])
    if not silent and not ("Returns" in parts or "Yields" in parts):
        wrong.append("no Returns")
    for line in parts.get("Raises", []):
        if not re.match(r"\w+: \S|    \S", line):
            wrong.append(f"Raises: {line!r} names no exception")
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_sections(package: str) -> None:
    wrong = {name: found for name, function in exported(package) if (found := faults(function))}
    assert not wrong, wrong


def test_protocols_document_their_methods() -> None:
    """The implementations refer to these sections, and do not repeat them."""
    protocols = importlib.import_module("flowrl.protocols")
    classes = {name: vars(getattr(protocols, name)) for name in protocols.__all__}
    methods = {f"{owner}.{name}": value for owner, body in classes.items() for name, value in body.items() if name[0] != "_"}
    wrong = {name: found for name, value in methods.items() if inspect.isfunction(value) and (found := faults(value))}
    assert len(methods) > 20 and not wrong, wrong


def test_the_check_finds_faults() -> None:
    def good(a: int, *rest: int, **more: int) -> int:
        """Sum.

        Args:
            a: a number.
            *rest: numbers; a long text
                goes on in the next line.
            **more: numbers.

        Returns:
            The sum.
        """
        return a

    def bad(a: int, b: int) -> int:
        """Sum.

        Args:
            b: a number.
        """
        return a + b

    assert faults(good) == []
    assert faults(bad) == ["Args names ['b'], not ['a', 'b']", "no Returns"]
