"""Probes that follow the ODE from unfinished states to images, with cheaper variants; and stochastic continuations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes.base import Call, Cost, Estimate, Grid, Key, NetworkUse, Probe, Probing, Scored, Shape, Solver
from flowrl.types import Schedule

CONTROL = "control"


@dataclass(frozen=True, kw_only=True)
class ODEProbe(Probe, ABC):
    """The base of `Substeps` and `Completion`: R_j scores the end of the ODE from node j, on a grid that the subclass defines.

    The options reduce the cost; the defaults have no effect.

    With `fraction` = p < 1, m = round(p G) members of every group of G (at least one), drawn anew every iteration, have
    estimates. R_j is C_j + (G / m) M (R_j - C_j), with M = 1 for these members and 0 for the others. Its expectation over the
    draw is exactly R_j, so expected gains are exact, too. R_T is scored for all members. The variance grows by (G / m - 1) E (R_j
    - C_j)^2. Statistics that are linear in the gains, such as the group's mean, are unbiased. Z divides by a standard deviation
    that contains the noise of the draw: advantages are smaller by a factor common to the group, with a bias of order 1 / G.
    Clamps are not linear.

    Every start node has a separate solution, because the rollout's previous nodes are not on the same ODE. Multistep solvers
    therefore start with a step of order 1, from the rollout's v_j; their last step has order 1, too.

    Args:
        every: k: score only every k-th stochastic step's node. The gain from one scored node to the next is split evenly over the
            stochastic steps between them; deterministic steps have gain 0. Gains sum to R_T - R_0.
        fraction: p, in (0, 1].
        control: C, which needs no network evaluation. "tweedie": the reward of x_j - t_j v_j, decoded and scored for all members;
            "uniform": linear over the stochastic steps from the mean of the group's R_T to the member's R_T.
        solver: euler, or by diffusers' schedulers and of order 2: heun (arXiv 2206.00364, algorithm 1), dpm++ (DPM-Solver++ 2M,
            arXiv 2211.01095) or unipc (arXiv 2302.04867).
        dtype: see `NetworkUse`; the first velocity is always the rollout's.
        guidance: see `NetworkUse`.
        cache: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    every: int = 1
    fraction: float = 1.0
    control: Literal["tweedie", "uniform"] = "tweedie"
    solver: Solver = "euler"
    dtype: Literal["own", "bfloat16"] = "own"
    guidance: Literal["own", "off"] = "own"
    cache: int = 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(self.every >= 1, f"{name}.every", self.every, "1 or more")
        require(0 < self.fraction <= 1, f"{name}.fraction", self.fraction, "above 0, at most 1")
        require(self.control in ("tweedie", "uniform"), f"{name}.control", self.control, "'tweedie' or 'uniform'")
        require(self.solver in get_args(Solver), f"{name}.solver", self.solver, f"one of {', '.join(get_args(Solver))}")
        require(self.cache >= 1, f"{name}.cache", self.cache, "1 (off) or more")
        _ = self.network

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.name == "count" or getattr(self, item.name) != item.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def network(self) -> NetworkUse:
        """How the network is called."""
        return NetworkUse(self.dtype, self.guidance, self.cache)

    @abstractmethod
    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The solver's grid from `node`."""

    @abstractmethod
    def evaluations(self, steps: int, node: int) -> int:
        """Network evaluations of a solution from `node`, including the rollout's evaluation at this node."""

    def nodes(self, schedule: Schedule) -> Sequence[int]:
        """The nodes with estimates."""
        return schedule.decisions[:: self.every]

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """The ends of the ODE and, with `fraction` < 1, those of the control."""
        schedule, tree = run.trajectories.schedule, run.trajectories.tree
        nodes = self.nodes(schedule)
        members = self._drawn(run, tree.members)
        rows = {node: members if tree.counts[node] == tree.members else None for node in nodes}
        if self.ahead(schedule):
            ends = run.completed
        else:
            ends = run.solve({node: self.grid(schedule, node) for node in nodes}, self.solver, rows)
        found: dict[Key, Estimate] = {node: Estimate(ends[node], members=rows[node]) for node in nodes}
        if members is not None and self.control == "tweedie":
            for node in nodes:
                x, velocity = run.start(node)
                found[CONTROL, node] = Estimate(x - schedule.times[node] * velocity)
        return found

    def _drawn(self, run: Probing, members: int) -> Tensor | None:
        """The members of each group that have estimates [prompt, chosen]; None: all."""
        if self.fraction == 1:
            return None
        order = run.rand(members).argsort(dim=1)
        return order[:, : self._count(members)].sort(dim=1).values

    def _count(self, members: int) -> int:
        """m."""
        return max(1, round(self.fraction * members))

    def rewards(self, scored: Scored) -> Mapping[int, Tensor]:
        """R[., node] of all nodes but the last."""
        values: dict[int, Tensor] = {}
        for node in (key for key in scored.rewards if isinstance(key, int)):
            found = scored.at(node)
            if node in scored.members:
                control = self._control(scored, node)
                weight = found.shape[1] / scored.members[node].shape[1]
                chosen = torch.zeros_like(found, dtype=torch.bool).scatter(1, scored.members[node].to(found.device), True)
                found = torch.where(chosen, control + weight * (found - control), control)
            values[node] = found
        return split_evenly(values, scored)

    def _control(self, scored: Scored, node: int) -> Tensor:
        """C at `node` [prompt, member]."""
        if self.control == "tweedie":
            return scored.at((CONTROL, node))
        mean = scored.final.nanmean(dim=1, keepdim=True)
        decisions = scored.schedule.decisions
        passed = sum(step < node for step in decisions) / max(len(decisions), 1)
        return mean + passed * (scored.final - mean)

    def cost(self, shape: Shape) -> Cost:
        """Solutions from all nodes advance together; with `cache` those from one node at a time."""
        schedule, counts = shape.schedule, shape.rows
        nodes, all_members = self.nodes(schedule), shape.groups * shape.members
        chosen = shape.groups * (self._count(shape.members) if self.fraction < 1 else shape.members)
        rows = {node: chosen if counts[node] == all_members else counts[node] for node in nodes}
        controls = sum(counts[node] for node in nodes) if self.fraction < 1 and self.control == "tweedie" else 0
        return Cost(self._calls(shape, rows), sum(rows.values()) + controls)

    def _calls(self, shape: Shape, rows: Mapping[int, int]) -> list[Call]:
        steps = shape.schedule.steps
        if self.ahead(shape.schedule):
            return [Call(rows[node], step=step) for node in rows for step in range(node + 1, steps)]
        lengths = {node: self.evaluations(steps, node) for node in rows}
        if self.cache == 1:
            last, share = max(lengths.values(), default=0), self.network.share(shape.blocks)
            together = [sum(rows[node] for node in rows if lengths[node] > number) for number in range(1, last)]
            return [Call(found, share) for found in together]
        one_by_one = [(node, self.network.reuses(number)) for node in rows for number in range(1, lengths[node])]
        return [Call(rows[node], self.network.share(shape.blocks, reuse)) for node, reuse in one_by_one]


