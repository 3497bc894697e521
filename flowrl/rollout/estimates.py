"""Stochastic continuations of unfinished states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.protocols import FlowPolicy, Sampler
from flowrl.core.types import Condition, Gaussian, Schedule
from flowrl.rollout.solvers import Usage


@dataclass(frozen=True)
class Walkers:
    """Settings of `continued`.

    Args:
        policy: the policy that computes velocities.
        sampler: the sampler of the continuations.
        schedule: the time grid.
        stochastic: whether the sampler draws at each step.
        draw: draws the next node.
        usage: counters of network evaluations, which are updated.
        max_batch: largest number of latents per network call.
    """

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    stochastic: Sequence[bool]
    draw: Callable[[Gaussian], Tensor]
    usage: Usage
    max_batch: int = 1024


def continued(
    walkers: Walkers, nodes: Tensor, start: int, condition: Condition, count: int
) -> Tensor:
    """Final latents of `count` independent continuations from each of `nodes`.

    Takes `count` (T - `start`) network evaluations per sample. Gradients are computed if they are
    enabled in the caller.

    Args:
        walkers: policy, sampler, schedule, draws and counters.
        nodes: latents [sample, *latent] at node `start`.
        start: index of the node.
        condition: the prompts' embeddings, one row per sample.
        count: continuations per sample.

    Returns:
        Latents [sample x count, *latent], float32; continuations of one sample are adjacent.
    """
    x, rows = nodes.repeat_interleave(count, dim=0), condition.repeat(count)
    schedule, drawn = walkers.schedule, walkers.stochastic
    for i in range(start, schedule.steps):
        timestep = schedule.network_timesteps[i].expand(len(x))
        velocity = walkers.usage.velocity(walkers.policy, x, timestep, rows, walkers.max_batch)
        gaussian = walkers.sampler.transition(
            x, velocity, schedule, torch.full((len(x),), i, device=x.device)
        )
        x = walkers.draw(gaussian) if drawn[i] else gaussian.mean
    return x
