"""Turning points under reward noise: probabilities of false and missed turning points, and their
effect on the decision's reward.

A turning point is an order relation of at most five scores of one trajectory. With independent
noise its probability is a nested integral over the relations, instead of an orthant integral over
their correlated differences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, ValueTable
from flowrl.credit import process_rewards, turning_points

Steps = Bool[Tensor, "prompt member decision"]
Table = Float[Tensor, "prompt member decision"]
Means = Mapping[str, Float[Tensor, " entry"]]
"""Means by letter, in units of the noise's standard deviation."""
TAIL = 7.5
"""Scores farther from their mean than this are neglected: a probability of 6e-14 each."""
GAP = 15.0
"""Means farther apart than this are moved together to it: their order is wrong with a probability
of 1e-26.
"""
POINTS = 10
"""Gauss-Legendre points per unit interval."""
CHUNK = 512
POWERS = ({}, {"x": 1}, {"y": 1}, {"z": 1}, {"y": 2}, {"z": 2}, {"x": 1, "y": 1}, {"x": 1, "z": 1})


def order_moments(
    means: Means, orders: Sequence[str], powers: Sequence[Mapping[str, int]] = ({},)
) -> Float[Tensor, "power entry"]:
    """E[1(order) prod_k e_k^{p_k}] for independent scores y_k = means[k] + e_k with standard normal
    e_k, float64.

    `orders`: mutually exclusive alternatives, whose moments are added; each a text of relations as
    in "x<w x<y". The letters are the vertices and the relations the edges of a graph, which must be
    a forest. Every element of `powers` has the exponents of one moment by letter (left out: 0); {}
    is the probability. The letters of `powers` must occur in all orders.

    With the normal density f_k, the integral of a forest factorises over its trees, and that of a
    tree is computed from the leaves to the root. The message of k is M_k(t) = f_k(t - mean_k)
    e_k^{p_k} prod_c I_c(t), where I_c(t) is the integral of the child's M_c above t (relation k<c)
    or below t (c<k); the tree's value is the integral of M_root. All are computed on a common
    Gauss-Legendre grid. The absolute error is below 1e-9.
    """
    count = len(next(iter(means.values())))
    pieces = []
    for start in range(0, count, CHUNK):
        piece = {letter: values[start : start + CHUNK].double() for letter, values in means.items()}
        parsed = [[relation.split("<") for relation in order.split()] for order in orders]
        pieces.append(sum(_Order(piece, relations).moments(powers) for relations in parsed))
    return (
        torch.cat(pieces, dim=1)
        if pieces
        else next(iter(means.values())).new_zeros(len(powers), 0, dtype=torch.float64)
    )


class _Order:
    """The messages of one order on a grid of unit intervals, [entry, interval, point]."""

    def __init__(self, means: Means, relations: Sequence[Sequence[str]]) -> None:
        self.relations = relations
        self.letters = sorted({letter for relation in relations for letter in relation})
        values = torch.stack([means[letter] for letter in self.letters])
        sorted_values, order = values.sort(dim=0)
        places = torch.cat(
            [torch.zeros_like(values[:1]), sorted_values.diff(dim=0).clamp(max=GAP).cumsum(0)]
        )
        places = places.gather(0, order.argsort(dim=0))
        intervals = int(torch.ceil(places.max() + 2 * TAIL))
        points, weights, matrix = (table.to(values.device) for table in _quadrature())
        grid = torch.arange(intervals, device=values.device)[:, None] + points - TAIL
        self.weights, self.matrix = weights, matrix
        self.noise = {
            letter: grid - place[:, None, None]
            for letter, place in zip(self.letters, places, strict=True)
        }
        self.density = {
            letter: torch.exp(-0.5 * e.square()) / (2 * torch.pi) ** 0.5
            for letter, e in self.noise.items()
        }

    def moments(self, powers: Sequence[Mapping[str, int]]) -> Tensor:
        return torch.stack([self._moment(power) for power in powers])

    def _moment(self, power: Mapping[str, int]) -> Tensor:
        seen: set[str] = set()
        value = torch.ones(
            len(next(iter(self.noise.values()))), dtype=torch.float64, device=self.weights.device
        )
        for letter in self.letters:  # the roots of the forest's trees
            if letter not in seen:
                value = value * (self._message(letter, "", power, seen) @ self.weights).sum(-1)
        return value

    def _message(
        self, letter: str, parent: str, power: Mapping[str, int], seen: set[str]
    ) -> Tensor:
        seen.add(letter)
        message = self.density[letter]
        if power.get(letter):
            message = message * self.noise[letter] ** power[letter]
        for low, high in self.relations:
            child = high if low == letter else low if high == letter else ""
            if child and child != parent:
                inside = self._message(child, letter, power, seen)
                message = message * self._integral(inside, above=child == high)
        return message

    def _integral(self, values: Tensor, above: bool) -> Tensor:
        """The integral of `values` below every point of the grid, or above it."""
        masses = values @ self.weights
        below = values @ self.matrix.T + (masses.cumsum(-1) - masses)[..., None]
        return masses.sum(-1)[:, None, None] - below if above else below


