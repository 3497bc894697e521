"""Intervals that cover, tests with a stated error, and first passage that gives 1 for an arm
against its copy.
"""

import math

import numpy as np
import pytest
from flowrl_bench.statistics import (
    Curve,
    detectable,
    first_passage,
    holm,
    mean_until,
    monotone,
    outside,
    rate,
    rate_difference,
    shift_at_equal_reward,
    widening,
)
from flowrl_compare.statistics import mean
from hypothesis import given
from hypothesis import strategies as st

rewards = st.lists(st.floats(0, 1), min_size=2, max_size=12)


def test_wilson_by_hand():
    """2 of 10: 0.0567 to 0.5098 (Newcombe 1998, method 3)."""
    interval = rate([True] * 2 + [False] * 8)
    bounds = interval.value, interval.low, interval.high
    assert bounds == pytest.approx((0.2, 0.0567, 0.5098), abs=1e-4)


def test_paired_difference_by_hand():
    """5 of 10 pairs discordant, all one way: d = 5 / 12, error sqrt((7 / 12 - 25 / 144) /
    12).
    """
    difference = rate_difference([True] * 5 + [False] * 5, [False] * 10)
    assert difference.value == 0.5
    assert difference.low == pytest.approx(
        5 / 12 - 1.95996 * math.sqrt((7 / 12 - 25 / 144) / 12), rel=1e-4
    )
    other = rate_difference([False] * 10, [True] * 5 + [False] * 5)
    assert (other.value, other.low, other.p) == pytest.approx(
        (-0.5, -difference.high, difference.p)
    )


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


def test_widening():
    assert widening(10) == pytest.approx(2.2622 / 1.95996 * math.sqrt(10 / 9), rel=1e-4)
    assert math.isinf(widening(1))


def test_holm_by_hand():
    expected = pytest.approx([0.03, 0.06, 0.06, math.nan, 0.02], nan_ok=True)
    assert holm([0.01, 0.04, 0.03, math.nan, 0.005]) == expected


def test_mean_until_by_hand():
    curve = Curve([0.0, 2.0, 4.0], [0.0, 1.0, 1.0])
    for until, expected in ((4.0, 0.75), (1.0, 0.25), (3.0, 2 / 3)):
        assert mean_until(curve, until) == pytest.approx(expected)


@given(rewards)
def test_monotone(values):
    rising = monotone(values)
    assert 1 <= len(rising) <= len(values) and (np.diff(rising) >= -1e-12).all()


def test_a_collapse_is_left_out():
    rising = [0.2, 0.5, 0.9, 0.9, 0.9]
    assert monotone([*rising, 0.3, 0.2]).tolist() == pytest.approx(rising)


@given(rewards, rewards)
def test_exchange_inverts_the_ratio(left, right):
    first, second = (Curve(list(range(len(values))), values) for values in (left, right))
    forth, back = first_passage(first, second), first_passage(second, first)
    assert forth.log_ratio == pytest.approx(-back.log_ratio, abs=1e-9)
    assert (forth.first_never, forth.second_never) == (back.second_never, back.first_never)


def test_a_shift_is_found():
    fast, slow = np.linspace(0.2, 0.9, 8), np.linspace(0.2, 0.7, 12)
    curves = Curve(list(range(8)), fast.tolist()), Curve(list(range(12)), slow.tolist())
    shift = shift_at_equal_reward(*curves, (fast**2 + 0.3).tolist(), (slow**2).tolist())
    assert shift == pytest.approx(0.3, abs=1e-6)
