"""Turning points under reward noise: closed forms, Monte Carlo, limits, and
the criterion that uses them.

Monte Carlo comparisons have fixed seeds; had they not, each test would fail by chance with a
probability of at most 1e-3 (`FALSE_ALARM`, divided among the test's comparisons by Bonferroni's
inequality).
"""

import math

import pytest
import torch
from flowrl_bench.rules import likely_turns
from flowrl_bench.turn_noise import expected_calls, turn_probability
from hypothesis import strategies as st
from scipy.stats import norm
from seeded import rand, randn

from flowrl.credit import process_rewards, turning_points

FALSE_ALARM = 1e-3
DEFINITIONS = [
    (consistent, first_step) for consistent in (True, False) for first_step in (True, False)
]
seeds = st.integers(0, 10**6)


def table(seed, count=6, prompts=2, members=3):
    """Random values of `count` decisions."""
    return rand(prompts, members, count + 1, seed=seed, dtype=torch.float64)


# Expected calls


@pytest.mark.parametrize(("consistent", "first_step"), DEFINITIONS)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_calls_bias_and_variance_agree_with_monte_carlo(count, consistent, first_step):
    true, noise, draws = table(3, count, 1, 1), 0.3, 100_000
    expected = expected_calls(true, noise, consistent, first_step)
    noisy = true + noise * randn(draws, 1, count + 1, seed=4, dtype=torch.float64)
    called = turning_points(noisy, consistent, first_step)
    rewards = process_rewards(noisy, called)
    deviations = rewards - expected.mean[0, 0]
    limit = norm.isf(FALSE_ALARM / (3 * count) / 2)
    for sample, prediction in (
        (called.double(), expected.called),
        (rewards, expected.mean),
        (deviations**2, expected.variance),
    ):
        error = sample.std(0)[0] / math.sqrt(draws)
        assert ((sample.mean(0)[0] - prediction[0, 0]).abs() <= limit * error + 1e-9).all()


# The criterion


def test_one_uncertain_difference_is_judged_by_its_standard_deviations():
    """All other differences are certain: the probability is Phi(d / (sqrt(2) noise))."""
    noise = 0.01
    for z in (0.2, 1.0, 2.5):
        d = z * math.sqrt(2) * noise
        row = torch.tensor([[5.0, 9.0, 7.0, 7.0 + d, 12.0]], dtype=torch.float64)
        rows = torch.stack([row, -row])
        for consistent in (True, False):
            turns = turning_points(rows, consistent)
            assert turns[:, 0, 2].all()
            probability = turn_probability(rows, turns, noise, consistent)
            assert probability[:, 0, 2].tolist() == pytest.approx([norm.cdf(z)] * 2, abs=1e-9)
            assert likely_turns(rows, turns, noise, z - 1e-6, consistent)[:, 0, 2].all()
            assert not likely_turns(rows, turns, noise, z + 1e-6, consistent)[:, 0, 2].any()


def test_the_last_step_compares_one_score_with_two():
    """R_T must exceed R_{T-1} and R_0; if all three are equal but for a hair, it is the largest
    with a probability of 1/3.
    """
    row = torch.tensor([[0.0, 9.0, 0.0, 1e-9]], dtype=torch.float64)
    rows = torch.stack([row, -row])
    turns = turning_points(rows, False)
    assert turns[:, 0, 2].all()
    probability = turn_probability(rows, turns, 0.1, False)[:, 0, 2]
    assert probability.tolist() == pytest.approx([1 / 3] * 2, abs=1e-7)
