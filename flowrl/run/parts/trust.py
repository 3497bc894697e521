"""Settings in a file that need the user's consent (SECURITY.md has the reasons), and checks for
changed code.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import OWN_PACKAGES, ConfigError
from flowrl.run.io import write_json
from flowrl.run.parts.plugins import plugin
from flowrl.run.parts.prompt_sources import place_and_reward, rewards_of
from flowrl.run.parts.registry import KINDS, files_of, find_maker
from flowrl.run.parts.specs import NESTED, Spec, parse_spec
from flowrl.run.reading import read_bytes, read_json, reading

PARTS = {
    "credit": "credit",
    "sampler": "sampler",
    "window": "window",
    "loss": "loss",
    "reward": "reward",
    "prompts": "reward",
    "heldout_prompts": "reward",
    "heldout_rewards": "reward",
    "diversity": "features",
    "world": "world",
    "observe": "observer",
}
"""The settings with specs of parts, and the kind of these parts."""
CODE = "it is code that would run"
NAMES_CODE = re.compile(r":|\.py[co]?$")
"""In the name of a part: only the names of built-in parts and of plug-ins have neither."""
PICKLED = re.compile(r"\.(bin|ckpt|pickle|pkl|pt|pth)\b")
LOCAL_TRACKERS = (None, "auto", "none", "tensorboard")
"""Trackers that only write files; every other one needs trust."""


def _specs(settings: Mapping[str, Any], setting: str) -> tuple[str, ...]:
    """The specs of a setting, of prompts those of their rewards; none for a world given as an
    object, or for that of a model.
    """
    value = settings.get(setting) or ()
    if setting == "world" and (value == "model" or not isinstance(value, str)):
        return ()
    texts = (value,) if isinstance(value, str) else tuple(value)
    if setting == "heldout_rewards":
        return tuple(place_and_reward(text, setting)[1] for text in texts)
    return rewards_of(texts) if setting in ("prompts", "heldout_prompts") else texts


class OwnPart(NamedTuple):
    """A part of the user's in settings, or inside another one there."""

    setting: str
    kind: str
    spec: Spec


def own_parts(settings: Mapping[str, Any]) -> Iterator[OwnPart]:
    """The user's parts in `settings` (without groups) and in the options of parts: those in files,
    in modules and of plug-ins, without flowrl's own.
    """
    for setting, outermost in PARTS.items():
        todo = [(outermost, text) for text in _specs(settings, setting)]
        for kind, text in todo:  # grows
            spec = parse_spec(text, setting)
            todo += spec.nested()
            place = KINDS[kind].built_in.get(spec.name, spec.name)
            if ":" not in place:
                point = plugin(KINDS[kind].group, place, kind)
                place = point.value if point else "flowrl"
            if spec.file or re.split("[.:]", place)[0] not in OWN_PACKAGES:
                yield OwnPart(setting, kind, spec)


def own_text(runs: Iterable[Mapping[str, Any]]) -> str:
    """The user's parts in the settings of `runs`, as in "; your parts: credit my.py:MyRule"."""
    names = [
        f"{part.setting} {part.spec.name}" for settings in runs for part in own_parts(settings)
    ]
    return f"; your parts: {', '.join(dict.fromkeys(names))}" if names else ""


def untrusted(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(setting, its content, the risk) for everything in the settings that needs the user's
    consent.
    """
    for setting, kind in PARTS.items():
        for text in _specs(settings, setting):
            yield from ((setting, *risk) for risk in _risks(kind, text))
    backend, tracker = str(settings.get("attention_backend")), settings.get("tracker", "none")
    if backend.endswith("hub"):
        yield "attention_backend", backend, CODE
    if tracker not in LOCAL_TRACKERS:
        yield "tracker", tracker, "a service to which metrics and samples are sent"


def _risks(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """(name, risk) of a part as written and of every text in its options. Text that is no part is
    judged by its colon: a part may import what it is given.
    """
    spec = parse_spec(text, kind)
    is_code = NAMES_CODE.search(spec.name)
    if is_code:
        yield spec.name, CODE
    for option, value in spec.options.items():
        for inner in _texts(value):
            content = f"({option}={inner!r})"
            if "://" in inner:
                yield spec.name, f"an address for a connection {content}"
            elif PICKLED.search(inner):
                yield spec.name, f"a pickled file {content}"
            elif option in NESTED:
                yield from _risks(NESTED[option], inner)
            elif NAMES_CODE.search(inner):
                yield spec.name, f"{CODE} {content}"
    if not is_code and (why := _risk_by_name(kind, spec.name)):
        yield spec.name, why


def _texts(value: Any) -> Iterator[str]:
    """The texts in an option's value, at any depth; of a dictionary the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inside in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(inside)


def _risk_by_name(kind: str, name: str) -> str:
    """The risk of an installed part, in words, or "". A class or function that connects, or starts
    a process, has an attribute `connects`; parts of some kinds may (`Kind.acts`).
    """
    entry = KINDS[kind]
    point = None if name in entry.built_in else plugin(entry.group, name, kind)
    if point and entry.acts and point.module.partition(".")[0] not in OWN_PACKAGES:
        return f"a {entry.noun} of another package, which may start a process or connect"
    if not point and name not in entry.built_in:
        return ""
    maker = find_maker(kind, Spec(name, {}))
    connects = getattr(getattr(maker, "func", maker), "connects", False)
    return "a part that sends data to another machine or starts a process" if connects else ""


def require_trust(settings: Mapping[str, Any], source: object, trust: bool = False) -> None:
    """Raise `ConfigError` if the file `source`, from which the `settings` (without groups) were
    read, names code, connections or other things that need the user's consent, without `trust`
    (`--trust` on the command line). This is asked once, when a file is read.
    """
    with reading(str(source)):
        for setting, content, why in () if trust else untrusted(settings):
            raise ConfigError(
                f"{source}: {setting} names {content}: {why}. If you trust this file and what it"
                " names, add --trust (trust=True in Python)"
            )


def trust_option(settings: Mapping[str, Any]) -> str:
    """The option that a command needs to read these settings from a file: " --trust", or ""."""
    return " --trust" if any(untrusted(settings)) else ""


NAME = "code.json"
"""File in a run's folder with the hashes of the user's parts, compared when the run is resumed."""


def code_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by "setting: part" of parts in files, in modules and of plug-ins, and of the family
    of a model in a folder; flowrl's own parts have none.

    Files that these files import or read are not included.
    """
    library, hashes = Path(str(resources.files("flowrl"))).resolve(), dict[str, str]()
    used = {f"{p.setting}: {p.spec.name}": files_of(p.kind, p.spec) for p in own_parts(settings)}
    index = Path(settings.get("model") or "") / "model_index.json"
    kind = read_json(index, dict[str, Any]).get("_class_name", "") if index.is_file() else ""
    if kind and (point := plugin("flowrl.families", str(kind), "model family")):
        found = find_spec(point.module)
        used[f"model: {kind}"] = [Path(found.origin)] if found and found.origin else []
    for name, paths in used.items():
        files = [path.resolve() for path in paths if path.is_file()]
        data = [read_bytes(path) for path in files if not path.is_relative_to(library)]
        if data:
            hashes[name] = hashlib.sha256(b"".join(data)).hexdigest()
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
            f"{folder}: code has changed since the run started: {'; '.join(changed)}. Restore it,"
            " or resume with the new code by adding --changed-code (changed_code=True in Python)"
        )
