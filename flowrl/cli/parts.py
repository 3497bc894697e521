"""`flowrl parts`."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tyro

from flowrl.cli.layout import clipped, columns, listed, wrapped
from flowrl.core.errors import ConfigError, FlowrlError, require
from flowrl.parts.registry import (
    KINDS,
    available,
    documentation_of,
    options_of,
    shadowed,
    summary_of,
)
from flowrl.parts.settings import unknown

OPTIONS = {"features": "diversity", "probe": "credit", "times": "loss", "observer": "observe"}
"""Kinds of parts whose option of `flowrl train` has another name; a probe and training times are
options of parts.
"""
WITHIN = {"probe": "--credit 'RULE(probe={})'", "times": "--loss 'LOSS(times={})'"}


@dataclass(frozen=True)
class Parts:
    """List the parts of every kind, plug-ins too, or describe one with its options.

    Examples: flowrl parts

    flowrl parts turning-point
    """

    name: tyro.conf.Positional[str] = ""
    """A part to describe: its documentation, and its options with their defaults. Left out: list
    all, a line each.
    """
    kind: str = ""
    """credit, probe, sampler, window, loss, reward, features, observer, times, world or all: list
    only these, with their options.
    """

    def main(self) -> int:
        """Print the list, or one part."""
        require(
            self.kind in ("", "all", *KINDS), "kind", self.kind, f"one of {', '.join(KINDS)}, all"
        )
        kinds = (self.kind,) if self.kind in KINDS else tuple(KINDS)
        print("\n".join(described(self.name, kinds) if self.name else self._list(kinds)))
        return 0

    def _list(self, kinds: tuple[str, ...]) -> Iterator[str]:
        """A line per part, and below it its options if a kind is chosen."""
        width = columns()
        for kind in kinds:
            yield f"{kind} (--{OPTIONS.get(kind, kind)})"
            for name, origin in sorted(available(kind).items()):
                title = f"  {_title(name, origin)}"
                try:
                    summary, choices = (
                        summary_of(kind, name),
                        options_of(kind, name) if self.kind else {},
                    )
                except FlowrlError as error:
                    yield f"{title}: unusable, {error}"
                    continue
                yield clipped(f"{title}: {summary}", width)
                if choices:
                    yield from wrapped(
                        ", ".join(f"{n}={_shown(v)}" for n, v in choices.items()), width, 6
                    )
            if not available(kind):
                yield (
                    "  none by name: a task brings its own, and a plug-in or path/to/file.py:Class"
                    " replaces it"
                )
        yield from (f"\nWarning: {text}" for text in shadowed())
        if not self.kind:
            yield "\nA part with its options: flowrl parts NAME"


def described(name: str, kinds: tuple[str, ...]) -> list[str]:
    """The documentation and the options of every part of `kinds` that is called `name`. Raises
    `ConfigError` if there is none.
    """
    found = [kind for kind in kinds if name in available(kind)]
    if not found:
        raise ConfigError(
            unknown(name, sorted({part for kind in kinds for part in available(kind)}), "part")
        )
    width, lines = columns(), list[str]()
    for kind in found:
        option = OPTIONS.get(kind, kind)
        how = WITHIN.get(kind, f"--{option} {{}}").format(name)
        lines += ["", f"{_title(name, available(kind)[name])}: {KINDS[kind].noun}, {how}", ""]
        text, meanings = _arguments(documentation_of(kind, name))
        lines += wrapped(text, width, 2)
        choices = options_of(kind, name)
        lines += ["", "  options = defaults:" if choices else "  no options"]
        described = (
            (f"{choice} = {_shown(value)}", meanings.get(choice, ""))
            for choice, value in choices.items()
        )
        lines += listed(described, width, 4)
    return lines[1:]


def _arguments(text: str) -> tuple[str, dict[str, str]]:
    """A docstring without its section Args, and the meaning of every argument in this section."""
    head, begins, rest = text.partition("\nArgs:\n")
    section, _, tail = rest.partition("\n\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    meanings = {name: " ".join(meaning.split()) for name, meaning in entries}
    return ("\n\n".join(filter(None, (head.strip(), tail.strip()))) if begins else text), meanings


def _title(name: str, origin: str) -> str:
    return name if origin == "flowrl" else f"{name}  [{origin}]"


def _shown(value: Any) -> str:
    return "(required)" if value is inspect.Parameter.empty else repr(value)
