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
from collections.abc import Iterator, Mapping
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
    "latent_reward": "probe",
    "times": "times",
}
"""Options that contain other parts, and the kind of these parts."""
DEEPEST = 50
WORD = re.compile(r"[\w.:/+~@\\-]+(?: +[\w.:/+~@\\-]+)*")
KEY = re.compile(r"[\w.-]+")
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
        parts = []
        for option, kind in NESTED.items():
            value = self.options.get(option)
            values = value.values() if isinstance(value, dict) else [value]
            parts += [(kind, text) for text in values if isinstance(text, str)]
        return parts


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
        head, options = (counted[1], {"count": int(counted[2])}) if counted else (name, {})
        return Spec(head, options, spec)
    reader = _Reader(spec, kind, len(head) + 1)
    options = reader.options(")")
    if not reader.skip(""):
        raise reader.error("the end of the text")
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
    return _Reader(text, noun, 0).options("")


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

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return sorted((str(name), plain(inside)) for name, inside in value.items())
        return identity(value) if isinstance(value, str) else value

    file, name = parsed.file, parsed.name
    head = f"{file.resolve()}:{name.rpartition(':')[2]}" if file else name
    options = {n: plain(v) if n in NESTED else v for n, v in parsed.options.items()}
    return f"{head} {sorted((n, repr(v)) for n, v in options.items())}"


@dataclass
class _Reader:
    """A text that is read from left to right; `position` is the next character."""

    text: str
    kind: str
    position: int
    depth: int = 0

    def options(self, closing: str) -> dict[str, Any]:
        """``option=value, ...`` up to the `closing` bracket ("" for the end of the text)."""
        options: dict[str, Any] = {}
        for _ in self.items(closing):
            start, key = self.position, self.match(KEY)
            if not key or not self.skip("="):
                self.position = start
                raise self.error("option=value")
            if key in options:
                raise ConfigError(f"{self.kind} = {self.text!r:.200}: {key} is set twice")
            options[key] = self.value()
        return options

    def items(self, closing: str) -> Iterator[None]:
        """Yields before every item of a list that commas separate; consumes `closing`."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"at most {DEEPEST} levels of brackets")
        while not self.skip(closing):
            if closing and self.position == len(self.text):
                raise self.error(repr(closing))
            yield
            if not self.skip(","):
                if not self.skip(closing):
                    raise self.error(f"',' or {closing!r}" if closing else "','")
                break
        self.depth -= 1

    def value(self) -> Any:
        """One value; a part with options is returned as its text."""
        self.skip("")
        start = self.position
        if quoted := self.match(QUOTED):
            return self.literal(quoted, start)
        if self.skip("{"):
            return {self.key(): self.value() for _ in self.items("}")}
        if self.skip("["):
            return [self.value() for _ in self.items("]")]
        if self.skip("("):
            values = [self.value() for _ in self.items(")")]
            single = len(values) == 1 and not re.search(r",\s*\)$", self.text[: self.position])
            return values[0] if single else tuple(values)
        word = self.match(WORD)
        if not word:
            raise self.error("a value")
        if self.text.startswith("(", self.position):
            self.position += 1
            self.options(")")
            return self.text[start : self.position]
        if word in CONSTANTS:
            return CONSTANTS[word]
        return self.literal(word, start) if NUMBER.fullmatch(word) else word

    def key(self) -> Any:
        """The key of a dictionary and its colon."""
        self.skip("")
        start = self.position
        quoted = self.match(QUOTED)
        key = self.literal(quoted, start) if quoted else self.match(KEY)
        if key == "" and not quoted:
            raise self.error("key: value")
        if not self.skip(":"):
            raise self.error("':'")
        return int(key) if not quoted and key.isdecimal() else key

    def literal(self, written: str, start: int) -> Any:
        try:
            return ast.literal_eval(written)
        except (SyntaxError, ValueError):
            self.position = start
            raise self.error("a string or a number") from None

    def match(self, pattern: re.Pattern[str]) -> str:
        """The text that `pattern` matches, which is consumed; "" if it does not match."""
        self.skip("")
        matched = pattern.match(self.text, self.position)
        self.position = matched.end() if matched else self.position
        return matched[0] if matched else ""

    def skip(self, mark: str) -> bool:
        """Skip blanks, and `mark` if it follows; whether it did ("": the end of the text)."""
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1
        if not mark:
            return self.position == len(self.text)
        follows = self.text.startswith(mark, self.position)
        self.position += len(mark) if follows else 0
        return follows

    def error(self, expected: str) -> ConfigError:
        rest = self.text[self.position : self.position + 20]
        place = f"at character {self.position + 1}, before {rest!r}" if rest else "at its end"
        text = f"{self.kind} = {self.text!r:.200}"
        return ConfigError(f"{text} cannot be read: expected {expected} {place}")
