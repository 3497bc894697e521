"""The built-in worlds by name: prompts, rewards and a policy that fit together."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path

import torch

from flowrl.errors import CheckpointError, ConfigError
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.types import Prompt
from flowrl.worlds import mixture as mixture_world
from flowrl.worlds.shapes import scene, verifier
from flowrl.worlds.shapes.verifier import QUALITIES, ShapesQuality


@dataclass(frozen=True)
class PolicyOptions:
    """How a world's policy is built. `lora_rank` and `lora_alpha` are LoRA's (arXiv 2106.09685); `base_weights`
    replaces the shipped file."""

    lora_rank: int = 8
    lora_alpha: float = 16.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    base_weights: str = ""


@dataclass(frozen=True)
class World:
    """A world: its tasks, the forms of its scores, and makers of prompts ("train" or "heldout"), rewards and policies.

    `qualities` are rewards that nobody trains on, by name, for measuring beside the reward.
    """

    name: str
    tasks: tuple[str, ...]
    forms: tuple[str, ...]
    prompts: Callable[[str, str], list[Prompt]]
    parse: Callable[[str], Prompt]
    reward: Callable[[str], RewardModel]
    policy: Callable[[PolicyOptions], FlowPolicy]
    qualities: Mapping[str, Callable[[], RewardModel]] = field(default_factory=dict)


def weights_path() -> Path:
    """The base weights of the shapes world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / "shapes.safetensors"))


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_hash(path: Path) -> None:
    """Raise `CheckpointError` unless `path` exists and matches the hash in the JSON file beside it."""
    card = path.with_suffix(".json")
    for needed in (path, card):
        if not needed.is_file():
            raise CheckpointError(f"weights: {needed} does not exist; make it with `flowrl pretrain --out {path}`")
    try:
        expected = json.loads(card.read_text())["sha256"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"weights: {card} is not a weight card with an entry 'sha256'") from error
    found = file_hash(path)
    if found != expected:
        raise CheckpointError(
            f"weights: {path} has SHA-256 {found[:16]}..., its card says {expected[:16]}...; the file is damaged or foreign; "
            f"remake it with `flowrl pretrain --out {path}`"
        )


def _shapes_policy(options: PolicyOptions) -> FlowPolicy:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from flowrl.policies.small_sd3 import SmallSD3, SmallSD3Config, SmallSD3Policy

    path = Path(options.base_weights) if options.base_weights else weights_path()
    check_hash(path)
    network = SmallSD3(SmallSD3Config(len(scene.VOCABULARY), scene.MAX_WORDS, grid=scene.GRID))
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"weights: {path} does not hold the shapes world's model: {str(error)[:200]}") from error
    dtype = getattr(torch, options.dtype)
    return SmallSD3Policy(network, scene.tokenise, options.lora_rank, options.lora_alpha, options.seed, options.device, dtype)


def _mixture_policy(options: PolicyOptions) -> FlowPolicy:
    from flowrl.policies.mixture import MixturePolicy

    return MixturePolicy(mixture_world.ring(), mixture_world.angle_of, seed=options.seed, device=options.device)


def _mixture_prompt(text: str) -> Prompt:
    return Prompt(text, {"angle": mixture_world.angle_of(text)})


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
    ),
    "mixture": World(
        "mixture",
        mixture_world.TASKS,
        mixture_world.FORMS,
        lambda task, part: mixture_world.split(task)[part],
        _mixture_prompt,
        mixture_world.DirectionReward,
        _mixture_policy,
        {"density": mixture_world.DensityReward},
    ),
}


def world(name: str) -> World:
    """A built-in world. Raises `ConfigError` for an unknown name."""
    if name not in WORLDS:
        raise ConfigError(f"unknown world {name!r}; allowed: {', '.join(WORLDS)}")
    return WORLDS[name]
