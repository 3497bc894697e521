"""Intervals that cover, tests with a stated error, and first passage that gives 1 for an arm
against its copy.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from flowrl_bench.calibration import LAWS, experiment
from flowrl_bench.statistics import (
    Curve,
    bootstrap,
    detectable,
    first_passage,
    holm,
    interquartile,
    interquartile_mean,
    mean_until,
    median,
    monotone,
    profile,
    rate,
    rate_difference,
    shift_at_equal_reward,
    survival,
    widening,
    wins,
    worst,
)
from flowrl_compare.statistics import COLLAPSE, Inference, collapsed, mean
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError

rewards = st.lists(st.floats(0, 1), min_size=2, max_size=12)


class TestMean:
    def test_by_hand(self) -> None:
        """Of 1, 2, 3: error 1 / sqrt(3), t = 2 sqrt(3) with 2 degrees of freedom."""
        found = mean([1.0, 2.0, 3.0])
        assert found.value == 2.0 and found.high - 2.0 == pytest.approx(
            4.30265 / math.sqrt(3), rel=1e-5
        )
        assert found.p == pytest.approx(0.0741799, rel=1e-5)
        assert mean([1.0, 2.0, 3.0], null=2.0).p == pytest.approx(1.0)

    def test_no_spread(self) -> None:
        assert mean([0.5, 0.5]) == Inference(0.5, 0.5, 0.5, 0.0) and mean([0.5, 0.5], 0.5).p == 1.0

    def test_one_seed_says_nothing(self) -> None:
        found = mean([0.7])
        assert (
            found.value == 0.7
            and math.isinf(found.low)
            and math.isinf(found.high)
            and math.isnan(found.p)
        )

    @pytest.mark.parametrize(
        ("draw", "least"),
        [
            (lambda g, n: g.normal(0.3, 1, n), 0.93),
            # skewed: no interval of 10 seeds covers in full
            (lambda g, n: 0.3 + g.exponential(1, n) - 1, 0.85),
            (
                lambda g, n: (
                    0.3
                    + 0.02 * g.normal(size=n)
                    - 0.4 * (g.random(n) < 0.2)
                    + 0.4 * (g.random(n) < 0.2)
                ),
                0.93,
            ),
        ],
        ids=["normal", "skewed", "both arms collapse"],
    )
    @pytest.mark.parametrize("seeds", [10, 15])
    def test_coverage(self, draw: Callable, least: float, seeds: int) -> None:
        """1000 experiments; a coverage of 0.95 falls below 0.93 with probability 2e-3, and the
        draws are fixed.
        """
        generator = np.random.default_rng(0)
        found = [mean(draw(generator, seeds)) for _ in range(1000)]
        assert np.mean([one.low <= 0.3 <= one.high for one in found]) > least
        assert all((one.p < 0.05) == (not one.low <= 0 <= one.high) for one in found)


class TestRates:
    def test_wilson_by_hand(self) -> None:
        """2 of 10: 0.0567 to 0.5098 (Newcombe 1998, method 3)."""
        found = rate([True] * 2 + [False] * 8)
        assert (found.value, found.low, found.high) == pytest.approx(
            (0.2, 0.0567, 0.5098), abs=1e-4
        )

    def test_paired_difference_by_hand(self) -> None:
        """5 of 10 pairs discordant, all one way: d = 5 / 12, error sqrt((7 / 12 - 25 / 144) /
        12).
        """
        found = rate_difference([True] * 5 + [False] * 5, [False] * 10)
        assert found.value == 0.5
        assert found.low == pytest.approx(
            5 / 12 - 1.95996 * math.sqrt((7 / 12 - 25 / 144) / 12), rel=1e-4
        )
        other = rate_difference([False] * 10, [True] * 5 + [False] * 5)
        assert (other.value, other.low, other.p) == pytest.approx((-0.5, -found.high, found.p))

    def test_false_alarms(self) -> None:
        """2000 experiments of 10 pairs with equal rates: at most 5% with p < 0.05 at every rate
        (standard error 0.5%).
        """
        generator = np.random.default_rng(0)
        for chance in (0.05, 0.2, 0.5):
            draws = generator.random((2000, 2, 10)) < chance
            assert np.mean([rate_difference(a, b).p < 0.05 for a, b in draws]) <= 0.05

    def test_wins(self) -> None:
        assert wins([1, 2, 3, 4], [0, 2, 5, 1]) == pytest.approx(2.5 / 4)


class TestDetectable:
    @pytest.mark.parametrize("count", [3, 6, 10])
    @pytest.mark.parametrize("alpha", [0.05, 0.05 / 18])
    def test_power_by_simulation(self, count: int, alpha: float) -> None:
        """20,000 experiments: a power of 0.8 is found within 0.01 with probability 0.9996."""
        draws = np.random.default_rng(count).normal(
            detectable(2.0, count, alpha), 2.0, (20_000, count)
        )
        found = [mean(row).p < alpha for row in draws[:300]]
        t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(count))
        from scipy import stats

        power = 2 * stats.t.sf(np.abs(t), count - 1) < alpha
        assert power[:300].tolist() == found
        assert power.mean() == pytest.approx(0.8, abs=0.01)

    def test_size(self) -> None:
        assert math.isinf(detectable(1.0, 1)) and detectable(0.0, 5) == 0.0
        # the usual approximation
        assert detectable(1.0, 10) == pytest.approx((2.262 + 0.883) / math.sqrt(10), rel=0.01)


class TestBootstrap:
    def test_interquartile_mean_by_hand(self) -> None:
        assert float(
            interquartile(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]))
        ) == pytest.approx(3.5)
        # a quarter of three is none
        assert interquartile_mean([1.0, 2.0, 6.0]).value == pytest.approx(3.0)

    def test_widening(self) -> None:
        assert widening(10) == pytest.approx(2.2622 / 1.95996 * math.sqrt(10 / 9), rel=1e-4)
        assert math.isinf(widening(1))

    def test_means_show_what_interquartile_means_hide(self) -> None:
        sound, fallen = np.full(10, 0.98), np.array([0.19, 0.19] + [0.98] * 8)
        assert interquartile_mean(fallen, sound).value == 0.0
        assert mean(fallen - sound).value == pytest.approx(-0.158) and worst(
            fallen, sound
        ).value == pytest.approx(-0.79)
        assert median(fallen).value == 0.98

    def test_coverage(self) -> None:
        """150 experiments of 10 normal seeds: with 95%, at most 87% of 150 has probability 2e-4."""
        generator = np.random.default_rng(0)
        inside = [interquartile_mean(generator.normal(0.3, 1, 10)) for _ in range(150)]
        assert np.mean([one.low <= 0.3 <= one.high for one in inside]) > 0.87

    def test_exchanges_are_exact_if_the_arms_are_alike(self) -> None:
        """p < 0.05 in at most 5% of 300 experiments, plus three standard errors."""
        generator = np.random.default_rng(0)
        found = [interquartile_mean(*generator.standard_cauchy((2, 8))).p for _ in range(300)]
        assert np.mean(np.array(found) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)

    def test_pairs(self) -> None:
        with pytest.raises(ConfigError, match="same seeds"):
            bootstrap(np.median, [1.0, 2.0], [1.0])


class TestHolm:
    def test_by_hand(self) -> None:
        assert holm([0.01, 0.04, 0.03, math.nan, 0.005]) == pytest.approx(
            [0.03, 0.06, 0.06, math.nan, 0.02], nan_ok=True
        )

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
    def test_the_smallest_p_value_has_bonferronis_correction(self, ps: list[float]) -> None:
        assert all(p <= adjusted <= 1 for p, adjusted in zip(ps, holm(ps), strict=True))
        assert min(holm(ps)) == pytest.approx(min(1.0, len(ps) * min(ps)))


class TestCurves:
    def test_collapse(self) -> None:
        assert collapsed([0.2, 0.9, 0.9 - COLLAPSE - 0.01]) and not collapsed([0.2, 0.9, 0.85])
        assert collapsed([0.5, 0.5, 0.47]) and not collapsed([0.5, 0.49])

    def test_mean_until_by_hand(self) -> None:
        curve = Curve([0.0, 2.0, 4.0], [0.0, 1.0, 1.0])
        assert mean_until(curve, 4.0) == pytest.approx(0.75)
        assert mean_until(curve, 1.0) == pytest.approx(0.25) and mean_until(
            curve, 3.0
        ) == pytest.approx(2 / 3)

    @given(rewards)
    def test_monotone(self, values: list[float]) -> None:
        found = monotone(values)
        assert 1 <= len(found) <= len(values) and (np.diff(found) >= -1e-12).all()

    def test_a_collapse_is_left_out(self) -> None:
        assert monotone([0.2, 0.5, 0.9, 0.9, 0.9, 0.3, 0.2]).tolist() == pytest.approx(
            [0.2, 0.5, 0.9, 0.9, 0.9]
        )

    def test_survival_counts_runs_that_never_arrive(self) -> None:
        curves = [Curve([0, 1, 2], [0.0, 0.5, 1.0]), Curve([0, 1, 2], [0.0, 0.1, 0.2])]
        (found,) = survival(curves, [0.5])
        assert (found.fraction(0.9), found.fraction(1.0), found.fraction(9.0)) == (0.0, 0.5, 0.5)

    def test_profile(self) -> None:
        assert profile([[0.2, 0.6], [0.9, 0.9]], [0.0, 0.5, 0.95]).tolist() == [1.0, 0.75, 0.0]


class TestFirstPassage:
    @given(rewards, rewards)
    def test_exchange_inverts_the_ratio(self, one: list[float], other: list[float]) -> None:
        first, second = (Curve(list(range(len(values))), values) for values in (one, other))
        forth, back = first_passage(first, second), first_passage(second, first)
        assert forth.log_ratio == pytest.approx(-back.log_ratio, abs=1e-9)
        assert (forth.first_never, forth.second_never) == (back.second_never, back.first_never)

    def test_a_run_against_itself(self) -> None:
        curve = Curve([0, 2, 4, 6], [0.2, 0.5, 0.7, 0.9])
        assert first_passage(curve, curve).log_ratio == 0.0

    def test_half_of_the_budget(self) -> None:
        """The same rise at half of the speed, with evaluations that resolve it."""
        rise = np.linspace(0, 1, 41) ** 2
        fast, slow = (
            Curve(np.arange(41.0).tolist(), rise.tolist()),
            Curve((2 * np.arange(41.0)).tolist(), rise.tolist()),
        )
        assert math.exp(first_passage(fast, slow).log_ratio) == pytest.approx(0.5)

    def test_who_never_arrives_is_counted(self) -> None:
        found = first_passage(Curve([0, 1, 2], [0.0, 0.5, 1.0]), Curve([0, 1, 2], [0.0, 0.0, 0.0]))
        assert found.second_never and not found.first_never and found.log_ratio < 0

    @pytest.mark.parametrize("law", LAWS)
    def test_an_arm_against_its_copy_is_1(self, law: str) -> None:
        """200 experiments of 10 seeds: the interval misses 1 in at most 9.6% (5% and three standard
        errors).
        """
        ratios = [
            experiment(10, seed, a=LAWS[law], b=LAWS[law]).differences("a", "b", "updates")[:, 0]
            for seed in range(200)
        ]
        found = [mean(values).exponential() for values in ratios]
        assert np.mean([not one.low <= 1 <= one.high for one in found]) <= 0.05 + 3 * math.sqrt(
            0.05 * 0.95 / 200
        )
        assert math.exp(np.mean(ratios)) == pytest.approx(1.0, abs=0.02)


class TestQualityAtEqualReward:
    @pytest.mark.parametrize(
        "function",
        [lambda r: -1 - 2 * r**2, lambda r: -np.exp(2 * r) / 3],
        ids=["square", "exponential"],
    )
    @pytest.mark.parametrize("slower", [1.0, 3.0, 8.0])
    def test_the_same_function_of_reward_gives_0(self, function: Callable, slower: float) -> None:
        """Arms of different speed, noisy evaluations, 10 seeds: the interval misses 0 in at most
        10.3% of 150 experiments.
        """
        generator, at, misses = np.random.default_rng(0), np.arange(0, 41, 2.0), 0
        for _ in range(150):
            shifts = []
            for _ in range(10):
                found = []
                for scale in (6.0, 6.0 * slower):
                    true = 0.22 + 0.73 * (
                        1 - np.exp(-((at / (scale * np.exp(0.25 * generator.normal()))) ** 1.5))
                    )
                    seen = (true + 0.005 * generator.normal(size=len(at))).tolist()
                    found.append(
                        (
                            Curve(at.tolist(), seen),
                            (function(true) + 0.02 * generator.normal(size=len(at))).tolist(),
                        )
                    )
                shifts.append(
                    shift_at_equal_reward(found[0][0], found[1][0], found[0][1], found[1][1])
                )
            one = mean(shifts)
            misses += not one.low <= 0 <= one.high
        assert misses / 150 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)

    def test_a_shift_is_found(self) -> None:
        fast, slow = np.linspace(0.2, 0.9, 8), np.linspace(0.2, 0.7, 12)
        curves = Curve(list(range(8)), fast.tolist()), Curve(list(range(12)), slow.tolist())
        found = shift_at_equal_reward(*curves, (fast**2 + 0.3).tolist(), (slow**2).tolist())
        assert found == pytest.approx(0.3, abs=1e-6)
