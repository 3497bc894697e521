"""Calibrated credit: its reductions, and its expectation in a random walk with exact values."""

import pytest
import torch
from seeded import randn
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


def test_by_hand():
    """v = (-1, 0, 1), r = (-2, 1, 1): the slope 3/2 is limited to 1, r2 = 9 / (2 x 6). A group of
    equal rewards changes neither and gets 0, one of equal values uniform credit.
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
    flat = torch.cat([torch.full_like(values[..., :2], 2.0), values[..., 2:]], -1)
    expected = Uniform().assign(flat, Decisions.like(flat))
    assert_close(CalibratedGain().assign(flat, Decisions.like(flat)), expected)


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
