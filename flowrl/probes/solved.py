"""Probes that follow the ODE from unfinished states to images, with cheaper variants; and
stochastic continuations.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.probe import (
    Call,
    Cost,
    Estimate,
    Grid,
    Key,
    NetworkUse,
    Probe,
    Probing,
    Scored,
    Shape,
    Solver,
)
from flowrl.core.types import Schedule

CONTROL = "control"


@dataclass(frozen=True, kw_only=True)
class ODEProbe(Probe, ABC):
    """The base of `Substeps` and `Completion`: R_j scores the end of the ODE from node j, on a grid
    that the subclass defines.

    The options reduce the cost; the defaults have no effect.

    With `fraction` = p < 1, m = round(p G) members of every group of G (at least one), drawn anew
    every iteration, have estimates. R_j is C_j + (G / m) M (R_j - C_j), with M = 1 for these
    members and 0 for the others. Its expectation over the draw is exactly R_j, so expected gains
    are exact, too. R_T is scored for all members. The variance grows by (G / m - 1) E (R_j
    - C_j)^2. Statistics that are linear in the gains, such as the group's mean, are unbiased. Z
      divides by a standard deviation
    that contains the noise of the draw: advantages are smaller by a factor common to the group,
    with a bias of order 1 / G. Clamps are not linear.

    Every start node has a separate solution, because the rollout's previous nodes are not on the
    same ODE. Multistep solvers therefore start with a step of order 1, from the rollout's v_j;
    their last step has order 1, too.

    Args:
        every: k: score only the states of every k-th decision. The gain from one of them to the
            next is split evenly over the decisions between them. Gains sum to R_T - R_0.
        fraction: p, in (0, 1].
        control: C, which needs no network evaluation. "tweedie": the reward of x_j - t_j v_j,
            decoded and scored for all members; "uniform": linear over the decisions from the mean
            of the group's R_T to the member's R_T.
        solver: euler, or by diffusers' schedulers and of order 2: heun (arXiv 2206.00364, algorithm
            1), dpm++ (DPM-Solver++ 2M, arXiv 2211.01095) or unipc (arXiv 2302.04867).
        dtype: see `NetworkUse`; the first velocity is always the rollout's.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    every: int = 1
    fraction: float = 1.0
    control: Literal["tweedie", "uniform"] = "tweedie"
    solver: Solver = "euler"
    dtype: Literal["own", "bfloat16"] = "own"
    guidance: Literal["own", "off"] = "own"

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(self.every >= 1, f"{name}.every", self.every, "1 or more")
        require(0 < self.fraction <= 1, f"{name}.fraction", self.fraction, "above 0, at most 1")
        require(
            self.control in ("tweedie", "uniform"),
            f"{name}.control",
            self.control,
            "'tweedie' or 'uniform'",
        )
        require(
            self.solver in get_args(Solver),
            f"{name}.solver",
            self.solver,
            f"one of {', '.join(get_args(Solver))}",
        )
        _ = self.network

    def __repr__(self) -> str:
        shown = [
            item.name
            for item in fields(self)
            if item.name == "count" or getattr(self, item.name) != item.default
        ]
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__name__}({options})"

    @property
    def network(self) -> NetworkUse:
        """How the network is called."""
        return NetworkUse(self.dtype, self.guidance)

    @abstractmethod
    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The solver's grid from `node`."""

    @abstractmethod
    def evaluations(self, steps: int, node: int) -> int:
        """Network evaluations of a solution from `node`, including the rollout's evaluation at this
        node.
        """

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """The ends of the ODE and, with `fraction` < 1, those of the control."""
        schedule, tree = run.trajectories.schedule, run.trajectories.tree
        nodes = run.nodes[:: self.every]
        members = self._drawn(run, tree.members)
        rows = {node: members if tree.counts[node] == tree.members else None for node in nodes}
        if self.ahead(run.nodes):
            ends = run.completed
        else:
            ends = run.solve({node: self.grid(schedule, node) for node in nodes}, self.solver, rows)
        found: dict[Key, Estimate] = {
            node: Estimate(ends[node], members=rows[node]) for node in nodes
        }
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
        """The values of all nodes to be estimated."""
        values: dict[int, Tensor] = {}
        for place, node in enumerate(scored.nodes):
            if node not in scored.rewards:
                continue
            found = scored.at(node)
            if node in scored.members:
                control = self._control(scored, place)
                weight = found.shape[1] / scored.members[node].shape[1]
                drawn = scored.members[node].to(found.device)
                chosen = torch.zeros_like(found, dtype=torch.bool).scatter(1, drawn, True)
                found = torch.where(chosen, control + weight * (found - control), control)
            values[node] = found
        return split_evenly(values, scored)

    def _control(self, scored: Scored, place: int) -> Tensor:
        """C at the node `scored.nodes[place]` [prompt, member]."""
        if self.control == "tweedie":
            return scored.at((CONTROL, scored.nodes[place]))
        mean = scored.final.nanmean(dim=1, keepdim=True)
        return mean + place / len(scored.nodes) * (scored.final - mean)

    def cost(self, shape: Shape) -> Cost:
        """Solutions from all nodes advance together."""
        nodes, counts = shape.nodes[:: self.every], shape.rows
        all_members = shape.groups * shape.members
        chosen = shape.groups * (self._count(shape.members) if self.fraction < 1 else shape.members)
        rows = {node: chosen if counts[node] == all_members else counts[node] for node in nodes}
        controls = (
            sum(counts[node] for node in nodes)
            if self.fraction < 1 and self.control == "tweedie"
            else 0
        )
        return Cost(self._calls(shape, rows), sum(rows.values()) + controls)

    def _calls(self, shape: Shape, rows: Mapping[int, int]) -> list[Call]:
        steps = shape.schedule.steps
        if self.ahead(shape.nodes):
            return [Call(rows[node], step=step) for node in rows for step in range(node + 1, steps)]
        lengths = {node: self.evaluations(steps, node) for node in rows}
        last = max(lengths.values(), default=0)
        together = [
            sum(rows[node] for node in rows if lengths[node] > number) for number in range(1, last)
        ]
        return [Call(count, self.network.share) for count in together]


