"""Time grids, the interpolant, and diagonal Gaussians."""

import json

import pytest
import torch
from loading import ROOT
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.core.types import Gaussian
from flowrl.flow import (
    interpolate,
    kl,
    log_prob,
    log_prob_without_constants,
    noise_estimate,
    sample,
    shifted_schedule,
    tweedie,
    velocity_target,
)


def test_shifted_schedule_is_dancegrpos_grid():
    """XueZeyue/DanceGRPO 15cc71d, 10 steps, shift 3."""
    golden = json.loads((ROOT / "tests" / "golden" / "kernels.json").read_text())
    expected, times = torch.tensor(golden["dance"]["sigmas"]), shifted_schedule(10, 3.0).times
    assert_close(times, expected, rtol=0, atol=1e-6)
    assert times[0] == 1.0 and times[-1] == 0.0


def test_estimates_invert_the_interpolant():
    clean, noise, time = randn(5, 2, 3), randn(5, 2, 3, seed=1), torch.linspace(0, 1, 5)
    x, v = interpolate(clean, noise, time), velocity_target(clean, noise)
    assert_close(tweedie(x, v, time), clean, rtol=0, atol=1e-5)
    assert_close(noise_estimate(x, v, time), noise, rtol=0, atol=1e-5)


def test_densities_and_kl_are_means_of_those_of_torch_distributions():
    std, x = torch.tensor([0.01, 0.3, 1.0, 5.0]), randn(4, 6, seed=2)
    p, q = Gaussian(randn(4, 6), std), Gaussian(randn(4, 6, seed=1), std)
    normal, other = (torch.distributions.Normal(g.mean, std[:, None]) for g in (p, q))
    assert_close(log_prob(p, x), normal.log_prob(x).mean(1))
    assert_close(log_prob_without_constants(p, x), -(x - p.mean).square().mean(1))
    exact = torch.distributions.kl_divergence(normal, other).mean(1)
    assert_close(kl(p, q), exact)


@pytest.mark.parametrize("density", [log_prob, log_prob_without_constants])
def test_densities_give_no_gradient_to_the_sample(density):
    mean, x = randn(3, 4).requires_grad_(), randn(3, 4, seed=1).requires_grad_()
    density(Gaussian(mean, torch.full((3,), 0.4)), x).sum().backward()
    assert x.grad is None and (mean.grad != 0).all()


def test_samples_are_detached_float32_and_depend_on_their_generator_alone():
    mean, state = randn(3, 4).to(torch.bfloat16).requires_grad_(), torch.get_rng_state()
    gaussian = Gaussian(mean, torch.tensor([0.0, 0.5, 2.0]))
    first, second, other = (sample(gaussian, seeded(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert first.dtype == torch.float32 and not first.requires_grad
    assert torch.equal(first[0], mean[0].detach().float())
    assert torch.equal(state, torch.get_rng_state())
