"""Final images estimated from unfinished states after the trajectories are complete."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.protocols import FlowPolicy, Sampler
from flowrl.rollout.solvers import Usage
from flowrl.types import Condition, Gaussian, Schedule, Trajectories


@dataclass(frozen=True)
class Walkers:
    """Settings of `continued`: policy, sampler, a schedule with stds, how the next node is drawn, counters."""

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    draw: Callable[[Gaussian], Tensor]
    usage: Usage
    max_batch: int = 1024


def continued(walkers: Walkers, nodes: Tensor, start: int, condition: Condition, count: int) -> Tensor:
    """Final latents of `count` independent continuations from each of `nodes` [sample, *latent] at node `start`.

    Returns [sample x count, *latent], those of one sample in a row; `condition` has one row per sample. `count` (T - `start`)
    network evaluations per sample. Gradients as the caller has them switched; float32.
    """
    x, rows = nodes.repeat_interleave(count, dim=0), condition.repeat(count)
    schedule = walkers.schedule
    for i in range(start, schedule.steps):
        timestep = schedule.network_timesteps[i].expand(len(x))
        velocity = walkers.usage.velocity(walkers.policy, x, timestep, rows, walkers.max_batch)
        gaussian = walkers.sampler.transition(x, velocity, schedule, torch.full((len(x),), i, device=x.device))
        x = walkers.draw(gaussian) if i in schedule.decisions else gaussian.mean
    return x


def substeps(
    policy: FlowPolicy, trajectories: Trajectories, condition: Condition, count: int, usage: Usage, max_batch: int
) -> dict[int, Tensor]:
    """Euler on an even grid over [t_j, 0] for all nodes j < T at once; the first velocity is the rollout's own.

    `condition` has one row per prompt; the result has one row per distinct state of a node.
    """
    schedule, tree = trajectories.schedule, trajectories.tree
    counts = [n * len(trajectories.states) for n in tree.counts[:-1]]
    units = [tree.at(node) for node in range(schedule.steps)]
    conditions = Condition.cat([condition.repeat(n) for n in tree.counts[:-1]])
    x = torch.cat([trajectories.states[:, at].flatten(0, 1) for at in units])
    velocity = torch.cat([trajectories.outputs[:, at].flatten(0, 1) for at in units])
    start = torch.cat([time.expand(n) for time, n in zip(schedule.times[:-1], counts, strict=True)])
    length = (start / count).view(-1, *(1,) * (x.ndim - 1))
    for k in range(count):
        if k > 0:
            timestep = 1000.0 * start * (1 - k / count)
            velocity = usage.velocity(policy, x, timestep, conditions, max_batch)
        x = x - length * velocity
    return dict(enumerate(x.split(counts)))
