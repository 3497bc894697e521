"""Exported functions and classes with more than one parameter document each of them; functions also
document their result.

Parameters are documented in an Args section. In packages without `__all__`, whose names are
internal to flowrl for the most part, a parameter may instead be named in backticks in the text. A
field of a data class may have a string below it.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowrl.parts.settings import groups_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from reference_pages import PAGES, modules_of, public_names  # noqa: E402

PACKAGES = (
    "flow",
    "samplers",
    "credit",
    "losses",
    "probes",
    "rollout",
    "rewards",
    "policies",
    "prompts",
    "diagnostics",
    "worlds",
    "testing",
    "serving",
    "types",
    "protocols",
    "errors",
    "experience",
    "registry",
    "io",
    "distributed",
    "workers",
)
BRIEF = (
    "methods",
    "training",
    "plots",
    "settings",
    "specs",
    "options",
    "plugins",
    "reading",
    "trust",
    "tree",
    "forward",
    "transfer",
    "prompt",
    "sources",
    "signals",
    "imports",
)
"""Packages and modules in which backticks in the text suffice, as for errors and messages."""
HEADINGS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def exported(package: str) -> Iterator[tuple[str, Callable]]:
    """The functions and classes of a package's documented names, once each, without protocols,
    enumerations and errors.
    """
    seen: set[int] = set()
    for module in modules_of(package):
        for name in public_names(module):
            value = getattr(module, name)
            plain = (
                isinstance(value, type)
                and not getattr(value, "_is_protocol", False)
                and not issubclass(value, tuple)
            )
            ours = (inspect.isfunction(value) or plain) and value.__module__.startswith("flowrl.")
            if ours and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}", value


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
    """Parameters as an Args section names them; none for an error with the constructor of
    Python's.
    """
    if (
        isinstance(function, type)
        and issubclass(function, BaseException)
        and not inspect.isfunction(function.__init__)
    ):
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(p.kind, "") + name
        for name, p in inspect.signature(function).parameters.items()
        if name != "self"
    ]


def described_fields(kind: type) -> set[str]:
    """Fields of a class and its bases with a string below them or a description, and those whose
    values are settings groups.
    """
    found = {name for name, field in getattr(kind, "model_fields", {}).items() if field.description}
    for base in kind.__mro__:
        if base.__module__.startswith(("flowrl.", __name__)):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            body = getattr(definition, "body", [])
            found |= {
                field.target.id
                for field, below in itertools.pairwise(body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            }
    return found | set(groups_of(kind)) if dataclasses.is_dataclass(kind) else found


def faults(function: Callable, brief: bool = False) -> list[str]:
    """What the docstring of a function or class lacks; empty for one parameter."""
    expected, text = parameters(function), inspect.getdoc(function) or ""
    brief = brief or (
        isinstance(function, type) and issubclass(function, (BaseException, BaseModel))
    )
    if len(expected) < 2 or function.__doc__ is None:
        return [] if len(expected) < 2 else ["no docstring"]
    parts = sections(text)
    named = [
        found.group(1)
        for line in parts.get("Args", [])
        if (found := re.match(r"(\*{0,2}\w+): \S", line))
    ]
    if isinstance(function, type):
        expected = [
            name for name in expected if name not in described_fields(function) or name in named
        ]
    if brief and not named:
        expected = [name for name in expected if not re.search(rf"`{name.lstrip('*')}[`( =]", text)]
    wrong = [] if named == expected else [f"Args names {named}, not {expected}"]
    silent = isinstance(function, type) or inspect.signature(function).return_annotation in (
        None,
        "None",
        Iterator[None],
    )
    if not silent and not (brief and not named) and not ("Returns" in parts or "Yields" in parts):
        wrong.append("no Returns")
    for line in parts.get("Raises", []):
        if not re.match(r"\w+: \S|    \S", line):
            wrong.append(f"Raises: {line!r} names no exception")
    return wrong


@pytest.mark.parametrize("package", [*PACKAGES, *BRIEF])
def test_sections(package: str) -> None:
    wrong = {
        name: found
        for name, value in exported(package)
        if (found := faults(value, package in BRIEF))
    }
    assert not wrong, wrong


def test_every_module_is_checked() -> None:
    """But for the command line, whose options have help texts, and packages of data."""
    assert {name for page in PAGES for name in page.modules} <= {*PACKAGES, *BRIEF}


def test_protocols_document_their_methods() -> None:
    """The implementations refer to these sections, and do not repeat them."""
    protocols = importlib.import_module("flowrl.core.protocols")
    exports = {name: getattr(protocols, name) for name in protocols.__all__}
    classes = {name: vars(value) for name, value in exports.items() if isinstance(value, type)}
    methods = {
        f"{owner}.{name}": value
        for owner, body in classes.items()
        for name, value in body.items()
        if name[0] != "_"
    }
    wrong = {
        name: found
        for name, value in methods.items()
        if inspect.isfunction(value) and (found := faults(value))
    }
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

    def brief(a: int, b: int) -> int:
        """The sum of `a` and `b`."""
        return a + b

    assert faults(good) == []
    assert faults(bad) == ["Args names ['b'], not ['a', 'b']", "no Returns"]
    assert faults(brief, brief=True) == [] and len(faults(brief)) == 2
    assert faults(Sized) == ["Args names ['height'], not ['height', 'width']"]
    assert faults(NoWords) == ["no docstring"]


@dataclasses.dataclass
class NoWords:
    a: int
    b: int


NoWords.__doc__ = None


@dataclasses.dataclass
class Sized:
    """A size.

    Args:
        height: in pixels.
    """

    height: int
    width: int
    frames: int = 1
    """Number of frames."""
