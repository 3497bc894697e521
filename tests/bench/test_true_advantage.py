"""True advantages against exact ones, and the agreement of rules whose credit is known.

z-scores are held to |z| < 5 (a correct estimator fails one of 400 with probability 2e-4); seeds are
fixed.
"""

import dataclasses
import math

import pytest
import torch
from all_but_last import AllButLast
from closed_form import exact_values, gaussian_setting
from flowrl_bench.true_advantage import (
    LEAST_RELIABILITY,
    Look,
    TrueAdvantages,
    compare_credit,
    true_advantages,
)
from seeded import randn, seeded

from flowrl.probes import Branch, Comb, NoProbe
from flowrl.rollout import Usage
from flowrl.samplers import FlowSDE, Windowed

CASES = {
    "all but last": (NoProbe(), AllButLast(FlowSDE(0.7))),
    "window": (NoProbe(), Windowed(FlowSDE(1.0), range(1, 4))),
    "splits": (Branch((2, 1, 2)), AllButLast(FlowSDE(0.7))),
    "edges": (Branch((2, 2), weight="edge"), Windowed(FlowSDE(1.0), range(1, 4))),
    "comb": (Comb(2, count=1), Windowed(FlowSDE(1.0), range(1, 4))),
}


@pytest.mark.parametrize("case", CASES)
def test_true_advantages_are_the_exact_ones_of_a_gaussian(case):
    """Against the closed form along every member's path, also of trees; the distinct states alone
    are continued, each once.
    """
    probe, sampler = CASES[case]
    setting, members, squares = gaussian_setting(sampler), 8, []
    for seed in range(4):
        usage = Usage()
        result = Look(setting, members, seed).trajectories(False, probe)
        truth = true_advantages(setting, result, 200, seed=5 + seed, usage=usage)
        tree, schedule = result.trajectories.tree, setting.schedule
        values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
        assert truth.steps == tuple(tree.drawn_steps)
        weights = truth.weights if tree.branched else torch.ones_like(truth.values)
        counted = weights > 0
        assert torch.equal(counted, tree.decisions[:, tree.drawn_steps].expand_as(counted))
        torch.testing.assert_close(truth.state_values[..., -1], values[..., -1], atol=1e-4, rtol=0)
        assert not truth.values[~counted].any() and not truth.state_errors[..., -1].any()
        uncertain = counted & (truth.errors > 0)
        exact = values.diff(dim=-1)[..., list(truth.steps)]
        z = (truth.values - exact)[uncertain] / truth.errors[uncertain]
        assert z.abs().max() < 5
        squares.append(float(z.square().mean()))
        ends = {*tree.drawn.nonzero().flatten().tolist(), *tree.parent[tree.drawn].tolist()}
        last, nodes = int(setting.stds.nonzero().max()), [int(tree.node[unit]) for unit in ends]
        continued = [(200 if node <= last else 1) * (schedule.steps - node) for node in nodes]
        assert not tree.branched or usage.nfe == 3 * sum(continued)
        total = tree.drawn.sum() if tree.weight == "edge" else tree.decisions.sum()
        assert weights[0].sum() == pytest.approx(float(total))
    assert sum(squares) / 4 == pytest.approx(1.0, abs=0.4)


@pytest.fixture(scope="module")
def noisy():
    """Exact advantages of many groups, and a noisy estimate of them with known errors."""
    generator = seeded()
    exact = 0.3 * torch.randn(60, 10, 4, generator=generator)
    errors = torch.full_like(exact, 0.2)
    estimates = exact + 0.2 * torch.randn(exact.shape, generator=generator)
    state = torch.zeros(60, 10, 5)
    return exact, TrueAdvantages(estimates, errors, state, state, (0, 1, 2, 3))


def test_the_noise_of_the_truth_is_taken_out(noisy):
    exact, truth = noisy
    report = compare_credit(exact * 7, truth).overall
    assert report.raw_correlation == pytest.approx(0.3 / math.hypot(0.3, 0.2), abs=0.02)
    assert report.correlation.value == pytest.approx(1.0, abs=0.03)
    assert report.correlation.high - report.correlation.low < 0.04
    drowned = dataclasses.replace(truth, errors=torch.full_like(truth.errors, 9.0))
    faint = exact + 3.0 * randn(*exact.shape, seed=2)
    result = compare_credit(faint, drowned).overall
    assert 0.03 < result.raw_correlation < 0.2 and result.reliability == LEAST_RELIABILITY
    # and no further
    assert result.correlation.value == pytest.approx(
        result.raw_correlation / math.sqrt(LEAST_RELIABILITY)
    )
    reliability = 1 - truth.errors.square().mean() / truth.values.var()
    assert report.reliability == pytest.approx(float(reliability), abs=1e-3)
    assert report.sign.value > 0.95 and 0.2 < report.resolved < 0.5
    assert report.bias.value < 0.05
