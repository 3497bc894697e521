"""Means, intervals, tests and first passage for runs that are paired by seed. The rules of use:
docs/verdicts.md.

The unit is the seed. Of several intervals (t, widened percentile, studentised bootstrap; 3 to 15
seeds; normal, skewed and collapse-contaminated differences), the t interval of the mean of paired
differences covers best; `flowrl_bench.calibration` measures its false-alarm rates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flowrl_compare.statistics import (
    COLLAPSE,
    LEVEL,
    Estimate,
    Inference,
    Values,
    first_reached,
    t_interval,
)
from numpy.typing import ArrayLike

from flowrl.core.errors import require

DRAWS = 2000
SMALLEST = 0.05
"""The smallest difference of interest in reward, in both directions, as a fraction of the possible
gain (docs/verdicts.md).
"""
SMALLEST_RATIO = 1.1
"""The smallest budget ratio of interest, in both directions."""
SMALLEST_RATE = 0.1
"""The smallest difference of interest between collapse rates."""
SMALLEST_DENSITY = 0.05
"""The smallest difference of interest in log-density."""
REACHED, RISE = (0.5, 0.7, 0.9), 0.05
"""Levels of budget ratios, as fractions of the rise that both arms of a seed achieve, which counts
as at least `RISE`.
"""


def detectable(spread: float, count: int, alpha: float = 1 - LEVEL, power: float = 0.8) -> float:
    """The smallest mean difference that a two-sided t test at level `alpha` finds with probability
    `power`.

    d spread / sqrt(n), with P(T > t_{1 - alpha/2, n-1}) = `power` for the noncentral T of n - 1
    degrees of freedom and shift d; `spread`: the standard deviation of n = `count` paired
    differences. The usual approximation of d, t_{1 - alpha/2, n-1} + t_{power, n-1}, has a power of
    0.77 instead of 0.8 for 3 seeds, and less at the levels of Holm's correction. Infinite for fewer
    than 2 differences.
    """
    from scipy import optimize, stats  # a second of import time

    if count < 2:
        return math.inf
    critical = float(stats.t.ppf(1 - alpha / 2, count - 1))
    solution = optimize.root_scalar(
        lambda d: stats.nct.sf(critical, count - 1, d) - power, bracket=(0.0, 4 * critical + 4)
    )
    return float(solution.root) * spread / math.sqrt(count)


def rate(events: ArrayLike) -> Estimate:
    """The fraction of runs with an event (Boolean [run]) with Wilson's interval."""
    outcomes = np.asarray(events, float).ravel()
    count, value = outcomes.size, float(outcomes.mean())
    from scipy import stats  # a second of import time

    z = float(stats.norm.ppf((1 + LEVEL) / 2))
    centre = (value + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * math.sqrt(value * (1 - value) / count + z**2 / (4 * count**2))
    return Estimate(value, max(0.0, centre - reach), min(1.0, centre + reach))


def rate_difference(first: ArrayLike, second: ArrayLike, null: float = 0.0) -> Inference:
    """Difference of the event rates of paired runs (Boolean [run]), by Bonett and Price 2012: the
    Wald interval with a run added to both kinds of discordant pairs.

    d = (b - c) / (n + 2), b + 1 and c + 1 discordant pairs of n + 2; the value is the plain
    difference of rates.
    """
    a, b = np.asarray(first, bool).ravel(), np.asarray(second, bool).ravel()
    require(
        a.shape == b.shape and a.size > 0,
        "runs of the arms",
        (a.shape, b.shape),
        "the same runs for both arms",
    )
    count = a.size + 2
    only_first, only_second = (
        (float((a & ~b).sum()) + 1) / count,
        (float((b & ~a).sum()) + 1) / count,
    )
    centre = only_first - only_second
    error = math.sqrt((only_first + only_second - centre**2) / count)
    return t_interval(float(a.mean() - b.mean()), centre, error, 1e9, null)


def outside(test: Callable[[float], Inference], margin: float) -> float:
    """p-value of the hypothesis that a difference is at least `margin` in either direction: the
    larger one of two one-sided tests. `test` has the two-sided p-value of a null; 1 for an estimate
    beyond the margin.
    """
    low, high = test(-margin), test(margin)
    if not abs(low.low + low.high) < 2 * margin:
        return 1.0
    return max(low.p, high.p) / 2


def interquartile(values: Values, axis: int = -1) -> Values:
    """The mean of the middle half: a quarter of the values is cut off at either end (rounded
    down).
    """
    from scipy import stats  # a second of import time

    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def widening(size: int) -> float:
    """The factor by which a percentile interval is widened about its centre so that it covers with
    few seeds.

    t_{n-1} / z sqrt(n / (n - 1)): the bootstrap's spread is too small by sqrt((n - 1) / n) and
    leaves out the uncertainty of the spread itself (the expanded percentile interval, Hesterberg
    2014, arXiv 1411.5279). 1.22 for 10 seeds, 2.69 for 3.
    """
    from scipy import stats  # a second of import time

    if size < 2:
        return math.inf
    tail = (1 + LEVEL) / 2
    return float(stats.t.ppf(tail, size - 1) / stats.norm.ppf(tail)) * math.sqrt(size / (size - 1))


Statistic = Callable[..., Values]
"""statistic(values [..., seed], axis=-1) -> [...]."""


def bootstrap(statistic: Statistic, values: ArrayLike, seed: int = 0) -> Inference:
    """statistic(values [seed]) with a widened percentile interval."""
    sample = np.asarray(values, float)
    require(sample.ndim == 1 and sample.size > 0, "values", sample.shape, "[seed], one or more")
    value = float(statistic(sample, axis=-1))
    if sample.size < 2:
        return Inference(value, -math.inf, math.inf)
    index = np.random.default_rng(seed).integers(0, sample.size, (DRAWS, sample.size))
    low, high = np.quantile(statistic(sample[index], axis=-1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    stretch = widening(sample.size)
    return Inference(
        value, value - (value - float(low)) * stretch, value + (float(high) - value) * stretch
    )


def median(values: ArrayLike) -> Inference:
    """Median over seeds (`bootstrap`)."""
    return bootstrap(np.median, values)


def interquartile_mean(values: ArrayLike) -> Inference:
    """Interquartile mean over seeds (`bootstrap`)."""
    return bootstrap(interquartile, values)


def wins(first: ArrayLike, second: ArrayLike) -> float:
    """Fraction of seeds at which `first` is larger than `second`; ties count a half."""
    a, b = np.asarray(first, float), np.asarray(second, float)
    return float(((a > b) + 0.5 * (a == b)).mean())


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


def monotone(rewards: Sequence[float]) -> Values:
    """The rewards up to a collapse, made non-decreasing by isotonic regression (least squares); it
    may be shorter than `rewards`.

    A collapse begins at the first evaluation after the best mean of three that is more than
    `COLLAPSE` below that mean.
    """
    from scipy.optimize import isotonic_regression  # a second of import time

    y = np.asarray(rewards, float)
    if len(y) < 3:
        return np.asarray(isotonic_regression(y).x)
    smooth = np.convolve(np.pad(y, 1, mode="edge"), np.full(3, 1 / 3), "valid")
    smooth[0] = y[0]
    best = int(smooth.argmax())
    low = np.flatnonzero(y[best:] < smooth[best] - COLLAPSE)
    return np.asarray(
        isotonic_regression(y[: best + low[0]] if len(low) and best + low[0] > 0 else y).x
    )


@dataclass(frozen=True)
class Passage:
    """First passage in one seed: log of the first arm's budget over the second's, averaged over
    levels, and which arms missed a level.
    """

    log_ratio: float
    first_never: bool
    second_never: bool


def first_passage(first: Curve, second: Curve) -> Passage:
    """The budgets at which two runs of a seed first reach common levels; exchanging the arms
    changes the sign.

    Levels: start + q max(RISE, M - start), q in `REACHED`, M the smaller of both monotone curves'
    best rewards. A level that a run never reaches counts as its whole budget, one that it reaches
    before its first evaluation as that evaluation's budget, because evaluations do not resolve
    more.
    """
    rises = monotone(first.rewards), monotone(second.rewards)
    start = (float(rises[0][0]) + float(rises[1][0])) / 2
    levels = start + np.array(REACHED) * max(RISE, min(float(rise[-1]) for rise in rises) - start)
    logs, never = [], []
    for curve, rise in zip((first, second), rises, strict=True):
        xs = curve.budgets
        reached = first_reached(xs[: len(rise)], rise.tolist(), levels)
        never.append(bool(np.isinf(reached).any()))
        logs.append(np.log(np.clip(reached, xs[min(1, len(xs) - 1)], xs[-1])).mean())
    return Passage(float(logs[0] - logs[1]), *never)


@dataclass(frozen=True)
class Survival:
    """Budgets at which runs first reached a level, in increasing order; the other runs never
    did.
    """

    level: float
    budgets: tuple[float, ...]
    runs: int

    def fraction(self, budget: float) -> float:
        """Fraction of all runs that had reached the level by `budget`."""
        return sum(reached <= budget for reached in self.budgets) / self.runs


def survival(curves: Sequence[Curve], levels: Sequence[float]) -> list[Survival]:
    """First passage of every level by monotone curves (`monotone`), for figures that include runs
    which never reach it.
    """
    survivals = []
    for level in levels:
        rises = [(curve.budgets, monotone(curve.rewards)) for curve in curves]
        times = [float(first_reached(xs[: len(rise)], rise.tolist(), level)) for xs, rise in rises]
        survivals.append(
            Survival(level, tuple(sorted(t for t in times if math.isfinite(t))), len(curves))
        )
    return survivals


def shift_at_equal_reward(
    first: Curve, second: Curve, of_first: Sequence[float], of_second: Sequence[float]
) -> float:
    """How much higher a quantity (`of_first`, `of_second`, at the evaluations) is in the first run
    at the same reward.

    The coefficient s of quantity = cubic(reward) + s [first run], fitted by least squares to the
    evaluations of both runs with monotone rewards up to the smaller of both best rewards. 0 if the
    quantity is the same cubic of reward in both runs.
    """
    rises = monotone(first.rewards), monotone(second.rewards)
    top = min(float(rise[-1]) for rise in rises) + 1e-9
    points = [
        (rise[rise <= top], np.asarray(q, float)[: len(rise)][rise <= top])
        for rise, q in zip(rises, (of_first, of_second), strict=True)
    ]
    rewards = np.concatenate([point[0] for point in points])
    scaled = (rewards - rewards.mean()) / max(float(np.ptp(rewards)), 1e-9)
    indicator = np.repeat([1.0, 0.0], [len(point[0]) for point in points])
    design = np.column_stack([indicator, np.vander(scaled, 4)])
    return float(
        np.linalg.lstsq(design, np.concatenate([point[1] for point in points]), rcond=None)[0][0]
    )
