"""Policy gradients of un-normalised credit against the gradient of the expected reward, on the 2-D
world.

Estimates are compared along the true gradient and along each parameter tensor's piece of it: 7
directions, |z| < 5 in each. A correct estimator fails that for 4e-6 of all seeds; seeds are fixed.
"""

import pytest
import torch
from rollouts import AllButLast
from seeded import seeded
from torch.testing import assert_close

from flowrl.bench.gradients import (
    RawCredit,
    Setting,
    alignment,
    forward_gradients,
    pathwise_gradients,
    policy_gradients,
)
from flowrl.credit import Uniform
from flowrl.flow import DrawnSteps
from flowrl.losses import AWM, DGPO
from flowrl.probes import Completion
from flowrl.rollout import Usage
from flowrl.run.worlds import world
from flowrl.samplers import FlowSDE, Multistep
from flowrl.worlds.built_in import PolicyOptions

LIMIT = 5.0


def untrained(sampler):
    """The policy is the exact velocity of its data and the reference."""
    mixture = world("mixture")
    policy, prompts = mixture.policy(PolicyOptions()), mixture.prompts("direction", "train")
    return Setting(policy, sampler, policy.schedule(10), mixture.reward("soft"), prompts)


@pytest.fixture(scope="module")
def setting():
    """A policy that is not the optimum of anything, so that the gradient is not small."""
    setting = untrained(AllButLast(FlowSDE(0.7)))
    generator = seeded()
    with torch.no_grad():
        for parameter in setting.parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return setting


@pytest.fixture(scope="module")
def truths(setting):
    return pathwise_gradients(setting, 25, 200, decisions_only=True)


@pytest.fixture(scope="module")
def directions(setting):
    """[direction, parameter] from trajectories of their own: the gradient, and its piece in each
    tensor.
    """
    gradient = pathwise_gradients(setting, 5, 200, seed=99, decisions_only=True).mean(0)
    rows, start = [gradient], 0
    for parameter in setting.parameters:
        row = torch.zeros_like(gradient)
        row[start : start + parameter.numel()] = gradient[start : start + parameter.numel()]
        start += parameter.numel()
        rows.append(row)
    return torch.stack([row / row.norm() for row in rows])


def z_scores(estimates, truths, directions):
    """Difference of the means in units of its standard error, per direction."""
    a, b = estimates @ directions.T, truths @ directions.T
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    return (a.mean(0) - b.mean(0)) / error


@pytest.mark.parametrize("rule", [RawCredit(), RawCredit(1.0, Completion())], ids=["R", "R - V"])
def test_return_and_reward_to_go_are_unbiased(setting, truths, directions, rule):
    estimates = policy_gradients(setting, rule, 30, 24, seed=3)
    assert z_scores(estimates, truths, directions).abs().max() < LIMIT
    assert alignment(estimates, truths).scale == pytest.approx(1.0, abs=0.2)


def test_at_the_reference_dgpo_has_half_of_the_gradient_of_matching_weighted_by_advantages():
    """S = 0, so every weight is A / 2; the same times, noise and images by the same seed."""
    times = DrawnSteps(4, 7)
    weighted = AWM(
        weight="uniform",
        advantage_clip=100.0,
        advantage_scale=100.0,
        kl_weight=0,
        average_weight=0,
        times=times,
        noise="group",
    )
    usage, setting = Usage(), untrained(Multistep())
    awm = forward_gradients(setting, Uniform(), weighted, 2, 6, seed=1, usage=usage)
    dgpo = forward_gradients(
        setting, Uniform(), DGPO(clip=None, kl_weight=0.0, times=times), 2, 6, seed=1
    )
    assert_close(2 * dgpo, awm, atol=1e-6, rtol=1e-4)
    assert (awm[0] - awm[1]).norm() > 0.1 * float(awm[0].norm())
    assert usage.nfe == 2 * 18 * 6 * 10
