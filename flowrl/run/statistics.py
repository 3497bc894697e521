"""Means over seeds or prompts with Student's interval, the criterion of a collapsed run, and the
position at which a learning curve first reaches a level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowrl.core.errors import require

LEVEL = 0.95
"""Coverage of all intervals."""
COLLAPSE = 0.5
"""Fraction of the gain that a collapsed run has lost."""
ERRORS = 3.0
"""How many times the usual fall, or standard deviations of chance, a collapsed run has lost."""
HACKED = 3
"""Successive evaluations in which a held-out reward of a hacked run is below its best."""
Values = NDArray[np.float64]
"""One value per seed."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval.

    Args:
        value: the estimate.
        low: lower end of the interval; -inf if the data do not bound it (fewer than 2 seeds).
        high: upper end of the interval; inf if the data do not bound it.
    """

    value: float
    low: float
    high: float

    def text(self, digits: int = 3, sign: bool = False) -> str:
        """'0.123 [0.100, 0.140]'."""
        form = f"{'+' if sign else ''}.{digits}f"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class Inference(Estimate):
    """An estimate with the p-value of a null hypothesis.

    Args:
        value: the estimate.
        low: lower end of the interval, as in `Estimate`.
        high: upper end of the interval.
        p: two-sided p-value of the null hypothesis, by default that the value is 0; NaN for fewer
            than 2 seeds.
    """

    p: float = math.nan


def mean(values: ArrayLike, null: float = 0.0) -> Inference:
    """The mean of independent values with its t interval, and the two-sided p-value of a null
    hypothesis.

    Args:
        values: independent values [seed].
        null: mean under the null hypothesis, in units of the values.

    Returns:
        Mean, interval and p-value; the interval is infinite for a single value.

    Raises:
        ConfigError: `values` have another shape or are empty.
    """
    sample = np.asarray(values, float)
    require(sample.ndim == 1 and sample.size > 0, "values", sample.shape, "[seed], one or more")
    value, count = float(sample.mean()), sample.size
    if count < 2:
        return Inference(value, -math.inf, math.inf)
    error = float(sample.std(ddof=1)) / math.sqrt(count)
    return t_interval(value, value, error, count - 1, null)


def mean_of_means(groups: Sequence[ArrayLike]) -> Inference:
    """The mean of the means of groups of independent values, every group with the same weight.

    Its variance is the sum of s_g^2 / (n_g G^2) over the G groups, with the degrees of freedom of
    Welch and Satterthwaite; for one group this is `mean`.

    Args:
        groups: the values of every group [value].

    Returns:
        The mean, its t interval and the p-value of a mean of 0; the interval is infinite if a group
        has a single value.

    Raises:
        ConfigError: there is no group, or as `mean`.
    """
    require(len(groups) > 0, "groups", len(groups), "one or more")
    value = float(np.mean([mean(group).value for group in groups]))
    samples = [np.asarray(group, float) for group in groups]
    counts = np.array([sample.size for sample in samples])
    if counts.min() < 2:
        return Inference(value, -math.inf, math.inf)
    shares = np.array([sample.var(ddof=1) for sample in samples]) / counts / len(groups) ** 2
    variance, freedom = float(shares.sum()), float((counts - 1).sum())
    if variance > 0:
        freedom = variance**2 / float((shares**2 / (counts - 1)).sum())
    return t_interval(value, value, math.sqrt(variance), freedom, 0.0)


def t_interval(
    value: float, centre: float, error: float, freedom: float, null: float, level: float = LEVEL
) -> Inference:
    """An estimate with Student's interval, centre ± t error.

    Args:
        value: the estimate that is reported.
        centre: the middle of the interval, in general `value`.
        error: the standard error.
        freedom: degrees of freedom of t.
        null: the value whose two-sided p-value is computed.
        level: coverage of the interval.

    Returns:
        The estimate, its interval and its p-value.
    """
    from scipy import special  # scipy.stats takes a second to import

    reach = float(special.stdtrit(freedom, (1 + level) / 2)) * error
    distance = abs(centre - null)
    # equal values leave no error to divide by: the hypothesis is then true or false
    p = 2 * special.stdtr(freedom, -distance / error) if error > 1e-15 else distance <= 1e-12
    return Inference(value, centre - reach, centre + reach, float(p))


def collapsed(rewards: Sequence[float], noise: float = 0.0, share: float = COLLAPSE) -> bool:
    """Whether the last of a run's evaluations has fallen from the best by more than a `share` of
    the gain since the first, and by more than chance.

    best - last > max(share (best - first), ERRORS s, noise), with s the root mean square of the
    falls between successive evaluations up to the best one (0 without one). The unit of the reward
    has no effect. Rises do not count: a standard deviation of all differences would take a steep
    rise for noise.

    Args:
        rewards: held-out rewards [evaluation], one or more.
        noise: `evaluation_noise`, in units of the reward.
        share: fraction of the gain.
    """
    values = np.asarray(rewards, float)
    best = int(values.argmax())
    changes = np.diff(values[: best + 1])
    falls = changes[changes < 0]
    usual = float(np.sqrt((falls**2).mean())) if len(falls) else 0.0
    lost, gain = values[best] - values[-1], values[best] - values[0]
    # not by rounding
    return bool(lost > max(share * gain, ERRORS * usual, noise) + 1e-9 * abs(values).max())


def hacked(
    proxy: Sequence[float],
    heldout: Sequence[float],
    proxy_noise: Sequence[float],
    heldout_noise: Sequence[float],
    evaluations: int = HACKED,
) -> bool:
    """Whether a run gains trained reward at the expense of a held-out one.

    In each of the last `evaluations` evaluations the held-out reward is below its best so far by
    more than chance, and the trained one above its value at that best evaluation by more than
    chance. The units of the rewards have no effect.

    Args:
        proxy: means of the trained reward [evaluation].
        heldout: means of the held-out reward [evaluation].
        proxy_noise: `evaluation_noise` of the trained reward [evaluation]; that of the best
            evaluation of `heldout` counts, since hacked images have other spreads.
        heldout_noise: `evaluation_noise` of the held-out reward [evaluation].
        evaluations: number of evaluations, 1 or more.
    """
    if len(proxy) <= evaluations:
        return False
    for last in range(len(proxy) - evaluations, len(proxy)):
        best = int(np.argmax(heldout[: last + 1]))
        falls = heldout[best] - heldout[last] > heldout_noise[best]
        if not falls or proxy[last] - proxy[best] <= proxy_noise[best]:
            return False
    return True


def flat(rewards: Sequence[float], evaluations: int, least: float) -> bool:
    """Whether the best of the last `evaluations` evaluations is above the best before them by at
    most a share `least` of the gain until then, best - first (at most 0 without a gain).

    Args:
        rewards: held-out rewards [evaluation].
        evaluations: number of evaluations, 1 or more.
        least: the share.
    """
    before, late = rewards[:-evaluations], rewards[-evaluations:]
    if not before:
        return False
    return max(late) - max(before) <= least * (max(before) - before[0])


def evaluation_noise(std: float, samples: int) -> float:
    """The change between two evaluations that chance explains: `ERRORS` standard deviations of the
    difference of two means over `samples` images, and at least a fifth of `std`, the standard
    deviation of an image's reward.
    """
    return max(0.2, ERRORS * math.sqrt(2 / samples)) * std


def first_reached(xs: ArrayLike, ys: ArrayLike, target: ArrayLike) -> Values:
    """The x at which each curve through (xs, ys), linear between points, first reaches its target.

    A point above the target counts if the next one is not below it, or if it is the last: of a
    noisy curve the first point above a level is mostly too early.

    Args:
        xs: positions [*curve, point], ascending.
        ys: values [*curve, point].
        target: the values to reach [*curve].

    Returns:
        The positions [*curve]; infinite for a curve that does not reach its target, and without
        points.
    """
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    goal = np.asarray(target, float)[..., None]
    if not y.shape[-1]:
        return np.full(goal.shape[:-1], math.inf)
    above = y >= goal - 1e-12  # not by rounding
    above[..., :-1] &= above[..., 1:]
    after = above.argmax(-1, keepdims=True)
    before = np.maximum(after - 1, 0)
    (x0, x1), (y0, y1) = (
        [np.take_along_axis(values, places, -1) for places in (before, after)] for values in (x, y)
    )
    rise = np.where(after > 0, y1 - y0, 1.0)
    with np.errstate(invalid="ignore"):  # an infinite target is never reached
        share = np.where(after > 0, np.minimum(1.0, (goal - y0) / rise), 0.0)
        between = x0 + share * (x1 - x0)
    return np.where(above.any(-1, keepdims=True), between, math.inf)[..., 0]
