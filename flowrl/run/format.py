"""The format of a run's settings in files."""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require

FORMAT = "flowrl-run-3"
"""The format of a run's config.json and config.yaml, which their entry "format" names. It changes
when a setting is added, since files of a format have all of its settings.
"""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` names another format. A
    user's own file needs no entry.
    """
    written = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    require(written == FORMAT, f"{path}: format", written, repr(FORMAT))


def require_complete(path: Path | str, given: Container[str], needed: Iterable[str]) -> None:
    """Raise `ConfigError` unless all `needed` settings are among those `given` in the file `path`,
    which flowrl has written: of a damaged file, the defaults would be another run.
    """
    missing = [name for name in needed if name not in given]
    if missing:
        names = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise ConfigError(
            f"{path} is damaged: {names} missing; a file with a format contains all settings"
        )
