"""The cost until a target: closed forms, invariances, arms that do not arrive, and coverage."""

import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.compare.target import Curves, cost_ratio
from flowrl.core.errors import ConfigError
from flowrl.run.statistics import first_reached


def line(slopes, unit=1.0, points=11, noise=None):
    """Curves that rise linearly from 0, with a slope per seed, at the costs 0, unit, 2 unit, ..."""
    x = unit * np.arange(points)
    rewards = np.outer(slopes, np.arange(points) / (points - 1))
    return Curves(np.tile(x, (len(slopes), 1)), rewards if noise is None else rewards + noise)


@pytest.mark.parametrize(
    ("rewards", "target", "expected"),
    [
        ([0, 1, 2], 1.5, 1.5),
        ([0, 1, 2], 2, 2.0),  # the last evaluation has no next one
        ([0, 2, 1, 2], 1.5, 2.5),  # after 1 it falls below
        ([0, 2, 2, 0], 1.5, 0.75),
        ([1, 2], 1, 0.0),
        ([0, 1], 1.5, math.inf),
        ([], 1.0, math.inf),
    ],
)
def test_where_a_curve_arrives(rewards, target, expected):
    assert first_reached(range(len(rewards)), rewards, target) == pytest.approx(expected)


def by_definition(xs, ys, target):
    """Point by point."""
    for i, y in enumerate(ys):
        if y >= target - 1e-12 and (i + 1 == len(ys) or ys[i + 1] >= target - 1e-12):
            if i == 0:
                return xs[0]
            return xs[i - 1] + (target - ys[i - 1]) / (y - ys[i - 1]) * (xs[i] - xs[i - 1])
    return math.inf


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 1)), min_size=1, max_size=8),
    st.floats(0, 1.2),
)
def test_the_first_crossing(points, target):
    xs, ys = np.cumsum([step for step, _ in points]).tolist(), [y for _, y in points]
    for goal in (target, ys[-1], max(ys)):
        assert first_reached(xs, ys, goal) == pytest.approx(by_definition(xs, ys, goal), abs=1e-6)


def test_the_ratio_of_straight_lines():
    """A line with the mean slope s reaches r at r/s: the ratio is the inverse one of the slopes,
    and the interval that of the jackknife on its logarithm, worked out by hand for two seeds.
    """
    fast, slow = line([2.0, 2.4]), line([1.0, 1.2])
    ratio = cost_ratio([(fast, slow)], [0.5])
    assert ratio.value == pytest.approx(0.5)
    assert (ratio.low, ratio.high) == pytest.approx((0.5, 0.5))  # paired: the same without a seed
    ratio = cost_ratio([(line([2.0, 2.4]), line([1.1, 1.1]))], [0.5])
    # leave-one-out logarithms log(1.1/2.4), log(1.1/2.0): s^2 = (their difference)^2 / 4
    reach = 12.7062 * math.log(2.4 / 2.0) / 2
    assert ratio.value == pytest.approx(0.5)
    assert math.log(ratio.high / ratio.low) == pytest.approx(2 * reach, rel=1e-4)
    # the result of the second arm is the target: 1.1 at the cost 10, which the first reaches at 5
    assert cost_ratio([(line([2.0, 2.4]), line([1.1, 1.1]))]).value == pytest.approx(0.5)
    assert cost_ratio([(line([2.0]), line([1.0]))]).text() == "0.50"  # no interval


def test_over_tasks_it_is_the_geometric_mean():
    pairs = [(line([2.0, 2.2]), line([1.0, 1.2])), (line([1.0, 1.3]), line([4.0, 4.1]))]
    singly = [cost_ratio([pair], [0.4]).value for pair in pairs]
    assert cost_ratio(pairs, [0.4, 0.4]).value == pytest.approx(math.sqrt(math.prod(singly)))
    with pytest.raises(ConfigError, match="the same seeds"):
        cost_ratio([(line([1.0]), line([1.0, 2.0]))])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(-5, 5))
def test_units_do_not_matter(seed, cost, scale, shift):
    random = np.random.default_rng(seed)
    pair = [line(1 + random.random(5), noise=0.05 * random.normal(size=(5, 11))) for _ in "ab"]
    moved = [Curves(cost * c.costs, scale * c.rewards + shift) for c in pair]
    first, second = cost_ratio([(pair[0], pair[1])]), cost_ratio([(moved[0], moved[1])])
    for name in ("value", "low", "high"):
        values = [getattr(ratio, name) for ratio in (first, second)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)
    back = cost_ratio([(pair[1], pair[0])], [0.5])
    forth = cost_ratio([(pair[0], pair[1])], [0.5])
    assert back.value * forth.value == pytest.approx(1.0)
    if math.isfinite(forth.high) and forth.low:
        assert back.low * forth.high == pytest.approx(1.0, rel=0.2)  # resamples are not symmetric


def test_equal_arms_have_the_ratio_one():
    ratio = cost_ratio([(line([1.0, 2.0, 3.0]),) * 2])
    assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)


def test_an_arm_that_does_not_arrive_is_kept():
    """The ratio is more than the share of the other's cost at which its curves end."""
    short = Curves(
        *(part[:, :5] for part in operator.attrgetter("costs", "rewards")(line([1.0] * 3)))
    )
    ratio = cost_ratio([(short, line([1.0] * 3))])
    assert math.isinf(ratio.value) and ratio.text() == "> 0.40"
    # one seed of three carries it
    some = cost_ratio([(line([1.2, 0.9, 0.9]), line([1.0] * 3))], [0.97])
    assert math.isfinite(some.value) and math.isinf(some.high) and some.text().endswith(", -]")
    never = cost_ratio([(line([1.0] * 3), line([0.1] * 3))], [0.9])
    assert never.value == 0 and never.text() == "-"
    neither = cost_ratio([(line([0.1] * 3), line([0.1] * 3))], [0.9])
    assert math.isnan(neither.value) and neither.text() == "-"
    falling = line([-1.0] * 3)
    assert math.isnan(cost_ratio([(falling, falling)]).value)  # nothing to reach


def test_equal_arms_are_seldom_told_apart():
    """Two arms of one population, 10 seeds, a spread of 20% between seeds, noise: the 95% interval
    contains 1 in at least 91% of 400 draws (95% would give 93% with a probability of .98).
    """
    random = np.random.default_rng(0)

    def arm(common):
        slopes = 1 + 0.2 * (0.7 * common + 0.7 * random.normal(size=10))
        return line(slopes, points=13, noise=0.012 * random.normal(size=(10, 13)))

    inside = []
    for _ in range(400):
        common = random.normal(size=10)
        ratio = cost_ratio([(arm(common), arm(common))], [0.6])
        inside.append(ratio.low <= 1 <= ratio.high)
    assert 0.91 <= np.mean(inside) <= 0.985


@pytest.mark.filterwarnings("error")
def test_each_arm_misses_another_target():
    rising, low = line([1.0, 1.0]), line([0.1, 0.1])
    assert math.isnan(cost_ratio([(rising, low), (low, rising)], [0.9, 0.9]).value)
