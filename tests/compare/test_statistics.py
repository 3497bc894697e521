"""The place at which a curve first reaches a level, compared with the definition."""

import math

import numpy as np
import pytest
from flowrl_compare.statistics import first_reached
from hypothesis import given
from hypothesis import strategies as st


def crossing(xs, ys, target):
    """The definition, point by point."""
    for i, y in enumerate(ys):
        if y >= target - 1e-12:
            return (
                xs[0]
                if i == 0
                else xs[i - 1] + (target - ys[i - 1]) / (y - ys[i - 1]) * (xs[i] - xs[i - 1])
            )
    return math.inf


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 1)), min_size=1, max_size=8),
    st.lists(st.floats(0, 1.2), max_size=4),
)
def test_the_first_crossing(points, targets):
    xs, ys = np.cumsum([step for step, _ in points]).tolist(), [y for _, y in points]
    expected = [crossing(xs, ys, target) for target in [*targets, math.inf]]
    assert first_reached(xs, ys, [*targets, math.inf]).tolist() == pytest.approx(expected, abs=1e-9)
    assert first_reached(xs, ys, ys[-1]) == pytest.approx(crossing(xs, ys, ys[-1]))
