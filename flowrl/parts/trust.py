"""Settings in a file that need the user's consent (SECURITY.md has the reasons), and checks for
changed code.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import OWN_PACKAGES, ConfigError
from flowrl.io import write_json
from flowrl.parts.plugins import plugin
from flowrl.parts.registry import KINDS, files_of
from flowrl.parts.specs import Spec, parse_spec
from flowrl.reading import read_bytes, read_json, reading

PARTS = {
    "credit": "credit",
    "sampler": "sampler",
    "window": "window",
    "loss": "loss",
    "reward": "reward",
    "heldout_rewards": "reward",
    "diversity": "features",
    "world": "world",
    "observe": "observer",
}
"""The settings with specs of parts, and the kind of these parts."""
OUTSIDE = ("url", "key", "token_file", "certificate")
"""Options of parts that send data or a secret to another machine."""
PICKLED = re.compile(r"\.(bin|ckpt|pickle|pkl|pt|pth)\b")
NAMES_CODE = re.compile(r":|\.py[co]?$")
"""In the name of a part: only the names of built-in parts and of plug-ins have neither."""
HUB_FILE = re.compile(r"[\w.-]+/[\w.-]+:[\w./+-]+\.safetensors")
"""REPOSITORY:FILE, which is read as data; a module's name has no slash."""


def _specs(settings: Mapping[str, Any], setting: str) -> tuple[str, ...]:
    """The specs of a setting; none for a world given as an object, or for that of a model."""
    value = settings.get(setting) or ()
    if setting == "world" and (value == "model" or not isinstance(value, str)):
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def own_parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Spec]]:
    """Setting, kind and spec of the user's parts in `settings` (without groups) and in the options
    of parts: those in files, in modules and of plug-ins, without flowrl's own.
    """
    for setting, outer in PARTS.items():
        todo = [(outer, text) for text in _specs(settings, setting)]
        for kind, text in todo:  # grows
            spec = parse_spec(text, setting)
            todo += spec.nested()
            place = KINDS[kind].built_in.get(spec.name, spec.name)
            if ":" not in place:
                point = plugin(KINDS[kind].group, place, kind)
                place = point.value if point else "flowrl"
            if spec.file or re.split("[.:]", place)[0] not in OWN_PACKAGES:
                yield setting, kind, spec


def own_text(runs: Iterable[Mapping[str, Any]]) -> str:
    """The user's parts in the settings of `runs`, as in "; your parts: credit my.py:MyRule"."""
    names = [f"{part[0]} {part[2].name}" for settings in runs for part in own_parts(settings)]
    return f"; your parts: {', '.join(dict.fromkeys(names))}" if names else ""


def untrusted(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(setting, its content, the risk) for every setting that needs the user's consent."""
    for setting in PARTS:
        for text in _specs(settings, setting):
            for content, risk in _risks(parse_spec(text, setting)):
                yield setting, content, risk
    backend = str(settings.get("attention_backend"))
    if backend.endswith("hub"):
        yield "attention_backend", backend, CODE
    if settings.get("tracker") == "wandb":
        yield "tracker", "wandb", "a service to which metrics and samples are sent"


CODE = "code, which would run"


def _risks(spec: Spec) -> Iterator[tuple[str, str]]:
    """(content, risk) of a part and of every text in its options, at any depth and whatever the
    option's name: the part may build any of these texts as another part.
    """
    if NAMES_CODE.search(spec.name):
        yield spec.name, CODE
    for option, value in spec.options.items():
        content = f"{spec.name}({option}={value!r})"
        if option in OUTSIDE or "://" in content:
            yield content, "an address or a secret for a connection"
        if PICKLED.search(repr(value)):
            yield content, "a pickled file"
        for text in _texts(value):
            try:
                yield from () if HUB_FILE.fullmatch(text) else _risks(parse_spec(text))
            except ConfigError:  # not a part as a whole
                if NAMES_CODE.search(text):
                    yield content, CODE


def _texts(value: Any) -> Iterator[str]:
    """The texts in a literal at any depth, keys included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


def trusted(settings: dict[str, Any], source: object, trust: bool = False) -> dict[str, Any]:
    """`settings` (without groups). Raises `ConfigError` if the file `source` contains settings that
    are not allowed without `trust`.

    A file may name built-in parts and installed plug-ins, at any depth of their options. Code in a
    file or a module (also of flowrl), addresses, keys and pickled weights need `trust`: `--trust`
    on the command line.
    """
    with reading(str(source)):
        for setting, content, risk in () if trust else untrusted(settings):
            raise ConfigError(
                f"{source}: {setting} names {content}: {risk}. If you trust this file and what it"
                " names, add --trust (trust=True in Python)"
            )
    return settings


def trust_option(settings: Mapping[str, Any]) -> str:
    """The option that a command needs to read these settings from a file: " --trust", or ""."""
    return " --trust" if any(untrusted(settings)) else ""


NAME = "code.json"
"""File in a run's folder with the hashes of the user's parts, compared when the run is resumed."""


def code_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by "setting: part" of parts in files, in modules and of plug-ins; flowrl's own parts
    have none.

    Files that these files import or read are not included.
    """
    library, hashes = Path(__file__).resolve().parents[1], dict[str, str]()
    for setting, kind, spec in own_parts(settings):
        files = [path.resolve() for path in files_of(kind, spec) if path.is_file()]
        data = [read_bytes(path) for path in files if not path.is_relative_to(library)]
        if data:
            hashes[f"{setting}: {spec.name}"] = hashlib.sha256(b"".join(data)).hexdigest()
    return hashes


def record_code(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write code.json to the run's `folder` if its `settings` contain such parts."""
    hashes = code_of(settings)
    if hashes or (folder / NAME).exists():
        write_json(folder / NAME, hashes)


def check_code(folder: Path, settings: Mapping[str, Any], changed_code: bool) -> None:
    """Raise `ConfigError` if code in `settings` has changed since `folder`/code.json, unless
    `changed_code` allows it.
    """
    if not (folder / NAME).exists():
        return
    recorded: dict[str, str] = read_json(folder / NAME, dict[str, str])
    hashes = code_of(settings)
    changed = [name for name in recorded if hashes.get(name) != recorded[name]]
    if changed and not changed_code:
        raise ConfigError(
            f"{folder}: code has changed since the run was started: {'; '.join(changed)}. Restore"
            " it, or resume with the new code: add --changed-code (changed_code=True in Python)"
        )
