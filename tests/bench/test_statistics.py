"""Interquartile means, intervals that cover, probabilities of improvement, and profiles."""

import math

import numpy as np
import pytest
from flowrl_bench.statistics import Estimate, bootstrap, difference, improvement, interquartile_mean, level, profile, widening

from flowrl.errors import ConfigError


def test_interquartile_mean_by_hand() -> None:
    assert float(interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]))) == pytest.approx(3.5)
    assert float(interquartile_mean(np.array([1.0, 2.0, 6.0]))) == pytest.approx(3.0)  # a quarter of three is none


def test_widening() -> None:
    assert widening([10]) == pytest.approx(2.2622 / 1.95996 * math.sqrt(10 / 9), rel=1e-4)
    assert widening([3]) == pytest.approx(4.3027 / 1.95996 * math.sqrt(1.5), rel=1e-4)
    assert widening([3, 3, 3]) < widening([3])
    assert math.isinf(widening([1]))


@pytest.mark.parametrize("sizes", [(10,), (3,), (4, 4)])
def test_intervals_cover(sizes: tuple[int, ...]) -> None:
    """Nominal 95%. With a true coverage of 95%, 87% or less of 150 has probability 2e-4."""
    covered = 0
    for seed in range(150):
        generator = np.random.default_rng(seed)
        a = [generator.normal(0.3, 1, size) for size in sizes]
        b = [generator.normal(0.0, 1, size) for size in sizes]
        found = _quick_difference(a, b, seed)
        covered += found.low <= 0.3 <= found.high
    assert covered / 150 > 0.87


def test_pairing_takes_out_what_seeds_share() -> None:
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 1, 10)
    a, b = shared + 0.1 + generator.normal(0, 0.02, 10), shared
    found = difference([a], [b])
    assert 0 < found.low < 0.1 < found.high < 0.2
    with pytest.raises(ConfigError, match="same seeds"):
        difference([a], [b[:5]])


def test_probability_of_improvement_by_hand() -> None:
    a, b = np.array([1.0, 3.0]), np.array([2.0, 1.0])
    assert improvement([a], [b]).value == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert improvement([a, a], [a, a - 5]).value == pytest.approx((0.5 + 1) / 2)
    sure = improvement([a + 9], [b])
    assert (sure.value, sure.low, sure.high) == (1.0, 1.0, 1.0)


def test_one_seed_says_nothing() -> None:
    found = level([np.array([0.7])])
    assert found.value == 0.7 and math.isinf(found.low) and math.isinf(found.high)


def test_strata_are_resampled_by_themselves() -> None:
    """Between tasks of 0 and 100 without spread there is nothing to doubt; pooled, there would be."""
    found = level([np.zeros(4), np.full(4, 100.0)])
    assert found.low == found.high == found.value == pytest.approx(50.0)


def test_profile() -> None:
    assert profile([np.array([0.2, 0.6]), np.array([0.9, 0.9])], [0.0, 0.5, 0.95]).tolist() == [1.0, 0.75, 0.0]


def _quick_difference(a: list[np.ndarray], b: list[np.ndarray], seed: int) -> Estimate:
    gaps = [x - y for x, y in zip(a, b, strict=True)]

    def statistic(*index: np.ndarray, axis: int = -1) -> np.ndarray:
        return interquartile_mean(np.concatenate([g[i] for g, i in zip(gaps, index, strict=True)], axis=-1), axis)

    return bootstrap(statistic, [len(g) for g in gaps], seed, draws=200)
