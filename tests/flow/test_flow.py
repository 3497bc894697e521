"""Time grids, the interpolant, Gaussians, the mixture in closed form, and training times."""

import json
import math

import pytest
import torch
from loading import ROOT
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import Gaussian, Schedule
from flowrl.flow import (
    DrawnSteps,
    LateSteps,
    LogitNormalTimes,
    PermutedTimes,
    StratifiedTimes,
    UniformTimes,
    interpolate,
    kl,
    log_prob,
    log_prob_without_constants,
    noise_estimate,
    sample,
    shifted_schedule,
    tweedie,
    uniform_schedule,
    velocity_target,
)
from flowrl.flow.mixture import GaussianMixture


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


# The Gaussian mixture, against its own density, its samples, and quadrature

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


# Training times

KINDS = [
    PermutedTimes(0.5, shared=True),
    StratifiedTimes(),
    UniformTimes(shift=1.0, shared=True),
    LogitNormalTimes(count=2, mean=1.0, std=2.0),
    DrawnSteps(),
    DrawnSteps(count=7, shared=False),
    LateSteps(count=3, power=2.0),
    LateSteps(count=2, last=4, shared=True),
]
GRID = shifted_schedule(10)


def drawn(kind, samples=50, seed=0, schedule=GRID):
    return kind.draw(schedule, samples, seeded(seed))


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_times_are_in_range_and_repeatable(kind):
    times = drawn(kind)
    assert isinstance(kind, TimeDraw) and times.dtype == torch.float32
    assert times.shape == (50, kind.draws(GRID))
    assert ((times > 0) & (times <= 1)).all()
    assert torch.equal(times, drawn(kind)) and not torch.equal(times, drawn(kind, seed=1))
    assert torch.equal(times, times[:1].expand_as(times)) == kind.shared
    if not isinstance(kind, UniformTimes | LogitNormalTimes):  # distinct times of the grid
        assert torch.isclose(times[..., None], GRID.times[:-1], atol=1e-6).any(-1).all()
        assert all(len(row.unique()) == len(row) for row in times)


def counts(kind, samples=4000):
    """How often each step of the grid is drawn, per sample."""
    times = drawn(kind, samples)
    return torch.isclose(times[..., None], GRID.times[:-1], atol=1e-6).sum((0, 1)) / samples


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        (PermutedTimes(), [0.9] * 10),
        (DrawnSteps(shared=False), [4 / 7] * 7 + [0] * 3),
        (LateSteps(last=1), [0.0] * 9 + [1.0]),
        (LateSteps(count=2, last=4), [0.0] * 6 + [0.5] * 4),
        # steps 1 to 8 in 6 parts: edges 1, 2, 3, 5, 6, 7, 9
        (StratifiedTimes(), [0, 1, 1, 0.5, 0.5, 1, 1, 0.5, 0.5, 0]),
    ],
)
def test_every_step_has_its_probability(kind, shares):
    """Tolerance: five standard deviations of a share of 4,000 samples."""
    close = dict(rtol=0.0, atol=5 * 0.5 / 4000**0.5)
    assert_close(counts(kind), torch.tensor(shares), **close)


def test_strata_and_shift():
    numbers, options = torch.tensor([[0.0, 0.5, 0.999]]), dict(count=3, low=0.1, high=0.7)
    even, shifted = (
        UniformTimes(**options, shift=shift).times(numbers, GRID) for shift in (1.0, 3.0)
    )
    assert_close(even, torch.tensor([[0.1, 0.4, 0.6998]]))
    assert_close(shifted, 3 * even / (1 + 2 * even))
    middle = LogitNormalTimes(count=1, mean=0.3, shift=1.0).times(torch.tensor([[0.5]]), GRID)
    assert_close(middle, torch.sigmoid(torch.tensor([[0.3]])))
    median = LogitNormalTimes(count=1).times(torch.tensor([[0.5]]), GRID)  # 3 (1/2) / (1 + 2 / 2)
    assert float(median) == 0.75 and LogitNormalTimes().count == UniformTimes().count == 6


def test_the_smallest_uniform_number_gives_a_time_above_0():
    times = LogitNormalTimes(count=2).times(torch.zeros(1, 2), GRID)
    assert 0 < times.min() < 0.05


def test_times_are_what_the_network_is_told():
    """A scheduler whose time steps are not 1000 sigma."""
    schedule = Schedule(GRID.times, timesteps=torch.arange(999, 0, -100).float())
    times = drawn(DrawnSteps(), schedule=schedule)[0]
    assert set(times.mul(1000).round().tolist()) <= set(range(399, 1000, 100))


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        (StratifiedTimes(), 6, "StratifiedTimes.count = 6 .* 4 or fewer for a grid of 6 steps"),
        (LateSteps(count=6), 5, "LateSteps.count = 6 .* at most the grid's 5 steps"),
        (LateSteps(last=11), 5, "LateSteps.last = 11 .* at most the grid's 5 steps"),
        (DrawnSteps(), 5, "DrawnSteps.steps = 7 .* at most the grid's 5 steps"),
    ],
)
def test_a_grid_with_too_few_steps_is_named(kind, steps, words):
    with pytest.raises(ConfigError, match=words):
        drawn(kind, schedule=uniform_schedule(steps))
