"""The lines of a run's metrics.jsonl, and how they come back after a crash."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import CheckpointError
from flowrl.training.checkpoint import write_bytes

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """One line more."""
    with open(path, "a") as file:
        file.write(_line(row))


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


@dataclass(frozen=True)
class Restored:
    """The rows up to a checkpoint, and what was wrong with the file ("" where nothing was)."""

    rows: list[Row]
    note: str


def restore(path: Path, recorded: Sequence[Row] | None, done: int) -> Restored:
    """Rows 0 to `done`, and a file that holds them and nothing else: later lines will be made again.

    `recorded` are the rows that the checkpoint holds. A file that ends early, or in half a line, is what a crash leaves and is
    completed in silence; a file that says something else is kept as metrics.damaged.jsonl. Checkpoints of earlier versions hold
    no rows (None): then a damaged line before `done` is a `CheckpointError`.
    """
    text = path.read_text(errors="replace") if path.exists() else ""
    if recorded is None:
        rows, note = _parse(path, text, done), ""
    else:
        rows, note = list(recorded), _difference(path, text, recorded)
    if note:
        os.replace(path, path.with_name("metrics.damaged.jsonl"))
    write_bytes(path, "".join(map(_line, rows)).encode())
    return Restored(rows, note)


def _difference(path: Path, text: str, recorded: Sequence[Row]) -> str:
    lines = text.splitlines(keepends=True)
    for number, (line, row) in enumerate(zip(lines, recorded, strict=False), start=1):
        if line != _line(row) and not (number == len(lines) and _line(row).startswith(line)):
            return (
                f"{path}: line {number} is not what the checkpoint recorded. Lines 1 to {len(recorded)} were written again from "
                "the checkpoint; the other file is kept as metrics.damaged.jsonl"
            )
    return ""


def _parse(path: Path, text: str, done: int) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines()[: done + 1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or row.get("iteration") != number - 1 or "nfe_total" not in row:
            raise CheckpointError(f"resume: line {number} of {path} is damaged: it must be the row of iteration {number - 1}")
        rows.append(row)
    if len(rows) != done + 1:
        raise CheckpointError(f"resume: {path} ends before iteration {done} of the checkpoint beside it")
    return rows
