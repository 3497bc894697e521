"""The settings of a run as options, grouped in the help and flat on the command line."""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import tyro

from flowrl.cli.help_texts import argument
from flowrl.parts.settings import fields_of, flat, groups_of
from flowrl.training.config import Preset, RunConfig
from flowrl.training.presets import combine


def options_class(name: str, without: Sequence[str] = ()) -> type[Any]:
    """A plain copy of `RunConfig` and its groups, `without` some settings: types and help, no
    checks of ranges.

    The values are checked when `RunConfig` is built from them, so that a bad one gives the same
    message as in Python or YAML.
    """
    columns = _options(RunConfig, without)
    for group, kind in groups_of(RunConfig).items():
        options = dataclasses.make_dataclass(
            f"{name}{kind.__name__}", _options(kind, without), frozen=True
        )
        options.__doc__ = kind.__doc__
        columns.append(
            (
                group,
                Annotated[options, tyro.conf.arg(name=group)],
                dataclasses.field(default_factory=options),
            )
        )
    return dataclasses.make_dataclass(name, columns, frozen=True)


def _options(kind: type, without: Sequence[str]) -> list[tuple[str, Any, Any]]:
    known = cast(Any, kind).__pydantic_fields__
    columns: list[tuple[str, Any, Any]] = []
    for item in fields_of(kind):
        if item.name not in without and item.name not in groups_of(kind):
            info = known[item.name]
            kind_of_value = Annotated[info.annotation, argument(info.description, info.annotation)]
            columns.append((item.name, kind_of_value, item.default))
    return columns


def options_with(kind: type[Any], base: RunConfig) -> Any:
    """Options whose defaults are the settings of `base`, so that the help shows them."""
    values = flat(base)
    groups = {}
    for item in dataclasses.fields(kind):
        group: Any = getattr(item.type, "__origin__", item.type)
        if hasattr(group, "__dataclass_fields__"):
            groups[item.name] = group(
                **{inside.name: values[inside.name] for inside in dataclasses.fields(group)}
            )
    own = {
        item.name: values[item.name] for item in dataclasses.fields(kind) if item.name not in groups
    }
    return kind(**own, **groups)


def changes(options: Any, base: RunConfig) -> dict[str, Any]:
    """The settings in which `options` differ from `base`, by their own names."""
    values, given = flat(base), {}
    for name, value in vars(options).items():
        given |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    return {name: value for name, value in given.items() if value != values[name]}


def base_of(arguments: Sequence[str]) -> RunConfig:
    """The run that the options start from: that of `--preset`, `--settings`, `--world`, `--model`
    and `--method`, found before the others are read. With `--plan`, it is that of a machine with a
    GPU.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("preset", "settings", "world", "model", "method"):
        parser.add_argument(f"--{name}")
    try:
        found, _ = parser.parse_known_args(
            [text.replace("_", "-", 1) if text.startswith("--") else text for text in arguments]
        )
    except argparse.ArgumentError:  # an option without its value: the command's own parser says so
        return RunConfig()
    chosen = {
        name: getattr(found, name) for name in ("world", "model", "method") if getattr(found, name)
    }
    start = unchecked_preset(found.preset or "default", "--trust" in arguments)
    return start.apply(
        planned="--plan" in arguments, published=found.settings == "published", **chosen
    )


def unchecked_preset(name: str, trust: bool) -> Preset:
    """The preset before its settings are checked; without `trust`, nothing is built from them."""
    return Preset(name, combine(name, RunConfig).settings, trust)


LONGEST_NAME = 120
"""Characters of a run's name; settings that do not fit are counted."""
NAMED = ("method", "task", "model", "seed")
"""Settings that every name has in its own way."""
UNNAMED = (
    "credit",
    "world",
    "device",
    "tracker",
    "checkpoint_every",
    "keep_checkpoints",
    "prompt_cache",
    "decode_batch",
    "observe",
    "save_experience",
    "strict",
)
"""Settings that no name has: where and how a run computes rather than what."""


def run_name(config: RunConfig, base: RunConfig | None = None) -> str:
    """The method, the task or the model, the settings in which `config` differs from `base`, and
    the seed, as in ``tp-grpo,text,learning_rate=0.001,seed=1``; valid in a file system.
    """
    subject = config.policy.model.rstrip("/").rpartition("/")[2] or config.environment.task
    values, usual = flat(config), flat(config if base is None else base)
    changed = [
        f"{name}={_short(value)}"
        for name, value in values.items()
        if value != usual[name] and name not in (*NAMED, *UNNAMED)
    ]
    parts = [_short(config.algorithm.method), _short(subject)]
    seed = f"seed={config.seed}"
    while changed and len(",".join([*parts, changed[0], seed])) <= LONGEST_NAME:
        parts.append(changed.pop(0))
    return ",".join([*parts, *([f"{len(changed)}-more"] if changed else []), seed])


def _short(value: Any) -> str:
    """A value in a file's name: numbers in short, of paths the last part."""
    if isinstance(value, tuple):
        return "+".join(map(_short, value))
    text = f"{value:g}" if isinstance(value, float) else str(value).rpartition("/")[2]
    return re.sub(r"[^\w.=-]+", "_", text).strip("_")


def typed_command() -> str:
    """The command line as typed, for the record."""
    return shlex.join(["flowrl", *sys.argv[1:]])
