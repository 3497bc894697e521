"""What the kernels do to the distribution of the next node, without sampling.

For x_0 = m the exact velocity is affine in x, so a step maps a Gaussian to another one.
"""

import math

import pytest
import torch

from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS, DDIMSDE, DanceSDE, FlowSDE

MEAN = 0.8


def variances(kernel, steps):
    """Variance after the step to every node but the first, from the exact marginal of a point."""
    schedule, step = uniform_schedule(steps), torch.arange(steps).repeat(2)
    x, t = torch.tensor([[0.0], [1.0]]).repeat_interleave(steps, 0), schedule.times[step][:, None]
    gap = (x - (1 - t) * MEAN) / t**2
    velocity = t * gap - MEAN  # E[eps - x_0 | x_t = x]
    transition = kernel.transition(x, velocity, schedule, step)
    offset, at_one = transition.mean.double().view(2, steps)
    noise = transition.std[:steps].double().square()
    return ((at_one - offset).square() * t[:steps, 0] ** 2 + noise).tolist()


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.9), DDIMSDE(0.7)], ids=repr)
def test_the_variance_after_a_step_from_the_marginal_of_a_point(kernel):
    """CPS and DDIM-SDE keep the marginal's s^2; the SDE adds Delta^2 sigma^2 (1/t + sigma^2 / (4
    t^2)).
    """
    times, after = uniform_schedule(10).times.tolist(), variances(kernel, 10)
    for step in range(1, 10):
        t, s = times[step], times[step + 1]
        sigma = {FlowSDE: 0.7 * math.sqrt(t / (1 - t)), DanceSDE: 0.3}.get(type(kernel), 0.0)
        excess = (t - s) ** 2 * sigma**2 * (1 / t + sigma**2 / (4 * t**2))
        assert after[step] - s**2 == pytest.approx(excess, rel=2e-3, abs=1e-6)
