"""Where the settings of a run come from: options, presets, the method, files."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowrl.run.config import SIZES, RunConfig
from flowrl.run.origins import FILE, GIVEN, read_origins
from flowrl.run.parts.settings import owners
from flowrl.run.presets import MODEL_DEFAULTS, combine, method_overrides, world_defaults

FORMS = {"stop_on": "observe", "keep_best": "observe"}
"""Options that are short forms of a setting."""
BY_MACHINE = (*SIZES, "device", "dtype")
"""Settings whose default depends on the machine."""


def typed_settings(arguments: Sequence[str]) -> tuple[str, ...]:
    """The settings for which the `arguments` of a command have an option."""
    words = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    names = dict.fromkeys(re.sub("^--(no-)?", "", word).replace("-", "_") for word in words)
    sets = (FORMS.get(name, name) for name in names)
    return tuple(dict.fromkeys(name for name in sets if name in owners(RunConfig)))


def origins_of(
    config: RunConfig, preset: str, typed: Iterable[str], published: bool, profile: Iterable[str]
) -> dict[str, str]:
    """The origins of the settings that have not the default of all runs.

    Args:
        config: the settings.
        preset: the name of the preset.
        typed: the settings of the command line.
        published: whether the method has its published window and clip.
        profile: the settings from a file of sizes.
    """
    method, world = config.algorithm.method, config.environment.world
    is_model = bool(config.policy.model)
    usual = MODEL_DEFAULTS if is_model else world_defaults(world)
    of_usual = f"default of {'models' if is_model else f'world {config.environment.world_name}'}"
    overrides = method_overrides(preset, "model" if is_model else world, method, published)
    origins = dict.fromkeys(usual, of_usual)
    origins |= {
        name: _of_preset(origin) for name, origin in combine(preset, RunConfig).origins.items()
    }
    origins |= dict.fromkeys(overrides, f"method {method}")
    origins |= dict.fromkeys(profile, "profile")
    origins |= dict.fromkeys(typed, "option")
    now, default = config.typed(), RunConfig().typed()
    return {
        name: origins.get(name, "default on this machine" if name in BY_MACHINE else "option")
        for name in now
        if now[name] != default[name] or origins.get(name, of_usual) != of_usual
    }


def _of_preset(origin: str) -> str:
    return f"file {origin}" if origin.endswith((".yaml", ".yml")) else f"preset {origin}"


def origins_beside(path: Path, config: RunConfig) -> dict[str, str]:
    """The origins of the settings of the run whose file at `path` is repeated: those that it has
    recorded, else the file.
    """
    found: dict[str, Any] = read_origins(path.parent, config.typed())
    recorded = (path.parent / FILE).exists()
    return {
        name: text if recorded or text != GIVEN else f"file {path}" for name, text in found.items()
    }
