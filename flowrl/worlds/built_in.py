"""Worlds: prompts, rewards and a policy that fit together; built-in ones by name, a user's, and a
diffusers model as a world.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load

from flowrl.core.errors import CheckpointError
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.protocols import FlowPolicy, RewardModel
from flowrl.core.types import Prompt
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.small_sd3 import CHANNELS, SmallSD3, SmallSD3Policy
from flowrl.run.reading import read_bytes, reading
from flowrl.run.worlds import check_hash
from flowrl.worlds import edits, mixture, scene, verifier


def weights_path(world: str = "shapes") -> Path:
    """The base weights of a world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / f"{world}.safetensors"))


def base_network(path: Path, edits: bool = False) -> SmallSD3:
    """The small SD3 with base weights of a file. Raises `CheckpointError` if they are missing or
    damaged.
    """
    check_hash(path)
    network = SmallSD3(len(scene.VOCABULARY), scene.MAX_WORDS, edits=edits)
    with reading(f"base weights: {path}", CheckpointError):
        network.load_state_dict(load(read_bytes(path)))
    return network


def _small_policy(
    world: str, tokenise: Callable[[str], list[int]], options: PolicyOptions
) -> SmallSD3Policy:
    """The small SD3 of a world with the shipped weights, or those of `base_weights`, and a LoRA."""
    path = Path(options.base_weights) if options.base_weights else weights_path(world)
    return SmallSD3Policy(
        base_network(path, edits=world == "edits"),
        tokenise,
        options.lora_rank,
        options.lora_alpha,
        options.seed,
        options.device,
        getattr(torch, options.dtype),
    )


class ShapesWorld:
    """Text to image: scenes of coloured shapes and letters on a 4x4 lattice, 64 x 64 pixels, scored
    by a verifier.
    """

    name = "shapes"
    tasks = scene.TASKS
    forms = get_args(verifier.Form)
    elements = CHANNELS * scene.GRID**2
    imports = ("diffusers.models.transformers.transformer_sd3", "peft")
    qualities: Mapping[str, Callable[[], RewardModel]] = {
        name: partial(verifier.ShapesQuality, name) for name in get_args(verifier.Quality)
    }

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Training or held-out requests, in words."""
        return [request.prompt() for request in scene.split(task)[part]]

    def parse(self, text: str) -> Prompt:
        """A request in words. Raises `ConfigError` for other words."""
        return scene.parse(text).prompt()

    def reward(self, form: Any) -> RewardModel:
        """The verifier's score."""
        return verifier.ShapesReward(form)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The small SD3 with the shipped weights and a LoRA. Raises `CheckpointError` for missing
        or damaged weights.
        """
        return _small_policy(self.name, scene.tokenise, options)


class EditsWorld:
    """Edits of pictures of the shapes world, such as "make the circle blue": a prompt has a
    reference image, and a verifier compares the result with both.
    """

    name = "edits"
    tasks = edits.TASKS
    forms = get_args(verifier.Form)
    elements = ShapesWorld.elements
    imports = ShapesWorld.imports

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Training or held-out edits, in words, with their pictures."""
        return list(edits.split(task)[part])

    def parse(self, text: str) -> Prompt:
        """An edit in words, with a picture. Raises `ConfigError` for other words."""
        return edits.parse(text)

    def reward(self, form: Any) -> RewardModel:
        """The verifier's score."""
        return edits.EditReward(form)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The small SD3 that reads a reference image, with the shipped weights and a LoRA. Raises
        `CheckpointError` for missing or damaged weights.
        """
        return _small_policy(self.name, edits.tokenise, options)


class MixtureWorld:
    """Two dimensions: eight modes on a circle, prompts that name a direction, rewards in closed
    form.
    """

    name = "mixture"
    tasks = mixture.TASKS
    forms = get_args(mixture.Form)
    elements = 2
    points = True
    reads = ("device", "compile")
    qualities: Mapping[str, Callable[[], RewardModel]] = {"density": mixture.DensityReward}

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Training or held-out directions, in words."""
        return list(mixture.split(task)[part])

    def parse(self, text: str) -> Prompt:
        """A direction in words. Raises `ConfigError` for other words."""
        return Prompt(text, {"angle": mixture.angle_of(text)})

    def reward(self, form: Any) -> RewardModel:
        """Closeness to the direction's target."""
        return mixture.DirectionReward(form)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The exact velocity plus a small network."""
        return MixturePolicy(
            mixture.ring(), mixture.angle_of, seed=options.seed, device=options.device
        )