def split_evenly(values: Mapping[int, Tensor], scored: Scored) -> dict[int, Tensor]:
    """R at every node before the last from R at some of them.

    Between two of these nodes R changes by equal amounts over the stochastic steps. It does not change over deterministic steps
    and before the first of the nodes.
    """
    schedule, values = scored.schedule, dict(values)
    stochastic = set(schedule.decisions)
    known = {**values, schedule.steps: scored.final}
    for node in range(schedule.steps):
        if node not in values:
            after = next(other for other in sorted(known) if other >= node)
            before = max((other for other in known if other < node), default=None)
            passed = 0 if before is None else sum(step in stochastic for step in range(before, node))
            whole = 0 if before is None else sum(step in stochastic for step in range(before, after))
            if before is None or passed == whole:
                values[node] = known[after]
            else:
                values[node] = known[before] + passed / whole * (known[after] - known[before])
    return values


@checked_options
@dataclass(frozen=True, repr=False)
class Substeps(ODEProbe):
    """R_j scores the image after `count` network evaluations on an even grid over [t_j, 0], the first of them the rollout's v_j.

    `count` = 1 is the Tweedie estimate x_j - t_j v_j. A step takes one evaluation; with heun there are (`count` + 1) / 2 steps.
    All nodes before the last have estimates unless `every` > 1. Source: Stepwise-Flow-GRPO (arXiv 2603.28718), T' = `count`,
    Euler's method.

    Args:
        count: T', 1 or more; odd with heun.
        every: see `ODEProbe`.
        fraction: see `ODEProbe`.
        control: see `ODEProbe`.
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.
        cache: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    count: int = 5

    def __post_init__(self) -> None:
        require(self.count >= 1, "Substeps.count", self.count, "1 or more")
        fits = self.solver != "heun" or self.count % 2 == 1
        require(fits, "Substeps.count", self.count, "odd with solver heun, which has 2 evaluations a step and 1 in the last")
        super().__post_init__()

    def nodes(self, schedule: Schedule) -> Sequence[int]:
        """All nodes before the last, or every k-th of those before stochastic steps."""
        return range(schedule.steps) if self.every == 1 else schedule.decisions[:: self.every]

    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The even grid."""
        start = schedule.times[node]
        steps = (self.count + 1) // 2 if self.solver == "heun" else self.count
        times = torch.stack([start * (1 - k / steps) for k in range(steps + 1)])
        timesteps = torch.stack([1000.0 * start * (1 - k / steps) for k in range(steps)])
        return Grid(times, (start / steps).expand(steps), timesteps)

    def evaluations(self, steps: int, node: int) -> int:
        """`count` from every node."""
        return self.count