def split_evenly(values: Mapping[int, Tensor], scored: Scored) -> dict[int, Tensor]:
    """Values of all nodes to be estimated from those of some of them, linear over the decisions
    between two of these.
    """
    found, nodes = dict(values), scored.nodes
    known = {nodes.index(node): table for node, table in values.items()}
    known[len(nodes)] = scored.final
    for before, after in pairwise(sorted(known)):
        for place in range(before + 1, after):
            share = (place - before) / (after - before)
            found[nodes[place]] = known[before] + share * (known[after] - known[before])
    return found


@checked_options
@dataclass(frozen=True, repr=False)
class Substeps(ODEProbe):
    """R_j scores the image after `count` network evaluations on an even grid over [t_j, 0], the
    first of them the rollout's v_j.

    `count` = 1 is the Tweedie estimate x_j - t_j v_j. A step takes one evaluation; with heun there
    are (`count` + 1) / 2 steps. Source: Stepwise-Flow-GRPO (arXiv 2603.28718), T' = `count`,
    Euler's method.

    Args:
        count: T', 1 or more; odd with heun.
        every: see `ODEProbe`.
        fraction: see `ODEProbe`.
        control: see `ODEProbe`.
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    count: int = 5

    def __post_init__(self) -> None:
        require(self.count >= 1, "Substeps.count", self.count, "1 or more")
        fits = self.solver != "heun" or self.count % 2 == 1
        require(
            fits,
            "Substeps.count",
            self.count,
            "odd with solver heun, which has 2 evaluations a step and 1 in the last",
        )
        super().__post_init__()

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
    """R_j scores the image reached by the remaining ODE steps on the sampler's grid. Source:
    TP-GRPO (arXiv 2602.06422).

    heun takes 2 (T - j) - 1 evaluations from node j, the other solvers T - j.

    Args:
        together: advance the solutions within the rollout's calls, T calls in all; applies to euler
            without cheaper options. False, and all cheaper options: separate calls, up to T - 1
            more.
        every: see `ODEProbe`.
        fraction: see `ODEProbe`.
        control: see `ODEProbe`.
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    together: bool = True

    def ahead(self, nodes: Sequence[int]) -> Sequence[int]:
        """The nodes with estimates, if their solutions advance with the rollout."""
        plain = (
            self.together
            and self.solver == "euler"
            and self.fraction == 1
            and self.network == NetworkUse()
        )
        return nodes[:: self.every] if plain else ()

    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The rest of the sampler's grid."""
        return Grid(
            schedule.times[node:], schedule.deltas[node:], schedule.network_timesteps[node:]
        )

    def evaluations(self, steps: int, node: int) -> int:
        """One for each remaining step; with heun two for all but the last."""
        return 2 * (steps - node) - 1 if self.solver == "heun" else steps - node


@checked_options
@dataclass(frozen=True)
class Continuation(Probe):
    """R_j is the mean reward of `count` stochastic continuations from node j: a Monte Carlo
    estimate of the value V(x_j).

    Gains of such rewards estimate the true advantages V(x_{i+1}) - V(x_i) of the steps taken, the
    ideal credit if evaluations were free. This takes `count` T (T + 1) / 2 evaluations in addition
    to the rollout. Raises `ConfigError` for a `count` below 1.
    """

    count: int = 16

    def __post_init__(self) -> None:
        require(self.count >= 1, "Continuation.count", self.count, "1 or more")

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """The ends of the continuations."""
        return {node: Estimate(run.continued(node, self.count), self.count) for node in run.nodes}

    def cost(self, shape: Shape) -> Cost:
        """`count` rows for every trajectory, node and step after it."""
        rows = shape.groups * shape.members * self.count
        calls = [Call(rows) for node in shape.nodes for _ in range(node, shape.schedule.steps)]
        return Cost(calls, len(shape.nodes) * rows)
