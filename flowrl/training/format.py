"""The format of a run's settings in files, and the conversion of settings in the older format.

The older format wrote windows as START:SIZE, all, random:SIZE and so on, and the arms of a
comparison as lists of methods and credit rules.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.core.errors import require
from flowrl.reading import read_text

FORMAT = "flowrl-run-3"
"""The format of a run's config.json, which its entry "format" names."""
OLDER = "flowrl-run-2"
COMMENT = "All settings of this run; repeat it with"
"""The beginning of a run's config.yaml. In the older format this file has no entry "format"."""
WORDS = {"all": ":", "all-but-last": ":-1"}
FORWARD = ("diffusion-nft", "awm", "dgpo")
METHODS_WORDS = {"sampler": "flow-sde", "loss": "clipped"}
"""Words of the older format for the published sampler and loss of the `FORWARD` methods."""


def format_of(path: Path | str, values: Any) -> str:
    """The format of settings with the content `values`, from the file `path`. Raises `ConfigError`
    for an unknown one.
    """
    if not isinstance(values, dict):
        return FORMAT
    older = "methods" in values or (
        str(path).endswith((".yaml", ".yml")) and read_text(Path(path)).startswith(f"# {COMMENT}")
    )
    written = values.get("format", OLDER if older else FORMAT)
    if {"members", "lr"} <= set(values):
        written = "flowrl 0.1"
    require(written in (FORMAT, OLDER), f"{path}: format", written, f"{FORMAT!r} or {OLDER!r}")
    return written


def current(settings: Any, written: str, source: object = "") -> Any:
    """Settings of a file in the present format.

    Args:
        settings: settings, at any depth of groups.
        written: their format.
        source: the file, which a line on standard error names if a setting is converted; "" for no
            line.

    Returns:
        The settings.
    """
    if written != OLDER:
        return settings
    changes: dict[str, None] = {}
    converted = _converted(settings, changes)
    if changes and source:
        _tell(f"{source}: settings of an older version, converted: {', '.join(changes)}")
    return converted


def _converted(settings: Any, changes: dict[str, None]) -> Any:
    if not isinstance(settings, dict):
        return settings
    result = {name: _converted(value, changes) for name, value in settings.items()}
    for name, value in settings.items():
        if name in ("window", "trained_steps") and isinstance(value, str):
            result[name] = from_older(name, value)
        elif (name, value) == ("credit", "random"):
            result[name] = "random(seed=0)"  # the default is now the run's seed
        elif settings.get("method") in FORWARD and METHODS_WORDS.get(name) == value:
            result[name] = ""
        if isinstance(value, str) and result[name] != value:
            new = result[name] or "empty (the method has its own)"
            changes[f"{name} {value} is now {new}"] = None
    return result


def current_comparison(values: dict[str, Any], source: object = "") -> dict[str, Any]:
    """The content of a comparison's config.json with its arms in the entry "arms".

    Earlier versions wrote `methods` (the names of all arms), `credit` (the rules of the last of
    them) and `method_settings`.

    Args:
        values: the content.
        source: as in `current`.

    Returns:
        The content in the present form.
    """
    written = format_of("config.json", values)
    values = current(values, written, source)
    if "arms" in values or "methods" not in values:
        return values
    names, specs = values["methods"], values.get("credit", ())
    rules = dict(zip(names[len(names) - len(specs) :], specs, strict=False))
    arms: dict[str, dict[str, Any]] = {name: {"method": name} for name in names}
    for name, settings in arms.items():
        if name in rules:
            settings["credit"] = rules[name]
        if name in FORWARD and written == OLDER:
            # the run's words for sampler and loss had another meaning for these methods
            settings |= dict.fromkeys(METHODS_WORDS, "")
        settings |= values.get("method_settings", {}).get(name, {})
    return {**values, "arms": arms}


@cache
def _tell(line: str) -> None:
    """Print `line` on standard error, once per process."""
    print(line, file=sys.stderr)


def from_older(setting: str, text: str) -> str:
    """The value `text` of the `setting` window or trained_steps in the older format, as it is
    written now.

    A `text` that the older format does not allow is returned unchanged.
    """
    kind, *numbers = text.split(":")
    if kind.strip().isdecimal() and len(numbers) == 1 and numbers[0].strip().isdecimal():
        start, size = int(kind), int(numbers[0])
        return f"{start}:{start + size}"
    names = {
        ("trained_steps", "random"): ["fraction"],
        # the last numbers of a random window are told apart by the decimal point of a ratio
        ("window", "random"): ["size", *("geometric" if "." in n else "high" for n in numbers[1:])],
        ("window", "sliding"): ["size", "stride", "every"],
    }.get((setting, kind), [])
    if not 0 < len(numbers) <= len(names):
        return WORDS.get(text, text)
    options = zip(names, numbers, strict=False)
    return f"{kind}({', '.join(f'{name}={number}' for name, number in options)})"