def Tweedie() -> Substeps:
    """The one-step clean estimate x_j - t_j v_j: `Substeps(1)`."""
    return Substeps(1)


@checked_options
@dataclass(frozen=True, repr=False)
class Completion(ODEProbe):
    """R_j scores the image reached by the remaining ODE steps on the sampler's grid. Source: TP-GRPO (arXiv 2602.06422).

    Only nodes before stochastic steps have estimates: from other nodes the ODE leads to the next node's image. heun takes 2 (T -
    j) - 1 evaluations from node j, the other solvers T - j.

    Args:
        together: advance the solutions within the rollout's calls, T calls in all; applies to euler without cheaper options.
            False, and all cheaper options: separate calls, up to T - 1 more.
        every: see `ODEProbe`.
        fraction: see `ODEProbe`.
        control: see `ODEProbe`.
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.
        cache: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    together: bool = True

    def ahead(self, schedule: Schedule) -> Sequence[int]:
        """The nodes with estimates, if their solutions advance with the rollout."""
        plain = self.together and self.solver == "euler" and self.fraction == 1 and self.network == NetworkUse()
        return self.nodes(schedule) if plain else ()

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """The ends of the ODE; without cheaper options also for the nodes that the ODE links to them."""
        found = dict(super().estimate(run))
        if self.every == 1 and self.fraction == 1:
            found |= linked(found, run)
        return found

    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The rest of the sampler's grid."""
        return Grid(schedule.times[node:], schedule.deltas[node:], schedule.network_timesteps[node:])

    def evaluations(self, steps: int, node: int) -> int:
        """One for each remaining step; with heun two for all but the last."""
        return 2 * (steps - node) - 1 if self.solver == "heun" else steps - node


def linked(found: Mapping[Key, Estimate], run: Probing) -> dict[Key, Estimate]:
    """Estimates of the other nodes: a deterministic step leads to the same image, so they equal the next node's."""
    steps = run.trajectories.schedule.steps
    chain: dict[Key, Estimate] = {steps: Estimate(run.final)}
    for node in reversed(range(steps)):
        chain[node] = found.get(node, chain[node + 1])
    return {node: chain[node] for node in range(steps)}


@checked_options
@dataclass(frozen=True)
class Continuation(Probe):
    """R_j is the mean reward of `count` stochastic continuations from node j: a Monte Carlo estimate of the value V(x_j).

    Gains of such rewards estimate the true advantages V(x_{i+1}) - V(x_i) of the steps taken, the ideal credit if evaluations
    were free. This takes `count` T (T + 1) / 2 evaluations in addition to the rollout. Raises `ConfigError` for a `count` below
    1.
    """

    count: int = 16

    def __post_init__(self) -> None:
        require(self.count >= 1, "Continuation.count", self.count, "1 or more")

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """The ends of the continuations from every stochastic step's node."""
        decisions = run.trajectories.schedule.decisions
        return linked({node: Estimate(run.continued(node, self.count), self.count) for node in decisions}, run)

    def cost(self, shape: Shape) -> Cost:
        """`count` rows for every trajectory, stochastic step and step after."""
        decisions, rows = shape.schedule.decisions, shape.groups * shape.members * self.count
        return Cost([Call(rows) for node in decisions for _ in range(node, shape.schedule.steps)], len(decisions) * rows)
