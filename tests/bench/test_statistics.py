"""Tests with a stated error, and means of learning curves."""

import math

import numpy as np
import pytest
from flowrl_bench.statistics import (
    Curve,
    detectable,
    holm,
    mean_until,
    outside,
)
from flowrl_compare.statistics import mean


@pytest.mark.parametrize("count", [3, 6, 10])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 18])
def test_power_by_simulation(count, alpha):
    """20,000 experiments: a power of 0.8 is found within 0.01 with probability 0.9996."""
    draws = np.random.default_rng(count).normal(detectable(2.0, count, alpha), 2.0, (20_000, count))
    significant = [mean(row).p < alpha for row in draws[:300]]
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(count))
    from scipy import stats

    power = 2 * stats.t.sf(np.abs(t), count - 1) < alpha
    assert power[:300].tolist() == significant
    assert power.mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("middle", "p"), [(0.0, 0.0275), (0.02, 0.0741), (-0.02, 0.0741)])
def test_two_one_sided_tests_by_hand(middle, p):
    """t = (0.06 - |mean|) / error with 4 degrees of freedom; error 0.05 / sqrt(5)."""
    values = middle + 0.05 * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    assert outside(lambda null: mean(values, null), 0.06) == pytest.approx(p, abs=1e-4)


def test_beyond_the_margin():
    assert outside(lambda null: mean([0.1, 0.1, 0.1], null), 0.06) == 1.0
    assert outside(lambda null: mean([0.01] * 3, null), 0.06) == 0.0


def test_holm_by_hand():
    expected = pytest.approx([0.03, 0.06, 0.06, math.nan, 0.02], nan_ok=True)
    assert holm([0.01, 0.04, 0.03, math.nan, 0.005]) == expected


def test_mean_until_by_hand():
    curve = Curve([0.0, 2.0, 4.0], [0.0, 1.0, 1.0])
    for until, expected in ((4.0, 0.75), (1.0, 0.25), (3.0, 2 / 3)):
        assert mean_until(curve, until) == pytest.approx(expected)
