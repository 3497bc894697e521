"""The steps of a sampler from noise to images, with counted network calls, and their result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.protocols import FlowPolicy, Sampler
from flowrl.core.types import Condition, Edges, Gaussian, Paths, Schedule, Trajectories, to_device
from flowrl.probes import Estimates, NoProbe, Probe
from flowrl.rollout.groups import Groups


@dataclass
class Usage:
    """Costs of one iteration.

    Args:
        nfe: network evaluations, one per latent; a fraction for calls that compute less.
        probe_nfe: those of `nfe` that a probe adds to the trajectories.
        calls: sequential network calls; a call that is split to respect `max_batch` counts once.
        decodes: decoded latents.
        reward_calls: scored images.
    """

    nfe: float = 0
    probe_nfe: float = 0
    calls: int = 0
    decodes: int = 0
    reward_calls: int = 0

    def velocity(
        self,
        policy: FlowPolicy,
        latent: Tensor,
        timestep: Tensor,
        condition: Condition,
        max_batch: int,
        share: float = 1,
    ) -> Tensor:
        """`policy.velocity` in chunks of at most `max_batch`, counted as `share` of an evaluation
        per latent.
        """
        self.nfe += len(latent) * share
        self.calls += 1
        if len(latent) <= max_batch:
            return policy.velocity(latent, timestep, condition)
        rows = torch.arange(len(latent), device=latent.device).split(max_batch)
        return torch.cat([policy.velocity(latent[r], timestep[r], condition.take(r)) for r in rows])


@dataclass(frozen=True)
class Rollout:
    """Trajectories and estimates.

    Args:
        trajectories: the trajectories.
        groups: sizes of the groups.
        condition: the prompts' embeddings, one row per prompt.
        estimates: the probe's estimates of final latents.
        probe: the probe.
        nodes: the nodes that the probe was to estimate (`flowrl.probes.Probing`).
        features: those of a `ValueProbe` at these nodes [prompt, member, node, feature].
    """

    trajectories: Trajectories
    groups: Groups
    condition: Condition
    estimates: Estimates = field(default_factory=dict)
    probe: Probe = NoProbe()
    nodes: Sequence[int] = ()
    features: Tensor | None = None

    @property
    def samples(self) -> slice:
        """Its samples among those of all groups."""
        first = self.groups.first * self.groups.members
        return slice(first, first + self.groups.samples)

    def part(self, first: int, count: int) -> "Rollout":
        """`count` of its groups, from index `first` on."""
        chosen, path, prompts = slice(first, first + count), self.trajectories, self.groups.prompts
        return replace(
            self,
            trajectories=replace(path, states=path.states[chosen], outputs=path.outputs[chosen]),
            estimates={
                key: rows.unflatten(0, (prompts, -1))[chosen].flatten(0, 1)
                for key, rows in self.estimates.items()
            },
            groups=self.groups.part(first, count),
            condition=self.condition.take(chosen),
            features=None if self.features is None else self.features[chosen],
        )


@dataclass(frozen=True)
class Walk:
    """The steps of a sampler from given states, in batches of all groups.

    Args:
        policy: the policy that computes velocities.
        sampler: the sampler.
        schedule: the time grid.
        stds: standard deviations of the sampler's transitions, in main memory [step].
        condition: the prompts' embeddings, one row per prompt.
        groups: sizes of the groups.
        generator: the source of the draws.
        usage: counters of network evaluations, which are updated.
        max_batch: largest number of latents per network call.
    """

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    stds: Tensor
    condition: Condition
    groups: Groups
    generator: torch.Generator
    usage: Usage
    max_batch: int = 1024

    @cached_property
    def stochastic(self) -> list[bool]:
        """Whether the sampler draws at each step."""
        return (self.stds > 0).tolist()

    def conditions(self, latents: Tensor) -> Condition:
        """The condition of each of `latents`, equally many for every prompt."""
        return self.condition.repeat(len(latents) // self.groups.prompts)

    def velocity(
        self, latents: Tensor, timestep: Tensor, condition: Condition, share: float = 1
    ) -> Tensor:
        """The network's output, counted as `share` of an evaluation per latent."""
        return self.usage.velocity(self.policy, latents, timestep, condition, self.max_batch, share)

    def run(
        self,
        noise: Tensor,
        tree: Paths,
        ahead: Sequence[int],
        recorder: Any = None,
    ) -> tuple[Trajectories, dict[int, Tensor]]:
        """The trajectories from `noise` [sample, *latent], and the ends of the ODE from the nodes
        in `ahead`. `recorder` keeps the trajectories' hidden states.

        One batched call per step, for all states of a node and all ODE solutions that have begun.
        """
        schedule, prompts, shape = self.schedule, self.groups.prompts, noise.shape[1:]
        edges_from, _ = tree.edges, self.stochastic  # computed before the device is busy
        states = noise.new_empty(prompts, tree.units, *shape, dtype=torch.float32)
        outputs = torch.empty_like(states[:, : tree.at(schedule.steps).start])
        members = noise.float().unflatten(0, (prompts, -1)).unbind(1)
        for member in reversed(range(tree.members)):  # the first member's noise is its tree's
            states[:, int(tree.paths[member, 0])] = members[member]
        ends: dict[int, Tensor] = {}
        walk = replace(self, policy=recorder) if recorder else self
        for i in range(schedule.steps):
            x = states[:, tree.at(i)]
            parts = [x.flatten(0, 1), *ends.values()]
            conditions = Condition.cat([self.conditions(part) for part in parts])
            batch = torch.cat(parts)
            timestep = schedule.network_timesteps[i].expand(len(batch))
            velocity, *others = walk.velocity(batch, timestep, conditions).split(
                [len(part) for part in parts]
            )
            if recorder:
                recorder.keep(len(velocity), prompts)
            if i in ahead:
                ends[i], others = parts[0], [*others, velocity]
            for node, other in zip(ends, others, strict=True):
                ends[node] = ends[node] - schedule.deltas[i] * other
            outputs[:, tree.at(i)] = velocity = velocity.view_as(x)
            for edges in edges_from[i]:
                following = self._following(x, velocity, i, edges)
                states[:, to_device(edges.units, x.device)] = following.unflatten(0, (prompts, -1))
        return Trajectories(states, outputs, schedule, tree, self.stds), ends

    def _following(self, x: Tensor, velocity: Tensor, step: int, edges: Edges) -> Tensor:
        """The states [prompt x edge, *latent] to which `edges` lead from the states x [prompt,
        unit, *latent]: a draw from the sampler, its deterministic step, or an ODE step.
        """
        parents = to_device(edges.parents, x.device)
        x, velocity = x[:, parents].flatten(0, 1), velocity[:, parents].flatten(0, 1)
        if edges.drawn or (edges.node == step + 1 and not self.stochastic[step]):
            gaussian = self.transition(x, velocity, step)
        else:  # it may skip nodes
            length = self.schedule.times[edges.node] - self.schedule.times[step]
            gaussian = Gaussian(x + length * velocity, x.new_zeros(len(x)))
        return self.groups.draw(gaussian, self.generator) if edges.drawn else gaussian.mean

    def transition(self, latents: Tensor, velocity: Tensor, step: int) -> Gaussian:
        """The sampler's distribution over node `step` + 1."""
        index = torch.full((len(latents),), step, device=latents.device)
        return self.sampler.transition(latents, velocity, self.schedule, index)

    def continued(
        self, nodes: Tensor, start: int, count: int, generator: torch.Generator
    ) -> Tensor:
        """Final latents of `count` independent continuations from each of `nodes`, which are
        adjacent: [sample x count, *latent], float32.

        Takes `count` (T - `start`) network evaluations per sample. Gradients are computed if they
        are enabled in the caller.

        Args:
            nodes: latents [sample, *latent] at node `start`, equally many for every prompt.
            start: index of the node.
            count: continuations per sample.
            generator: the source of their draws.

        Returns:
            The latents.
        """
        x = nodes.repeat_interleave(count, dim=0)
        conditions = self.conditions(x)
        for i in range(start, self.schedule.steps):
            timestep = self.schedule.network_timesteps[i].expand(len(x))
            gaussian = self.transition(x, self.velocity(x, timestep, conditions), i)
            x = self.groups.draw(gaussian, generator) if self.stochastic[i] else gaussian.mean
        return x
