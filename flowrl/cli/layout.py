"""Lists of names with a line of text each: whole lines in a pipe, fitted to the columns of a
terminal.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

LEAST = 40
"""Columns that a text takes at least, however narrow the terminal."""


def columns() -> int | None:
    """The columns of the terminal, or those that the variable COLUMNS names; None if the output is
    a pipe or a file.
    """
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(LEAST, shutil.get_terminal_size().columns)
    return None


def clipped(line: str, width: int | None) -> str:
    """`line` on one line of a terminal: words that do not fit are left out, as " ..." says."""
    if width is None or len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return indent + textwrap.shorten(line, width - len(indent), placeholder=" ...")


def hanging(text: str, width: int | None, indent: int) -> str:
    """`text` with its long lines wrapped, the rest of each `indent` columns to the right."""
    if width is None:
        return text
    pad = " " * indent
    lines = (
        textwrap.wrap(line, width, subsequent_indent=pad, drop_whitespace=True) or [""]
        for line in text.splitlines()
    )
    return "\n".join("\n".join(some) for some in lines)


def listed(rows: Iterable[tuple[str, str]], width: int | None, indent: int = 2) -> list[str]:
    """A name and its text per row, the texts aligned and wrapped below each other."""
    rows = list(rows)
    first = indent + max((len(name) for name, _ in rows), default=0) + 2
    found = list[str]()
    for name, text in rows:
        head = f"{'':{indent}s}{name:{first - indent}s}"
        lines = (
            [text]
            if width is None
            else textwrap.wrap(text, max(LEAST // 2, width - first), break_on_hyphens=False)
        )
        found += [(head if i == 0 else " " * first) + line for i, line in enumerate(lines or [""])]
    return [line.rstrip() for line in found]


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """`text` with every line `indent` columns to the right; a paragraph with a line that is too
    long is broken anew.
    """
    pad, found = " " * indent, list[str]()
    for paragraph in text.split("\n\n"):
        lines = [pad + line for line in paragraph.splitlines()]
        if width is not None and max(map(len, lines), default=0) > width:
            lines = textwrap.wrap(
                " ".join(paragraph.split()),
                width,
                initial_indent=pad,
                subsequent_indent=pad,
                break_on_hyphens=False,
            )
        found += ["", *lines]
    return [line.rstrip() for line in found[1:]]
