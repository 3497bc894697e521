"""What the kernels that keep the marginals do to the distribution of the next node, without sampling.

For x_0 = m the exact velocity is affine in x, so a step maps a Gaussian to another one.
"""

import pytest
import torch
from torch.testing import assert_close

from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS, DDIMSDE

MEAN, STEPS = 0.8, 10


@pytest.mark.parametrize("kernel", [CPS(0.9), DDIMSDE(0.7)], ids=repr)
def test_a_step_from_the_marginal_of_a_point_has_the_variance_of_the_next_one(kernel):
    """From x ~ N((1-t) m, t^2) to s^2."""
    schedule, step = uniform_schedule(STEPS), torch.arange(1, STEPS).repeat(2)
    x, t = torch.tensor([[0.0], [1.0]]).repeat_interleave(STEPS - 1, 0), schedule.times[step, None]
    velocity = (x - (1 - t) * MEAN) / t - MEAN  # E[eps - x_0 | x_t = x]
    transition = kernel.transition(x, velocity, schedule, step)
    offset, at_one = transition.mean.double().view(2, -1)
    noise, start = transition.std[: STEPS - 1].double(), schedule.times[1:-1].double()
    variance = ((at_one - offset) * start).square() + noise.square()
    assert_close(variance, schedule.times[2:].double().square(), rtol=2e-3, atol=1e-6)
