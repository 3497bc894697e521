"""What a run was started with, its settings and its prompts; a resume names what has changed since.

Edits belong into config.json; config.yaml has the settings of the last start or resume. The prompts
of worlds that are not built in are in prompts.jsonl and heldout-prompts.jsonl.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import World
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.config import SIZES, RunConfig, load_config
from flowrl.run.io import write_bytes
from flowrl.run.parts.prompts import prompt_lines
from flowrl.run.parts.registry import KINDS
from flowrl.run.reading import read_bytes
from flowrl.run.worlds import prompts_of

FILES = {"train": "prompts.jsonl", "heldout": "heldout-prompts.jsonl"}
"""The stored prompts by part."""
SETTINGS = {"train": "prompts", "heldout": "heldout_prompts"}


def changed_settings(folder: Path, config: RunConfig) -> str:
    """The settings of `config` that differ from those of the last start of the run in `folder`, as
    in "iterations 12 -> 24"; "" if there are none.
    """
    try:
        before = load_config(folder / "config.yaml", trust=True).typed()
    except ConfigError:  # missing or damaged: it is written again
        return ""
    now = config.typed()
    # what is measured at the start is the same in a resumed run
    now |= {name: before[name] for name in SIZES if now[name] == "auto"}
    changed = [name for name in now if now[name] != before[name]]
    return ", ".join(f"{name} {before[name]!r} -> {now[name]!r}" for name in changed)


def require_unchanged(folder: Path, done: Mapping[str, Any], config: RunConfig) -> str:
    """What to say of the run in `folder`, which has ended as its done.json says; "" if it has more
    iterations in `config` and continues. Raises `ConfigError` if other settings have changed, which
    would have no effect.
    """
    iterations, stopped = int(done["iterations"]), done.get("stopped", "")
    if not stopped and config.iterations > iterations:
        return ""
    why = f"it was stopped by {stopped}" if stopped else "raise iterations in config.json for more"
    ended = f"the run in {folder} has ended after iteration {iterations} ({why})"
    if changed := changed_settings(folder, config):
        raise ConfigError(
            f"{ended}, so the changed settings in config.json have no effect: {changed}. Undo the"
            f" change, or continue from a checkpoint with --from: {Checkpoints(folder).listed()}"
        )
    return ended


def stored_lines(world: World, task: str, part: str) -> bytes:
    """The prompts as JSON lines; of metadata that JSON cannot represent, the name of the type."""
    return prompt_lines(prompts_of(world, task, part), lambda value: type(value).__name__)


def store_prompts(folder: Path, world: World, config: RunConfig) -> None:
    """Write the prompts of a world that is not built in to `folder`."""
    environment = config.environment
    own = environment.world not in KINDS["world"].built_in
    for part, name in FILES.items() if own else ():
        path, lines = folder / name, stored_lines(world, environment.task, part)
        if not path.exists() or read_bytes(path) != lines:
            write_bytes(path, lines)


def changed_prompts(folder: Path, world: World, config: RunConfig) -> dict[str, str]:
    """Of the parts of the prompts that differ from those stored in `folder`, where they are from
    and how many they are.
    """
    environment, changed = config.environment, dict[str, str]()
    for part, name in FILES.items():
        if not (folder / name).exists():
            continue
        stored, lines = read_bytes(folder / name), stored_lines(world, environment.task, part)
        if stored != lines:
            setting = SETTINGS[part]
            source = getattr(environment, setting) or environment.prompts or world.name
            before, now = (text.count(b"\n") for text in (stored, lines))
            changed[part] = f"{setting} {source} ({before} prompts at the start, {now} now)"
    return changed


def with_stored_prompts(folder: Path, config: RunConfig) -> RunConfig:
    """The settings of the run of a model in `folder` with its stored prompts, if it has them: its
    files of prompts may have changed, or be on another machine.
    """
    if not config.policy.model or not all((folder / name).exists() for name in FILES.values()):
        return config
    return config.replace(**{SETTINGS[part]: str(folder / name) for part, name in FILES.items()})


def resumed_prompts(
    folder: Path, world: World, config: RunConfig, allowed: bool
) -> tuple[RunConfig, str]:
    """The settings with which the run in `folder` continues, and what to say of changed prompts.

    Evaluations keep the stored held-out prompts, so that they stay comparable. Raises `ConfigError`
    for changed prompts unless they are `allowed`, and for other held-out prompts of a user's world.
    """
    changed = changed_prompts(folder, world, config)
    model, held = bool(config.policy.model), folder / FILES["heldout"]
    if not changed:
        return config, ""
    if not allowed or ("heldout" in changed and not model):
        raise ConfigError(
            f"{folder}: prompts have changed since the run started: {'; '.join(changed.values())}."
            f" Restore them; the run's own are in {folder / FILES['train']} and {held}."
            " `flowrl train --resume` takes other training prompts with --changed-prompts"
            " (changed_prompts=True in Python)"
        )
    text = f"changed prompts: {'; '.join(changed.values())}"
    if "heldout" in changed:
        config = config.replace(heldout_prompts=str(held))
        text += f"; evaluations keep those in {held}"
    return config, text
