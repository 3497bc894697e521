"""The position at which a learning curve first reaches a level."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]
"""One value per seed, or per target."""


def first_reached(xs: Sequence[float], ys: Sequence[float], target: ArrayLike) -> Values:
    """The x at which the curve through (xs, ys), linear between points, first reaches `target`.

    Args:
        xs: positions [point], ascending.
        ys: values [point].
        target: one target, or an array of targets.

    Returns:
        Positions of the shape of `target`; infinite if the curve, which may have no points, does
        not reach the target.
    """
    x, y, goal = np.asarray(xs, float), np.asarray(ys, float), np.asarray(target, float)
    if not len(y):
        return np.full(goal.shape, math.inf)
    first = np.searchsorted(np.maximum.accumulate(y), goal - 1e-12)
    after = np.clip(first, 1, len(y) - 1)
    rise = y[after] - y[after - 1]
    fraction = (goal - y[after - 1]) / np.where(rise > 0, rise, 1.0)
    with np.errstate(invalid="ignore"):  # an infinite target is never reached
        between = x[after - 1] + fraction * (x[after] - x[after - 1])
    return np.where(first == len(y), math.inf, np.where(first == 0, x[0], between))
