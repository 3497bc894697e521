"""Tests and learning curves for runs that are paired by seed.

The unit is the seed. Of several intervals (t, widened percentile, studentised bootstrap; 3 to 15
seeds; normal, skewed and collapse-contaminated differences), the t interval of the mean of paired
differences covered best.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.run.statistics import LEVEL, Inference

SMALLEST = 0.05
"""The smallest difference of interest in reward, in both directions, as a fraction of the possible
gain.
"""


def detectable(spread: float, count: int, alpha: float = 1 - LEVEL) -> float:
    """The smallest mean difference that a two-sided t test at level `alpha` finds with probability
    0.8.

    d spread / sqrt(n), with P(T > t_{1 - alpha/2, n-1}) = 0.8 for the noncentral T of n - 1
    degrees of freedom and shift d; `spread`: the standard deviation of n = `count` paired
    differences. The usual approximation of d, t_{1 - alpha/2, n-1} + t_{0.8, n-1}, has a power of
    0.77 instead of 0.8 for 3 seeds, and less at the levels of Holm's correction. Infinite for fewer
    than 2 differences.
    """
    from scipy import optimize, stats  # a second of import time

    if count < 2:
        return math.inf
    critical = float(stats.t.ppf(1 - alpha / 2, count - 1))
    solution = optimize.root_scalar(
        lambda d: stats.nct.sf(critical, count - 1, d) - 0.8, bracket=(0.0, 4 * critical + 4)
    )
    return float(solution.root) * spread / math.sqrt(count)


def outside(test: Callable[[float], Inference], margin: float) -> float:
    """p-value of the hypothesis that a difference is at least `margin` in either direction: the
    larger one of two one-sided tests. `test` has the two-sided p-value of a null; 1 for an estimate
    beyond the margin.
    """
    low, high = test(-margin), test(margin)
    if not abs(low.low + low.high) < 2 * margin:
        return 1.0
    return max(low.p, high.p) / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: all below 0.05 are rejected with a family-wise
    error of at most 5%.

    adjusted_(k) = max_{j <= k} min(1, (m - j + 1) p_(j)). NaN stays NaN and does not count as a
    test. Source: Holm 1979.
    """
    order = sorted(
        (i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i]
    )
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class Curve:
    """A learning curve: held-out rewards at increasing budgets, the first before training."""

    budgets: Sequence[float]
    rewards: Sequence[float]


def mean_until(curve: Curve, budget: float) -> float:
    """The mean of the piecewise linear curve over budgets from its first to `budget`, which must
    not exceed its last.
    """
    xs, ys = np.asarray(curve.budgets, float), np.asarray(curve.rewards, float)
    if budget <= xs[0]:
        return float(ys[0])
    inside = xs < budget
    x, y = np.append(xs[inside], budget), np.append(ys[inside], np.interp(budget, xs, ys))
    return float(np.trapezoid(y, x) / (budget - xs[0]))
