"""The format of a run's config.json; settings of another version raise an error."""

from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, require

FORMAT = "flowrl-run-2"
"""The format of a run's config.json, which its entry "format" names."""


def check_format(path: Path | str, values: Any) -> None:
    """Check the format of run settings; a missing entry is allowed.

    Args:
        path: the file, for the message.
        values: its content.

    Raises:
        ConfigError: the settings have another format.
    """
    if not isinstance(values, dict):
        return
    if {"members", "lr"} <= set(values):
        raise ConfigError(
            f"config: {path} was written by flowrl 0.1 with flat settings; this version reads settings in groups ({FORMAT!r})"
        )
    found = values.get("format", FORMAT)
    require(found == FORMAT, f"config: {path}: format", found, f"{FORMAT!r}, which this version of flowrl reads")
