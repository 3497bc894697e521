"""What the kernels do to the distribution of the next node, without sampling.

For x_0 ~ N(m, c^2) the exact velocity is affine in x, so a step maps a Gaussian to another one: the
mean and the variance at t = 0 follow exactly.
"""

import math
from itertools import pairwise

import pytest
import torch

from flowrl.core.types import Schedule
from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, FlowSDE

MEAN = 0.8


def moments(kernel, steps, start=1.0, spread=0.5):
    """Mean and variance at every node from the exact ones at `start`, and the variance after the
    step to it from the exact marginal.
    """
    schedule = Schedule(uniform_schedule(steps).times * start)
    step = torch.arange(steps).repeat(2)
    x, t = torch.tensor([[0.0], [1.0]]).repeat_interleave(steps, 0), schedule.times[step][:, None]
    variance = (1 - t) ** 2 * spread**2 + t**2
    gap = (x - (1 - t) * MEAN) / variance
    velocity = t * gap - (MEAN + (1 - t) * spread**2 * gap)  # E[eps - x_0 | x_t = x]
    transition = kernel.transition(x, velocity, schedule, step)
    offset, at_one = transition.mean.double().view(2, steps)
    slope, noise = at_one - offset, transition.std[:steps].double().square()
    exact = slope.square() * variance[:steps, 0] + noise
    rows = [((1 - start) * MEAN, variance[0], variance[0])]
    for a, b, added, reached in zip(offset, slope, noise, exact, strict=True):
        mean, var, _ = rows[-1]
        rows.append((a + b * mean, b**2 * var + added, reached))
    return [tuple(map(float, row)) for row in rows]


@pytest.mark.parametrize(
    ("kernel", "start"), [(ODE(), 1.0), (DanceSDE(1.0), 1.0), (FlowSDE(0.7), 0.9)], ids=repr
)
def test_the_ode_and_the_sde_have_weak_order_one(kernel, start):
    ends = [moments(kernel, steps, start)[-1] for steps in (100, 200, 400)]
    errors = [variance - 0.25 for _, variance, _ in ends]
    orders = [math.log2(abs(a / b)) for a, b in pairwise(errors)]
    assert all(0.9 < order < 1.1 for order in orders), errors
    assert abs(errors[-1]) < 0.02 and all(abs(mean - MEAN) < 1e-5 for mean, _, _ in ends)


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.9), DDIMSDE(0.7)], ids=repr)
def test_the_variance_after_a_step_from_the_marginal_of_a_point(kernel):
    """CPS and DDIM-SDE keep the marginal's s^2; the SDE adds Delta^2 sigma^2 (1/t + sigma^2 / (4
    t^2)).
    """
    times = uniform_schedule(10).times.tolist()
    for step in range(1, 10):
        t, s = times[step], times[step + 1]
        sigma = {FlowSDE: 0.7 * math.sqrt(t / (1 - t)), DanceSDE: 0.3}.get(type(kernel), 0.0)
        excess = (t - s) ** 2 * sigma**2 * (1 / t + sigma**2 / (4 * t**2))
        variance = moments(kernel, 10, spread=0.0)[step + 1][2]
        assert variance - s**2 == pytest.approx(excess, rel=2e-3, abs=1e-6)
