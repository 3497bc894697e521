"""Options of commands: their help, and the settings of a run as options, grouped in the help and
flat on the command line.
"""

import argparse
import dataclasses
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from flowrl.core.errors import ConfigError, require
from flowrl.core.options import split
from flowrl.run.config import TRACKER, RunConfig, preset
from flowrl.run.parts.settings import (
    TEXTS,
    fields_of,
    flat,
    groups_of,
    help_of,
    infos,
    is_switch,
    plain,
    typed_unset,
)
from flowrl.run.parts.specs import parse_spec
from flowrl.run.presets import combine, is_of_task, require_method
from flowrl.run.results import holds

Base = tyro.conf.Suppress[tyro.conf.Fixed[RunConfig]]
"""The settings that the options of a command start from: no option."""
Typed = tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]]
"""The settings on the command line: no option."""


def argument(text: str) -> Any:
    """tyro's description of an option, without the line breaks of its source. None and the empty
    string, which mean that it was not given, are not shown as its default.
    """
    return tyro.conf.arg(help=" ".join(text.split()), help_behavior_hint=_default)


def _default(value: str) -> str:
    return "" if value.strip() in ("None", "''", "") else f"(default: {value})"


@cache
def with_help(command: type) -> Any:
    """`command`, a data class, with the string below each field as the help of its option; so too
    in its groups and subcommands.
    """
    for kind in {command, *_inside(command)}:
        texts = help_of(kind)
        for name in kind.__annotations__.keys() & texts:
            text = texts[name]
            kind.__annotations__[name] = Annotated[kind.__annotations__[name], argument(text)]
    return command


def _inside(hint: Any) -> Iterator[type]:
    """The data classes within the type `hint`: the groups and subcommands of a command."""
    for item in dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ():
        yield from _inside(item.type)
    for part in get_args(hint):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            yield part
        yield from _inside(part)


