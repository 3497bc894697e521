"""The notation of parts in settings and on the command line: names with options.

A part is written as ``NAME``, ``path/to/file.py:Class`` or ``package.module:Class``; options as in ``NAME(option=value)``.
Values are Python literals, or bare words (``balance=trend``, ``solver=dpm++``). ``NAME:N`` is ``NAME(count=N)``, as in
``substeps:5``. Options for another part (``rule``, ``sampler``, ``reward``, ``probe``) take its spec, ``models`` a
dictionary of rewards, as in ``weighted-sum(models={'pick': 'pickscore', 'text': 'ocr'})``, and ``times`` the spec of training
times (`registry.TIMES`). A window may also be a Python slice of the steps, as in ``2:7``.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

NESTED = {"rule": "credit", "sampler": "sampler", "reward": "reward", "models": "reward", "probe": "probe"}
"""Options that contain other parts, and the kind of these parts."""


@dataclass(frozen=True)
class Spec:
    """A part as written.

    Args:
        name: NAME, path/to/file.py:Class or package.module:Class.
        options: its options, unconverted.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def file(self) -> Path | None:
        """The user's file that defines the part; None for other parts."""
        path = self.name.rpartition(":")[0]
        return Path(path) if path.endswith(".py") else None

    def nested(self) -> list[tuple[str, str]]:
        """Kind and spec of every part in the options."""
        found = []
        for option, kind in NESTED.items():
            value = self.options.get(option)
            values = value.values() if isinstance(value, dict) else [value]
            found += [(kind, text) for text in values if isinstance(text, str)]
        return found


def parse_spec(spec: str, kind: str = "part") -> Spec:
    """The name and options in `spec`. Raises `ConfigError`, which names its `kind`, if it cannot be read."""
    match = re.fullmatch(r"([^()]+)(?:\((.*)\))?", spec.strip(), flags=re.DOTALL)
    fixed = parse_slice(spec) if kind == "window" else None
    if fixed is not None:
        return Spec("fixed", {"start": fixed.start, "stop": fixed.stop})
    if match is None:
        raise ConfigError(f"{kind} = {spec!r} is not allowed: write NAME, NAME(option=value, ...) or path/to/file.py:Class")
    name, inside = match.group(1).strip(), _quoted(match.group(2) or "")
    counted = re.fullmatch(r"([\w.-]+):(\d+)", name)
    if counted and not inside:
        return Spec(counted.group(1), {"count": int(counted.group(2))})
    try:
        call = ast.parse(f"part({inside})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("it is not one part with options")
        options = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{kind} = {spec!r} cannot be read: {error}; write {name}(option=value, ...)") from error
    names = [keyword.arg for keyword in call.keywords]
    if len(options) < len(names):
        raise ConfigError(f"{kind} = {spec!r:.200}: {next(name for name in names if names.count(name) > 1)} is set twice")
    if call.args or None in options:
        raise ConfigError(f"{kind} = {spec!r}: options need names, as in {name}(option=value)")
    return Spec(name, {str(option): value for option, value in options.items()})


def parse_slice(text: str) -> slice | None:
    """The Python slice START:STOP that `text` contains, as in ``2:7``, ``:-1`` or ``:``; None if it is not a slice."""
    match = re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", text.strip(), flags=re.ASCII)
    return match and slice(*(None if end is None else int(end) for end in match.groups()))


def identity(spec: str) -> str:
    """A key that all spellings of one part share: a file's resolved path and class (or the name), and its options in order."""
    parsed = parse_spec(spec)

    def plain(option: str, value: Any) -> Any:
        if option not in NESTED or not isinstance(value, str | dict):
            return value
        inner = value.items() if isinstance(value, dict) else [("", value)]
        return sorted((str(name), identity(text) if isinstance(text, str) else repr(text)) for name, text in inner)

    head = f"{parsed.file.resolve()}:{parsed.name.rpartition(':')[2]}" if parsed.file else parsed.name
    return f"{head} {sorted((option, repr(plain(option, value))) for option, value in parsed.options.items())}"


def _quoted(options: str) -> str:
    """The options with quotes around bare words that end in "++", which are not Python."""
    parts = re.split(r"('[^']*'|\"[^\"]*\")", options)
    parts[::2] = [re.sub(r"(=\s*)(\w+\+\+)(?=\s*(?:,|$))", r"\1'\2'", part) for part in parts[::2]]
    return "".join(parts)


def _literal(node: ast.expr) -> Any:
    """A Python literal, or a bare word (with hyphens or a colon's number left to quotes) as a string."""
    if isinstance(node, ast.Name):
        return {"none": None, "true": True, "false": False}.get(node.id, node.id)
    return ast.literal_eval(node)
