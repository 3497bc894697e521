"""Settings in a file that need the user's consent (SECURITY.md has the reasons), and checks for
changed code.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import OWN_PACKAGES, ConfigError
from flowrl.io import write_json
from flowrl.parts.plugins import plugin
from flowrl.parts.registry import CODE, KINDS, files_of, risk
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
LOCAL_TRACKERS = ("auto", "none", "tensorboard")
"""Trackers that only write files; every other one needs trust."""


def _specs(settings: Mapping[str, Any], setting: str) -> tuple[str, ...]:
    """The specs of a setting; none for a world given as an object, or for that of a model."""
    value = settings.get(setting) or ()
    if setting == "world" and (value == "model" or not isinstance(value, str)):
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


class OwnPart(NamedTuple):
    """A part of the user's in settings, or inside the part of which `outer` is the text there."""

    setting: str
    kind: str
    spec: Spec
    outer: str


def own_parts(settings: Mapping[str, Any]) -> Iterator[OwnPart]:
    """The user's parts in `settings` (without groups) and in the options of parts: those in files,
    in modules and of plug-ins, without flowrl's own.
    """
    for setting, outermost in PARTS.items():
        todo = [(outermost, text, text) for text in _specs(settings, setting)]
        for kind, text, outer in todo:  # grows
            spec = parse_spec(text, setting)
            todo += [(*inner, outer) for inner in spec.nested()]
            place = KINDS[kind].built_in.get(spec.name, spec.name)
            if ":" not in place:
                point = plugin(KINDS[kind].group, place, kind)
                place = point.value if point else "flowrl"
            if spec.file or re.split("[.:]", place)[0] not in OWN_PACKAGES:
                yield OwnPart(setting, kind, spec, outer)


def own_text(runs: Iterable[Mapping[str, Any]]) -> str:
    """The user's parts in the settings of `runs`, as in "; your parts: credit my.py:MyRule"."""
    names = [
        f"{part.setting} {part.spec.name}" for settings in runs for part in own_parts(settings)
    ]
    return f"; your parts: {', '.join(dict.fromkeys(names))}" if names else ""


def untrusted(
    settings: Mapping[str, Any], own: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """(setting, its content, the risk) for every setting that needs the user's consent and is not
    one of the texts in the user's `own` words.
    """
    for setting, kind in PARTS.items():
        for text in _specs(settings, setting):
            for content, why in () if text in own else _risks(kind, parse_spec(text, setting)):
                yield setting, content, why
    backend, tracker = str(settings.get("attention_backend")), settings.get("tracker", "none")
    if backend.endswith("hub") and backend not in own:
        yield "attention_backend", backend, CODE
    if tracker not in (*LOCAL_TRACKERS, *own):
        yield "tracker", tracker, "a service to which metrics and samples are sent"


def _risks(kind: str, spec: Spec) -> Iterator[tuple[str, str]]:
    """(name, risk) of a part and of the parts in its options that `build` builds."""
    inner = [each for k, text in spec.nested() for each in _risks(k, parse_spec(text, k))]
    why = risk(kind, spec)
    if why and not (inner and why.startswith(f"{CODE} (")):  # a part in the option names it
        yield spec.name, why
    yield from inner


def trusted(
    settings: dict[str, Any], source: object, trust: bool = False, own: Collection[str] = ()
) -> dict[str, Any]:
    """`settings` (without groups). Raises `ConfigError` if the file `source` contains settings that
    need `trust` (`--trust` on the command line) and are not the user's `own` words.

    This only names the file and the setting early: what imports (`registry.find_maker`) refuses by
    itself.
    """
    with reading(str(source)):
        for setting, content, why in () if trust else untrusted(settings, own):
            raise ConfigError(
                f"{source}: {setting} names {content}: {why}. If you trust this file and what it"
                " names, add --trust (trust=True in Python)"
            )
    return settings


def trust_option(settings: Mapping[str, Any], own: Collection[str] = ()) -> str:
    """The option that a command needs to read these settings from a file: " --trust", or ""."""
    return " --trust" if any(untrusted(settings, own)) else ""


NAME = "code.json"
"""File in a run's folder with the hashes of the user's parts, compared when the run is resumed."""


Trusts = Callable[[str], bool]
"""Whether a text of the settings is in the user's own words (`RunConfig.trusts`)."""


def code_of(settings: Mapping[str, Any], trusts: Trusts) -> dict[str, str]:
    """SHA-256 by "setting: part" of parts in files, in modules and of plug-ins; flowrl's own parts
    have none.

    Files that these files import or read are not included.
    """
    library, hashes = Path(__file__).resolve().parents[1], dict[str, str]()
    for part in own_parts(settings):
        paths = files_of(part.kind, part.spec, trusts(part.outer))
        files = [path.resolve() for path in paths if path.is_file()]
        data = [read_bytes(path) for path in files if not path.is_relative_to(library)]
        if data:
            name = f"{part.setting}: {part.spec.name}"
            hashes[name] = hashlib.sha256(b"".join(data)).hexdigest()
    return hashes


def record_code(folder: Path, settings: Mapping[str, Any], trusts: Trusts) -> None:
    """Write code.json to the run's `folder` if its `settings` contain such parts."""
    hashes = code_of(settings, trusts)
    if hashes or (folder / NAME).exists():
        write_json(folder / NAME, hashes)


def check_code(
    folder: Path, settings: Mapping[str, Any], changed_code: bool, trusts: Trusts
) -> None:
    """Raise `ConfigError` if code in `settings` has changed since `folder`/code.json, unless
    `changed_code` allows it.
    """
    if not (folder / NAME).exists():
        return
    recorded: dict[str, str] = read_json(folder / NAME, dict[str, str])
    hashes = code_of(settings, trusts)
    changed = [name for name in recorded if hashes.get(name) != recorded[name]]
    if changed and not changed_code:
        raise ConfigError(
            f"{folder}: code has changed since the run started: {'; '.join(changed)}. Restore it,"
            " or resume with the new code by adding --changed-code (changed_code=True in Python)"
        )
