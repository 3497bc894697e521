"""Settings as checked data classes: one schema for Python, YAML, JSON and the command line.

`settings_group` makes a frozen data class whose fields pydantic checks at construction: types are
not converted (except integers to floats), numbers are finite, and ranges are annotations. A run's
settings are a group of groups; the names of all fields are unique across groups, so a setting can
be given without its group (`flat`, `replaced`).
"""

import ast
import difflib
import inspect
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from flowrl.core import options
from flowrl.core.errors import ConfigError
from flowrl.core.policy_options import MADE_BY_RUN
from flowrl.run.reading import load_document

T = TypeVar("T")
C = TypeVar("C", bound=type)

RULES = ConfigDict(
    strict=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    extra="forbid",
)
"""Types are not converted, except integers to floats, and numbers are finite."""


@dataclass_transform(frozen_default=True)
def settings_group(group: C) -> C:
    """Class decorator: a frozen data class that raises `ConfigError` with the field, its value and
    what is allowed.
    """
    checked: Any = checked_dataclass(group, frozen=True, config=RULES)  # pyright: ignore
    build = checked.__init__

    def __init__(self: Any, *arguments: Any, **values: Any) -> None:
        known = checked.__pydantic_fields__
        given = {name: plain(known.get(name), value) for name, value in values.items()}
        try:
            build(self, *arguments, **given)
        except ValidationError as error:
            raise ConfigError(_words(checked, error)) from error

    checked.__init__ = __init__
    return checked


def plain(info: Any, value: Any) -> Any:
    """The `value` of a setting, from what a user has typed: None for its value of `Unset`, Booleans
    of their names, tuples of lists and, for several texts, of one. `info` is pydantic's of the
    field, or None.
    """
    if info and info.annotation == tuple[str, ...] and (value is None or isinstance(value, str)):
        return tuple(filter(None, [value]))
    if isinstance(value, list):
        return tuple(value)
    unset = typed_unset(info) if info else None
    if unset is not None and type(value) in (type(unset), int) and value == unset:
        return None
    return TEXTS.get(value, value) if isinstance(value, str) and info and is_switch(info) else value


TEXTS = {"true": True, "false": False, "True": True, "False": False}


def typed_unset(info: Any) -> Any:
    """How a user types that a setting is not set; None for a setting that always is."""
    return next((mark.typed for mark in info.metadata if isinstance(mark, options.Unset)), None)


def is_switch(info: Any) -> bool:
    """Whether a setting is true, false or not set."""
    return bool in get_args(info.annotation)


def _words(group: type, error: ValidationError) -> str:
    """The first error of a group as one sentence."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "unexpected_keyword_argument":
        return unknown(name, [item.name for item in fields(group)])
    if problem["type"] == "value_error":  # a condition on several fields, written as a ConfigError
        return str(problem.get("ctx", {}).get("error"))
    return f"{name} = {problem['input']!r} is not allowed; allowed: {allowed(group, name)}"


def unknown(name: str, known: Any, what: str = "setting") -> str:
    """The message for the unknown `name` of a `what`, with the `known` names and the most similar
    one.
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {what} {name!r:.100}{hint}; allowed: {', '.join(sorted(known))}"


def allowed(group: type, name: str) -> str:
    """The values that the field `name` of `group` allows, in words made from its annotation."""
    info = cast(Any, group).__pydantic_fields__[name]
    return options.words(info.annotation, tuple(info.metadata))


@cache
def help_of(kind: type) -> Mapping[str, str]:
    """The string below each field of a data class and of its bases, by the field's name."""
    texts = dict[str, str]()
    for base in reversed(kind.__mro__[:-1]):
        with suppress(OSError):  # a class made from others has no source
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            for node, below in pairwise(cast(ast.ClassDef, body).body):
                if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[ast.unparse(node.target)] = ast.literal_eval(below.value)
    return texts


def fields_of(settings: Any) -> list[Field[Any]]:
    """The settings and groups of a settings class (or value): its fields but for those that a run
    makes.
    """
    return [item for item in fields(settings) if MADE_BY_RUN not in item.metadata]


