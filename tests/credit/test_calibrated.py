"""Calibrated credit: its reductions, and its expectation in a random walk with exact values."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.core.experience import Decisions
from flowrl.credit import CalibratedGain, Uniform, calibrated_gains, value_quality

STEPS = 5
Z = 4.5
"""A standard normal exceeds it with probability 7e-6; fewer than 100 comparisons are made."""


def walk(prompts, members):
    """States x_j [prompt, member, STEPS+1] and increments eps_k of a random walk with R = x_D, so
    that V*(x_j) = x_j and A*_k = eps_k.
    """
    steps = randn(prompts, members, STEPS, dtype=torch.float64)
    start = torch.zeros_like(steps[..., :1])
    return torch.cat([start, steps.cumsum(-1)], -1), steps


def error(table, steps, expected):
    """Mean of A_k eps_k minus `expected` [decision], in standard errors over the groups."""
    groups = (table * steps).mean(1) - expected
    return groups.mean(0) / groups.std(0) * len(groups) ** 0.5


@settings(max_examples=10, derandomize=True, deadline=None)
@given(st.integers(0, 9999), st.sampled_from(["constant", "opposite"]), st.booleans())
def test_values_that_predict_nothing_give_uniform_credit(seed, kind, cross_fit):
    generator = seeded(seed)
    values = torch.rand(3, 5, STEPS + 1, generator=generator, dtype=torch.float64)
    values[..., :-1] = values[:, :1, :-1] if kind == "constant" else -values[..., -1:]
    valid = torch.rand(3, 5, 1, generator=generator) > 0.3
    decisions = Decisions.like(values)
    for mask in (decisions.mask, decisions.mask & valid):
        masked = replace(decisions, mask=mask)
        got, expected = (
            rule.assign(values, masked) for rule in (CalibratedGain(cross_fit=cross_fit), Uniform())
        )
        assert_close(got[mask], expected[mask])


def test_by_hand():
    """v = (-1, 0, 1), r = (-2, 1, 1): the slope 3/2 is limited to 1, r2 = 9 / (2 x 6). A group of
    equal rewards changes neither and gets 0.
    """
    values = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 2.0, 4.0], [0.0, 3.0, 4.0]]])
    equal = torch.cat([values, torch.full_like(values, 2.0)])
    v, r = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, 1.0, 1.0])
    for gain_weight, weight in ((None, 0.75), (0.5, 0.5)):
        raw = torch.stack([weight * v + (1 - weight) * r, r - v], -1)
        for unit in (1.0, 0.1):
            assert_close(calibrated_gains(unit * values, gain_weight)[0], unit * raw)
        rule = CalibratedGain(gain_weight=gain_weight)
        first, second = rule.assign(equal, Decisions.like(equal))
        assert_close(first, raw / (raw.std(correction=0) + 1e-4))
        assert not second.any()


def test_the_quality_of_values_by_hand():
    """v = (-1, 0, 1), r = (-2, 1, 1), next to a sample without reward; no value of decision 0."""
    values = torch.tensor(
        [[[torch.nan, v, r] for v, r in ((1, 1), (2, 4), (3, 4), (9, torch.nan))]]
    )
    quality = value_quality(values)
    assert quality == {"value_slope": [None, 1.0], "value_r2": [None, pytest.approx(0.75)]}
    values[..., 1] = torch.nan
    assert value_quality(values) == {}


@pytest.mark.parametrize("gain_weight", [None, 0.0, 1.0, 0.4])
def test_exact_values_give_the_advantage_of_the_step(gain_weight):
    """E[A_k | x_k, x_{k+1}] = (1 - 1/G) A*_k: A_k has this covariance with eps_k, and none with an
    earlier step.
    """
    states, steps = walk(2000, 8)
    table = calibrated_gains(states, gain_weight)
    assert (error(table, steps, 7 / 8).abs() < Z).all()
    for k in range(1, STEPS):
        assert (error(table[..., k:], steps[..., k - 1 : k], 0.0).abs() < Z).all()


def test_a_wrong_value_biases_gains_but_not_the_reward_to_go():
    """V_j = x_1 later on: its gains are 0 until the last decision, which gets all of R - x_1."""
    states, steps = walk(2000, 8)
    wrong = states.clone()
    wrong[..., 2:-1] = states[..., 1:2]
    to_go = calibrated_gains(wrong, 0.0, cross_fit=True)
    assert (error(to_go, steps, 7 / 8).abs() < Z).all()
    assert (error(calibrated_gains(wrong, 1.0), steps, 7 / 8)[1:-1] < -Z).all()


def test_the_shrinkage_of_a_group_does_not_depend_on_its_own_rewards():
    values, _ = walk(4, 6)
    other = values.clone()
    other[0, :, -1] *= 2  # r of group 0; its predictions stay
    first, second = (calibrated_gains(table, 0.0, cross_fit=True) for table in (values, other))
    r = values[..., -1:] - values[..., -1:].mean(1, keepdim=True)
    assert_close((second - first)[0], r[0].expand(-1, STEPS))
    assert_close(calibrated_gains(values[:1], cross_fit=True), r[:1].expand(-1, -1, STEPS))
    first, second = (calibrated_gains(table, 0.0) for table in (values, other))
    assert not torch.allclose((second - first)[0], r[0].expand(-1, STEPS))


def test_the_correlation_with_the_true_advantages():
    """Of a walk of five with exact values and r2 by decision: .53, .69, .87, .98, 1; of uniform
    credit .45.
    """
    states, steps = walk(2000, 12)
    table = calibrated_gains(states)
    pairs = zip(table.flatten(0, 1).T, steps.flatten(0, 1).T, strict=True)
    correlation = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs])
    expected = correlation.new_tensor([0.53, 0.69, 0.87, 0.98, 1.0])
    assert_close(correlation, expected * (11 / 12) ** 0.5, atol=0.015, rtol=0)
