"""From prompts and noise to decoded images, batch by batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import FlowPolicy, extras
from flowrl.core.types import Prompt
from flowrl.rollout.solvers import solve
from flowrl.rollout.values import decoded
from flowrl.rollout.walk import Usage

EVALUATION_SEED = 20240
"""Seed of the noise that evaluations share, so that their scores are comparable."""


@dataclass(frozen=True)
class ImageBatch:
    """Decoded samples.

    Args:
        images: images [sample, channel, height, width], or videos [sample, frame, ...].
        latents: the latents [sample, *latent] from which they were decoded.
        prompts: one prompt per sample.
    """

    images: Tensor
    latents: Tensor
    prompts: Sequence[Prompt]

    @staticmethod
    def cat(batches: Iterable["ImageBatch"]) -> "ImageBatch":
        """Concatenate along the samples."""
        listed = list(batches)
        images = torch.cat([batch.images for batch in listed])
        latents = torch.cat([batch.latents for batch in listed])
        return ImageBatch(images, latents, [prompt for batch in listed for prompt in batch.prompts])

    def __getitem__(self, samples: slice) -> "ImageBatch":
        return ImageBatch(self.images[samples], self.latents[samples], self.prompts[samples])


def initial_noise(policy: FlowPolicy, count: int, seed: int = EVALUATION_SEED) -> Tensor:
    """Standard normal z_0, drawn on the CPU so that it does not depend on the device.

    Args:
        policy: the policy; its `latent_shape` is used.
        count: number of samples.
        seed: seed of the draw.

    Returns:
        Noise [sample, *latent], float32, on the CPU.
    """
    return torch.randn((count, *policy.latent_shape), generator=torch.Generator().manual_seed(seed))


def sample_images(
    policy: FlowPolicy,
    prompts: Sequence[Prompt],
    noise: Iterable[Tensor],
    num_steps: int,
    solver: str = "euler",
    max_batch: int = 256,
) -> Iterator[ImageBatch]:
    """Solve the probability-flow ODE from `noise` for every prompt and decode the result.

    A policy with text encoders embeds all prompts before the first batch. Images are on the
    policy's device.

    Args:
        policy: the policy that computes velocities and decodes.
        prompts: one prompt per sample.
        noise: one latent per prompt: a tensor [sample, *latent], or an iterator that draws latents
            when they are needed.
        num_steps: number of steps of the policy's schedule.
        solver: name of the solver (see `solve`).
        max_batch: largest number of samples per batch.

    Yields:
        Batches of images with their latents and prompts, in the order of `prompts`.

    Raises:
        ConfigError: the solver is unknown, `max_batch` is below 1, or there are too few latents.
        TrainingError: a latent or an image is not finite.
    """
    require(max_batch >= 1, "max_batch", max_batch, "1 or more")
    if (embedding := extras(policy, "warm")) is not None:
        embedding.warm(prompts)
    latents, schedule = iter(noise), policy.schedule(num_steps)

    def sampled(batch: Sequence[Prompt]) -> ImageBatch:
        drawn = list(islice(latents, len(batch)))
        require(len(drawn) == len(batch), "noise", len(drawn), f"{len(batch)} more latents")
        start, condition = torch.stack(drawn).to(policy.device), policy.encode(batch)
        final = solve(policy, schedule, condition, start, Usage(), max_batch, solver)
        return ImageBatch(decoded(policy, final, batch), final, batch)

    for first in range(0, len(prompts), max_batch):
        # no variable: it would keep the batch on the device until the next one is sampled
        yield sampled(prompts[first : first + max_batch])
