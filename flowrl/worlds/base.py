"""Worlds: prompts, rewards and a policy that fit together; built-in ones by name, and a diffusers model as a world."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flowrl.errors import CheckpointError, ConfigError, require
from flowrl.policies.load import load_policy
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.pipeline import ModelOptions
from flowrl.policies.small_sd3 import SmallSD3, SmallSD3Config, SmallSD3Policy
from flowrl.prompts import prompts_from
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.reading import read_json
from flowrl.registry import build
from flowrl.rewards import evaluation_reward
from flowrl.types import Prompt
from flowrl.worlds import mixture as mixture_world
from flowrl.worlds.shapes import scene, verifier
from flowrl.worlds.shapes.verifier import QUALITIES, ShapesQuality


@dataclass(frozen=True)
class PolicyOptions:
    """Options of a world's policy, with LoRA (arXiv 2106.09685).

    Args:
        lora_rank: rank of the LoRA.
        lora_alpha: alpha of the LoRA, which scales it by alpha / rank.
        seed: seed of the adapters.
        device: name of the device.
        dtype: type of the base weights.
        base_weights: file that replaces the shipped weights; empty for the shipped ones.
    """

    lora_rank: int = 8
    lora_alpha: float = 16.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    base_weights: str = ""


@dataclass(frozen=True)
class World:
    """Prompts, rewards and a policy that fit together.

    Args:
        name: name of the world.
        tasks: names of its tasks.
        forms: names of the forms of its scores.
        prompts: makes the prompts of (task, "train" or "heldout").
        parse: makes a prompt from a text.
        reward: makes the reward of a form for single samples, which evaluations use.
        policy: makes the policy.
        qualities: makers of rewards by name, which are only measured and never trained on.
        elements: numbers in a latent; 0 for a model, whose methods have their published clip.
    """

    name: str
    tasks: tuple[str, ...]
    forms: tuple[str, ...]
    prompts: Callable[[str, str], list[Prompt]]
    parse: Callable[[str], Prompt]
    reward: Callable[[str], RewardModel]
    policy: Callable[[PolicyOptions], FlowPolicy]
    qualities: Mapping[str, Callable[[], RewardModel]] = field(default_factory=dict)
    elements: int = 0


def weights_path() -> Path:
    """The base weights of the shapes world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / "shapes.safetensors"))


def check_hash(path: Path) -> None:
    """Raise `CheckpointError` unless `path` exists and matches the hash in its weight card, the JSON file of the same name."""
    card = path.with_suffix(".json")
    for needed in (path, card):
        if not needed.is_file():
            raise CheckpointError(f"base_weights: {needed} does not exist; make it with `flowrl pretrain --out {path}`")
    expected = read_json(card, dict[str, Any], CheckpointError).get("sha256")
    if not isinstance(expected, str):
        raise CheckpointError(f"weights: {card} is not a weight card with an entry 'sha256'")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise CheckpointError(
            f"weights: {path} has SHA-256 {found[:16]}..., its card {card} has {expected[:16]}...; one of them is damaged or "
            f"foreign; make it again with `flowrl pretrain --out {path}`"
        )


def _shapes_policy(options: PolicyOptions) -> FlowPolicy:
    path = Path(options.base_weights) if options.base_weights else weights_path()
    check_hash(path)
    network = SmallSD3(SmallSD3Config(len(scene.VOCABULARY), scene.MAX_WORDS, grid=scene.GRID))
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"weights: {path} does not contain the shapes world's model: {str(error)[:200]}") from error
    dtype = getattr(torch, options.dtype)
    return SmallSD3Policy(network, scene.tokenise, options.lora_rank, options.lora_alpha, options.seed, options.device, dtype)


def _mixture_policy(options: PolicyOptions) -> FlowPolicy:
    return MixturePolicy(mixture_world.ring(), mixture_world.angle_of, seed=options.seed, device=options.device)


WORLDS: dict[str, World] = {
    "shapes": World(
        "shapes",
        scene.TASKS,
        verifier.FORMS,
        lambda task, part: [request.prompt() for request in scene.split(task)[part]],
        lambda text: scene.parse(text).prompt(),
        verifier.ShapesReward,
        _shapes_policy,
        {name: partial(ShapesQuality, name) for name in QUALITIES},
        SmallSD3Config.channels * scene.GRID**2,
    ),
    "mixture": World(
        "mixture",
        mixture_world.TASKS,
        mixture_world.FORMS,
        lambda task, part: mixture_world.split(task)[part],
        lambda text: Prompt(text, {"angle": mixture_world.angle_of(text)}),
        mixture_world.DirectionReward,
        _mixture_policy,
        {"density": mixture_world.DensityReward},
        2,
    ),
}
"""The built-in worlds by name."""


def world(name: str) -> World:
    """A built-in world. Raises `ConfigError` for an unknown name."""
    if name not in WORLDS:
        raise ConfigError(f"unknown world {name!r}; allowed: {', '.join(WORLDS)}")
    return WORLDS[name]


def model_world(model: str, prompts: str, heldout_prompts: str, reward: str, options: ModelOptions) -> World:
    """The world of a run that trains a diffusers pipeline.

    Its only task is "prompts", its only form of the reward "reward". The prompt files are read immediately. Reward and policy
    are loaded at first use.

    Args:
        model: folder of the pipeline, or its name on the Hub (see `load_policy`).
        prompts: file of the training prompts.
        heldout_prompts: file of the held-out prompts; empty for the training prompts.
        reward: spec of the reward.
        options: options of the policy.

    Returns:
        The world.

    Raises:
        ConfigError: `prompts` or `reward` is empty, or a file of prompts cannot be read.
    """
    allowed = "a text file with a prompt per line, or a dataset (--prompts FILE or hf:NAME)"
    require(bool(prompts), "prompts", prompts, allowed)
    require(bool(reward), "reward", reward, "NAME of a reward or path/to/file.py:Class: a model has none of its own")
    training = prompts_from(prompts)
    heldout = prompts_from(heldout_prompts) if heldout_prompts else training

    def make_policy(chosen: PolicyOptions) -> FlowPolicy:
        shared = {name: getattr(chosen, name) for name in ("lora_rank", "lora_alpha", "seed", "device", "dtype")}
        return load_policy(model, replace(options, **shared))

    return World(
        "model",
        ("prompts",),
        ("reward",),
        lambda task, part: list(heldout if part == "heldout" else training),
        Prompt,
        cache(lambda form: evaluation_reward(build("reward", reward, device=options.device))),
        make_policy,
    )
