"""How fast the kernels approach the exact distribution, without sampling: Gaussian data keep every transition affine.

For x_0 ~ N(m, c^2) the exact velocity is affine in x, so one step maps a Gaussian N(a, b^2) to another, and the mean and
variance at t = 0 follow exactly. Their errors must fall like the step length (weak order 1, Euler and Euler-Maruyama).
"""

import math
from itertools import pairwise

import pytest
import torch

from flowrl.flow import uniform_schedule
from flowrl.protocols import Sampler
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, FlowSDE
from flowrl.types import Schedule

MEAN, SPREAD = 0.8, 0.5


def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
    """E[eps - x_0 | x_t = x] for x_0 ~ N(MEAN, SPREAD^2)."""
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    centred = x - (1 - t) * MEAN
    return t * centred / variance - (MEAN + (1 - t) * SPREAD**2 * centred / variance)


def final_moments(kernel: Sampler, steps: int, start: float = 1.0) -> tuple[float, float]:
    """Mean and variance at t = 0, propagated in float64 through the affine transitions from the exact ones at t = `start`."""
    schedule = Schedule(uniform_schedule(steps).times * start)
    mean, variance = (1 - start) * MEAN, (1 - start) ** 2 * SPREAD**2 + start**2
    for i, t in enumerate(schedule.times[:-1].tolist()):
        x = torch.tensor([[0.0], [1.0]])
        transition = kernel.transition(x, velocity(x, t), schedule, torch.full((2,), i))
        at_zero, at_one = transition.mean.double().flatten().tolist()
        slope = at_one - at_zero
        mean, variance = at_zero + slope * mean, slope**2 * variance + float(transition.std[0]) ** 2
    return mean, variance


def variance_error(kernel: Sampler, steps: int, start: float = 1.0) -> float:
    return final_moments(kernel, steps, start)[1] - SPREAD**2


def slopes(errors: list[float]) -> list[float]:
    """log2 of the ratio of neighbours: 1 where doubling the steps halves the error."""
    return [math.log2(abs(a / b)) for a, b in pairwise(errors)]


@pytest.mark.parametrize("kernel", [ODE(), FlowSDE(0.7), CPS(0.9), DDIMSDE(0.7), DanceSDE(1.0)], ids=repr)
def test_the_mean_is_exact_at_any_number_of_steps(kernel: Sampler) -> None:
    assert all(abs(final_moments(kernel, n)[0] - MEAN) < 1e-5 for n in (4, 25, 100))


@pytest.mark.parametrize(
    ("kernel", "start"), [(ODE(), 1.0), (DanceSDE(0.5), 1.0), (DanceSDE(1.0), 1.0), (FlowSDE(0.7), 0.9)], ids=repr
)
def test_the_ode_and_the_sde_have_weak_order_one(kernel: Sampler, start: float) -> None:
    errors = [variance_error(kernel, n, start) for n in (200, 400, 800)]
    assert all(0.9 < slope < 1.1 for slope in slopes(errors)), errors
    assert abs(errors[-1]) < 0.01


def test_flow_sde_pays_for_its_singular_start() -> None:
    """Its sigma is infinite at t = 1, so from pure noise the error falls more slowly than the step; it stays small."""
    errors = [variance_error(FlowSDE(0.7), n) for n in (25, 50, 100, 400, 1600)]
    assert max(map(abs, errors)) < 0.007
    assert 0 < errors[-1] < errors[-2]
    assert slopes(errors[-2:])[0] < 0.7


@pytest.mark.parametrize(("kernel", "limit"), [(CPS(0.5), -0.037), (CPS(0.9), -0.106), (DDIMSDE(0.7), -0.033)], ids=repr)
def test_kernels_that_preserve_coefficients_lose_variance_in_many_steps(kernel: Sampler, limit: float) -> None:
    """They are exact for a point (see test_marginals); for data with a spread, fresh noise at every step with the mean estimate
    of x_0 narrows the data's own variance (0.25 here), and more steps at the same noise level do not bring it back."""
    errors = [variance_error(kernel, n) for n in (400, 800, 1600)]
    assert all(error == pytest.approx(limit, abs=0.004) for error in errors)


@pytest.mark.parametrize(("kernel", "level"), [(CPS, 0.1), (DDIMSDE, 0.1)])
def test_they_converge_when_the_noise_of_a_step_shrinks_with_it(kernel: type, level: float) -> None:
    """With the variance of a step proportional to its length (noise level ~ 1 / sqrt(T)) the limit is an SDE with the right
    marginals, and the order is one again."""
    errors = [variance_error(kernel(level * math.sqrt(100 / n)), n) for n in (200, 400, 800)]
    assert all(0.85 < slope < 1.15 for slope in slopes(errors)), errors
