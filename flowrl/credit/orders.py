"""Probabilities and moments of independent Gaussian scores under the condition of an order.

A turning point is an order relation of at most five scores of one trajectory. With independent
noise its probability is a nested integral over the relations, instead of an orthant integral over
their correlated differences.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
        whole = values @ self.weights
        below = values @ self.matrix.T + (whole.cumsum(-1) - whole)[..., None]
        return whole.sum(-1)[:, None, None] - below if above else below


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