def require_once(command: Any, arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that the `arguments` of a parsed `command` contain twice,
    also as --NAME and --no-NAME, unless its values are given by repeating it.
    """
    hints, given = dict(reversed([*_types(command)])), set[str]()  # the command's own come first
    for word in takewhile(lambda word: word != "--", arguments):
        option = word.partition("=")[0].replace("_", "-")
        name = re.sub("^--(no-)?", "", option).replace("-", "_")
        kind = hints.get(name)
        if option.startswith("--") and tyro.conf.UseAppendAction not in get_args(kind):
            several = f", as in {option} A B" * (get_origin(split(kind)[0]) is tuple)
            if name in given:
                raise ConfigError(f"{option} is given twice; allowed: once{several}")
            given.add(name)


def _types(command: Any) -> Iterator[tuple[str, Any]]:
    """The types of the options of a parsed command, of its groups and of its subcommand."""
    for item in dataclasses.fields(command):
        yield item.name, item.type
        value = getattr(command, item.name)
        yield from _types(value) if dataclasses.is_dataclass(value) else ()


def options_class(name: str, without: Sequence[str] = ()) -> type[Any]:
    """A plain copy of `RunConfig` and its groups, `without` some settings: types and help, no
    checks of ranges.

    The values are checked when `RunConfig` is built from them, so that a bad one gives the same
    message as in Python or YAML.
    """
    columns = _options(RunConfig, without)
    for group, kind in groups_of(RunConfig).items():
        fields = _options(kind, without)
        options = dataclasses.make_dataclass(f"{name}{kind.__name__}", fields, frozen=True)
        options.__doc__ = kind.__doc__
        hint = Annotated[options, tyro.conf.arg(name=group)]
        columns.append((group, hint, dataclasses.field(default_factory=options)))
    return dataclasses.make_dataclass(name, columns, frozen=True)


def _options(kind: type, without: Sequence[str]) -> list[tuple[str, Any, Any]]:
    return [
        (
            name,
            Annotated[_typed_kind(name), argument(help_of(kind)[name])],
            _typed(name, item.default),
        )
        for item in fields_of(kind)
        if (name := item.name) not in (*without, *groups_of(kind))
    ]


def _typed_kind(name: str) -> Any:
    """The type of a setting on the command line, where "not set" has a value."""
    info = infos(RunConfig)[name]
    if (unset := typed_unset(info)) is None:
        return info.annotation
    if is_switch(info):
        return Literal[(*TEXTS, unset)]  # pyright: ignore
    kind = split(get_args(info.annotation)[0])[0]  # the other is None
    if get_origin(kind) is Literal:
        return Literal[(unset, *get_args(kind))]  # pyright: ignore
    return kind | Literal[unset] if unset == "auto" else kind  # pyright: ignore


def _typed(name: str, value: Any) -> Any:
    """The value of an option on the command line."""
    info = infos(RunConfig)[name]
    value = typed_unset(info) if value is None else value
    return str(value) if is_switch(info) else value


def options_with(kind: type[Any], base: RunConfig) -> Any:
    """Options whose defaults are the settings of `base`, so that the help shows them."""
    values = {name: _typed(name, value) for name, value in flat(base).items()}
    given = {
        item.name: values[item.name]
        if item.name in values
        else options_with(get_args(item.type)[0], base)
        for item in dataclasses.fields(kind)
    }
    return kind(**given)


def changes(options: Any, base: RunConfig) -> dict[str, Any]:
    """The settings in which `options` differ from `base`, by their own names."""
    values, given = flat(base), {}
    for name, value in vars(options).items():
        given |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    known = infos(RunConfig)
    plainly = {name: plain(known[name], value) for name, value in given.items()}
    return {name: value for name, value in plainly.items() if value != values[name]}


def early(arguments: Sequence[str], *names: str) -> dict[str, str]:
    """The options `names` that are given, read before all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    try:
        given = vars(parser.parse_known_args(arguments)[0])
    except argparse.ArgumentError:  # an option without its value: the command's own parser says so
        return {}
    return {name: text for name, text in given.items() if text is not None}


def base_of(arguments: Sequence[str]) -> RunConfig:
    """The run that the options start from: that of `--preset`, `--settings`, `--world`, `--model`
    and `--method`, read before all other options. With `--plan`, it is that of a machine with a
    GPU; with `--prompts`, without the held-out prompts of a task of the preset.
    """
    given = early(arguments, "preset", "settings", "world", "model", "method", "prompts", "credit")
    name, prompts = given.pop("preset", "default"), given.pop("prompts", "")
    start = preset(name, "--trust" in arguments)
    published = given.pop("settings", "") == "published"
    if not given.pop("credit", "") and given.get("method"):
        require_method(name, given["method"])
    chosen = {name: value for name, value in given.items() if value}
    run = start.apply(planned="--plan" in arguments, published=published, **chosen)
    if prompts and is_of_task("heldout_prompts", combine(name, RunConfig).origins):
        run = run.replace(heldout_prompts="")
    return run


def named_file(arguments: Sequence[str], entry: str = "algorithm") -> Path | None:
    """The settings file that `--resume` (see `resumed_file`) or `--config` names, or None."""
    given = early(arguments, "resume", "config")
    if "resume" in given:
        return resumed_file(Path(given["resume"]), entry)
    return Path(given["config"]) if "config" in given else None


LONGEST_NAME = 120
"""Characters of a run's name before its seed; settings that do not fit are left out."""
UNNAMED = (
    *("method", "task", "model", "seed"),  # named in their own way
    *("credit", "world", "device", *TRACKER, "checkpoint_every", "keep_checkpoints"),
    *("prompt_cache", "decode_batch", "observe", "save_experience", "strict"),
)
"""Settings left out of the name: where and how a run computes rather than what."""


def refuse_settings(command: Any, mode: str) -> None:
    """Raise `ConfigError` for a setting other than that of the file which the option `mode`
    names.
    """
    kept = command.base.flat()
    for name, value in changes(command.run, command.base).items():
        need = f"{kept[name]!r} or left out: {getattr(command, mode)} keeps its settings"
        edit = " edit its config.json, or" if mode == "resume" else ""
        others = f"for others,{edit} start a run with --preset CONFIG.yaml"
        require(False, name, value, f"{need}; {others}")


def refuse_options(command: Any, mode: str, allowed: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that is given with the option `mode`, which reads only the
    `allowed` ones; settings are no such options.
    """
    for item in dataclasses.fields(command):
        value = getattr(command, item.name)
        made = item.default_factory
        usual = item.default if made is dataclasses.MISSING else made()
        if item.name not in (mode, "run", "base", "typed", *allowed):
            fits = value == usual or not value
            require(fits, item.name, value, f"left out with --{mode}, which sets it")


COMMANDS = {"algorithm": "train", "arms": "compare"}
"""The command that resumes a folder, by the entry of its config.json (`holds`)."""


def resumed_file(folder: Path, entry: str = "algorithm") -> Path:
    """The config.json of the `folder` to resume: that of a run, or with the `entry` "arms" of a
    comparison. Raises `ConfigError` if it is another, with the command for what it is.
    """
    path = folder / "config.json"
    run, at, checkpoint = str(folder).rpartition("@")
    if folder.parent.name == "checkpoints":
        run, at, checkpoint = str(folder.parent.parent), "/", folder.stem
    if os.path.exists(path):  # False also for a name that is too long
        names = [COMMANDS[kind] for kind in COMMANDS if kind != entry and holds(folder, kind)]
        command = "".join(f"flowrl {name} --resume {shlex.quote(str(folder))}" for name in names)
    elif at and holds(Path(run), "algorithm"):
        command = f"flowrl train --resume {shlex.quote(run)} --from {shlex.quote(checkpoint)}"
    else:
        reason = "is no run" if os.path.exists(folder) else "does not exist"
        raise ConfigError(
            f"resume: {folder!s:.200} {reason}; allowed: a folder that contains config.json"
        )
    require(not command, "resume", str(folder), command)
    return path


def run_name(config: RunConfig, base: RunConfig) -> str:
    """The method, the task or the model, the settings in which `config` differs from `base`, and
    the seed, as in ``tp-grpo,text,learning_rate=0.001,seed=1``; valid in a file system.
    """
    subject = (config.policy.model or "").rstrip("/") or config.environment.task
    usual, names = base.typed(), [_short(config.algorithm.method), _short(subject)]
    for name, value in config.typed().items():
        if value != usual[name] and name not in UNNAMED:
            names.append(f"{name}={_short(value)}")
    # `shorten` leaves out whole words
    text = textwrap.shorten(" ".join(names), LONGEST_NAME, placeholder=" more")
    return ",".join([*text.split(), f"seed={config.seed}"])


def rule_name(spec: str) -> str:
    """A rule's name in tables: its spec, without the path of a file."""
    path, mark, rest = spec.partition(".py:")
    return rest if mark and "(" not in path else spec


def _short(value: Any) -> str:
    """A value in a file's name: numbers in short, of paths the last part."""
    if isinstance(value, tuple):
        return "+".join(map(_short, value))
    text = f"{value:g}" if isinstance(value, float) else str(value).rpartition("/")[2]
    return re.sub(r"[^\w.=-]+", "_", text).strip("_")


def typed_command() -> str:
    """The command line as typed, for the record."""
    return shlex.join(["flowrl", *sys.argv[1:]])


def with_rules(observe: Sequence[str], stop_on: Sequence[str], keep_best: str) -> tuple[str, ...]:
    """The setting `observe` with the observers that the short forms name, in place of those with
    the same names.
    """
    added = dict[str, str]()
    for text in stop_on:
        word = parse_spec(text, "stop_on").name
        require(word in STOP_ON, "stop_on", text, f"{', '.join(STOP_ON)}, each with options")
        added[STOP_ON[word]] = STOP_ON[word] + text.removeprefix(word)
    if keep_best:
        added["keep-best"] = f"keep-best(score={keep_best!r})"
    kept = [spec for spec in observe if parse_spec(spec, "observe").name not in added]
    return (*kept, *added.values())


STOP_ON = {
    **{name: f"stop-on-{name}" for name in ("collapse", "hacking", "plateau")},
    "budget": "budget",
}
"""The rules of `--stop-on`, and the observers that they mean."""
