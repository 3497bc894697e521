"""The format of a run's settings in files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require

FORMAT, EARLIER = "flowrl-run-4", "flowrl-run-3"
"""The format of a run's config.json and config.yaml, which their entry "format" names, and an
earlier one that can be read. The format changes when a setting is added, since files of a format
have all of its settings.
"""
ADDED: dict[str, Any] = {"start_from": "", "original": ""}
"""Settings that files of the earlier format do not have, with the values of runs at that time."""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` names another format. A
    user's own file needs no entry.
    """
    written = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    require(written in (FORMAT, EARLIER), f"{path}: format", written, repr(FORMAT))


def completed(
    path: Path | str, written: str, given: Mapping[str, Any], needed: Iterable[str]
) -> dict[str, Any]:
    """The settings `given` in the file `path`, which flowrl has written in the format `written`,
    with those that an earlier format does not have.

    Raises `ConfigError` unless all `needed` settings are there: of a damaged file, the defaults
    would be another run.
    """
    settings = {**(ADDED if written == EARLIER else {}), **given}
    missing = [name for name in needed if name not in settings]
    if missing:
        names = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise ConfigError(
            f"{path} is damaged: {names} missing; a file with a format contains all settings"
        )
    return settings
