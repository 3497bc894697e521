"""The numbers of a run as a table: every number of a row by its name, and metrics.csv."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.run.evaluation import Evaluation
from flowrl.run.io import append_bytes, write_bytes

FILE = "metrics.csv"
"""The table in a run's folder."""


def scalars(row: Mapping[str, Any] | list[Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a metrics row by name, without all other entries: groups become "group/name",
    lists "name/0", "name/1", ...
    """
    numbers: dict[str, float] = {}
    for name, value in enumerate(row) if isinstance(row, list) else row.items():
        if isinstance(value, Mapping | list):
            numbers |= scalars(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers


def columns_of(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names in `rows` of numbers, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def csv_text(lines: Iterable[Sequence[Any]]) -> str:
    """Lines of cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


class Table:
    """Writes metrics.csv: a line per row of metrics.jsonl, with every number in it. The file is
    complete after each evaluation and at the end.

    Args:
        folder: the run's folder.
        rows: the rows so far, of a resumed run.
    """

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path, self._rows = folder / FILE, list(map(scalars, rows))
        self._columns, self._written = dict[str, None](), 0

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Add a row; write the file if the row has an evaluation."""
        self._rows.append(scalars(row))
        if evaluation is not None:
            self.finish()

    def finish(self) -> None:
        """Append the rows that the file does not have; write it again if there are new columns."""
        new = columns_of(self._rows[self._written :])
        lines = list[Sequence[Any]]()
        if not self._columns or not self._columns.keys() >= {*new}:
            self._columns |= dict.fromkeys(columns_of(self._rows))
            self._written = 0
            lines.append([*self._columns])
        rows, self._written = self._rows[self._written :], len(self._rows)
        lines += [[row.get(name, "") for name in self._columns] for row in rows]
        data = csv_text(lines).encode()
        if lines and lines[0] == [*self._columns]:
            write_bytes(self.path, data)
        else:
            append_bytes(self.path, data)
