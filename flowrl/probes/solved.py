"""Probes that follow the ODE from unfinished states to images, with cheaper variants; and
stochastic continuations.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, checked_options
from flowrl.core.probe import (
    Call,
    Cost,
    Estimates,
    Grid,
    NetworkUse,
    Probe,
    Probing,
    Scored,
    Shape,
    Solver,
)
from flowrl.core.types import Schedule


@dataclass(frozen=True, kw_only=True)
class ODEProbe(Probe, ABC):
    """The base of `Substeps` and `Completion`: R_j scores the end of the ODE from node j, on a grid
    that the subclass defines.

    The options reduce the cost; the defaults have no effect.

    Every start node has a separate solution, because the rollout's previous nodes are not on the
    same ODE. Multistep solvers therefore start with a step of order 1, from the rollout's v_j;
    their last step has order 1, too.

    Args:
        every: k: score only the states of every k-th decision. The gain from one of them to the
            next is split evenly over the decisions between them. Gains sum to R_T - R_0.
        solver: euler, or by diffusers' schedulers and of order 2: heun (arXiv 2206.00364, algorithm
            1), dpm++ (DPM-Solver++ 2M, arXiv 2211.01095) or unipc (arXiv 2302.04867).
        dtype: see `NetworkUse`; the first velocity is always the rollout's.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    every: Count = 1
    solver: Solver = "euler"
    dtype: Literal["own", "bfloat16"] = "own"
    guidance: Literal["own", "off"] = "own"

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

    def grids(self, schedule: Schedule, nodes: Sequence[int]) -> dict[int, Grid]:
        """The grids from those of the `nodes` whose states are scored."""
        return {node: self.grid(schedule, node) for node in nodes[:: self.every]}

    def estimate(self, run: Probing) -> Estimates:
        """The ends of the ODE."""
        if self.ahead(run.nodes):
            return run.completed
        return run.solve(self.grids(run.trajectories.schedule, run.nodes), self.solver)

    def rewards(self, scored: Scored) -> Mapping[int, Tensor]:
        """The values of all nodes to be estimated."""
        values = {node: scored.at(node) for node in scored.nodes if node in scored.rewards}
        return split_evenly(values, scored)

    def cost(self, shape: Shape) -> Cost:
        """Solutions from all nodes advance together."""
        rows = {node: shape.rows[node] for node in shape.nodes[:: self.every]}
        calls = self.calls(shape.schedule, rows)
        if self.ahead(shape.nodes):
            calls = [
                Call(count, step=step)
                for node, count in rows.items()
                for step in range(node + 1, shape.schedule.steps)
            ]
        return Cost(calls, sum(rows.values()))

    def calls(self, schedule: Schedule, rows: Mapping[int, int]) -> list[Call]:
        """Separate calls for solutions of `rows` latents by node."""
        lengths = {node: len(self.grid(schedule, node).lengths) for node in rows}
        if self.solver == "heun":  # two evaluations in every step but the last
            lengths = {node: 2 * steps - 1 for node, steps in lengths.items()}
        last = max(lengths.values(), default=0)
        together = [
            sum(rows[node] for node in rows if lengths[node] > number) for number in range(1, last)
        ]
        return [Call(count, self.network.share) for count in together]


def split_evenly(values: Mapping[int, Tensor], scored: Scored) -> dict[int, Tensor]:
    """Values of all nodes to be estimated from those of some of them, linear over the decisions
    between two of these.
    """
    split, nodes = dict(values), scored.nodes
    known = {nodes.index(node): table for node, table in values.items()}
    known[len(nodes)] = scored.final
    for before, after in pairwise(sorted(known)):
        for place in range(before + 1, after):
            share = (place - before) / (after - before)
            split[nodes[place]] = known[before] + share * (known[after] - known[before])
    return split


@checked_options
@dataclass(frozen=True, repr=False)
class Substeps(ODEProbe):
    """R_j scores the image after `count` network evaluations on an even grid over [t_j, 0], the
    first of them the rollout's v_j.

    `count` = 1 is the Tweedie estimate z_j - t_j v_j. A step takes one evaluation; with heun there
    are (`count` + 1) / 2 steps. Source: Stepwise-Flow-GRPO (arXiv 2603.28718), T' = `count`,
    Euler's method.

    Args:
        count: T', 1 or more; odd with heun.
        every: see `ODEProbe`.
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 5

    def __post_init__(self) -> None:
        fits = self.solver != "heun" or self.count % 2 == 1
        allowed = "odd with solver heun, which takes 2 evaluations a step and 1 in the last"
        require(fits, "Substeps.count", self.count, allowed)

    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The even grid."""
        start = schedule.times[node]
        steps = (self.count + 1) // 2 if self.solver == "heun" else self.count
        times = torch.stack([start * (1 - k / steps) for k in range(steps + 1)])
        timesteps = torch.stack([1000.0 * start * (1 - k / steps) for k in range(steps)])
        return Grid(times, (start / steps).expand(steps), timesteps)


def Tweedie() -> Substeps:
    """The one-step clean estimate z_j - t_j v_j: `Substeps(1)`."""
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
        solver: see `ODEProbe`.
        dtype: see `NetworkUse`.
        guidance: see `NetworkUse`.

    Raises:
        ConfigError: a field is out of range.
    """

    together: bool = True

    def ahead(self, nodes: Sequence[int]) -> Sequence[int]:
        """The nodes with estimates, if their solutions advance with the rollout."""
        plain = self.together and self.solver == "euler" and self.network == NetworkUse()
        return nodes[:: self.every] if plain else ()

    def grid(self, schedule: Schedule, node: int) -> Grid:
        """The rest of the sampler's grid."""
        return Grid(
            schedule.times[node:], schedule.deltas[node:], schedule.network_timesteps[node:]
        )


@checked_options
@dataclass(frozen=True)
class Continuation(Probe):
    """R_j is the mean reward of `count` stochastic continuations from node j: a Monte Carlo
    estimate of the value V(z_j).

    Gains of such rewards estimate the true advantages V(z_{i+1}) - V(z_i) of the steps taken, the
    ideal credit if evaluations were free. This takes `count` T (T + 1) / 2 evaluations in addition
    to the rollout. Raises `ConfigError` for a `count` below 1.
    """

    count: Count = 16

    def estimate(self, run: Probing) -> Estimates:
        """The ends of the continuations, by number and node."""
        ends = {node: run.continued(node, self.count) for node in run.nodes}
        return {
            (str(number), node): ends[node][number :: self.count]
            for node in run.nodes
            for number in range(self.count)
        }

    def rewards(self, scored: Scored) -> Mapping[int, Tensor]:
        """The means over the continuations."""
        return {
            node: torch.stack([scored.at((str(n), node)) for n in range(self.count)]).mean(0)
            for node in scored.nodes
        }

    def cost(self, shape: Shape) -> Cost:
        """`count` rows for every trajectory, node and step after it."""
        rows = shape.groups * shape.members * self.count
        calls = [Call(rows) for node in shape.nodes for _ in range(node, shape.schedule.steps)]
        return Cost(calls, len(shape.nodes) * rows)