@cache
def groups_of(settings: Any) -> Mapping[str, type]:
    """The groups of a settings class by the name of their field."""
    return {
        item.name: cast(type, item.type)
        for item in fields(settings)
        if hasattr(item.type, "__pydantic_fields__")
    }


@cache
def owners(settings: Any) -> Mapping[str, str]:
    """Every setting's name and the field of its group; "" for a setting of no group."""
    groups = groups_of(settings)
    home = {item.name: "" for item in fields_of(settings) if item.name not in groups}
    for group, kind in groups.items():
        home |= {item.name: group for item in fields_of(kind)}
    return home


def flat(settings: Any) -> dict[str, Any]:
    """All settings by their own names."""
    return {
        name: getattr(getattr(settings, group) if group else settings, name)
        for name, group in owners(type(settings)).items()
    }


def typed(settings: Any) -> dict[str, Any]:
    """All settings by their own names as a user types them: those that are not set by their value
    of `Unset`.
    """
    known = infos(type(settings))
    return {
        name: typed_unset(known[name]) if value is None else value
        for name, value in flat(settings).items()
    }


@cache
def infos(settings: Any) -> Mapping[str, Any]:
    """pydantic's description of every setting by its name: annotation and metadata."""
    groups = {"": settings, **groups_of(settings)}
    homes = owners(settings).items()
    return {name: groups[group].__pydantic_fields__[name] for name, group in homes}


