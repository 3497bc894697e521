"""Settings from YAML: read with line numbers, so that a mistake is named with its place; and written back."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import ConfigError

Settings = dict[str, Any]
Kinds = Mapping[str, type]
"""The settings that exist and their types: str, int, float, bool, or tuple (of texts)."""
SECTIONS = ("about", "settings", "with")
RENAMED = {
    "groups": "prompts", "group_size": "members", "learning_rate": "lr", "beta": "kl_weight", "clip_range": "clip",
    "epochs": "iterations", "num_steps": "steps", "guidance_scale": "guidance", "lora_rank": "rank", "lora_alpha": "alpha",
    "batch_size": "micro_batch",    "reward_fn": "reward", "gradient_checkpointing": "checkpointing",
}  # fmt: skip
"""What other programs call a setting."""


@dataclass(frozen=True)
class SettingsFile:
    """What a YAML file says: its settings, those that hold `when` another named preset is chosen too (in the file's order), and
    what it says about itself."""

    path: Path
    settings: Settings
    when: dict[str, Settings] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def read_settings(path: Path, kinds: Kinds) -> SettingsFile:
    """Read a file of settings: one ``name: value`` a line, or the sections ``about``, ``settings`` and ``with`` of a preset.

    Numbers may be written as Python does (``1e-4``, which YAML itself takes for a text). Raises `ConfigError` that names the
    file, the line, and what is allowed: no YAML, an unknown setting (with the nearest name), a value of another type, a
    name twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config: {path}{place}, is not YAML: {getattr(error, 'problem', None) or error}") from error
    return _Reader(path, kinds).file(root)


@dataclass(frozen=True)
class _Reader:
    """One file being read."""

    path: Path
    kinds: Kinds

    def file(self, root: yaml.Node | None) -> SettingsFile:
        if root is None:
            raise ConfigError(f"config: {self.path} is empty; write one setting a line, as in 'steps: 10'")
        entries = self._entries(root, "the file")
        if "settings" not in entries and "with" not in entries:
            return SettingsFile(self.path, self._settings(root))
        for name, node in entries.items():
            if name not in SECTIONS:
                raise self._unknown(name, node, "section", SECTIONS, hint=" (settings go below 'settings:')")
        when = (
            {name: self._settings(node) for name, node in self._entries(entries["with"], "with").items()}
            if "with" in entries
            else {}
        )
        about = (
            {name: _plain(node) for name, node in self._entries(entries["about"], "about").items()} if "about" in entries else {}
        )
        return SettingsFile(self.path, self._settings(entries["settings"]) if "settings" in entries else {}, when, about)

    def _settings(self, node: yaml.Node) -> Settings:
        found = {}
        for name, value in self._entries(node, "settings").items():
            if name not in self.kinds:
                raise self._unknown(name, value, "setting", self.kinds)
            found[name] = self._value(name, value)
        return found

    def _entries(self, node: yaml.Node, what: str) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self._at(node)}: {what} must be lines of 'name: value', not {_kind_of(node)}")
        entries: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(getattr(key, "value", key))
            if name in entries:
                raise ConfigError(f"{self._at(key)}: {name} is set twice")
            entries[name] = value
        return entries

    def _value(self, name: str, node: yaml.Node) -> Any:
        kind: type = self.kinds[name]
        value: Any = _plain(node)
        if kind is float and isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is str and isinstance(node, yaml.ScalarNode) and not isinstance(value, str):
            value = node.value if value is not None else ""
        if kind is tuple and isinstance(value, str | list):
            value = (value,) if isinstance(value, str) else tuple(value)
        texts = kind is not tuple or (isinstance(value, tuple) and all(isinstance(item, str) for item in value))
        if type(value) is not kind or not texts:
            told = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list of texts"}[
                kind
            ]
            hint = "; a file of prompts goes to prompt_file" if name == "prompts" and isinstance(value, str) else ""
            raise ConfigError(f"{self._at(node)}: {name} = {value!r} is not allowed: {told}{hint}")
        return value

    def _at(self, node: yaml.Node) -> str:
        return f"config: {self.path}, line {node.start_mark.line + 1}"

    def _unknown(self, name: str, node: yaml.Node, what: str, known: Any, hint: str = "") -> ConfigError:
        close = [RENAMED[name]] if RENAMED.get(name) in known else difflib.get_close_matches(name, list(known), n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        return ConfigError(f"{self._at(node)}: unknown {what} {name!r}{meant}{hint}; allowed: {', '.join(sorted(known))}")


def _plain(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _kind_of(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{getattr(node, 'value', '')!r}"


def settings_text(values: Mapping[str, Any], comments: tuple[str, ...] = ()) -> str:
    """Settings as YAML that `read_settings` gives back exactly; `comments` are lines above them."""
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    return head + yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000)
