"""The Gaussian mixture in closed form, against its own density, its samples, and quadrature."""

import math

import pytest
import torch
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.flow.mixture import GaussianMixture

RING = GaussianMixture.ring()
UNEVEN = GaussianMixture(
    torch.tensor([[1.0, -0.5], [-2.0, 0.3], [0.2, 2.0]]), 0.4, torch.tensor([0.2, 0.5, 0.3])
)


def log_density(mixture, x, t):
    """log p_t: a mixture of N((1-t) mean, ((1-t)^2 std^2 + t^2) I), written out."""
    variance = (1 - t) ** 2 * mixture.std**2 + t**2
    gap = x[:, None] - (1 - t) * mixture.means
    terms = (
        mixture.weights.log()
        - gap.square().sum(-1) / (2 * variance)
        - math.log(2 * math.pi * variance)
    )
    return torch.logsumexp(terms, dim=1)


@pytest.mark.parametrize("mixture", [RING, UNEVEN], ids=["ring", "uneven"])
@pytest.mark.parametrize("t", [0.05, 0.4, 1.0])
def test_estimates_follow_from_the_score(mixture, t):
    """E[eps | x] = -t score, and x = (1-t) E[x_0 | x] + t E[eps | x]; v is their difference."""
    x = (2 * randn(50, 2)).requires_grad_()
    (score,) = torch.autograd.grad(log_density(mixture, x, t).sum(), x)
    times = torch.full((50,), t)
    clean, noise = mixture.clean_and_noise(x.detach(), times)
    assert_close(noise, -t * score, rtol=1e-4, atol=1e-5)
    assert_close((1 - t) * clean + t * noise, x.detach(), rtol=1e-4, atol=1e-5)
    assert_close(mixture.velocity(x.detach(), times), noise - clean)
    assert_close(
        mixture.log_marginal(x.detach(), times),
        log_density(mixture, x, t).detach(),
        rtol=1e-4,
        atol=1e-4,
    )


def test_samples_have_the_mixtures_moments():
    """40,000 draws: means within 5 standard errors, which fails for 2e-6 of seeds."""
    draws = UNEVEN.sample(40_000, seeded())
    mean = (UNEVEN.weights[:, None] * UNEVEN.means).sum(0)
    spread = (UNEVEN.weights[:, None] * (UNEVEN.means - mean).square()).sum(0) + UNEVEN.std**2
    assert ((draws.mean(0) - mean).abs() < 5 * (spread / 40_000).sqrt()).all()
    assert_close(draws.var(0), spread, rtol=0.05, atol=0.0)
    right_and_top = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert_close(RING.means[:3:2], right_and_top, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("mixture", "width"), [(RING, 0.5), (UNEVEN, 1.0)])
def test_the_expected_bump_is_its_integral_and_tilting_multiplies_by_it(mixture, width):
    axis = torch.linspace(-6, 6, 241)
    grid = torch.cartesian_prod(axis, axis)
    target = torch.tensor([1.5, -0.7])
    bump = torch.exp(-(grid - target).square().sum(1) / (2 * width**2))
    product = log_density(mixture, grid, 0.0).exp() * bump
    integral = float(product.sum() * 0.05**2)
    assert mixture.expected_bump(target, width) == pytest.approx(integral, rel=1e-3)
    tilted = log_density(mixture.tilted(target, width), grid, 0.0).exp()
    assert_close(tilted, product / mixture.expected_bump(target, width), atol=1e-4, rtol=1e-4)
