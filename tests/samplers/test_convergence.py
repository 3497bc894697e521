"""How fast the kernels approach the exact distribution, without sampling: Gaussian data keep every
transition affine.

For x_0 ~ N(m, c^2) the exact velocity is affine in x, so one step maps a Gaussian N(a, b^2) to
another, and the mean and variance at t = 0 follow exactly. Their errors must fall like the step
length (weak order 1, Euler and Euler-Maruyama).
"""

import math
from itertools import pairwise

import pytest
import torch

from flowrl.core.protocols import Sampler
from flowrl.core.types import Schedule
from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, FlowSDE

MEAN, SPREAD = 0.8, 0.5


def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[eps - x_0 | x_t = x] for x_0 ~ N(MEAN, SPREAD^2)."""
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    centred = x - (1 - t) * MEAN
    return t * centred / variance - (MEAN + (1 - t) * SPREAD**2 * centred / variance)


def exact_moments(t: float) -> tuple[float, float]:
    """Mean and variance of x_t."""
    return (1 - t) * MEAN, (1 - t) ** 2 * SPREAD**2 + t**2


def moments(kernel: Sampler, steps: int, start: float = 1.0) -> list[tuple[float, float]]:
    """Mean and variance at every node, propagated in float64 through the affine transitions from
    the exact ones at `start`.
    """
    schedule = Schedule(uniform_schedule(steps).times * start)
    step = torch.arange(steps).repeat(2)
    x = torch.cat([torch.zeros(steps, 1), torch.ones(steps, 1)])
    transition = kernel.transition(x, velocity(x, schedule.times[step][:, None]), schedule, step)
    at_zero, at_one = transition.mean.double().view(2, steps)
    found = [exact_moments(start)]
    for offset, slope, std in zip(
        at_zero.tolist(), (at_one - at_zero).tolist(), transition.std.tolist(), strict=False
    ):
        mean, variance = found[-1]
        found.append((offset + slope * mean, slope**2 * variance + std**2))
    return found


def final_moments(kernel: Sampler, steps: int, start: float = 1.0) -> tuple[float, float]:
    """Mean and variance at t = 0."""
    return moments(kernel, steps, start)[-1]


def variance_error(kernel: Sampler, steps: int, start: float = 1.0) -> float:
    return final_moments(kernel, steps, start)[1] - SPREAD**2


def slopes(errors: list[float]) -> list[float]:
    """log2 of the ratio of neighbours: 1 where doubling the steps halves the error."""
    return [math.log2(abs(a / b)) for a, b in pairwise(errors)]


@pytest.mark.parametrize(
    "kernel", [ODE(), FlowSDE(0.7), CPS(0.9), DDIMSDE(0.7), DanceSDE(1.0)], ids=repr
)
def test_the_mean_is_exact_at_any_number_of_steps(kernel: Sampler) -> None:
    assert all(abs(final_moments(kernel, n)[0] - MEAN) < 1e-5 for n in (4, 25, 100))


@pytest.mark.parametrize(
    ("kernel", "start"),
    [(ODE(), 1.0), (DanceSDE(0.5), 1.0), (DanceSDE(1.0), 1.0), (FlowSDE(0.7), 0.9)],
    ids=repr,
)
def test_the_ode_and_the_sde_have_weak_order_one(kernel: Sampler, start: float) -> None:
    errors = [variance_error(kernel, n, start) for n in (200, 400, 800)]
    assert all(0.9 < slope < 1.1 for slope in slopes(errors)), errors
    assert abs(errors[-1]) < 0.01


@pytest.mark.parametrize("steps", [5, 40])
def test_flow_sde_with_its_noise_undone_is_dance_sde(steps: int) -> None:
    """With a sqrt(t / (1-t)) = eta step by step (t_1 in the denominator at t = 1) the two are one
    kernel.
    """
    schedule = uniform_schedule(steps)
    x, v = torch.randn(2, steps, 3, generator=torch.Generator().manual_seed(0))
    dance = DanceSDE(0.5).transition(x, v, schedule, torch.arange(steps))
    for i in range(steps):
        t = float(schedule.times[i])
        level = 0.5 * math.sqrt((1 - float(schedule.times[max(i, 1)])) / t)
        flow = FlowSDE(level).transition(x[i : i + 1], v[i : i + 1], schedule, torch.tensor([i]))
        torch.testing.assert_close(flow.mean[0], dance.mean[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(flow.std[0], dance.std[i])


@pytest.mark.parametrize("steps", [5, 40])
def test_ddim_sde_with_its_noise_undone_is_cps(steps: int) -> None:
    """With a sqrt(1-t) = sin(eta pi / 2) step by step the two are one kernel; at t = 1 this one has
    no noise at all.
    """
    schedule = uniform_schedule(steps)
    x, v = torch.randn(2, steps, 3, generator=torch.Generator().manual_seed(0))
    cps = CPS(0.4).transition(x, v, schedule, torch.arange(steps))
    for i in range(1, steps):
        level = math.sin(0.4 * math.pi / 2) / math.sqrt(1 - float(schedule.times[i]))
        ddim = DDIMSDE(level).transition(x[i : i + 1], v[i : i + 1], schedule, torch.tensor([i]))
        torch.testing.assert_close(ddim.mean[0], cps.mean[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ddim.std[0], cps.std[i])


def test_flow_sde_pays_for_its_singular_start() -> None:
    """Its sigma is infinite at t = 1, so from pure noise the error falls more slowly than the step;
    it stays small.
    """
    errors = [variance_error(FlowSDE(0.7), n) for n in (25, 50, 100, 400, 1600)]
    assert max(map(abs, errors)) < 0.007
    assert 0 < errors[-1] < errors[-2]
    assert slopes(errors[-2:])[0] < 0.7


@pytest.mark.parametrize(
    ("kernel", "limit"), [(CPS(0.5), -0.037), (CPS(0.9), -0.106), (DDIMSDE(0.7), -0.033)], ids=repr
)
def test_kernels_that_preserve_coefficients_lose_variance_in_many_steps(
    kernel: Sampler, limit: float
) -> None:
    """They are exact for a point (see test_marginals); for data with a spread, fresh noise at every
    step with the mean estimate of x_0 narrows the data's own variance (0.25 here), and more steps
    at the same noise level do not bring it back.
    """
    errors = [variance_error(kernel, n) for n in (400, 800, 1600)]
    assert all(error == pytest.approx(limit, abs=0.004) for error in errors)


@pytest.mark.parametrize(("kernel", "level"), [(CPS, 0.1), (DDIMSDE, 0.1)])
def test_they_converge_when_the_noise_of_a_step_shrinks_with_it(kernel: type, level: float) -> None:
    """With the variance of a step proportional to its length (noise level ~ 1 / sqrt(T)) the limit
    is an SDE with the right marginals, and the order is one again.
    """
    errors = [variance_error(kernel(level * math.sqrt(100 / n)), n) for n in (200, 400, 800)]
    assert all(0.85 < slope < 1.15 for slope in slopes(errors)), errors
