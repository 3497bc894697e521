"""The notation of parts in settings and on the command line.

A part is written as ``NAME``, ``path/to/file.py:Class`` or ``package.module:Class``; options as in
``NAME(option=value)``. A value is a number, a word, a quoted text, ``none``, ``true``, ``false``, a
list, a dictionary, or another part, as in
``weighted(rule=sibling-relative(probe=comb(branches=6)))`` and ``weighted-sum(models={pick:
pickscore, text: ocr})``. ``NAME:N`` is ``NAME(count=N)``, as in ``substeps:5``. A window may also
be a Python slice of the steps, as in ``2:7``.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError

NESTED = {
    "rule": "credit",
    "sampler": "sampler",
    "reward": "reward",
    "models": "reward",
    "probe": "probe",
    "times": "times",
}
"""Options that contain other parts, and the kind of these parts."""
DEEPEST = 50
WORD = re.compile(r"[\w.:/+~@\\-]+(?: +[\w.:/+~@\\-]+)*")
KEY = re.compile(r"\s*([\w.-]+)\s*")
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", flags=re.DOTALL)
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", flags=re.ASCII | re.IGNORECASE)
CONSTANTS = {"none": None, "true": True, "false": False, "None": None, "True": True, "False": False}


@dataclass(frozen=True)
class Spec:
    """A part as written.

    Args:
        name: NAME, path/to/file.py:Class or package.module:Class.
        options: its options; a part in an option is a text.
        text: the part as written, with its options.
    """

    name: str
    options: Mapping[str, Any]
    text: str = field(default="", compare=False)

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
    """The name and options in `spec`. Raises `ConfigError`, which names its `kind` and the place,
    if it cannot be read.
    """
    fixed = parse_slice(spec) if kind == "window" else None
    if fixed is not None:
        return Spec("fixed", {"start": fixed.start, "stop": fixed.stop}, spec)
    head, bracket, _ = spec.partition("(")
    name = head.strip()
    if not name or ")" in name:
        raise ConfigError(
            f"{kind} = {spec!r} is not allowed: write NAME, NAME(option=value, ...) or"
            " path/to/file.py:Class"
        )
    if not bracket:
        counted = re.fullmatch(r"([\w.-]+):(\d+)", name)
        return (
            Spec(counted[1], {"count": int(counted[2])}, spec) if counted else Spec(name, {}, spec)
        )
    reader = _Reader(spec, kind, len(head) + 1)
    options = reader.options(")")
    reader.end()
    return Spec(name, options, spec)


def parse_options(text: str, noun: str) -> dict[str, Any]:
    """The values in ``option=value, ...``.

    Args:
        text: the options.
        noun: what they belong to, for the message.

    Returns:
        The values by option; a part is a text.

    Raises:
        ConfigError: the text cannot be read; the message names the place.
    """
    reader = _Reader(text, noun, 0)
    options = reader.options("")
    reader.end()
    return options


def parse_slice(text: str) -> slice | None:
    """The Python slice START:STOP that `text` contains, as in ``2:7``, ``:-1`` or ``:``; None if it
    is not a slice.
    """
    match = re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", text.strip(), flags=re.ASCII)
    return match and slice(*(None if end is None else int(end) for end in match.groups()))


def identity(spec: str) -> str:
    """A key that all spellings of one part share: a file's resolved path and class (or the name),
    and its options in order.
    """
    parsed = parse_spec(spec)

    def plain(option: str, value: Any) -> Any:
        if option not in NESTED or not isinstance(value, str | dict):
            return value
        inner = value.items() if isinstance(value, dict) else [("", value)]
        return sorted(
            (str(name), identity(text) if isinstance(text, str) else repr(text))
            for name, text in inner
        )

    head = (
        f"{parsed.file.resolve()}:{parsed.name.rpartition(':')[2]}" if parsed.file else parsed.name
    )
    options = sorted(
        (option, repr(plain(option, value))) for option, value in parsed.options.items()
    )
    return f"{head} {options}"


@dataclass
class _Reader:
    """A text that is read from left to right."""

    text: str
    kind: str
    at: int
    depth: int = 0

    def options(self, closing: str) -> dict[str, Any]:
        """``option=value, ...`` up to the `closing` bracket ("" for the end of the text), which is
        consumed.
        """
        found: dict[str, Any] = {}
        while not self.closed(closing):
            key = KEY.match(self.text, self.at)
            if key is None or self.text[key.end() : key.end() + 1] != "=":
                raise self.error("option=value")
            if key[1] in found:
                raise ConfigError(f"{self.kind} = {self.text!r:.200}: {key[1]} is set twice")
            self.at = key.end() + 1
            found[key[1]] = self.value()
            self.separated(closing)
        return found

    def value(self) -> Any:
        """One value; a part with options is returned as its text."""
        self.blank()
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"at most {DEEPEST} levels of brackets")
        try:
            return self._value()
        finally:
            self.depth -= 1

    def _value(self) -> Any:
        start, first = self.at, self.text[self.at : self.at + 1]
        if quoted := QUOTED.match(self.text, start):
            self.at = quoted.end()
            return self.literal(quoted[0], start)
        if first and first in "[({":
            self.at += 1
            return self.dictionary() if first == "{" else self.sequence(first)
        word = WORD.match(self.text, start)
        if word is None:
            raise self.error("a value")
        self.at = word.end()
        if self.text[self.at : self.at + 1] == "(":
            self.at += 1
            self.options(")")
            return self.text[start : self.at]
        if word[0] in CONSTANTS:
            return CONSTANTS[word[0]]
        return self.literal(word[0], start) if NUMBER.fullmatch(word[0]) else word[0]

    def literal(self, written: str, start: int) -> Any:
        try:
            return ast.literal_eval(written)
        except (SyntaxError, ValueError):
            self.at = start
            raise self.error("a text or a number") from None

    def sequence(self, opening: str) -> Any:
        """A list, a tuple, or a value in brackets."""
        closing, found, comma = "]" if opening == "[" else ")", [], False
        while not self.closed(closing):
            found.append(self.value())
            comma = self.separated(closing)
        if opening == "[":
            return found
        return tuple(found) if comma or len(found) != 1 else found[0]

    def dictionary(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not self.closed("}"):
            self.blank()
            quoted, key = QUOTED.match(self.text, self.at), KEY.match(self.text, self.at)
            if quoted is None and key is None:
                raise self.error("key: value")
            name = self.value() if quoted else key[1] if key else ""
            self.at = self.at if quoted or key is None else key.end()
            self.blank()
            if self.text[self.at : self.at + 1] != ":":
                raise self.error("':'")
            self.at += 1
            found[int(name) if key and name.isdecimal() else name] = self.value()
            self.separated("}")
        return found

    def blank(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def closed(self, closing: str) -> bool:
        """Whether the text is at `closing`, which is consumed."""
        self.blank()
        ended = self.at == len(self.text)
        if ended and closing:
            raise self.error(repr(closing))
        if not ended and closing and self.text[self.at] == closing:
            self.at += 1
            return True
        return ended

    def separated(self, closing: str) -> bool:
        """Whether a comma follows a value, which is consumed; none is needed before `closing`."""
        self.blank()
        following = self.text[self.at : self.at + 1]
        if following == ",":
            self.at += 1
        elif following != closing:
            raise self.error(f"',' or {closing!r}" if closing else "','")
        return following == ","

    def end(self) -> None:
        self.blank()
        if self.at < len(self.text):
            raise self.error("nothing more")

    def error(self, expected: str) -> ConfigError:
        rest = self.text[self.at : self.at + 20]
        place = f"at character {self.at + 1}, before {rest!r}" if rest else "at its end"
        return ConfigError(
            f"{self.kind} = {self.text!r:.200} cannot be read: {expected} is expected {place}"
        )
