"""Trajectories and the final states of their unfinished nodes, in as few network calls as possible."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.flow.gaussian import log_prob
from flowrl.probes import Branching, Key, NoProbe, Probe
from flowrl.protocols import FlowPolicy, Sampler
from flowrl.rollout.groups import Groups
from flowrl.rollout.probing import check_network, estimates
from flowrl.rollout.solvers import SolverSteps, Usage, ode_step, solver_schedule, solver_steps
from flowrl.samplers import Multistep, transition_stds
from flowrl.transfer import to_device
from flowrl.tree import Edges, Tree, plain_tree
from flowrl.types import Condition, Gaussian, Schedule, Trajectories


@dataclass(frozen=True)
class Rollout:
    """Trajectories and estimates.

    Args:
        trajectories: the trajectories.
        estimates: latents of the estimated final image, by node: [sample, *latent], or [prompt, *latent] at nodes that a whole
            group shares (same x_T, no stochastic step before). Nodes without a probe are absent; the last node is always present.
            Nodes with the same final image (linked by ODE steps) have the same tensor. Some probes use other keys than nodes.
        groups: sizes of the groups.
        copies: number of adjacent rows per sample, to be averaged, by node; 1 if absent.
        log_probs: log-probabilities of the edges of a branched tree [prompt, unit].
        members: the members of the rows [prompt, chosen], by node; all if absent.
        probe: the probe.
    """

    trajectories: Trajectories
    estimates: Mapping[Key, Tensor]
    groups: Groups
    copies: Mapping[Key, int] = field(default_factory=dict)
    log_probs: Tensor | None = None
    members: Mapping[Key, Tensor] = field(default_factory=dict)
    probe: Probe = NoProbe()

    def part(self, first: int, count: int) -> "Rollout":
        """`count` of its groups, from index `first` on."""

        def rows(tensor: Tensor) -> Tensor:
            per_group = len(tensor) // self.groups.prompts
            return tensor[first * per_group : (first + count) * per_group]

        path = self.trajectories
        distinct = {id(tensor): rows(tensor) for tensor in self.estimates.values()}
        estimates = {node: distinct[id(tensor)] for node, tensor in self.estimates.items()}
        members = {node: rows(chosen) for node, chosen in self.members.items()}
        part = Trajectories(rows(path.states), rows(path.outputs), path.schedule)
        log_probs = None if self.log_probs is None else rows(self.log_probs)
        return Rollout(part, estimates, self.groups.part(first, count), self.copies, log_probs, members, self.probe)


def attach_stds(schedule: Schedule, sampler: Sampler) -> Schedule:
    """The schedule with the sampler's standard deviations per step.

    Args:
        schedule: the time grid.
        sampler: the sampler of the rollout.

    Returns:
        A copy of the schedule with `stds` [step].
    """
    return replace(schedule, stds=transition_stds(sampler, schedule))


def rollout(
    policy: FlowPolicy,
    sampler: Sampler,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    generator: torch.Generator,
    groups: Groups,
    probe: Probe = NoProbe(),
    usage: Usage | None = None,
    max_batch: int = 1024,
) -> Rollout:
    """Sample one trajectory per row of `noise`, and estimate final images at the nodes that `probe` fills.

    Network evaluations per trajectory with T steps and independent noise: T without a probe, T T' with `Substeps(T')` in T + T' -
    1 calls, T (T + 1) / 2 with `Completion` in T calls. Nodes that a group shares (same x_T and only ODE steps so far) are
    evaluated once per group, and a completion starts only if a stochastic step follows: from other nodes the ODE leads to the
    image of the next node. Probes draw from a separate generator, so the trajectories, and all later draws, are the same for
    every probe. A `Branching` probe makes the trajectories of a group branches of trees: the number of evaluations is that of the
    trees' states before the last node, in T calls. A tree starts from the noise of its first member.

    Args:
        policy: the policy that computes velocities.
        sampler: the sampler of the trajectories.
        schedule: the schedule, with the sampler's standard deviations.
        condition: the prompts' embeddings, one row per prompt.
        noise: initial latents [sample, *latent], in prompt-major order.
        generator: the source of the sampler's noise.
        groups: number of prompts and of members, and whether members share their initial noise.
        probe: which nodes get an estimate of the final image.
        usage: counters of network evaluations, which are updated; None for new ones.
        max_batch: largest number of latents per network call; results depend on it only by float rounding.

    Returns:
        Trajectories and estimates, float32 and detached.

    Raises:
        ConfigError: the policy lacks what the probe needs.
        ProbeError: the probe breaks its contract.
    """
    allowed = "an object of a class derived from flowrl.probes.Probe, such as Completion()"
    require(isinstance(probe, Probe), "probe", probe, allowed)
    check_network(probe.network, policy)
    require(max_batch >= 1, "max_batch", max_batch, "1 or more")
    require(len(noise) == groups.samples, "noise rows", len(noise), f"prompts x members = {groups.samples}")
    if isinstance(sampler, Multistep):
        schedule = solver_schedule(sampler.solver, schedule)
    schedule = attach_stds(schedule, sampler)
    tree = group_tree(schedule, groups, probe, generator)
    walk = _Walk(policy, sampler, replace(schedule, tree=tree), condition, generator, groups, usage or Usage(), max_batch)
    if isinstance(sampler, Multistep):
        walk.solver = solver_steps(sampler.solver, schedule.times, sampler.tau, lambda x: groups.normal(x, generator))
    with policy.frozen(), torch.no_grad():
        starts = noise.float().unflatten(0, (groups.prompts, -1))
        return walk.run(torch.stack([starts[:, member] for member in tree.first_members], 1), probe)


def group_tree(schedule: Schedule, groups: Groups, probe: Probe, generator: torch.Generator) -> Tree:
    """The tree of states that the trajectories of a group share.

    The generator is used only by a probe whose tree is drawn anew every iteration.

    Args:
        schedule: the schedule, with the sampler's standard deviations.
        groups: sizes of the groups, and whether members share their initial noise.
        probe: the probe; a `Branching` one determines the tree.
        generator: the source of random trees.

    Returns:
        The tree of one group; the same for all groups.

    Raises:
        ConfigError: the probe's tree does not fit the members or the steps.
    """
    if isinstance(probe, Branching):
        tree = probe.tree(schedule.steps, schedule.decisions, groups.members, groups.shared_noise, generator)
        found = f"{tree.members} leaves, {tree.steps} steps"
        fits = tree.members == groups.members and tree.steps == schedule.steps and tree.branched
        require(
            fits, f"{type(probe).__name__}.tree", found, f"a branched tree of {groups.members} leaves, {schedule.steps} steps"
        )
        return tree
    return plain_tree(groups.members, schedule.steps, tuple(schedule.decisions), groups.shared_noise)


@dataclass
class _Walk:
    """One rollout in progress: the arguments of `rollout`, bundled. `schedule` has the tree."""

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    condition: Condition
    generator: torch.Generator
    groups: Groups
    usage: Usage
    max_batch: int
    solver: SolverSteps | None = None

    def run(self, x: Tensor, probe: Probe) -> Rollout:
        """One batched call per step for all states of a node and all running completions. `x` is the noise of the roots
        [prompt, root, *latent].
        """
        steps, tree, ahead_of = self.schedule.steps, self._tree, set(probe.ahead(self.schedule))
        completing, _ = [step for step in self.schedule.decisions if step in ahead_of], tree.edges  # before the device is busy
        pieces: dict[int, list[Piece]] = {0: [Piece(torch.arange(x.shape[1]), x)]}
        running: dict[int, Tensor] = {}
        states, outputs = [], []
        for i in range(steps):
            x = _in_order(pieces.pop(i))
            states.append(x)
            velocity, ahead = self._velocities(x, i, running)
            running = {j: ode_step(self.schedule, running[j], ahead[j], i) for j in running}
            if i in completing:
                running[i] = ode_step(self.schedule, x.flatten(0, 1), velocity.flatten(0, 1), i)
            for node, piece in self._children(x, velocity, i):
                pieces.setdefault(node, []).append(piece)
            outputs.append(velocity)
        states.append(_in_order(pieces.pop(steps)))
        trajectories = Trajectories(torch.cat(states, 1), torch.cat(outputs, 1), self.schedule)
        found = estimates(
            probe, self.policy, self.sampler, trajectories, running, self.condition, self.groups, self.generator, self.usage,
            self.max_batch,
        )  # fmt: skip
        return Rollout(
            trajectories,
            {key: estimate.latents for key, estimate in found.items()},
            self.groups,
            {key: estimate.copies for key, estimate in found.items() if estimate.copies > 1},
            self._log_probs(trajectories) if tree.branched else None,
            {key: estimate.members for key, estimate in found.items() if estimate.members is not None},
            probe,
        )

    @property
    def _tree(self) -> Tree:
        assert self.schedule.tree is not None
        return self.schedule.tree

    def _velocities(self, x: Tensor, step: int, running: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """Velocities of the states at a node and, in the same call, of the completions started before it."""
        latents = [x.flatten(0, 1), *running.values()]
        conditions = [self.condition.repeat(len(part) // self.groups.prompts) for part in latents]
        batch = torch.cat(latents)
        timestep = self.schedule.network_timesteps[step].expand(len(batch))
        velocity = self.usage.velocity(self.policy, batch, timestep, Condition.cat(conditions), self.max_batch)
        first, *others = velocity.split([len(part) for part in latents])
        return first.view_as(x), dict(zip(running, others, strict=True))

    def _children(self, x: Tensor, velocity: Tensor, step: int) -> Iterator[tuple[int, "Piece"]]:
        """The states that follow from those of a node, with their node: draws from the sampler, its deterministic steps, and ODE
        steps, which may skip nodes.
        """
        for edges in self._tree.edges[step]:
            if self.solver is not None:
                following = self.solver.step(step, velocity.flatten(0, 1), x.flatten(0, 1))
            elif edges.drawn or (edges.node == step + 1 and step not in self.schedule.decisions):
                gaussian = self._transition(x, velocity, step, edges)
                following = self.groups.draw(gaussian, self.generator) if edges.drawn else gaussian.mean
            else:
                length = self.schedule.times[edges.node] - self.schedule.times[step]
                following = (x + length * velocity)[:, to_device(edges.parents[edges.place], x.device)].flatten(0, 1)
            yield edges.node, Piece(edges.units, following.unflatten(0, (self.groups.prompts, -1)))

    def _transition(self, x: Tensor, velocity: Tensor, step: int, edges: Edges) -> Gaussian:
        """The sampler's distributions over the children of states [prompt, unit, *latent] along `edges`."""
        if len(edges.parents) < x.shape[1]:
            chosen = to_device(edges.parents, x.device)
            x, velocity = x[:, chosen], velocity[:, chosen]
        index = torch.full((x.shape[0] * x.shape[1],), step, device=x.device)
        gaussian = self.sampler.transition(x.flatten(0, 1), velocity.flatten(0, 1), self.schedule, index)
        if edges.in_order:
            return gaussian
        place = to_device(edges.place, x.device)
        mean, std = gaussian.mean.view_as(x)[:, place], gaussian.std.view(x.shape[:2])[:, place]
        return Gaussian(mean.flatten(0, 1), std.flatten())

    def _log_probs(self, trajectories: Trajectories) -> Tensor:
        """Log-density per element of the edges into the units [prompt, unit]; 0 for those that are no decisions."""
        tree = trajectories.tree
        found = torch.zeros(self.groups.prompts, tree.units, device=trajectories.states.device)
        for step, edges in ((step, edges) for step, at_node in enumerate(tree.edges) for edges in at_node if edges.drawn):
            at = tree.at(step)
            gaussian = self._transition(trajectories.states[:, at], trajectories.outputs[:, at], step, edges)
            units = to_device(edges.units, found.device)
            density = log_prob(gaussian, trajectories.states[:, units].flatten(0, 1))
            found[:, units] = density.view(self.groups.prompts, -1).to(found)
        return found


@dataclass(frozen=True)
class Piece:
    """States [prompt, unit, *latent] of some of a node's `units`."""

    units: Tensor
    states: Tensor


def _in_order(pieces: list[Piece]) -> Tensor:
    """All states of a node, by unit."""
    if len(pieces) == 1:
        return pieces[0].states
    order = torch.cat([piece.units for piece in pieces]).argsort()
    states = torch.cat([piece.states for piece in pieces], 1)
    return states[:, to_device(order, states.device)]
