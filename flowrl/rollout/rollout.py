"""Trajectories and the final states of their unfinished nodes, in as few network calls as
possible.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.errors import ProbeError, require
from flowrl.core.protocols import AnySampler, FlowPolicy, MultistepSolver, Sampler
from flowrl.core.tree import Edges, Tree, plain_tree
from flowrl.core.types import Condition, Gaussian, Schedule, Trajectories, to_device
from flowrl.flow.gaussian import log_prob
from flowrl.probes import Branching, Estimate, Key, NoProbe, Probe
from flowrl.rollout.groups import Groups
from flowrl.rollout.probing import check_network, estimates
from flowrl.rollout.solvers import Usage, ode_step
from flowrl.samplers import transition_stds


@dataclass(frozen=True)
class Rollout:
    """Trajectories and estimates.

    Args:
        trajectories: the trajectories.
        estimates: the probe's estimates of final images, by node; some probes use further keys.
        groups: sizes of the groups.
        probe: the probe.
        nodes: the nodes that the probe was to estimate (`flowrl.probes.Probing`).
    """

    trajectories: Trajectories
    estimates: Mapping[Key, Estimate]
    groups: Groups
    probe: Probe = NoProbe()
    nodes: Sequence[int] = ()

    def part(self, first: int, count: int) -> "Rollout":
        """`count` of its groups, from index `first` on."""
        path, groups, chosen = self.trajectories, self.groups, slice(first, first + count)
        part = replace(path, states=path.states[chosen], outputs=path.outputs[chosen])
        estimates = {
            key: one.part(first, count, groups.prompts) for key, one in self.estimates.items()
        }
        return replace(
            self, trajectories=part, estimates=estimates, groups=groups.part(first, count)
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
) -> Rollout:
    """Sample one trajectory per row of `noise`, and estimate final images from the states at which
    decisions start.

    Network evaluations per trajectory with T steps, all decisions, and independent noise: T without
    a probe, T T' with `Substeps(T')` in T + T' - 1 calls, T (T + 1) / 2 with `Completion` in T
    calls. Nodes that a group shares (same x_T and only ODE steps so far) are evaluated once per
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
    require(
        len(noise) == groups.samples,
        "noise rows",
        len(noise),
        f"prompts x members = {groups.samples}",
    )
    stds = transition_stds(sampler, schedule).cpu()
    if isinstance(sampler, MultistepSolver):
        grid = sampler.grid(schedule)
        kept = isinstance(grid, Schedule) and grid.steps == schedule.steps
        require(
            kept, f"{type(sampler).__name__}.grid", grid, f"a Schedule of {schedule.steps} steps"
        )
        schedule = grid
        sampler = _Solution(sampler.solution(grid, lambda x: groups.normal(x, generator)))
    tree = group_tree(stds, groups, probe, generator)
    asked = [True] * len(tree.drawn_steps) if columns is None else columns.tolist()
    nodes = [step for step, needed in zip(tree.drawn_steps, asked, strict=False) if needed]
    walk = _Walk(
        policy,
        sampler,
        schedule,
        tree,
        stds,
        nodes,
        condition,
        generator,
        groups,
        usage or Usage(),
        max_batch,
    )
    with policy.frozen(), torch.no_grad():
        starts = noise.float().unflatten(0, (groups.prompts, -1))
        return walk.run(torch.stack([starts[:, member] for member in tree.first_members], 1), probe)


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
        return plain_tree(groups.members, steps, tuple(stochastic), groups.shared_noise)
    tree = probe.tree(steps, stochastic, groups.members, groups.shared_noise, generator)
    fits = tree.members == groups.members and tree.steps == steps and tree.branched
    found, name = f"{tree.members} leaves, {tree.steps} steps", f"{type(probe).__name__}.tree"
    require(fits, name, found, f"a branched tree of {groups.members} leaves, {steps} steps")
    return tree


@dataclass
class _Walk:
    """One rollout in progress: the arguments of `rollout`, bundled, with the nodes to be
    estimated.
    """

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    tree: Tree
    stds: Tensor
    nodes: Sequence[int]
    condition: Condition
    generator: torch.Generator
    groups: Groups
    usage: Usage
    max_batch: int

    def run(self, x: Tensor, probe: Probe) -> Rollout:
        """One batched call per step for all states of a node and all running completions. `x` is
        the noise of the roots [prompt, root, *latent].
        """
        steps, completing = self.schedule.steps, set(probe.ahead(self.nodes))
        _ = self.tree.edges  # before the device is busy
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
        trajectories = Trajectories(
            torch.cat(states, 1), torch.cat(outputs, 1), self.schedule, self.tree, self.stds
        )
        found = estimates(
            probe,
            self.policy,
            self.sampler,
            self.stochastic,
            trajectories,
            self.nodes,
            running,
            self.condition,
            self.groups,
            self.generator,
            self.usage,
            self.max_batch,
        )
        return Rollout(trajectories, found, self.groups, probe, self.nodes)

    def __post_init__(self) -> None:
        self.stochastic = (self.stds > 0).tolist()

    def _velocities(
        self, x: Tensor, step: int, running: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Velocities of the states at a node and, in the same call, of the completions started
        before it.
        """
        latents = [x.flatten(0, 1), *running.values()]
        conditions = [self.condition.repeat(len(part) // self.groups.prompts) for part in latents]
        batch = torch.cat(latents)
        timestep = self.schedule.network_timesteps[step].expand(len(batch))
        velocity = self.usage.velocity(
            self.policy, batch, timestep, Condition.cat(conditions), self.max_batch
        )
        first, *others = velocity.split([len(part) for part in latents])
        return first.view_as(x), dict(zip(running, others, strict=True))

    def _children(self, x: Tensor, velocity: Tensor, step: int) -> Iterator[tuple[int, "Piece"]]:
        """The states that follow from those of a node, with their node: draws from the sampler, its
        deterministic steps, and ODE steps, which may skip nodes.
        """
        for edges in self.tree.edges[step]:
            if edges.drawn or (edges.node == step + 1 and not self.stochastic[step]):
                gaussian = self._transition(x, velocity, step, edges)
                following = (
                    self.groups.draw(gaussian, self.generator) if edges.drawn else gaussian.mean
                )
            else:
                length = self.schedule.times[edges.node] - self.schedule.times[step]
                following = (x + length * velocity)[
                    :, to_device(edges.parents[edges.place], x.device)
                ].flatten(0, 1)
            yield edges.node, Piece(edges.units, following.unflatten(0, (self.groups.prompts, -1)))

    def _transition(self, x: Tensor, velocity: Tensor, step: int, edges: Edges) -> Gaussian:
        """The sampler's distributions over the children of states [prompt, unit, *latent] along
        `edges`.
        """
        if len(edges.parents) < x.shape[1]:
            chosen = to_device(edges.parents, x.device)
            x, velocity = x[:, chosen], velocity[:, chosen]
        index = torch.full((x.shape[0] * x.shape[1],), step, device=x.device)
        gaussian = self.sampler.transition(
            x.flatten(0, 1), velocity.flatten(0, 1), self.schedule, index
        )
        if edges.in_order:
            return gaussian
        place = to_device(edges.place, x.device)
        mean, std = gaussian.mean.view_as(x)[:, place], gaussian.std.view(x.shape[:2])[:, place]
        return Gaussian(mean.flatten(0, 1), std.flatten())


@dataclass
class _Solution:
    """The steps of a multistep solver, one call for each in order, as a sampler without noise."""

    step: Callable[[int, Tensor, Tensor], Tensor]
    number: int = 0

    def transition(
        self, latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor
    ) -> Gaussian:
        """The next state, with std 0."""
        if self.number == schedule.steps:
            raise ProbeError(
                "a multistep solver has no continuations; use a probe that solves the ODE"
            )
        following = self.step(self.number, velocity, latent)
        self.number += 1
        return Gaussian(following, latent.new_zeros(len(latent)))


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
        units = tree.paths[:, step]
        latent, velocity = (
            table[:, to_device(units, table.device)].flatten(0, 1)
            for table in (path.states, path.outputs)
        )
        index = torch.full((len(latent),), step, device=latent.device)
        gaussian = sampler.transition(latent, velocity, path.schedule, index)
        density = log_prob(gaussian, path.at(step + 1)).unflatten(0, (-1, tree.members)).cpu()
        columns.append(density.masked_fill(~tree.decisions[:, step], torch.nan))
    return torch.stack(columns, -1).float()