def grouped(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `kind` with `values` by name, sorted into their groups. Raises `ConfigError`
    for an unknown name.
    """
    home, result = owners(kind), {}
    for name, value in values.items():
        if name not in home:
            raise ConfigError(unknown(name, home))
        place = result.setdefault(home[name], {}) if home[name] else result
        place[name] = list(value) if isinstance(value, tuple) else value
    return result


def options_text(values: Mapping[str, Any]) -> str:
    """Settings as options of a command, as in "--learning-rate 0.001 --no-offload"."""
    words = list[str]()
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            items = value if isinstance(value, list | tuple) else [value]
            words += [f"--{option}", *(str(item) for item in items)]
    return shlex.join(words)


def replaced(settings: T, values: Mapping[str, Any]) -> T:
    """`settings` changed by `values`, named without their groups. Raises `ConfigError`."""
    changed, groups = grouped(type(settings), values), groups_of(type(settings))
    inside = {
        name: replace(getattr(settings, name), **changed[name])
        for name in changed
        if name in groups
    }
    return replace(cast(Any, settings), **{**changed, **inside})


@dataclass(frozen=True)
class SettingsFile:
    """The content of a file of settings.

    Args:
        settings: settings by name.
        when: further settings by the name of another preset that is also chosen, in the file's
            order.
        about: facts about the file.
    """

    settings: dict[str, Any]
    when: dict[str, dict[str, Any]]
    about: dict[str, Any]


def read_values(values: Any, kind: type) -> dict[str, Any]:
    """The settings of `kind` by name, from groups of plain `values` (the inverse of `nested`).
    Raises `ConfigError`.
    """
    return _Document(None, kind, None).settings(values)


SECTIONS = ("about", "settings", "with")


def read_settings(path: Path, kind: type) -> SettingsFile:
    """Read settings of `kind` from a YAML (.yaml, .yml) or JSON file at `path`.

    The file has groups of ``name: value``, or a preset file's sections ``about``, ``settings`` and
    ``with``. Numbers may be written as ``1e-4``. Raises `ConfigError` with the file, the line, the
    setting and what is allowed, also for names that occur twice.
    """
    root, node = load_document(path)
    document = _Document(path, kind, node)
    root = dict(document.mapping(root))
    root.pop("format", None)  # checked by the caller
    if not set(root) & set(SECTIONS):
        return SettingsFile(document.settings(root), {}, {})
    for name in root.keys() - set(SECTIONS):
        hint = f"{unknown(name, SECTIONS, 'section')} (settings go below 'settings:')"
        raise document.error([name], hint)
    about, settings, when = (document.mapping(root.get(name, {}), name) for name in SECTIONS)
    others = {
        str(other): document.settings(values, "with", str(other)) for other, values in when.items()
    }
    return SettingsFile(document.settings(settings, "settings"), others, about)


def read_arms(path: Path, kind: type) -> dict[str, dict[str, Any]]:
    """Settings of `kind` by the names of arms: the entry ``arms`` of a YAML or JSON file at `path`,
    without groups.

    Raises `ConfigError` as `read_settings` does.
    """
    root, node = load_document(path)
    document = _Document(path, kind, node)
    if not isinstance(root, dict) or list(root) != ["arms"]:
        raise document.error(
            (), "write 'arms:' and, below it, one line 'name: {setting: value}' per arm"
        )
    return {
        str(name): document.settings(values or {}, "arms", str(name), grouped=False)
        for name, values in document.mapping(root["arms"], "arms").items()
    }


@dataclass(frozen=True)
class _Document:
    """The settings in one file, which are checked one by one so that an error has its line.

    Conditions on several settings are checked when the run is built.
    """

    path: Path | None
    kind: type
    node: yaml.Node | None

    def mapping(self, values: Any, *place: str) -> dict[str, Any]:
        """`values`, which must be a mapping."""
        if not isinstance(values, dict):
            name = place[-1] if place else "a settings file"
            message = f"{name} must contain lines 'name: value', not {values!r:.60}"
            raise self.error(place, message)
        return values

    def settings(self, values: Any, *place: str, grouped: bool = True) -> dict[str, Any]:
        """Settings by their own names, from groups or, if not `grouped`, from names alone."""
        groups, home, checked = groups_of(self.kind), owners(self.kind), dict[str, Any]()
        for name, value in self.mapping(values, *place).items():
            if grouped and name in groups:
                for inside, setting in self.mapping(value, *place, name).items():
                    checked[inside] = self._checked(name, str(inside), setting, *place, name)
            elif not grouped and name not in home:
                raise self.error([*place, str(name)], unknown(str(name), home))
            else:
                group = "" if grouped else home[name]
                checked[name] = self._checked(group, str(name), value, *place)
        return checked

    def _checked(self, group: str, name: str, value: Any, *place: str) -> Any:
        """The value of the setting `name` of `group` ("": of none), which is at `place`."""
        groups, home = groups_of(self.kind), owners(self.kind)
        place = (*place, name)
        if home.get(name) != group:
            known = [setting for setting, owner in home.items() if owner == group]
            what = "setting" if group else "group or setting"
            hint = unknown(name, [*known, *(() if group else groups)], what)
            below = f"{name} belongs below '{home.get(name)}:'"
            raise self.error(place, below if home.get(name) else hint)
        owner = groups.get(group, self.kind)
        info, node = infos(self.kind)[name], self._entry(place)[1]
        if str in (info.annotation, *get_args(info.annotation)) and isinstance(
            node, yaml.ScalarNode
        ):
            value = "" if value is None else node.value  # 0:9 and 12 are texts here
        if get_origin(info.annotation) is tuple and isinstance(value, str | list):
            value = tuple(filter(None, [value]) if isinstance(value, str) else value)
        if not _fits(plain(info, value), info.annotation, tuple(info.metadata)):
            problem = f"{name} = {value!r:.200} is not allowed; allowed: {allowed(owner, name)}"
            raise self.error(place, problem)
        return value

    def _entry(self, place: Sequence[str]) -> tuple[int | None, yaml.Node | None]:
        """The line and the node of the entry at `place`, or of the innermost group around it."""
        line, node = None, self.node
        for key in place:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            pair = next((pair for pair in pairs if pair[0].value == key), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        return line, node

    def error(self, place: Sequence[str], message: str) -> ConfigError:
        """`message` with the file and, if known, the line of the entry at `place`."""
        if self.path is None:
            return ConfigError(f"config: {message}")
        line = self._entry(place)[0]
        return ConfigError(f"config: {self.path}{f', line {line}' if line else ''}: {message}")


def _fits(value: Any, kind: Any, bounds: tuple[Any, ...]) -> bool:
    """Whether pydantic accepts a value of a setting with this annotation."""
    hint: Any = Annotated[kind, *bounds] if bounds else kind  # pyright: ignore
    rules = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        TypeAdapter(hint, config=rules).validate_python(value)
    except ValidationError:
        return False
    return True


def settings_text(values: Mapping[str, Any], comment: str = "") -> str:
    """Groups of settings (`values`) as YAML that `read_settings` reads exactly, below `comment`."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000)
