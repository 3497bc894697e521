"""Trajectories and the final states of their unfinished nodes, in as few network calls as
possible.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.core.calls import part_call
from flowrl.core.errors import ProbeError, require
from flowrl.core.protocols import AnySampler, FlowPolicy, MultistepSolver, Sampler, extras
from flowrl.core.tree import Edges, Tree, plain_tree
from flowrl.core.types import Condition, Gaussian, Prompt, Schedule, Trajectories, to_device
from flowrl.flow.gaussian import log_prob
from flowrl.probes import (
    Branching,
    Estimates,
    Grid,
    NetworkUse,
    NoProbe,
    Probe,
    Probing,
    Solver,
    ValueProbe,
)
from flowrl.rollout.groups import Groups
from flowrl.rollout.solvers import Solution, Usage, advance
from flowrl.samplers import transition_stds


@dataclass(frozen=True)
class Rollout:
    """Trajectories and estimates.

    Args:
        trajectories: the trajectories.
        estimates: the probe's estimates of final latents.
        groups: sizes of the groups.
        probe: the probe.
        nodes: the nodes that the probe was to estimate (`flowrl.probes.Probing`).
        features: those of a `ValueProbe` at these nodes [prompt, member, node, feature].
    """

    trajectories: Trajectories
    estimates: Estimates
    groups: Groups
    probe: Probe = NoProbe()
    nodes: Sequence[int] = ()
    features: Tensor | None = None

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
            features=None if self.features is None else self.features[chosen],
        )


def rollout(
    policy: FlowPolicy,
    sampler: AnySampler,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    generator: torch.Generator,
    groups: Groups,
    probe: Probe = NoProbe(),
    usage: Usage | None = None,
    max_batch: int = 1024,
    columns: Tensor | None = None,
    prompts: Sequence[Prompt] = (),
) -> Rollout:
    """Sample one trajectory per row of `noise`, and estimate final images from the states at which
    decisions start.

    Network evaluations per trajectory with T steps, all decisions, and independent noise: T without
    a probe, T T' with `Substeps(T')` in T + T' - 1 calls, T (T + 1) / 2 with `Completion` in T
    calls. Nodes that a group shares (same z_0 and only ODE steps so far) are evaluated once per
    group. Probes draw from a separate generator, so the trajectories, and all later draws, are the
    same for every probe. A `Branching` probe makes the trajectories of a group branches of trees:
    the number of evaluations is that of the trees' states before the last node, in T calls. A tree
    starts from the noise of its first member.

    Args:
        policy: the policy that computes velocities.
        sampler: the sampler of the trajectories.
        schedule: the time grid.
        condition: the prompts' embeddings, one row per prompt.
        noise: initial latents [sample, *latent], in prompt-major order.
        generator: the source of the sampler's noise.
        groups: number of prompts and of members, and whether members share their initial noise.
        probe: how unfinished states are estimated.
        usage: counters of network evaluations, which are updated; None for new ones.
        max_batch: largest number of latents per network call; results depend on it only by float
            rounding.
        columns: the columns of the value table to be estimated [decision+1], Boolean; None for all.
        prompts: the prompts themselves, for a probe that reads them (`flowrl.probes.LatentReward`).

    Returns:
        Trajectories and estimates, float32 and detached.

    Raises:
        ConfigError: the policy lacks what the probe needs.
        ProbeError: the probe breaks its contract.
    """
    guided = None
    if probe.network.guidance == "off":
        guided = extras(policy, "guided", "guidance_scale")
        fits = guided is not None and guided.guidance_scale != 1
        require(fits, "guidance of the probe", "off", "own: the policy samples without guidance")
    require(max_batch >= 1, "max_batch", max_batch, "1 or more")
    require(len(noise) == groups.samples, "noise rows", len(noise), f"{groups.samples} samples")
    stds = transition_stds(sampler, schedule).cpu()
    if isinstance(sampler, MultistepSolver):
        grid, steps = sampler.grid(schedule), schedule.steps
        fits = isinstance(grid, Schedule) and grid.steps == steps
        require(fits, f"{type(sampler).__name__}.grid", grid, f"a Schedule of {steps} steps")
        schedule = grid
        sampler = _Deterministic(sampler.solution(grid, lambda x: groups.normal(x, generator)))
    tree = group_tree(stds, groups, probe, generator)
    nodes, usage = tree.drawn_steps, usage or Usage()
    before = usage.nfe
    if columns is not None:
        nodes = [step for step, asked in zip(nodes, columns.tolist(), strict=False) if asked]
    walk = Walk(policy, sampler, schedule, stds, condition, groups, generator, usage, max_batch)
    values = probe if isinstance(probe, ValueProbe) else None
    recorder = HiddenStates(policy) if values and values.reads_hidden else None
    with policy.frozen(), torch.no_grad():
        path, completed = walk.run(noise, tree, probe.ahead(nodes), recorder)
        last, hidden = path.images_latent, recorder.table if recorder else None
        given = path, last, nodes, completed, condition, prompts, hidden
        run = ProbeRun(*given, walk, probe.network)
        features = run.features(values) if values else None
        with guided.guided(1.0) if guided else nullcontext():
            estimates = run.estimates(probe)
    # every output is an evaluation of the trajectories themselves
    usage.probe_nfe += usage.nfe - before - path.outputs.shape[:2].numel()
    return Rollout(path, estimates, groups, probe, nodes, features)


def group_tree(stds: Tensor, groups: Groups, probe: Probe, generator: torch.Generator) -> Tree:
    """The tree of states that the trajectories of a group share.

    The generator is used only by a probe whose tree is drawn anew every iteration.

    Args:
        stds: standard deviations of the sampler's transitions [step].
        groups: sizes of the groups, and whether members share their initial noise.
        probe: the probe; a `Branching` one determines the tree.
        generator: the source of random trees.

    Returns:
        The tree of one group; the same for all groups.

    Raises:
        ConfigError: the probe's tree does not fit the members or the steps.
    """
    steps, stochastic = len(stds), (stds > 0).nonzero().flatten().tolist()
    if not isinstance(probe, Branching):
        return plain_tree(groups.members, steps, tuple(stochastic), groups.one_start)
    tree = probe.tree(steps, stochastic, groups.members, groups.one_start, generator)
    shape, wanted = (tree.branched, tree.members, tree.steps), (True, groups.members, steps)
    require(shape == wanted, "tree: (branched, leaves, steps)", shape, f"{wanted}")
    return tree


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
        tree: Tree,
        ahead: Sequence[int],
        recorder: "HiddenStates | None" = None,
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
        walk = replace(self, policy=cast(FlowPolicy, recorder)) if recorder else self
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


class HiddenStates:
    """A policy that records its last hidden states, means over tokens, in every call.

    Args:
        policy: the policy, with a `hidden_layer`.

    Raises:
        ConfigError: the policy has none.
    """

    def __init__(self, policy: FlowPolicy) -> None:
        extra = extras(policy, "hidden_layer")
        allowed = "one with a hidden_layer, which the probe reads"
        require(extra is not None, "policy", type(policy).__name__, allowed)
        self.policy, self.layer = policy, extra.hidden_layer
        self.rows, self.kept = list[Tensor](), list[Tensor]()

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The policy's; the states of its last `len(latent)` rows are those of the prompts, since
        guidance evaluates the negative prompt first.
        """
        calls = list[Tensor]()

        def record(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].float()
            calls.append(hidden.flatten(1, -2).mean(1) if hidden.ndim > 2 else hidden)

        handle = self.layer.register_forward_pre_hook(record)
        try:
            velocity = self.policy.velocity(latent, timestep, condition)
        finally:
            handle.remove()
        self.rows.append(torch.cat(calls)[-len(latent) :])
        return velocity

    def keep(self, count: int, prompts: int) -> None:
        """Keep the first `count` rows since the last call of this method."""
        self.kept.append(torch.cat(self.rows)[:count].unflatten(0, (prompts, -1)))
        self.rows.clear()

    @property
    def table(self) -> Tensor:
        """What was kept [prompt, unit, feature]."""
        return torch.cat(self.kept, 1)


@dataclass(frozen=True)
class ProbeRun(Probing):
    """The input of a probe that calls the network `walk.policy` as `network` says."""

    walk: Walk
    network: NetworkUse

    @cached_property
    def generator(self) -> torch.Generator:
        """The probe's generator, seeded by the state of the trajectories' generator, which does not
        change.
        """
        source = self.walk.generator
        state = source.get_state()  # bytes in main memory, whatever the generator's device
        digest = hashlib.sha256(ctypes.string_at(state.data_ptr(), state.numel())).digest()
        return torch.Generator(source.device).manual_seed(int.from_bytes(digest[:7]))

    def velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The network, counted."""
        rows, prompts = len(latents), self.groups
        require(rows % prompts == 0, "latents", rows, f"equally many for each of {prompts} prompts")
        return self._velocity(latents, timestep, self.walk.conditions(latents))

    def _velocity(self, latents: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        use, device = self.network, self.walk.policy.device.type
        with torch.autocast(device, torch.bfloat16, enabled=use.dtype == "bfloat16"):
            return self.walk.velocity(latents, timestep, condition, use.share).float()

    def solve(
        self,
        grids: Mapping[int, Grid],
        solver: Solver = "euler",
        members: int | None = None,
    ) -> dict[int, Tensor]:
        """The ends of the ODE, all nodes together."""
        solutions: dict[int, Solution] = {}
        for node, grid in grids.items():
            x, velocity = self.start(node, members)
            solutions[node] = Solution(x, grid, self.walk.conditions(x), solver, velocity)
        advance(list(solutions.values()), self._velocity)
        return {node: solution.x for node, solution in solutions.items()}

    def continued(self, node: int, count: int) -> Tensor:
        """Stochastic continuations."""
        return self.walk.continued(self.trajectories.at(node), node, count, self.generator)

    def rand(self, *shape: int) -> Tensor:
        """Uniform random numbers."""
        return self.walk.groups.rand(shape, self.generator)

    def draw(self, gaussian: Gaussian) -> Tensor:
        """Draws of Gaussians."""
        return self.walk.groups.draw(gaussian, self.generator)

    def features(self, probe: ValueProbe) -> Tensor:
        """The probe's features. Raises `ProbeError` if it returns anything but numbers
        [prompt, member, node, feature].
        """
        name, groups = f"{type(probe).__name__}.features", self.walk.groups
        with part_call(name):
            features: Any = probe.features(self)
        shape = (groups.prompts, groups.members, len(self.nodes))
        fits = isinstance(features, Tensor) and features.is_floating_point() and features.ndim == 4
        if not fits or features.shape[:3] != shape or not bool(features.isfinite().all()):
            given = tuple(features.shape) if fits else type(features).__name__
            allowed = f"finite numbers [prompt, member, node, feature] = {(*shape, '...')}"
            raise ProbeError(f"{name} returned {given}; allowed: {allowed}")
        return features.detach().float().cpu()

    def estimates(self, probe: Probe) -> Estimates:
        """The probe's estimates. Raises `ProbeError` for anything but latents of `nodes`."""
        name, path = f"{type(probe).__name__}.estimate", self.trajectories
        with part_call(name):
            estimates = dict(probe.estimate(self))
        groups, latent = self.walk.groups, path.states.shape[2:]
        for key, latents in estimates.items():
            node = key[1] if isinstance(key, tuple) and len(key) == 2 else key
            counts = (1, groups.members) if key == node else range(1, groups.members + 1)
            shapes = [(groups.prompts * count, *latent) for count in counts]
            shape = tuple(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            if node not in self.nodes or shape not in shapes:
                allowed = f"latents of {shapes} for the nodes {list(self.nodes)}"
                raise ProbeError(f"{name} returned {shape} for {key!r}; allowed: {allowed}")
        return estimates


@dataclass
class _Deterministic:
    """The steps of a multistep solver, one call for each in order, as a sampler without noise."""

    step: Callable[[int, Tensor, Tensor], Tensor]
    number: int = 0

    def transition(
        self, latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor
    ) -> Gaussian:
        """The next state, with std 0."""
        if self.number == schedule.steps:
            raise ProbeError("a multistep solver has no continuations; use a probe of the ODE")
        following = self.step(self.number, velocity, latent)
        self.number += 1
        return Gaussian(following, latent.new_zeros(len(latent)))


def log_probs(sampler: AnySampler, trajectories: Trajectories) -> Tensor:
    """Log-probabilities of the drawn transitions under the policy that drew them.

    Args:
        sampler: the sampler of the rollout.
        trajectories: the trajectories.

    Returns:
        Means over latent elements [prompt, member, decision], in main memory; NaN where nothing was
        drawn.
    """
    path, tree = trajectories, trajectories.tree
    # the decision is the initial noise
    if isinstance(sampler, MultistepSolver) or not tree.drawn_steps:
        return torch.full((len(path.states), tree.members, 1), torch.nan)
    columns = []
    for step in tree.drawn_steps:
        latent, units = path.at(step), to_device(tree.paths[:, step], path.states.device)
        velocity = path.outputs[:, units].flatten(0, 1)
        index = torch.full((len(latent),), step, device=latent.device)
        gaussian = sampler.transition(latent, velocity, path.schedule, index)
        density = log_prob(gaussian, path.at(step + 1)).unflatten(0, (-1, tree.members)).cpu()
        columns.append(density.masked_fill(~tree.decisions[:, step], torch.nan))
    return torch.stack(columns, -1).float()
