"""The format of a run's settings in files."""

from pathlib import Path
from typing import Any

from flowrl.core.errors import require

FORMAT = "flowrl-run-3"
"""The format of a run's config.json, which its entry "format" names."""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` has another format.

    A file without an entry "format" has this one, unless its settings are those of flowrl 0.1.
    """
    if isinstance(values, dict):
        first_release = {"members", "lr"} <= set(values)
        written = "flowrl 0.1" if first_release else values.get("format", FORMAT)
        require(written == FORMAT, f"{path}: format", written, repr(FORMAT))
