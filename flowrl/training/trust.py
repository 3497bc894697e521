"""What the settings in a file may name without the user's own word; SECURITY.md has the reasons."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.errors import ConfigError
from flowrl.specs import Spec, parse_spec

PARTS = {
    "credit": "credit", "sampler": "sampler", "loss": "loss", "reward": "reward", "heldout_rewards": "reward",
    "diversity": "features",
}  # fmt: skip
"""The settings that contain specs of parts, and the kind of these parts."""
OWN_PACKAGES = ("flowrl", "flowrl_bench", "flowrl_course")
OUTSIDE = ("url", "key", "token_file", "certificate")
"""Options of parts by which data or a secret leaves the machine."""
PICKLED = re.compile(r"\.(bin|ckpt|pickle|pkl|pt|pth)\b")


def parts_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Spec]]:
    """Setting, kind and spec of every part that `settings` (by their own names) name, and of the parts in their options."""
    for setting, kind in PARTS.items():
        value = settings.get(setting) or ()
        todo = [(kind, text) for text in ((value,) if isinstance(value, str) else value)]
        while todo:
            kind_of_part, text = todo.pop(0)
            spec = parse_spec(text, setting)
            todo += spec.nested()
            yield setting, kind_of_part, spec


def untrusted(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(setting, what it names, what that can do) for everything that needs the user's own word."""
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
    """`settings` (by their own names). Raises `ConfigError` if the file `source`, which they are from, names more than it may.

    A file may name built-in parts, parts of installed plug-ins (by their name) and of flowrl's own packages. Code in a file or
    a module, addresses, keys and pickled weights need `trust`: `--trust` on the command line.
    """
    for setting, named, what in () if trust else untrusted(settings):
        raise ConfigError(
            f"{source}: {setting} names {named}: {what}. If you trust this file and what it names, add --trust "
            "(trust=True in Python)"
        )
    return settings


def trust_option(settings: Mapping[str, Any]) -> str:
    """What a command needs that reads these settings from a file: " --trust", or nothing."""
    return " --trust" if any(untrusted(settings)) else ""
