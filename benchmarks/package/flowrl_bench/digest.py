"""The files of the user's own that a run's parts stand in: they belong to what a run is, as its settings do."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from flowrl.registry import KINDS
from flowrl.training.config import RunConfig

PARTS = ("credit", "reward", "sampler", "loss")
"""Settings that hold the spec of a part; each is also the name of the part's kind."""
NESTED = {"rule": "credit", "sampler": "sampler", "reward": "reward", "models": "reward"}
"""Options that hold a part of a part, by kind (see `flowrl.registry`)."""


def sources(config: RunConfig) -> list[Path]:
    """The files that the run's rule, reward, sampler and loss stand in, and parts that these are given; none for built-in names.

    Of `path/to/file.py:Class` that file; of `package.module:Class` and of a plug-in's name the file that the class is defined in
    and the module's own. A file that does not exist is left out. Not covered: whatever these files import or read, options
    that a part takes under other names than `NESTED`, and classes without Python source.
    """
    found: dict[Path, None] = {}
    for kind in PARTS:
        for nested, head in _heads(kind, getattr(config, kind)):
            path, _, _ = head.rpartition(":")
            paths = [Path(path)] if path.endswith(".py") else _of_class(nested, head)
            found |= dict.fromkeys(p for p in paths if p.is_file())
    return list(found)


@cache
def _heads(kind: str, spec: str) -> tuple[tuple[str, str], ...]:
    """(kind, name) of a spec's part and of the parts in its options; nothing of a spec that cannot be read."""
    return tuple(_walk(kind, spec)) if spec else ()


def _walk(kind: str, spec: str) -> Iterator[tuple[str, str]]:
    head, opened, inside = spec.strip().partition("(")
    yield kind, head.strip()
    try:
        call = ast.parse(f"part({inside}", mode="eval").body if opened else None
    except SyntaxError:
        return
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        nested = NESTED.get(keyword.arg or "")
        values = keyword.value.values if isinstance(keyword.value, ast.Dict) else [keyword.value]
        for value in values if nested else ():
            if isinstance(value, ast.Name):
                yield nested or "", value.id
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from _walk(nested or "", value.value)


def _of_class(kind: str, head: str) -> list[Path]:
    """The files of a module's or a plug-in's class; none for a built-in part, or where it cannot be had (`build` says why)."""
    module, _, name = head.partition(":")
    try:
        if name:
            made = getattr(importlib.import_module(module), name)
        elif head in KINDS[kind].built_in:
            return []
        else:
            point = next(iter(entry_points(group=KINDS[kind].group, name=head)))
            module, made = point.module, point.load()
    except Exception:  # a module of the user's own may raise anything
        return []
    files = (_source(made), getattr(sys.modules.get(module), "__file__", None))
    return [Path(file) for file in files if file]


def _source(made: Any) -> str | None:
    while isinstance(made, partial):
        made = made.func
    try:
        return inspect.getsourcefile(made)
    except TypeError:
        return None
