"""Turning points under reward noise: probabilities of false and missed turning points, and their effect on the step's reward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.orders import order_moments
from flowrl.credit.turning_point import deciding_nodes, process_rewards, turn_orders, turning_points
from flowrl.errors import require
from flowrl.types import NodeTable

Table = Float[Tensor, "prompt member node-1"]
POWERS = ({}, {"x": 1}, {"y": 1}, {"z": 1}, {"y": 2}, {"z": 2}, {"x": 1, "y": 1}, {"x": 1, "z": 1})


@dataclass(frozen=True)
class ExpectedCalls:
    """The effect of noise on the turning points of known rewards; tables [prompt, member, step].

    Args:
        turns: the turning points without noise.
        called: the probability that the noisy rewards show a turning point.
        rewards: the step's reward without noise.
        mean: mean of the step's reward from noisy rewards: R_T - R_i if the step is called, R_{i+1} - R_i if not.
        variance: variance of this reward.
    """

    turns: Bool[Tensor, "prompt member node-1"]
    called: Table
    rewards: Table
    mean: Table
    variance: Table

    @property
    def false_calls(self) -> Table:
        """The probability of a call at steps that are no turning points, 0 at the others."""
        return torch.where(self.turns, 0.0, self.called)

    @property
    def misses(self) -> Table:
        """The probability of no call at turning points, 0 at the other steps."""
        return torch.where(self.turns, 1 - self.called, 0.0)

    @property
    def bias(self) -> Table:
        """`mean` minus `rewards`."""
        return self.mean - self.rewards


def expected_calls(
    rewards: NodeTable, noise: float, consistent: bool = True, first_step: bool = True, changes: Sequence[bool] | None = None
) -> ExpectedCalls:
    """Calls and missed turning points if independent N(0, noise^2) is added to the true reward R_j of every node.

    Write d_i = R_{i+1} - R_i, D = R_T - R_0 and F = R_T - R_{i+1}. In units of the noise, the noisy (d_{i-1}, d_i, F, D) are
    normal around the true ones with covariance ::

        [[2, -1, 0, a], [-1, 2, -1, b], [0, -1, 2, 1], [a, b, 1, 2]],  a = 1 if i = 1 else 0,  b = 1 if i = T - 1 else 0,

    where F is 0 if i = T - 1. A step is called if their signs are (-, +, +, +) or the opposite (`consistent`); the plain rule
    leaves out F. Step 0 is called if d_0 and F, or under the plain rule d_0 and D, have the same sign. `order_moments` computes
    the probability P(R) of the first case and the moments of the noise in this case. The second case is the first case of -R.
    Let C be 1 if the step is called and 0 if not. With noisy differences in the brackets ::

        called = P(R) + P(-R),   mean = d_i + E[C (F)],   E[r_i^2] = d_i^2 + 2 noise^2 + E[C (d_i + F)^2 - C (d_i)^2]

    The error of `called` is below 1e-9; those of `mean` and `variance` are below 1e-8 in units of max(`noise`, |R_T - R_i|) and
    its square. Definitions: TP-GRPO (arXiv 2602.06422).

    Args:
        rewards: table of true rewards R [prompt, member, node].
        noise: standard deviation of the noise, above 0, in units of the reward.
        consistent: the definition of a turning point (see `turning_points`).
        first_step: let step 0 be a turning point.
        changes: per step, whether it can change the completed image (schedule.stds > 0). If not, image, score and noise of the
            next node are equal to those of this node. None: independent noise at every node.

    Returns:
        Tables [prompt, member, step] of probabilities, means and variances.

    Raises:
        ConfigError: `noise` is not above 0, or `changes` does not have one value per step.
    """
    steps = rewards.shape[-1] - 1
    changes = [True] * steps if changes is None else list(changes)
    require(noise > 0, "noise", noise, "above 0")
    require(len(changes) == steps, "changes", len(changes), f"one value per step, {steps}")
    true = rewards.double()
    turns = turning_points(true, consistent, first_step)
    images = torch.tensor([0, *changes]).cumsum(0)
    labels, nodes = deciding_nodes(images), deciding_nodes(true / noise)
    columns = []
    for i in range(steps):
        image = {letter: int(values[i]) for letter, values in labels.items()}
        possible = changes[i] and ((i > 0 and changes[i - 1]) or (i == 0 and first_step))
        at_end = image["y"] == image["z"]
        orders = turn_orders(i == 0, consistent, image["w"] == image["v"], at_end) if possible else ()
        means = {letter: values[..., i].flatten() for letter, values in nodes.items()}
        columns.append(_moments(means, orders, changes[i], at_end))
    called, mean, variance = (torch.stack(parts, -1).view(turns.shape) for parts in zip(*columns, strict=True))
    return ExpectedCalls(turns, called, process_rewards(true, turns), mean * noise, variance * noise**2)


def _moments(means: dict[str, Tensor], orders: tuple[str, ...], changes: bool, at_end: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Probability of a call, mean and variance of the step's reward [entry], in units of the noise.

    If y and z are one score (`at_end`), the long-term reward is the increment, and the call does not matter.
    """
    increment = means["y"] - means["x"]
    called, long_term, square = torch.zeros_like(increment), torch.zeros_like(increment), torch.zeros_like(increment)
    for sign in (1, -1) if orders else ():
        signed = {letter: sign * values for letter, values in means.items()}
        if at_end:
            called = called + order_moments(signed, orders)[0]
            continue
        p, x, y, z, yy, zz, xy, xz = order_moments(signed, orders, POWERS)
        follow, both = signed["z"] - signed["y"], signed["z"] + signed["y"] - 2 * signed["x"]
        called = called + p
        long_term = long_term + sign * (follow * p + z - y)
        square = square + follow * both * p + follow * (z + y - 2 * x) + both * (z - y) + zz - yy - 2 * (xz - xy)
    mean = increment + long_term
    return called, mean, increment.square() + (2.0 if changes else 0.0) + square - mean.square()
