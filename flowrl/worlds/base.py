"""Worlds: prompts, rewards and a policy that fit together; built-in ones by name, a user's, and a
diffusers model as a world.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.protocols import FlowPolicy, PolicyOptions, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.parts.prompts import prompts_from
from flowrl.parts.registry import build, check_part
from flowrl.parts.specs import parse_spec
from flowrl.policies.load import load_policy
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.pipeline import ModelOptions
from flowrl.policies.small_sd3 import SmallSD3, SmallSD3Config, SmallSD3Policy
from flowrl.reading import read_json
from flowrl.rewards import evaluation_reward
from flowrl.worlds import mixture, scene, verifier
from flowrl.worlds.verifier import QUALITIES, ShapesQuality


def weights_path() -> Path:
    """The base weights of the shapes world that ship with the package."""
    return Path(str(resources.files("flowrl") / "data" / "shapes.safetensors"))


def check_hash(path: Path) -> None:
    """Raise `CheckpointError` unless `path` exists and matches the hash in its weight card, the
    JSON file of the same name.
    """
    card = path.with_suffix(".json")
    for needed in (path, card):
        if not needed.is_file():
            raise CheckpointError(
                f"base_weights: {needed} does not exist; make it with `flowrl pretrain --out"
                f" {path}`"
            )
    expected = read_json(card, dict[str, Any], CheckpointError).get("sha256")
    if not isinstance(expected, str):
        raise CheckpointError(f"weights: {card} is not a weight card with an entry 'sha256'")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise CheckpointError(
            f"weights: {path} has SHA-256 {found[:16]}..., its card {card} has {expected[:16]}...;"
            f" one of them is damaged or foreign; make it again with `flowrl pretrain --out {path}`"
        )


class ShapesWorld:
    """Text to image: scenes of coloured shapes and letters on a 4x4 lattice, 64 x 64 pixels, scored
    by a verifier.
    """

    name = "shapes"
    tasks = scene.TASKS
    forms = verifier.FORMS
    elements = SmallSD3Config.channels * scene.GRID**2
    imports = ("diffusers.models.transformers.transformer_sd3", "peft")
    qualities: Mapping[str, Callable[[], RewardModel]] = {
        name: partial(ShapesQuality, name) for name in QUALITIES
    }

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Training or held-out requests, in words."""
        return [request.prompt() for request in scene.split(task)[part]]

    def parse(self, text: str) -> Prompt:
        """A request in words. Raises `ConfigError` for other words."""
        return scene.parse(text).prompt()

    def reward(self, form: str) -> RewardModel:
        """The verifier's score."""
        return verifier.ShapesReward(form)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The small SD3 with the shipped weights and a LoRA. Raises `CheckpointError` for missing
        or damaged weights.
        """
        path = Path(options.base_weights) if options.base_weights else weights_path()
        check_hash(path)
        network = SmallSD3(SmallSD3Config(len(scene.VOCABULARY), scene.MAX_WORDS, grid=scene.GRID))
        try:
            network.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"weights: {path} does not contain the shapes world's model: {str(error)[:200]}"
            ) from error
        dtype = getattr(torch, options.dtype)
        return SmallSD3Policy(
            network,
            scene.tokenise,
            options.lora_rank,
            options.lora_alpha,
            options.seed,
            options.device,
            dtype,
        )


class MixtureWorld:
    """Two dimensions: eight modes on a circle, prompts that name a direction, rewards in closed
    form.
    """

    name = "mixture"
    tasks = mixture.TASKS
    forms = mixture.FORMS
    elements = 2
    points = True
    qualities: Mapping[str, Callable[[], RewardModel]] = {"density": mixture.DensityReward}

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Training or held-out directions, in words."""
        return mixture.split(task)[part]

    def parse(self, text: str) -> Prompt:
        """A direction in words. Raises `ConfigError` for other words."""
        return Prompt(text, {"angle": mixture.angle_of(text)})

    def reward(self, form: str) -> RewardModel:
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
    immediately. Reward and policy are loaded at first use.

    Args:
        model: folder of the pipeline, or its name on the Hub (see `load_policy`).
        prompts: file of the training prompts.
        heldout_prompts: file of the held-out prompts; empty for the training prompts.
        reward: spec of the reward.
        options: options of the policy.

    Raises:
        ConfigError: `prompts` or `reward` is empty, or a file of prompts cannot be read.
    """

    name = "model"
    tasks = ("prompts",)
    forms = ("reward",)
    elements = 0

    def __init__(
        self, model: str, prompts: str, heldout_prompts: str, reward: str, options: ModelOptions
    ) -> None:
        allowed = "a text file with a prompt per line (--prompts FILE), or hf(name=NAME)"
        require(bool(prompts), "prompts", prompts, allowed)
        require(
            bool(reward),
            "reward",
            reward,
            "NAME of a reward or path/to/file.py:Class: a model has none of its own",
        )
        self._model, self._spec, self._options = model, reward, options
        self._training = prompts_from(prompts)
        self._heldout = prompts_from(heldout_prompts) if heldout_prompts else self._training
        self._reward: RewardModel | None = None

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """The prompts of the training or the held-out file."""
        return list(self._heldout if part == "heldout" else self._training)

    def parse(self, text: str) -> Prompt:
        """Any text."""
        return Prompt(text)

    def reward(self, form: str) -> RewardModel:
        """The reward of the run, loaded once."""
        if self._reward is None:
            self._reward = evaluation_reward(
                build("reward", self._spec, device=self._options.device)
            )
        return self._reward

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The pipeline's transformer, as a policy."""
        shared = {
            name: getattr(options, name)
            for name in ("lora_rank", "lora_alpha", "seed", "device", "dtype")
        }
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
    if file is None or not file.is_file():
        return _built(named, None, 0)
    return _built(named, file.resolve(), file.stat().st_mtime_ns)


