"""Settings in a file that need the user's consent (SECURITY.md has the reasons), and checks for changed code."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.io import write_json
from flowrl.reading import read_json, reading
from flowrl.registry import files_of
from flowrl.specs import Spec, parse_spec

PARTS = {
    "credit": "credit", "sampler": "sampler", "loss": "loss", "reward": "reward", "heldout_rewards": "reward",
    "diversity": "features",
}  # fmt: skip
"""The settings with specs of parts, and the kind of these parts."""
OWN_PACKAGES = ("flowrl", "flowrl_bench", "flowrl_course")
OUTSIDE = ("url", "key", "token_file", "certificate")
"""Options of parts that send data or a secret to another machine."""
PICKLED = re.compile(r"\.(bin|ckpt|pickle|pkl|pt|pth)\b")


def parts_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Spec]]:
    """Setting, kind and spec of every part in `settings` (without groups), and of the parts in their options."""
    for setting, kind in PARTS.items():
        value = settings.get(setting) or ()
        todo = [(kind, text) for text in ((value,) if isinstance(value, str) else value)]
        while todo:
            kind_of_part, text = todo.pop(0)
            spec = parse_spec(text, setting)
            todo += spec.nested()
            yield setting, kind_of_part, spec


def untrusted(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(setting, its content, the risk) for every setting that needs the user's consent."""
    for setting, _, spec in parts_in(settings):
        package = spec.name.partition(":")[0].partition(".")[0]
        if ":" in spec.name and (spec.file is not None or package not in OWN_PACKAGES):
            yield setting, spec.name, "code, which would run"
        for option, value in spec.options.items():
            text = value if isinstance(value, str) else repr(value)
            if option in OUTSIDE or "://" in text:
                yield setting, f"{spec.name}({option}={value!r})", "an address or a secret for a connection"
            elif PICKLED.search(text):
                yield setting, f"{spec.name}({option}={value!r})", "a pickled file"


def trusted(settings: dict[str, Any], source: object, trust: bool = False) -> dict[str, Any]:
    """`settings` (without groups). Raises `ConfigError` if the file `source` contains settings that are not allowed without
    `trust`.

    A file may contain built-in parts, parts of installed plug-ins (by their name) and of flowrl's own packages. Code in a file or
    a module, addresses, keys and pickled weights need `trust`: `--trust` on the command line.
    """
    with reading(str(source)):
        found = [] if trust else list(untrusted(settings))
    for setting, named, what in found:
        raise ConfigError(
            f"{source}: {setting} names {named}: {what}. If you trust this file and what it names, add --trust "
            "(trust=True in Python)"
        )
    return settings


def trust_option(settings: Mapping[str, Any]) -> str:
    """The option that a command needs to read these settings from a file: " --trust", or ""."""
    return " --trust" if any(untrusted(settings)) else ""


NAME = "code.json"
"""File in a run's folder with the hashes of the user's parts, compared when the run is resumed."""


def code_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by "setting: part" of parts in files, in modules and of plug-ins; flowrl's own parts have none.

    Files that these files import or read are not included.
    """
    own = {Path(__file__).resolve().parent}
    found: dict[str, str] = {}
    for setting, kind, spec in parts_in(settings):
        if spec.name.partition(":")[0].partition(".")[0] in OWN_PACKAGES:
            continue
        files = [path.resolve() for path in files_of(kind, spec)]
        data = [path.read_bytes() for path in files if path.is_file() and own.isdisjoint(path.parents)]
        if data:
            found[f"{setting}: {spec.name}"] = hashlib.sha256(b"".join(data)).hexdigest()
    return found


def record_code(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write code.json to the run's `folder` if its `settings` contain such parts."""
    found = code_of(settings)
    if found or (folder / NAME).exists():
        write_json(folder / NAME, found)


def check_code(folder: Path, settings: Mapping[str, Any], changed_code: bool) -> None:
    """Raise `ConfigError` if code in `settings` has changed since `folder`/code.json; with `changed_code` record the new code
    instead."""
    if not (folder / NAME).exists():
        return
    recorded: dict[str, str] = read_json(folder / NAME, dict[str, str])
    found = code_of(settings)
    changed = [name for name in recorded if found.get(name) != recorded[name]]
    if changed and not changed_code:
        raise ConfigError(
            f"{folder}: code has changed since the run was started: {'; '.join(changed)}. Restore it, or resume with the new "
            "code: add --changed-code (changed_code=True in Python)"
        )
    record_code(folder, settings)
