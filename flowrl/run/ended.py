"""How a run has ended, besides done.json: the error that has ended it."""

from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowrlError, foreign_call
from flowrl.run.io import write_json
from flowrl.run.reading import read_json

ERROR_FILE = "error.json"
"""The error that has ended a run, until it is resumed."""


def record_error(folder: Path, error: BaseException) -> None:
    """Write the error that ends the run in `folder` to error.json, for its page."""
    text = str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}"
    if call := foreign_call(error):
        text = f"{call} failed: {text}"
    write_json(folder / ERROR_FILE, {"error": " ".join(text.split())[:1000]})


def recorded_error(folder: Path) -> str:
    """The error that has ended the run in `folder`; "" if it has not been ended by one."""
    path = folder / ERROR_FILE
    return str(read_json(path, dict[str, Any]).get("error", "")) if path.exists() else ""


def forget_error(folder: Path) -> None:
    """Delete the `recorded_error` of a run that is resumed."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
