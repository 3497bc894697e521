"""The policy that a finished run left behind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flowrl.errors import CheckpointError
from flowrl.protocols import FlowPolicy
from flowrl.rollout import Usage, integrate, score
from flowrl.training.config import RunConfig, load_config
from flowrl.worlds.base import PolicyOptions, world


def trained_policy(folder: Path, device: str = "") -> tuple[FlowPolicy, RunConfig]:
    """The policy of a finished run with its averaged weights. Raises `ConfigError` or `CheckpointError`.

    `device` left out: the CPU for a built-in world; for a model the run's own where that exists.
    """
    if not (folder / "weights.safetensors").is_file():
        raise CheckpointError(
            f"weights: {folder / 'weights.safetensors'} does not exist; {folder} must be the folder of a finished run"
        )
    config = RunConfig.from_dict(load_config(folder / "config.json"))
    own = config.device if config.model and torch.cuda.is_available() else "cpu"
    policy = config.make_world().policy(replace(config.policy_options(), device=device or own))
    load_trained(policy, folder)
    return policy, config


def load_trained(policy: FlowPolicy, folder: Path) -> None:
    """Put the averaged weights of the finished run in `folder` into its policy. Raises `CheckpointError`."""
    path = folder / "weights.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights: {path} cannot be read: {error}") from error
    named = policy.trainable()
    if set(named) != set(tensors):
        raise CheckpointError(f"weights: {path} does not hold the weights that {folder / 'config.json'} describes")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])


@dataclass(frozen=True)
class Grid:
    """`images` [prompt, count, channel, height, width], their soft scores [prompt, count], and the prompts' texts."""

    images: Tensor
    scores: Tensor
    prompts: tuple[str, ...]


def sample_grid(prompts: Sequence[str], weights: Path | None, world_name: str, count: int, steps: int, seed: int) -> Grid:
    """`count` ODE samples per prompt; the same seed gives every model the same noise. Unknown words raise `ConfigError`."""
    max_batch = 1024
    if weights is None:
        chosen = world(world_name)
        parsed = [chosen.parse(text) for text in prompts]
        policy = chosen.policy(PolicyOptions())
    else:
        policy, config = trained_policy(weights)
        here = replace(config, device=str(policy.device))  # not that of the training, which may not exist here
        chosen, max_batch = here.make_world(), config.max_batch
        parsed = [chosen.parse(text) for text in prompts]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((len(parsed) * count, *policy.latent_shape), generator=generator).to(policy.device)
    everyone = [prompt for prompt in parsed for _ in range(count)]
    latents = integrate(policy, policy.schedule(steps), policy.encode(everyone), noise, Usage(), max_batch)
    images = policy.decode(latents)
    scores = score(chosen.reward("soft"), images, everyone)
    return Grid(images.cpu().unflatten(0, (len(parsed), count)), scores.cpu().view(len(parsed), count), tuple(prompts))
