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

from flowrl.probes import Branch, Comb
from flowrl.rollout import Usage
from flowrl.samplers import FlowSDE, Windowed


def of_decisions(nodes, steps):
    """The columns [..., decision+1] of the states from which decisions start, and of the image."""
    return nodes[..., [*steps, -1]]


@pytest.mark.parametrize(
    "sampler",
    [AllButLast(FlowSDE(0.7)), Windowed(FlowSDE(1.0), range(1, 4))],
    ids=["all but last", "window"],
)
def test_true_advantages_are_the_exact_ones_of_a_gaussian(sampler):
    setting, members = gaussian_setting(sampler), 12
    result = Look(setting, members, seed=3).trajectories(shared_noise=False)
    truth = true_advantages(setting, result, continuations=400, seed=5)
    values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
    quiet = [i for i in range(6) if i not in truth.steps]
    assert float(values.diff(dim=-1)[..., quiet].abs().max()) < 1e-5  # nothing is decided there
    exact = of_decisions(values, truth.steps).diff(dim=-1)
    z = (truth.values - exact) / truth.errors
    assert float(z.abs().max()) < 5
    # the stated errors are the real ones
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.35)
    after = values[..., truth.steps[-1] + 1]
    torch.testing.assert_close(truth.state_values[..., -1], after, atol=1e-5, rtol=1e-4)
    assert bool((truth.state_errors[..., -1] == 0).all())


TREES = {
    "splits": (Branch((2, 1, 2)), AllButLast(FlowSDE(0.7))),
    "edges": (Branch((2, 2), weight="edge"), Windowed(FlowSDE(1.0), range(1, 4))),
    "comb": (Comb(2, count=1), Windowed(FlowSDE(1.0), range(1, 4))),
}


@pytest.mark.parametrize("case", TREES)
def test_true_advantages_of_the_edges_of_a_tree_are_the_exact_ones(case):
    """Against the closed form along every member's path; the distinct states alone are continued,
    each once.
    """
    probe, sampler = TREES[case]
    setting, members, squares = gaussian_setting(sampler), 8, []
    for seed in range(4):
        usage = Usage()
        result = Look(setting, members, seed).trajectories(False, probe)
        truth = true_advantages(setting, result, 200, seed=5 + seed, usage=usage)
        tree, schedule = result.trajectories.tree, setting.schedule
        values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
        assert truth.weights is not None and truth.steps == tuple(tree.drawn_steps)
        counted = truth.weights > 0
        assert torch.equal(counted, tree.decisions[:, tree.drawn_steps].expand_as(counted))
        torch.testing.assert_close(truth.state_values[..., -1], values[..., -1], atol=1e-4, rtol=0)
        assert bool((truth.values[~counted] == 0).all())
        uncertain = counted & (truth.errors > 0)
        exact = values.diff(dim=-1)[..., list(truth.steps)]
        z = (truth.values - exact)[uncertain] / truth.errors[uncertain]
        assert float(z.abs().max()) < 5
        squares.append(float(z.square().mean()))
        ends = {*tree.drawn.nonzero().flatten().tolist(), *tree.parent[tree.drawn].tolist()}
        last, nodes = int(setting.stds.nonzero().max()), [int(tree.node[unit]) for unit in ends]
        continued = [(200 if node <= last else 1) * (schedule.steps - node) for node in nodes]
        assert usage.nfe == 3 * sum(continued)
        total = tree.drawn.sum() if tree.weight == "edge" else tree.decisions.sum()
        assert float(truth.weights[0].sum()) == pytest.approx(float(total))
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
    assert report.reliability == pytest.approx(truth.reliability, abs=1e-3)
    assert report.sign.value > 0.95 and 0.2 < report.resolved < 0.5
    assert report.bias.value < 0.05