@cache
def _built(spec: str, file: Path | None, changed: int) -> World:
    return _checked(build("world", spec))


def _checked(found: World) -> World:
    """The world. Raises `ConfigError` for a member of another type than `World` says."""
    label = type(found).__name__
    require(
        isinstance(found.name, str) and bool(found.name),
        f"world: {label}.name",
        found.name,
        "a text",
    )
    for member in ("tasks", "forms"):
        names = getattr(found, member)
        fits = (
            isinstance(names, list | tuple)
            and len(names) > 0
            and all(isinstance(name, str) and name for name in names)
        )
        require(
            fits,
            f"world: {label}.{member}",
            names,
            "a tuple of one or more names, as in ('direction',)",
        )
    whole = (
        isinstance(found.elements, int)
        and not isinstance(found.elements, bool)
        and found.elements >= 0
    )
    require(
        whole,
        f"world: {label}.elements",
        found.elements,
        "the count of numbers in a latent, or 0 for unscaled clips",
    )
    for member in ("defaults", "qualities"):
        given = getattr(found, member, {})
        fits = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        require(fits, f"world: {label}.{member}", given, "a mapping by name")
    return found


def check_policy(found: World, policy: FlowPolicy) -> None:
    """Check that the policy of a world is a policy and has latents of `World.elements` numbers.

    Args:
        found: the world.
        policy: what its method `policy` has returned.

    Raises:
        ConfigError: it does not fit.
    """
    missing = [name for name in POLICY if not hasattr(policy, name)]
    if missing:
        what = f"policy(options) has returned a {type(policy).__name__}, which is not a policy"
        raise ConfigError(
            f"world {found.name}: {what}: it has no {', '.join(f'`{name}`' for name in missing)}"
        )
    shape, wanted = policy.latent_shape, found.elements
    fits = not wanted or math.prod(shape) == wanted
    require(
        fits,
        f"elements of world {found.name}",
        wanted,
        f"{math.prod(shape)}, for the policy's latents of shape {shape}",
    )


POLICY = (
    "device",
    "latent_shape",
    "schedule",
    "encode",
    "velocity",
    "decode",
    "trainable",
    "reference",
    "frozen",
)
"""The members of a `FlowPolicy`."""


def prompts_of(found: World, task: str, part: str) -> list[Prompt]:
    """The prompts of a task. Raises `ConfigError` unless there are one or more."""
    prompts = list(found.prompts(task, part))
    need = "one or more flowrl.Prompt"
    wrong = next((prompt for prompt in prompts if not isinstance(prompt, Prompt)), None)
    require(
        len(prompts) > 0 and wrong is None,
        f"{part} prompts of world {found.name}",
        wrong or prompts,
        need,
    )
    return prompts
