"""Worlds: prompts, rewards and a policy that fit together; built-in ones by name, a user's, and a
diffusers model as a world.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load

from flowrl.core.errors import CheckpointError, require
from flowrl.core.options import Whole
from flowrl.core.protocols import FlowPolicy, PolicyOptions, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.distributed import Distributed
from flowrl.parts.prompts import read_prompts
from flowrl.parts.registry import build, check_part
from flowrl.parts.specs import parse_spec
from flowrl.policies.load import load_policy
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.pipeline import ModelOptions
from flowrl.policies.small_sd3 import CHANNELS, SmallSD3, SmallSD3Policy
from flowrl.reading import read_bytes, read_json, reading
from flowrl.rewards import evaluation_reward
from flowrl.worlds import mixture, scene, verifier


def weights_path() -> Path:
    """The base weights of the shapes world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / "shapes.safetensors"))


def check_hash(path: Path) -> None:
    """Raise `CheckpointError` unless `path` exists and matches the hash in its weight card, the
    JSON file of the same name.
    """
    card = path.with_suffix(".json")
    is_known = path.is_file() and card.is_file()
    if is_known:
        expected = read_json(card, dict[str, Any], CheckpointError).get("sha256")
        is_known = hashlib.sha256(read_bytes(path)).hexdigest() == expected
    if not is_known:
        raise CheckpointError(
            f"base_weights: {path} needs a card {card} with its 'sha256'; one of them is missing or"
            f" damaged, or they do not match; make both with `flowrl pretrain --out {path}`"
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
        return mixture.split(task)[part]

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


class ModelWorld:
    """The world of a run that trains a diffusers pipeline.

    Its only task is "prompts", its only form of the reward "reward". The prompt files are read
    immediately, by the main process. Reward and policy are loaded at first use.

    Args:
        model: folder of the pipeline, or its name on the Hub (see `load_policy`).
        prompts: file of the training prompts.
        heldout_prompts: file of the held-out prompts; empty for the training prompts.
        reward: spec of the reward.
        options: options of the policy.
        reward_device: device of the reward's network; empty: the policy's.
        distributed: the processes.

    Raises:
        ConfigError: `prompts` or `reward` is empty, or a file of prompts cannot be read.
    """

    name = "model"
    tasks = ("prompts",)
    forms = ("reward",)
    elements = 0

    def __init__(
        self,
        model: str,
        prompts: str,
        heldout_prompts: str,
        reward: str,
        options: ModelOptions,
        reward_device: str = "",
        distributed: Distributed = Distributed(),
    ) -> None:
        require(bool(prompts), "prompts", prompts, "a prompt file, or hf(name=NAME)")
        allowed = "NAME of a reward or path/to/file.py:Class: a model has none of its own"
        require(bool(reward), "reward", reward, allowed)
        self._model, self._spec, self._options = model, reward, options
        self._device = reward_device or options.device
        files = "a file or a list: a resumed run reads the prompts again"
        require("-" not in (prompts, heldout_prompts), "prompts", "-", files)
        self._training = distributed.in_main(lambda: read_prompts(prompts))
        self._heldout = self._training
        if heldout_prompts:
            self._heldout = distributed.in_main(lambda: read_prompts(heldout_prompts))

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """The prompts of the training or the held-out file."""
        return list(self._heldout if part == "heldout" else self._training)

    def parse(self, text: str) -> Prompt:
        """Any text."""
        return Prompt(text)

    def reward(self, form: str) -> RewardModel:
        """The reward of the run, loaded once."""
        return self._reward

    @cached_property
    def _reward(self) -> RewardModel:
        reward = build("reward", self._spec, device=self._device)
        return evaluation_reward(reward)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The pipeline's transformer, as a policy."""
        names = ("lora_rank", "lora_alpha", "seed", "device", "dtype")
        shared = {name: getattr(options, name) for name in names}
        return load_policy(self._model, replace(self._options, **shared))


def world(named: str | World) -> World:
    """A world by name, from a plug-in or a user's file, or given as an object; files are loaded
    again after a change only.

    Args:
        named: NAME, NAME(option=value) or path/to/file.py:Class; or the world itself.

    Returns:
        The world.

    Raises:
        ConfigError: the name is unknown, the file cannot be loaded, or a member of the world is
            missing or of another type.
    """
    if not isinstance(named, str):
        check_part("world", named)
        return _checked(named)
    file = parse_spec(named, "world").file
    changed = file.stat().st_mtime_ns if file and file.is_file() else 0
    return _built(named, file and file.resolve(), changed)


@cache
def _built(spec: str, file: Path | None, changed: int) -> World:
    """The world of a spec; a file is loaded again after a change."""
    return _checked(build("world", spec))


class _Members(BaseModel):
    """The types of a world's attributes."""

    model_config = ConfigDict(from_attributes=True, strict=True)

    name: Annotated[str, MinLen(1)]
    tasks: Annotated[Sequence[str], MinLen(1)]
    forms: Annotated[Sequence[str], MinLen(1)]
    elements: Whole
    defaults: Mapping[str, Any] = {}
    qualities: Mapping[str, Any] = {}


def _checked(chosen: World) -> World:
    """The world. Raises `ConfigError` for a member of another type than `World` says."""
    with reading(f"world: {type(chosen).__name__}"):
        _Members.model_validate(chosen)
    return chosen


def check_policy(chosen: World, policy: Any) -> None:
    """Check that the policy of a world is a policy and has latents of `World.elements` numbers.

    Args:
        chosen: the world.
        policy: what its method `policy` has returned.

    Raises:
        ConfigError: it does not fit.
    """
    kind, shape = type(policy).__name__, getattr(policy, "latent_shape", ())
    is_policy = isinstance(policy, FlowPolicy)
    require(is_policy, f"policy of world {chosen.name}", kind, "a flowrl.core.protocols.FlowPolicy")
    fits = chosen.elements in (0, math.prod(shape))
    allowed = f"{math.prod(shape)}, for the policy's latents of shape {shape}"
    require(fits, f"elements of world {chosen.name}", chosen.elements, allowed)


def prompts_of(chosen: World, task: str, part: str) -> list[Prompt]:
    """The prompts of a task. Raises `ConfigError` unless there are one or more."""
    prompts = list(chosen.prompts(task, part))
    fits = prompts and all(isinstance(prompt, Prompt) for prompt in prompts)
    require(bool(fits), f"{part} prompts of world {chosen.name}", prompts, "flowrl.Prompts")
    return prompts
