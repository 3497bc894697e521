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
from flowrl.worlds import mixture, scene, verifier


def weights_path() -> Path:
    """The base weights of the shapes world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / "shapes.safetensors"))


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
        path = Path(options.base_weights) if options.base_weights else weights_path()
        check_hash(path)
        network = SmallSD3(len(scene.VOCABULARY), scene.MAX_WORDS)
        with reading(f"weights of the shapes world: {path}", CheckpointError):
            network.load_state_dict(load(read_bytes(path)))
        return SmallSD3Policy(
            network,
            scene.tokenise,
            options.lora_rank,
            options.lora_alpha,
            options.seed,
            options.device,
            getattr(torch, options.dtype),
        )


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
