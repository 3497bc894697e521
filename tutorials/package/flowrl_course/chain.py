"""Denoising chains that are exact: one in the plane with one parameter, the wind, so that the
gradient of the expected reward is a vector in the plane, and a random walk in one dimension.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flowrl.bench.exact import ValueGrid
from flowrl.flow import GaussianMixture, uniform_schedule
from flowrl.samplers import FlowSDE, Windowed, transition_stds

RING = GaussianMixture.ring()
CALM = torch.zeros(2, dtype=torch.float64)
"""No wind: the policy before training."""
TARGET = 2 * torch.tensor([math.cos(math.pi / 4), math.sin(math.pi / 4)], dtype=torch.float64)


def reward(points: Tensor) -> Tensor:
    """exp(-d^2 / 2) for points [..., 2] at distance d from the target at 45 degrees of the ring."""
    return torch.exp(-(points - TARGET).square().sum(-1) / 2)


def velocity(z: Tensor, time: float) -> Tensor:
    """The exact velocity of the ring at z [sample, 2], float64."""
    return RING.velocity(z.float(), torch.full((len(z),), time)).double()


@dataclass(frozen=True)
class Chain:
    """Flow-SDE with noise level 0.7 on the exact flow of the ring; the last step follows the ODE.

    Decision k, the step from node k to node k + 1, draws z_{k+1} = mean(z_k) + std_k noise. The
    *wind* [2] is subtracted from the velocity in every decision, so that it blows the samples its
    way. z is [sample, 2], float64.

    Args:
        steps: steps from noise to data; all but the last are decisions.
        points: points per axis of the grid for exact values (`flowrl.bench.exact`).
    """

    steps: int = 10
    points: int = 81

    @property
    def decisions(self) -> int:
        """Steps but the last."""
        return self.steps - 1

    @cached_property
    def times(self) -> list[float]:
        """The times of the nodes, from 1 to 0."""
        return uniform_schedule(self.steps).times.tolist()

    @cached_property
    def stds(self) -> Tensor:
        """Standard deviation of every decision [decision]."""
        return transition_stds(self._sampler, uniform_schedule(self.steps))[:-1].double()

    @cached_property
    def pushes(self) -> Tensor:
        """How far a wind of 1 moves the mean of every decision [decision]."""
        still = torch.zeros(1, 2, dtype=torch.float64)
        moved = [self._transition(still, still - 1, k)[0, 0] for k in range(self.decisions)]
        return torch.stack(moved)

    def mean(self, z: Tensor, k: int, wind: Tensor = CALM) -> Tensor:
        """Mean of the next node, from z at node k."""
        return self._transition(z, velocity(z, self.times[k]) - wind, k)

    def finish(self, z: Tensor) -> Tensor:
        """The finished samples, from z at the last node but one."""
        return self._transition(z, velocity(z, self.times[-2]), self.decisions)

    def roll(self, count: int, seed: int = 0, wind: Tensor = CALM) -> Tensor:
        """The nodes of `count` trajectories [node, sample, 2], z_0 first and the finished sample
        last.
        """
        generator = torch.Generator().manual_seed(seed)
        nodes = [torch.randn(count, 2, generator=generator, dtype=torch.float64)]
        for k, std in enumerate(self.stds):
            noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
            nodes.append(self.mean(nodes[-1], k, wind) + std * noise)
        return torch.stack([*nodes, self.finish(nodes[-1])])

    def values(self, nodes: Tensor, wind: Tensor = CALM) -> Tensor:
        """Exact values of `nodes` under the policy with that wind [sample, decision+1]; the last
        column is the reward.
        """
        tables = self._tables(wind)
        columns = [
            self.grid.at(table[None], self.mean(nodes[k], k, wind)[None])[0]
            for k, table in enumerate(tables)
        ]
        return torch.stack([*columns, reward(nodes[-1])], -1)

    def expected_terms(self, nodes: Tensor) -> Tensor:
        """E[psi_k A*_k | z_k] of the calm policy [sample, decision, 2]: push_k times the gradient
        of V_k by the mean of decision k.
        """
        terms = []
        for k, table in enumerate(self._tables(CALM)):
            mean = self.mean(nodes[k], k).requires_grad_()
            value = self.grid.at(table[None], mean[None]).sum()
            terms.append(self.pushes[k] * torch.autograd.grad(value, mean)[0])
        return torch.stack(terms, 1)

    def objective(self, wind: Tensor = CALM) -> Tensor:
        """J, the expected reward of the policy with that wind: one number, differentiable."""
        first = self._at_grid(self._tables(wind)[0], 0, wind)
        return self.grid.smoothed(first, 1.0)[self.points // 2, self.points // 2]

    def gradient(self, wind: Tensor = CALM) -> Tensor:
        """The exact gradient of J by the wind [2]."""
        leaf = wind.clone().requires_grad_()
        return torch.autograd.grad(self.objective(leaf), leaf)[0]

    @cached_property
    def grid(self) -> ValueGrid:
        """The grid of exact values."""
        return ValueGrid(self.points, 5.0)

    @cached_property
    def _sampler(self) -> Windowed:
        return Windowed(FlowSDE(0.7), range(self.decisions))

    def _transition(self, z: Tensor, moving: Tensor, step: int) -> Tensor:
        index = torch.full((len(z),), step)
        return self._sampler.transition(z, moving, uniform_schedule(self.steps), index).mean

    def _tables(self, wind: Tensor) -> list[Tensor]:
        """E V_{k+1}(m + std_k noise) at every point m of the grid, by decision: dynamic programming
        from the end.
        """
        after = reward(self.finish(self.grid.places)).view(self.points, self.points)
        tables: list[Tensor] = []
        for k in reversed(range(self.decisions)):
            tables.insert(0, self.grid.smoothed(after, float(self.stds[k])))
            after = self._at_grid(tables[0], k, wind) if k else after
        return tables

    def _at_grid(self, table: Tensor, k: int, wind: Tensor) -> Tensor:
        """V_k at the points of the grid."""
        means = self.mean(self.grid.places, k, wind)
        return self.grid.at(table[None], means[None])[0].view(self.points, self.points)


def walk(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A chain in one dimension with five decisions: exact values [sample, 6], of which the last
    column is the reward, and scores [sample, 5].

    The state begins at -0.5, and decision k adds noise with a standard deviation of 1, 0.8, 0.6,
    0.4 and 0.3. The reward is sigmoid(3 x) of the last state. V_k is its mean over the rest of the
    noise, by Gauss-Hermite quadrature. The parameter is added to the mean of every decision.
    """
    stds = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.3], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, len(stds), generator=generator, dtype=torch.float64)
    start = torch.full((count, 1), -0.5, dtype=torch.float64)
    states = torch.cat([start, noise * stds], 1).cumsum(1)
    places, weights = np.polynomial.hermite_e.hermegauss(48)
    columns = []
    for k in range(len(stds)):
        rest = float(stds[k:].square().sum().sqrt())
        column = torch.zeros_like(states[:, k])
        for place, weight in zip(places, weights / weights.sum(), strict=True):
            column += weight * torch.sigmoid(3 * (states[:, k] + rest * place))
        columns.append(column)
    return torch.stack([*columns, torch.sigmoid(3 * states[:, -1])], 1), noise / stds
