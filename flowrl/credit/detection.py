"""Turning points under reward noise: probabilities of false and missed turning points, and their
effect on the decision's reward.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import ValueTable
from flowrl.credit.orders import order_moments
from flowrl.credit.turning_point import (
    deciding_columns,
    process_rewards,
    turn_orders,
    turning_points,
)

Table = Float[Tensor, "prompt member decision"]
POWERS = ({}, {"x": 1}, {"y": 1}, {"z": 1}, {"y": 2}, {"z": 2}, {"x": 1, "y": 1}, {"x": 1, "z": 1})


@dataclass(frozen=True)
class ExpectedCalls:
    """The effect of noise on the turning points of known values; tables [prompt, member, decision].

    Args:
        turns: the turning points without noise.
        called: the probability that the noisy values show a turning point.
        rewards: the decision's reward without noise.
        mean: mean of the decision's reward from noisy values: R - V_k if it is called, V_{k+1} -
            V_k if not.
        variance: variance of this reward.
    """

    turns: Bool[Tensor, "prompt member decision"]
    called: Table
    rewards: Table
    mean: Table
    variance: Table

    @property
    def false_calls(self) -> Table:
        """The probability of a call at decisions that are not turning points, 0 at the others."""
        return torch.where(self.turns, 0.0, self.called)

    @property
    def misses(self) -> Table:
        """The probability of no call at turning points, 0 at the other decisions."""
        return torch.where(self.turns, 1 - self.called, 0.0)

    @property
    def bias(self) -> Table:
        """`mean` minus `rewards`."""
        return self.mean - self.rewards


def expected_calls(
    values: ValueTable, noise: float, consistent: bool = True, first_step: bool = True
) -> ExpectedCalls:
    """Calls and missed turning points if independent N(0, noise^2) is added to the true value V_j
    of every column.

    Write d_k = V_{k+1} - V_k, D = R - V_0 and F = R - V_{k+1}, with R the last of the values and n
    the number of decisions. In units of the noise, the noisy (d_{k-1}, d_k, F, D) are normal around
    the true ones with covariance ::

        [[2, -1, 0, a], [-1, 2, -1, b], [0, -1, 2, 1], [a, b, 1, 2]]
        a = 1 if k = 1 else 0,  b = 1 if k = n - 1 else 0,

    where F is 0 if k = n - 1. A decision is called if their signs are (-, +, +, +) or the opposite
    (`consistent`); the plain rule leaves out F. Decision 0 is called if d_0 and F, or under the
    plain rule d_0 and D, have the same sign. `order_moments` computes the probability P(V) of the
    first case and the moments of the noise in this case. The second case is the first case of -V.
    Let C be 1 if the decision is called and 0 if not. With noisy differences in the brackets ::

        called = P(V) + P(-V),   mean = d_k + E[C (F)]
        E[r_k^2] = d_k^2 + 2 noise^2 + E[C (d_k + F)^2 - C (d_k)^2]

    The error of `called` is below 1e-9; those of `mean` and `variance` are below 1e-8 in units of
    max(`noise`, |R - V_k|) and its square. Definitions: TP-GRPO (arXiv 2602.06422).

    Args:
        values: table of true values V [prompt, member, decision+1].
        noise: standard deviation of the noise, above 0, in units of the reward.
        consistent: the definition of a turning point (see `turning_points`).
        first_step: let decision 0 be a turning point.

    Returns:
        Tables [prompt, member, decision] of probabilities, means and variances.

    Raises:
        ConfigError: `noise` is not above 0.
    """
    require(noise > 0, "noise", noise, "above 0")
    true = values.double()
    turns = turning_points(true, consistent, first_step)
    last, letters = turns.shape[-1] - 1, deciding_columns(true / noise)
    found = []
    for k in range(last + 1):
        orders = turn_orders(k == 0, consistent, k <= 1, k == last) if k > 0 or first_step else ()
        means = {letter: table[..., k].flatten() for letter, table in letters.items()}
        found.append(_moments(means, orders, k == last))
    called, mean, variance = (
        torch.stack(parts, -1).view(turns.shape) for parts in zip(*found, strict=True)
    )
    return ExpectedCalls(
        turns, called, process_rewards(true, turns), mean * noise, variance * noise**2
    )


def _moments(
    means: dict[str, Tensor], orders: tuple[str, ...], at_end: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Probability of a call, mean and variance of the decision's reward [entry], in units of the
    noise.

    If y and z are one score (`at_end`), the long-term reward is the increment, and the call does
    not matter.
    """
    increment = means["y"] - means["x"]
    called, long_term, square = (
        torch.zeros_like(increment),
        torch.zeros_like(increment),
        torch.zeros_like(increment),
    )
    for sign in (1, -1) if orders else ():
        signed = {letter: sign * values for letter, values in means.items()}
        if at_end:
            called = called + order_moments(signed, orders)[0]
            continue
        p, x, y, z, yy, zz, xy, xz = order_moments(signed, orders, POWERS)
        follow, both = signed["z"] - signed["y"], signed["z"] + signed["y"] - 2 * signed["x"]
        called = called + p
        long_term = long_term + sign * (follow * p + z - y)
        square = (
            square
            + follow * both * p
            + follow * (z + y - 2 * x)
            + both * (z - y)
            + zz
            - yy
            - 2 * (xz - xy)
        )
    mean = increment + long_term
    return called, mean, increment.square() + 2.0 + square - mean.square()
