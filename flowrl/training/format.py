"""The format of a run's settings in files."""

from pathlib import Path
from typing import Any

from flowrl.core.errors import require
from flowrl.reading import read_text

FORMAT = "flowrl-run-3"
"""The format of a run's config.json, which its entry "format" names."""

COMMENT = "All settings of this run; repeat it with"
"""How the comment of a run's config.yaml begins."""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` has another format.

    A file without an entry "format" has this one, unless its settings are those of flowrl 0.1, or a
    run wrote it: before flowrl-run-3, config.yaml had no entry, and windows were start and size.
    """
    if isinstance(values, dict):
        written = values.get("format", FORMAT)
        if {"members", "lr"} <= set(values):
            written = "flowrl 0.1"
        elif "format" not in values and isinstance(path, Path) and path.suffix != ".json":
            by_run = read_text(path).startswith(f"# {COMMENT}")
            written = "flowrl-run-2" if by_run else FORMAT
        require(written == FORMAT, f"{path}: format", written, repr(FORMAT))
