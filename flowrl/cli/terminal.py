"""Lines of text fitted to a terminal; whole lines in a pipe."""

import os
import shutil
import sys
import textwrap


def printable(text: str, longest: int = 60) -> str:
    """The first characters of `text` without what moves a terminal's cursor or changes its
    colours.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:longest])


def fitted(text: str, indent: int = 0) -> str:
    """`text` with its lines wrapped to the columns of the terminal or of the variable COLUMNS, the
    rest of each line `indent` columns to the right. Unchanged if the output is a pipe or a file.
    """
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        return text
    width = max(40, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
