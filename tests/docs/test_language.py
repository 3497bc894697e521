"""Words of the project's earlier English that must not come back, in documents, docstrings and
lessons.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNWANTED = (
    "told",
    "beside",
    "goes? round",
    "whose it was",
    "in vain",
    "pays a step",
    "quiet(?:ly)?",
    "loud(?:ly)?",
    "lies to",
    "company",
    "a person",
    "nobody",
    "somebody",
    "anybody",
    "whoever",
    "hears?",
    "wants",
    "gives? back",
    "pictures?",
    "drowns?",
    "blown up",
    "cures?",
    "talks? to",
    "network lives",
    "next to nothing",
    "asked about",
    "asks for no",
    "made of them",
    "comes and goes",
)
PATTERN = re.compile(rf"\b(?:{'|'.join(UNWANTED)})\b", re.IGNORECASE)
KEPT = ("`pictures", "prompts pictures", "(beside=...)")
"""Old names that the changelog translates."""


def documents() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield from (path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    yield from (ROOT / "tutorials" / "source").glob("*.py")


def modules() -> Iterator[Path]:
    for folder in ("flowrl", "benchmarks", "tutorials/package"):
        yield from (ROOT / folder).rglob("*.py")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings below attributes, with their
    lines.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        for statement in (
            getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ()
        ):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


def found(text: str) -> list[str]:
    kept = any(mark in text for mark in KEPT)
    return [] if kept else PATTERN.findall(text)


@pytest.mark.parametrize("path", sorted(documents()), ids=lambda path: path.name)
def test_documents(path: Path) -> None:
    seen = [
        f"line {n}: {word}"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        for word in found(line)
    ]
    assert not seen, seen


def test_docstrings() -> None:
    seen = [
        f"{path.relative_to(ROOT)}, line {line}: {word}"
        for path in modules()
        for line, text in docstrings(path)
        for word in found(text)
    ]
    assert not seen, seen


def test_the_check_finds_words() -> None:
    assert (
        found("What a person sees")
        and found("Nobody is told")
        and found("A picture.")
        and not found("An imperson; besides")
    )
