"""A model of the user's own as a world: prompts from a file, a reward by name, a policy from a diffusers pipeline."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flowrl.builtin import PolicyOptions, World
from flowrl.errors import ConfigError, require
from flowrl.policies.pipeline import ModelOptions
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.registry import build
from flowrl.types import Prompt

TASK = "prompts"
FORM = "reward"


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a text file, one a line (empty lines and lines that start with # are left out), or from a .jsonl file: objects
    with an entry "prompt"; their other entries are the prompt's metadata. Raises `ConfigError` naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: {path} cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        found = [_from_json(path, number, line) for number, line in numbered]
    else:
        found = [Prompt(line) for _, line in numbered if not line.startswith("#")]
    if not found:
        raise ConfigError(f"prompts: {path} holds no prompt; write one a line")
    return found


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        values = json.loads(line)
        return Prompt(str(values.pop("prompt")), values)
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f'prompts: {path}, line {number} is no JSON object with an entry "prompt"') from error


def model_world(model: str, prompt_file: str, heldout_file: str, reward: str, options: ModelOptions) -> World:
    """The world of a run that trains `model` (a folder or a name on the Hub; see `policies.load.load_policy`).

    It has one task, "prompts", and one form of the reward, "reward". Held-out prompts are those of `heldout_file`, or the
    training prompts where there is none. Nothing is loaded until the policy is asked for; the files are read at once.
    """
    require(bool(prompt_file), "prompt_file", prompt_file, "a text file with a prompt a line (--prompts FILE)")
    require(bool(reward), "reward", reward, "NAME of a reward or path/to/file.py:Class: a model has none of its own")
    training = read_prompts(Path(prompt_file))
    heldout = read_prompts(Path(heldout_file)) if heldout_file else training
    return World(
        "model",
        (TASK,),
        (FORM,),
        lambda task, part: list(heldout if part == "heldout" else training),
        Prompt,
        _reward_maker(reward),
        lambda chosen: _policy(model, replace(options, **_shared(chosen))),
    )


def _reward_maker(spec: str) -> Callable[[str], RewardModel]:
    """Built once: a reward may be a large model itself."""
    built: list[RewardModel] = []

    def make(form: str) -> RewardModel:
        if not built:
            built.append(build("reward", spec))
        return built[0]

    return make


def _shared(options: PolicyOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in ("rank", "alpha", "seed", "device", "dtype")}


def _policy(model: str, options: ModelOptions) -> FlowPolicy:
    from flowrl.policies.load import load_policy

    return load_policy(model, options)
