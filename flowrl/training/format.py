"""The format of a run's settings in files, and the conversion of settings in the older format."""

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.parts.specs import parse_slice
from flowrl.reading import read_text

FORMAT = "flowrl-run-3"
"""The format of a run's config.json, which its entry "format" names."""
OLDER = "flowrl-run-2"
"""The format whose `window` and `trained_steps` were written START:SIZE, all, random:SIZE and so
on.
"""
COMMENT = "All settings of this run; repeat it with"
"""The beginning of a run's config.yaml. In the older format this file has no entry "format"."""
STEPS = ("window", "trained_steps")
WORDS = {"all": ":", "all-but-last": ":-1"}
FORWARD = ("diffusion-nft", "awm", "dgpo")
OWN_WORDS = {"sampler": "flow-sde", "loss": "clipped"}
"""Words of the older format for the published sampler and loss of the `FORWARD` methods."""


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
            f"config: {path} was written by flowrl 0.1 with flat settings; this version reads"
            f" settings in groups ({FORMAT!r})"
        )
    found, known = (
        values.get("format", FORMAT),
        f"{FORMAT!r} or {OLDER!r}, which this version of flowrl reads",
    )
    require(found in (FORMAT, OLDER), f"config: {path}: format", found, known)


def format_of(path: Path, values: Any) -> str:
    """The format of the settings file at `path` with the content `values`.

    Raises `ConfigError` for an unknown format.
    """
    check_format(path, values)
    if isinstance(values, dict) and "format" in values:
        return values["format"]
    written = path.suffix in (".yaml", ".yml") and read_text(path).startswith(f"# {COMMENT}")
    return OLDER if written else FORMAT


def current(settings: Any, found: str, source: object = "") -> Any:
    """Settings of a file in the present format.

    Args:
        settings: settings, at any depth of groups.
        found: their format.
        source: the file, which a line on standard error names if a setting is converted; "" for no
            line.

    Returns:
        The settings.
    """
    if found != OLDER:
        return settings
    changes: dict[str, None] = {}
    converted = _converted(settings, changes)
    if changes and source:
        _tell(f"{source}: settings of an older version, converted: {', '.join(changes)}")
    return converted


def _converted(settings: Any, changes: dict[str, None]) -> Any:
    if not isinstance(settings, dict):
        return settings
    result = {}
    for name, value in settings.items():
        result[name] = _converted(value, changes)
        if name in STEPS and isinstance(value, str):
            result[name] = from_older(name, value)
        elif name == "credit" and value == "random":
            result[name] = "random(seed=0)"  # the default is now the run's seed
        elif settings.get("method") in FORWARD and OWN_WORDS.get(name) == value:
            result[name] = ""
        if isinstance(value, str) and result[name] != value:
            changes[f"{name} {value} is now {result[name] or 'empty (the method has its own)'}"] = (
                None
            )
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
    found = values.get("format", OLDER if "methods" in values else FORMAT)
    values = current(values, found, source)
    if "arms" in values or "methods" not in values:
        return values
    values = {**values}
    names, specs, given = (
        values.pop("methods"),
        values.pop("credit", ()),
        values.pop("method_settings", {}),
    )
    rules = dict(zip(names[len(names) - len(specs) :], specs, strict=False))
    # the run's words for sampler and loss had another meaning for these methods
    own = dict.fromkeys(OWN_WORDS, "") if found == OLDER else {}
    values["arms"] = {
        name: {
            "method": name,
            **({"credit": rules[name]} if name in rules else {}),
            **(own if name in FORWARD else {}),
            **given.get(name, {}),
        }
        for name in names
    }
    return values


@cache
def _tell(line: str) -> None:
    """Print `line` on standard error, once per process."""
    print(line, file=sys.stderr)


def from_older(setting: str, text: str) -> str:
    """The value `text` of the `setting` window or trained_steps in the older format, as it is
    written now.

    A `text` that the older format does not allow is returned unchanged.
    """
    fixed = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if fixed:
        start, size = map(int, fixed.groups())
        return f"{start}:{start + size}"
    kind, *numbers = text.split(":")
    if not numbers or not all(re.fullmatch(r"[\d.e-]+", number) for number in numbers):
        return WORDS.get(text, text)
    if setting == "trained_steps":
        names = {"random": ["fraction"]}
    else:
        ends = ["geometric" if "." in number else "high" for number in numbers[1:]]
        names = {"random": ["size", *ends], "sliding": ["size", "stride", "every"]}
    if kind not in names or len(numbers) > len(names[kind]):
        return text
    pairs = zip(names[kind], numbers, strict=False)
    return f"{kind}({', '.join(f'{name}={number}' for name, number in pairs)})"


def to_older(setting: str, text: str) -> str:
    """The inverse of `from_older` for a `setting`; a `text` that the older format cannot express is
    returned unchanged.
    """
    fixed = parse_slice(text)
    if fixed is not None:
        start, stop = fixed.start or 0, fixed.stop
        if start == 0 and stop in (None, -1):
            return "all" if stop is None else "all-but-last"
        return f"{start}:{stop - start}" if stop is not None and 0 <= start < stop else text
    part = re.fullmatch(r"(random|sliding)\((.*)\)", text.replace(" ", ""))
    pairs = [option.partition("=") for option in part.group(2).split(",")] if part else []
    options: dict[str, str] = {name: value for name, _, value in pairs}
    first = options.pop("fraction" if setting == "trained_steps" else "size", "")
    if part is None or not first:
        return text
    if part.group(1) == "sliding" and options.keys() <= {"stride", "every"}:
        last = [options["every"]] if "every" in options else []
        middle = [options.get("stride", "1")] if options else []
        return ":".join(["sliding", first, *middle, *last])
    known = options.keys() <= ({"high", "geometric"} if setting == "window" else set())
    fits = known and all(
        (name == "geometric") == ("." in number) for name, number in options.items()
    )
    return (
        ":".join(["random", first, *options.values()])
        if part.group(1) == "random" and fits
        else text
    )


def refuse_older(settings: Mapping[str, str]) -> None:
    """Raise `ConfigError`, which shows the new spelling, if a value of `settings` is a word of the
    older format only.
    """
    for name, text in settings.items():
        new = from_older(name, text)
        older = new != text and parse_slice(text) is None
        require(not older, name, text, f"{new!r}, which replaces this older spelling")
