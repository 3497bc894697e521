"""The fields of `RunConfig` as options, and what commands share."""

import ast
import dataclasses
import inspect
import shlex
import sys
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from flowrl.errors import require
from flowrl.training.config import RunConfig


def _switch(words: list[str]) -> bool:
    if words and words[0].lower() not in ("true", "false"):
        raise ValueError("true or false (or nothing, which is true)")
    return not words or words[0].lower() == "true"


SWITCH: Any = PrimitiveConstructorSpec(
    nargs=(0, 1), metavar="[TRUE|FALSE]", instance_from_str=_switch, is_instance=lambda value: value in (None, True, False),
    str_from_instance=lambda value: [],
)  # fmt: skip
"""How an option that is on or off is written: `--compile`, `--compile True` or `--compile False`."""


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
        if item.name == "prompts":
            columns += _prompt_options(item.default)
        elif item.name not in leave_out:
            text = helps.get(item.name, item.name.replace("_", " ").capitalize() + ".")
            kind: Any = item.type
            several = kind == tuple[str, ...]
            word = "NAME ..." if several else "[TRUE|FALSE]" if kind is bool else kind.__name__.upper()
            usual = "none" if several else item.default
            shown = tyro.conf.arg(help=text, metavar=word, help_behavior_hint=f"(default: {usual})")
            switch = (SWITCH,) if kind is bool else ()
            columns.append((item.name, Annotated[kind | None, *switch, shown], None))
    return dataclasses.make_dataclass(name, columns, frozen=True)


def _prompt_options(default: Any) -> list[tuple[str, Any, None]]:
    """`--prompts` says how many or, for a model, from which file; with a file, `--groups` says how many."""
    hint = f"(default: {default})"
    number_or_file = tyro.conf.arg(
        help="Prompts (groups) per iteration; or, with --model, the file or dataset (hf:NAME[:SPLIT[:COLUMN]]) that holds them.",
        metavar="INT|FILE",
        help_behavior_hint=hint,
    )
    number = tyro.conf.arg(
        help="Prompts (groups) per iteration where --prompts is a file.", metavar="INT", help_behavior_hint=hint
    )
    return [("prompts", Annotated[str | None, number_or_file], None), ("groups", Annotated[int | None, number], None)]


MODEL_FIELDS = (
    "model", "heldout_file", "resolution", "guidance", "tuning", "adapter", "frozen_adapters", "decode_batch", "decode_dtype",
    "text_tokens", "checkpointing", "tracker",
)  # fmt: skip
TrainSettings = _settings_class("TrainSettings", ("prompt_file",))
CompareSettings = _settings_class("CompareSettings", ("method", "credit", "seed", "prompt_file", *MODEL_FIELDS))


def changes(settings: Any) -> dict[str, Any]:
    """The options that were given, as fields of `RunConfig`. Raises `ConfigError` where two numbers of prompts are given."""
    given = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    prompts, groups = given.pop("prompts", None), given.pop("groups", None)
    if prompts is not None and not prompts.lstrip("-").isdecimal():
        given["prompt_file"] = prompts
    elif prompts is not None:
        require(groups is None, "groups", groups, "left out where --prompts is a number: both say how many groups there are")
        given["prompts"] = int(prompts)
    if groups is not None:
        given["prompts"] = groups
    return given


def typed_command() -> str:
    """The command line as typed, for the record."""
    return shlex.join(["flowrl", *sys.argv[1:]])
