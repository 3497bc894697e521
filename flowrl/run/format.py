"""The format of a run's settings in files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require

FORMAT = "flowrl-run-8"
"""The format of a run's config.json and config.yaml, which their entry "format" names. It changes
when a setting is added, since files of a format have all of its settings.
"""
ADDED: dict[str, dict[str, Any]] = {
    "flowrl-run-3": {"start_from": "", "original": ""},
    "flowrl-run-4": {
        "on_reward_error": "stop",
        "reward_timeout": 0.0,
        "lr_schedule": "linear",
        "warmup": 0,
        "tracker_project": "flowrl",
        "tracker_entity": "",
        "tracker_tags": (),
        "tracker_name": "",
    },
    "flowrl-run-5": {"sizes": ()},
    "flowrl-run-6": {"hold_out": False},
    "flowrl-run-7": {"eval_resolution": 0, "eval_guidance": 0.0},
}
"""By earlier format that can be read, the settings that the next one added, with the values of
runs at that time.
"""


def require_format(path: Path | str, values: Any) -> None:
    """Raise `ConfigError` if the file `path` with the content `values` names another format. A
    user's own file needs no entry.
    """
    written = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    require(written in (FORMAT, *ADDED), f"{path}: format", written, repr(FORMAT))


def completed(
    path: Path | str,
    written: str,
    given: Mapping[str, Any],
    needed: Iterable[str],
    for_models: Iterable[str] = (),
) -> dict[str, Any]:
    """The settings `given` in the file `path`, which flowrl has written in the format `written`,
    with those that later formats added; of a run without a model not those `for_models`.

    Raises `ConfigError` unless all `needed` settings are there: of a damaged file, the defaults
    would be another run.
    """
    formats = [*ADDED]
    later = formats[formats.index(written) :] if written in ADDED else []
    settings = {name: value for each in later for name, value in ADDED[each].items()} | {**given}
    missing = [name for name in needed if name not in settings]
    if missing:
        names = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise ConfigError(
            f"{path} is damaged: {names} missing; a file with a format contains all settings"
        )
    unused = () if settings.get("model") else {*for_models} - given.keys()
    return {name: value for name, value in settings.items() if name not in unused}