@cache
def _quadrature() -> tuple[Tensor, Tensor, Tensor]:
    """Gauss-Legendre points x_a and weights w_a on [0, 1], and the matrix that integrates the
    interpolant from 0 to every x_a.

    On [-1, 1] the interpolant of values y_b is sum_k (2k + 1) / 2 P_k(x) sum_b w_b P_k(x_b) y_b,
    and the integral of P_k from -1 to x is (P_{k+1}(x) - P_{k-1}(x)) / (2k + 1), for k = 0 x + 1.
    """
    x, w = np.polynomial.legendre.leggauss(POINTS)
    legendre = np.polynomial.legendre.legvander(x, POINTS)
    k = np.arange(POINTS)
    integrals = np.column_stack([x + 1, (legendre[:, 2:] - legendre[:, :-2]) / (2 * k[1:] + 1)])
    matrix = (integrals * (k + 0.5)) @ (legendre[:, :-1].T * w)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2), torch.from_numpy(matrix / 2)


def deciding_columns(table: Tensor) -> Mapping[str, Tensor]:
    """The entries [..., decision] of a table [..., decision+1] that decide whether decision k is a
    turning point, by letter.

    v: column 0; w: k - 1 (0 for the first decision); x: k; y: k + 1; z: the last.
    """
    x = table[..., :-1]
    return {
        "v": table[..., :1].expand_as(x),
        "w": torch.cat([table[..., :1], x[..., :-1]], dim=-1),
        "x": x,
        "y": table[..., 1:],
        "z": table[..., -1:].expand_as(x),
    }


def turn_orders(first: bool, consistent: bool, at_start: bool, at_end: bool) -> tuple[str, ...]:
    """The orders of the values at `deciding_columns` that make a decision an upward turning point,
    as in `turning_points`.

    They are mutually exclusive alternatives for `order_moments`; without one it never qualifies.
    `first`: it is decision 0. `at_start`: w and v are one value; `at_end`: y and z are one, written
    y. A downward turning point has all relations reversed.
    """
    if consistent and at_end:
        return ()
    if first:
        return ("x<y y<z",) if consistent else ("x<y",) if at_end else ("x<y x<z",)
    if consistent:
        return ("x<w w<y y<z", "x<y y<w w<z") if at_start else ("x<w x<y y<z v<z",)
    if at_end:
        return ("x<w w<y",) if at_start else ("x<w x<y v<y",)
    return ("x<y x<w w<z",) if at_start else ("x<w x<y v<z",)


def turn_probability(
    values: ValueTable, turns: Steps, noise: float, consistent: bool = True
) -> CreditTable:
    """The probability that a decision of `turns` is a turning point of the same direction in the
    values without noise.

    The values are V_j = v_j + `noise` e_j with independent standard normal e_j; with a flat prior
    the v_j are independent and normal around V_j, with the same standard deviation. Equal values of
    a trajectory count as one score, because a completion that gives the same image has the same
    noise. The error is below 1e-9. If the noise is not small against the differences between true
    values, a flat prior is too optimistic.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        turns: mask of turning points [prompt, member, decision], from `turning_points`.
        noise: standard deviation of the reward's noise, in units of the reward.
        consistent: the definition by which `turns` were found.

    Returns:
        Probabilities [prompt, member, decision]; 0 outside `turns`.
    """
    known = {letter: table[turns] for letter, table in deciding_columns(values).items()}
    direction = (known["y"] - known["x"]).sign() / noise
    zero = torch.arange(turns.shape[-1], device=turns.device).expand_as(turns)[turns] == 0
    probabilities = torch.zeros(len(zero), dtype=torch.float64, device=turns.device)
    for first, at_start, at_end in product((True, False), repeat=3):
        case = (
            (zero == first)
            & ((known["w"] == known["v"]) == at_start)
            & ((known["y"] == known["z"]) == at_end)
        )
        orders = turn_orders(first, consistent, at_start, at_end)
        if orders and bool(case.any()):
            probabilities[case] = order_moments(
                {letter: (direction * value)[case] for letter, value in known.items()}, orders
            )[0]
    table = torch.zeros(turns.shape, dtype=torch.float64, device=turns.device)
    table[turns] = probabilities
    return table


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
    moments = []
    for k in range(last + 1):
        orders = turn_orders(k == 0, consistent, k <= 1, k == last) if k > 0 or first_step else ()
        means = {letter: table[..., k].flatten() for letter, table in letters.items()}
        moments.append(_moments(means, orders, k == last))
    called, mean, variance = (
        torch.stack(parts, -1).view(turns.shape) for parts in zip(*moments, strict=True)
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
