"""Where the settings of a run come from: origins.json in its folder, for people to read."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.run.config import RunConfig
from flowrl.run.io import write_json
from flowrl.run.parts.settings import typed
from flowrl.run.reading import read_json

FILE = "origins.json"
"""The origins of the settings of a run that are not the default."""
GIVEN = "given"


def given_origins(settings: Mapping[str, Any]) -> dict[str, str]:
    """Of `settings` as in a file (`RunConfig.typed`), those that differ from the default are
    "given".
    """
    usual = {name: _plain(value) for name, value in typed(RunConfig()).items()}
    changed = [name for name in usual if name in settings and _plain(settings[name]) != usual[name]]
    return dict.fromkeys(changed, GIVEN)


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def record_origins(folder: Path, origins: Mapping[str, str]) -> None:
    """Write the `origins` of the settings of a new run."""
    write_json(folder / FILE, dict(origins))


def record_changed(folder: Path, config: RunConfig, changed: Iterable[str], done: int) -> None:
    """Record that a resume after iteration `done` has `changed` settings."""
    text = f"changed by a resume after iteration {done}"
    known = read_origins(folder, config.typed())
    record_origins(folder, known | dict.fromkeys(changed, text))


def read_origins(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The origins by setting; of a run of an earlier version `given_origins`."""
    path = folder / FILE
    return read_json(path, dict[str, str]) if path.exists() else given_origins(settings)
