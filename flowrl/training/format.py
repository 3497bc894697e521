"""The format of a run's settings in files."""

from pathlib import Path
from typing import Any

from flowrl.core.errors import require

FORMAT = "flowrl-run-3"
"""The format of a run's config.json and config.yaml, which their entry "format" names."""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` names another format. A
    user's own file needs no entry.
    """
    written = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    require(written == FORMAT, f"{path}: format", written, repr(FORMAT))
