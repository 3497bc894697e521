"""What the papers of the methods report, and what flowrl has of it (data/coverage.yaml)."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from flowrl.run.reading import load_document

LEGEND = (
    "Results are differences of the mean held-out reward over training, at equal updates and tuned"
    " settings, with 95% intervals over paired seeds, unless a row says otherwise; *final* is the"
    " reward at the end. *2-D* and *images* are the built-in worlds. A study in brackets is one of"
    " `docs/studies.md`. *Not at hand* marks content that is not known: the papers' full texts were"
    " not available, so whole items may be missing. No published model was trained."
)
"""How to read the rows."""


@dataclass(frozen=True)
class Row:
    """A figure, a table or a claim of a paper.

    Args:
        item: what it is.
        published: what the paper reports.
        flowrl: the part, the option or the command.
        result: what came out; empty if there is nothing to compare.
    """

    item: str
    published: str
    flowrl: str = ""
    result: str = ""


@dataclass(frozen=True)
class Paper:
    """A method's paper, and its rows."""

    title: str
    rows: tuple[Row, ...]


@cache
def coverage() -> dict[str, Paper]:
    """The papers by name of the method, in the order of `METHODS`."""
    path = Path(str(resources.files("flowrl") / "data" / "coverage.yaml"))
    return {
        method: Paper(entry["title"], tuple(Row(**row) for row in entry["rows"]))
        for method, entry in load_document(path)[0].items()
    }
