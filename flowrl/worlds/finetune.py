"""A model of the user's own as a world: prompts from a file, a reward by name, a policy from a diffusers pipeline."""

from collections.abc import Callable
from dataclasses import replace

from flowrl.errors import require
from flowrl.policies.pipeline import ModelOptions
from flowrl.prompts import prompts_from
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.registry import build
from flowrl.types import Prompt
from flowrl.worlds.base import PolicyOptions, World

TASK = "prompts"
FORM = "reward"


def model_world(model: str, prompt_file: str, heldout_file: str, reward: str, options: ModelOptions) -> World:
    """The world of a run that trains `model` (a folder or a name on the Hub; see `policies.load.load_policy`).

    It has one task, "prompts", and one form of the reward, "reward". Held-out prompts are those of `heldout_file`, or the
    training prompts where there is none. Nothing is loaded until the policy is asked for; the files are read at once.
    """
    require(
        bool(prompt_file),
        "prompts",
        prompt_file,
        "a text file with a prompt a line, or a dataset (--prompts FILE or hf:NAME)",
    )
    require(bool(reward), "reward", reward, "NAME of a reward or path/to/file.py:Class: a model has none of its own")
    training = prompts_from(prompt_file)
    heldout = prompts_from(heldout_file) if heldout_file else training
    return World(
        "model",
        (TASK,),
        (FORM,),
        lambda task, part: list(heldout if part == "heldout" else training),
        Prompt,
        _reward_maker(reward, options.device),
        lambda chosen: _policy(model, replace(options, **_shared(chosen))),
    )


def _reward_maker(spec: str, device: str) -> Callable[[str], RewardModel]:
    """Built once: a reward may be a large model itself."""
    built: list[RewardModel] = []

    def make(form: str) -> RewardModel:
        if not built:
            built.append(build("reward", spec, device=device))
        return built[0]

    return make


def _shared(options: PolicyOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in ("lora_rank", "lora_alpha", "seed", "device", "dtype")}


def _policy(model: str, options: ModelOptions) -> FlowPolicy:
    from flowrl.policies.load import load_policy

    return load_policy(model, options)
