"""What the kernels that keep the marginals do to the distribution of the next node, without sampling.

For x_0 = m the exact velocity is affine in x, so a step maps a Gaussian to another one.
"""

import pytest
import torch
from loading import ROOT
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


@pytest.mark.parametrize(
    ("kernel", "variances"),
    [
        (CPS(0.9), {10: 0.110, 40: 0.131, 640: 0.143}),
        (CPS(0.5), {10: 0.160, 40: 0.196, 640: 0.211}),
        (DDIMSDE(0.7), {10: 0.171, 40: 0.207, 640: 0.217}),
    ],
    ids=repr,
)
def test_a_spread_becomes_narrower_also_in_the_limit_of_many_steps(kernel, variances):
    """From x_0 ~ N(0, 1/4); the numbers are those of the page."""
    page = (ROOT / "docs" / "papers" / "stepwise-flow-grpo.md").read_text()
    for steps, expected in variances.items():
        schedule, step = uniform_schedule(steps), torch.arange(steps)
        x, t = torch.ones(steps, 1), schedule.times[:-1, None]
        slope = (t - (1 - t) / 4) / ((1 - t).square() / 4 + t.square())  # E[eps - x_0 | x_t] / x_t
        transition = kernel.transition(x, slope, schedule, step)
        variance = 1.0
        for factor, noise in zip(
            transition.mean[:, 0].tolist(), transition.std.tolist(), strict=True
        ):
            variance = factor**2 * variance + noise**2
        assert variance == pytest.approx(expected, abs=6e-4) and f"{expected:.3f}" in page
