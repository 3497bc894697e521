"""The expected policy gradient of TP-GRPO's credit with exact values, and its page's numbers."""

import itertools

import numpy as np
import pytest
import torch
from loading import ROOT

from flowrl.credit import gains, process_rewards, reward_to_go, turning_points

STDS = np.array([1.0, 0.8, 0.6, 0.4, 0.3])
PATHS = 400_000


@pytest.fixture(scope="module")
def chain():
    """Scores and values of x_{k+1} = x_k + std_k e_k from x_0 = -1/2 with R = sigmoid(3 x_5)."""
    noise = np.random.default_rng(0).standard_normal((PATHS, len(STDS)))
    states = -0.5 + np.concatenate([np.zeros((PATHS, 1)), (noise * STDS).cumsum(1)], 1)
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = np.linspace(-9, 9, 3001)
    values = [
        np.interp(
            states[:, k],
            grid,
            (1 / (1 + np.exp(-3 * (grid[:, None] + rest * points)))) @ (weights / weights.sum()),
        )
        for k in range(len(STDS) + 1)
        for rest in [np.sqrt(np.square(STDS[k:]).sum())]
    ]
    return torch.from_numpy(noise / STDS), torch.from_numpy(np.stack(values, 1))[None]


def test_the_selection_of_turning_points_adds_to_the_gradient(chain):
    """Each gradient within 4.5 standard errors: 1 false alarm in 7,000 runs of the test."""
    scores, values = chain
    marks = turning_points(values)
    by_decision = {
        "reward": (values[..., -1:] - 0.5).expand_as(marks),
        "to go": reward_to_go(values),
        "gains": gains(values),
        "turning points": process_rewards(values, marks),
    }
    gradients = {name: (scores * credit[0]).mean(0) for name, credit in by_decision.items()}
    for name, gradient in gradients.items():
        expected = [0.315, 0.285, 0.271, 0.260, 0.236] if name == "turning points" else [0.236] * 5
        errors = (scores * by_decision[name][0]).std(0) / PATHS**0.5
        assert ((gradient - torch.tensor(expected)).abs() < 4.5 * errors + 5e-4).all(), name
    assert (gradients["turning points"] - gradients["gains"] > 0.015)[:4].all()
    first = {name: float(g[0] / by_decision[name][..., 0].std()) for name, g in gradients.items()}
    page = (ROOT / "docs" / "papers" / "tp-grpo.md").read_text()
    assert "0.236" in page and "0.315, 0.285, 0.271, 0.260 and 0.236" in page
    for name, shown in (("gains", 0.979), ("turning points", 0.849)):
        assert first[name] == pytest.approx(shown, abs=0.005) and str(shown) in page


def test_with_rewards_of_0_and_1_no_decision_is_a_consistent_turning_point():
    values = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)))[None]
    assert turning_points(values, consistent=False).any() and not turning_points(values).any()
