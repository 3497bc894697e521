"""The fields of `RunConfig` as options, and what commands share."""

import ast
import dataclasses
import inspect
import shlex
import sys
from typing import Annotated, Any

import tyro

from flowrl.training.config import RunConfig


def _field_help() -> dict[str, str]:
    """The docstring under each field of `RunConfig`, so that the help says what the class says."""
    tree = ast.parse(inspect.getsource(RunConfig)).body[0]
    assert isinstance(tree, ast.ClassDef)
    helps: dict[str, str] = {}
    for item, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr):
            if isinstance(following.value, ast.Constant):
                helps[item.target.id] = str(following.value.value)
    return helps


def _settings_class(name: str, leave_out: tuple[str, ...]) -> type[Any]:
    """The fields of `RunConfig` as options that default to the preset's value."""
    helps = _field_help()
    columns = []
    for item in dataclasses.fields(RunConfig):
        if item.name not in leave_out:
            text = helps.get(item.name, item.name.replace("_", " ").capitalize() + ".")
            kind: Any = item.type
            shown = tyro.conf.arg(help=text, metavar=kind.__name__.upper(), help_behavior_hint=f"(default: {item.default})")
            columns.append((item.name, Annotated[kind | None, shown], None))
    return dataclasses.make_dataclass(name, columns, frozen=True)


TrainSettings = _settings_class("TrainSettings", ())
CompareSettings = _settings_class("CompareSettings", ("method", "credit", "seed"))


def changes(settings: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}


def typed_command() -> str:
    """The command line as typed, for the record."""
    return shlex.join(["flowrl", *sys.argv[1:]])
