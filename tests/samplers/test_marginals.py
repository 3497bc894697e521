"""What the kernels do to the distribution of the next node, in worlds whose velocity is known in
closed form.
"""

import math

import pytest
import torch

from flowrl.core.protocols import Sampler
from flowrl.core.types import Schedule
from flowrl.flow import expand, interpolate, sample, uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, FlowSDE

POINT = 1.5  # all the data of the point-mass world
SDE_KERNELS = [FlowSDE(0.7), DanceSDE(0.3), DanceSDE(1.0)]
PRESERVING_KERNELS = [CPS(0.3), CPS(0.9), DDIMSDE(0.7)]


def point_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """eps - x_0 = (x - x_0) / t."""
    return (x - POINT) / expand(t, x)


def one_step(kernel: Sampler, schedule: Schedule, step: int, noise: torch.Tensor):
    """The transition from x_t = (1-t) x_0 + t noise, noise [sample, 1]."""
    index = torch.full((len(noise),), step)
    t = schedule.times[index]
    x = interpolate(torch.full_like(noise, POINT), noise, t)
    return kernel.transition(x, point_velocity(x, t), schedule, index)


def next_variance(kernel: Sampler, schedule: Schedule, step: int) -> float:
    """Variance of x_s when x_t is exactly on the marginal: the mean is affine in the noise, so two
    points tell it.
    """
    gaussian = one_step(kernel, schedule, step, torch.tensor([[0.0], [1.0]]))
    coefficient = float(gaussian.mean[1] - gaussian.mean[0])
    return coefficient**2 + float(gaussian.std[0]) ** 2


def sigma_of(kernel: Sampler, t: float) -> float:
    if isinstance(kernel, FlowSDE):
        return kernel.noise_level * math.sqrt(t / (1 - t))
    assert isinstance(kernel, DanceSDE)
    return kernel.noise_level


@pytest.mark.parametrize("kernel", SDE_KERNELS, ids=repr)
@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_the_sde_step_adds_variance_of_known_size(kernel: Sampler, step: int) -> None:
    """Excess over the marginal's s^2: Delta^2 sigma^2 (1/t + sigma^2 / (4 t^2))."""
    schedule = uniform_schedule(10)
    t, s = float(schedule.times[step]), float(schedule.times[step + 1])
    sigma, delta = sigma_of(kernel, t), t - s
    excess = delta**2 * sigma**2 * (1 / t + sigma**2 / (4 * t**2))
    assert next_variance(kernel, schedule, step) - s**2 == pytest.approx(excess, rel=2e-3, abs=2e-7)
    assert excess > 1e-4


@pytest.mark.parametrize("kernel", PRESERVING_KERNELS, ids=repr)
@pytest.mark.parametrize("step", range(10))
def test_preserving_kernels_keep_the_coefficient_of_the_noise(kernel: Sampler, step: int) -> None:
    schedule = uniform_schedule(10)
    assert next_variance(kernel, schedule, step) == pytest.approx(
        float(schedule.times[step + 1]) ** 2, abs=1e-6
    )


def rollout(
    kernel: Sampler, velocity, schedule: Schedule, start: torch.Tensor, last: int, seed: int
) -> torch.Tensor:
    """The node `last` of trajectories from `start`."""
    generator = torch.Generator().manual_seed(seed)
    x = start
    for i in range(last):
        step = torch.full((len(x),), i)
        x = sample(
            kernel.transition(x, velocity(x, schedule.times[step]), schedule, step), generator
        )
    return x


def test_sampled_flow_sde_trajectories_carry_the_excess() -> None:
    """One step from the marginal at t = 0.7: predicted variance within |z| < 5, and the marginal's
    own is rejected.
    """
    n, schedule, step = 40_000, uniform_schedule(10), 3
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(3))
    x = sample(one_step(FlowSDE(0.7), schedule, step, noise), torch.Generator().manual_seed(4))
    predicted = next_variance(FlowSDE(0.7), schedule, step)
    marginal = float(schedule.times[step + 1]) ** 2
    assert abs(float(x.var()) / predicted - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(x.var()) / marginal - 1) > 5 * math.sqrt(2 / n)


MODES = torch.tensor([[2.0, 0.0], [-1.0, 1.0]])
WEIGHTS = torch.tensor([0.3, 0.7])
SPREAD = 0.3


def mixture_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """(x - E[x_0 | x_t]) / t for x_0 in a mixture of two round Gaussians in the plane."""
    t = t.reshape(-1, 1)
    variance = (1 - t).square() * SPREAD**2 + t.square()  # of x_t within a mode
    offset = x[:, None, :] - (1 - t)[:, None, :] * MODES
    responsibility = (WEIGHTS.log() - offset.square().sum(dim=-1) / (2 * variance)).softmax(dim=-1)
    clean = MODES + ((1 - t) * SPREAD**2 / variance)[:, None, :] * offset
    return (x - (responsibility[..., None] * clean).sum(dim=1)) / t


def within_mode_variance(x: torch.Tensor) -> float:
    distances = (x[:, None, :] - MODES).square().sum(dim=-1)
    return float(distances.min(dim=1).values.mean() / 2)


@pytest.mark.parametrize("kernel", [ODE(), FlowSDE(0.7), DanceSDE(0.3)], ids=repr)
def test_fine_grids_sample_a_mixture(kernel: Sampler) -> None:
    """200 steps, 4000 samples: 5 standard errors, plus grid error: 0.01 (weight of a mode), 2 %
    (its variance).
    """
    n = 4_000
    noise = torch.randn(n, 2, generator=torch.Generator().manual_seed(5))
    x = rollout(kernel, mixture_velocity, uniform_schedule(200), noise, last=200, seed=6)
    first = float((x[:, 0] > 0.5).float().mean())
    assert abs(first - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n) + 0.01
    assert within_mode_variance(x) == pytest.approx(SPREAD**2, rel=5 * math.sqrt(1 / n) + 0.02)
