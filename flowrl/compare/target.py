"""The cost at which an arm first reaches a reward, and the ratio of the costs of two arms with its
interval. The unit is the seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowrl.core.errors import require
from flowrl.run.statistics import LEVEL, Estimate, Values, first_reached, t_interval

RESAMPLES = 2000
"""Resamples of seeds, if the jackknife is undefined."""
WIDER = 1.22
"""Factor of their logarithmic half-widths: the percentile interval of 10 seeds is too narrow."""
Seeds = NDArray[np.intp]
"""Places of seeds [*draw, seed], in which one may occur more than once."""


@dataclass(frozen=True)
class Curves:
    """The learning curves of an arm with the same seeds as those of the other arm.

    Args:
        costs: cost at each evaluation [seed, evaluation], ascending from 0.
        rewards: held-out rewards [seed, evaluation].
    """

    costs: Values
    rewards: Values

    def __post_init__(self) -> None:
        shapes = np.shape(self.costs), np.shape(self.rewards)
        fits = shapes[0] == shapes[1] and len(shapes[0]) > 0 and 0 not in shapes[0]
        require(fits, "curves", shapes, "costs and rewards [seed, evaluation], one or more of each")

    def mean(self, seeds: Seeds) -> "Curves":
        """The means of the chosen curves [*draw, evaluation], of each row of `seeds`."""
        return Curves(self.costs[seeds].mean(-2), self.rewards[seeds].mean(-2))

    def cost(self, target: float) -> float:
        """Where the mean curve first reaches `target`; infinite if it does not."""
        return float(first_reached(self.costs.mean(0), self.rewards.mean(0), target))

    @property
    def results(self) -> Values:
        """The rewards at the last evaluation; infinite where they are not above the first one, as
        there is then nothing to reach.
        """
        start, end = self.rewards[..., 0], self.rewards[..., -1]
        return np.where(end > start, end, math.inf)


@dataclass(frozen=True)
class CostRatio(Estimate):
    """The cost of an arm until a target divided by that of another one.

    Args:
        value: the ratio; infinite if only the other arm reaches the target, 0 if only this one
            does, NaN if neither does.
        low: lower end of the 95% interval; 0 if the data do not bound it.
        high: upper end; infinite if the data do not bound it.
        more: if the arm does not reach the target, what the ratio is more than, because the arm's
            curves end there.
    """

    more: float = math.nan

    def text(self, digits: int = 2, sign: bool = False) -> str:
        """'0.62 [0.51, 0.75]', '0.92 [0.70, -]' with an open end, '> 0.39' or '> 0.39 [0.21, -]' if
        the arm's curves end there without a crossing, or '-' if the other arm has
        none.
        """
        if math.isinf(self.value):
            some = self.low < self.more
            low = f" [{self.low:.{digits}f}, -]" if some else ""
            return f"> {self.more:.{digits}f}{low}"
        if not self.value > 0:
            return "-"
        if not self.low and math.isinf(self.high):  # one seed
            return f"{self.value:.{digits}f}"
        high = f"{self.high:.{digits}f}" if math.isfinite(self.high) else "-"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {high}]"


Pair = tuple[Curves, Curves]


def cost_ratio(
    pairs: Sequence[Pair], targets: Sequence[float] | None = None, level: float = LEVEL
) -> CostRatio:
    """The cost of an arm until a target divided by that of another arm; over several tasks the
    geometric mean.

    theta = mean over tasks of log(C_first / C_second), in which C is the cost at which an arm's
    mean curve over seeds first reaches the task's target. The interval is Student's on theta, with
    the jackknife's standard error: seed i is left out of both arms and all tasks,

    s^2 = (n - 1)/n sum_i (theta_(-i) - mean theta_(-.))^2,    n - 1 degrees of freedom.

    If an arm does not reach a target without one of the seeds, it is the interval of 2.5% and 97.5%
    of resamples of the seeds, with `WIDER` half-widths of the logarithm. In a resample the ratio is
    infinite if the first arm does not reach its target, 0 if the second one does not, and 1 if
    neither does. If the first one does not in more than 2.5% of them, the interval is open.

    Args:
        pairs: by task, the curves of both arms with the same seeds.
        targets: by task, the reward to reach; None: the mean final reward of the second arm, of the
            same seeds.
        level: coverage of the interval, 0.95 above.

    Returns:
        Ratio and interval; the interval is open for a single seed.
    """
    seeds = len(pairs[0][0].rewards)
    same = {len(curves.rewards) for pair in pairs for curves in pair} == {seeds}
    require(same, "pairs", [len(c.rewards) for p in pairs for c in p], "curves with the same seeds")

    every = np.arange(seeds)
    theta, more = (float(t[0]) for t in _thetas(pairs, targets, every[None]))
    if math.isnan(theta) or seeds < 2:
        return CostRatio(_exp(theta), 0.0, math.inf, _exp(more))
    without = _thetas(pairs, targets, np.array([np.delete(every, i) for i in every]))[0]
    if np.isfinite(without).all() and math.isfinite(theta):
        error = math.sqrt((seeds - 1) * float(np.var(without)))
        interval = t_interval(theta, theta, error, seeds - 1, 0.0, level)
        low, high = interval.low, interval.high
    else:
        drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
        found = _thetas(pairs, targets, drawn)[0]
        values = np.sort(np.where(np.isnan(found), 0.0, found))
        outside = int((1 - level) / 2 * RESAMPLES)
        low, high = float(values[outside]), float(values[-1 - outside])
        if math.isfinite(theta):
            low, high = theta - WIDER * (theta - low), theta + WIDER * (high - theta)
    return CostRatio(_exp(theta), _exp(low), _exp(high), _exp(more))


def _thetas(
    pairs: Sequence[Pair], targets: Sequence[float] | None, seeds: Seeds
) -> tuple[Values, Values]:
    """theta for each row of `seeds`: inf if the first arm does not reach a target, -inf if the
    second does not, NaN if both; and what it is if the first arm arrives at its end at the latest.
    """
    thetas, least = list[Values](), list[Values]()
    for task, pair in enumerate(pairs):
        first, second = (curves.mean(seeds) for curves in pair)
        goals = second.results if targets is None else np.full(len(seeds), targets[task])
        costs = [first_reached(mean.costs, mean.rewards, goals) for mean in (first, second)]
        with np.errstate(invalid="ignore", divide="ignore"):
            own, other = np.log(costs)
            thetas.append(own - other)
            least.append(np.minimum(own, np.log(first.costs[:, -1])) - other)
    with np.errstate(invalid="ignore"):  # NaN if each arm misses another target
        return np.mean(thetas, 0), np.mean(least, 0)


def _exp(value: float) -> float:
    return math.inf if value == math.inf else math.exp(value)
