"""Pictures for prompts, from the base model or a finished run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.builtin import PolicyOptions, world
from flowrl.rollout import Usage, integrate, score
from flowrl.training.trained import trained_policy


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
