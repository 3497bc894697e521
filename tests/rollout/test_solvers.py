"""ODE solvers for evaluation, against the exact flow of a Gaussian."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.types import Condition
from flowrl.flow import shifted_schedule, uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.rollout import SOLVERS, Usage, solve
from flowrl.training.config import preset

MEAN, STD, ROWS = torch.tensor([0.7, -1.2]), 0.7, 100
GAUSSIAN = GaussianMixture(MEAN[None], STD, torch.ones(1))
NOISE = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
CONDITION = Condition({"none": torch.zeros(ROWS, 1)})


class Exact:
    """The velocity of a flow as a policy, and the times at which it was evaluated."""

    device = torch.device("cpu")

    def __init__(self, network=GAUSSIAN.velocity):
        self.network, self.times = network, []

    def frozen(self):
        return torch.no_grad()

    def velocity(self, latent, timestep, condition):
        self.times.append(float(timestep[0]))
        return self.network(latent, timestep / 1000)


def end(solver, schedule, policy=None, usage=None, max_batch=1024):
    given = schedule, CONDITION, NOISE, usage or Usage(), max_batch
    return solve(policy or Exact(), *given, solver)


@pytest.mark.parametrize(
    ("solver", "order"),
    [("euler", 1.0), ("heun", 2.05), ("dpm++", 1.6), ("unipc", 2.1), ("sa", 1.5)],
)
def test_orders_of_convergence(solver, order):
    """Slopes of log error against log steps from 20 to 80 steps, as measured: DPM-Solver++ is not
    monotone in the number of steps, and SA-Solver takes pure noise as a state at 0.999.
    """
    # the flow moves the quantiles of the noise to those of the data
    errors = [
        float((end(solver, uniform_schedule(steps)) - MEAN - STD * NOISE).square().mean().sqrt())
        for steps in (20, 80)
    ]
    assert math.log(errors[0] / errors[1], 4) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_every_solver_is_exact_for_a_point(solver, steps):
    policy = Exact(lambda x, t: (x - MEAN) / t[:, None])
    reached = end(solver, shifted_schedule(steps), policy)
    torch.testing.assert_close(reached, MEAN.expand(ROWS, 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("solver", "nodes"),
    [("heun", [0, 1, 1, 2, 2, 3, 3]), ("dpm++", [0, 1, 2, 3]), ("unipc", [0, 1, 2, 3])],
)
def test_the_network_is_told_the_schedules_own_timesteps(solver, nodes):
    """Pure noise is t = 1, whatever time the solver calculates with."""
    for timesteps in ([1000.0, 900.0, 750.0, 500.0], [990.0, 880.0, 740.0, 490.0]):
        policy = Exact()
        end(solver, replace(shifted_schedule(4), timesteps=torch.tensor(timesteps)), policy)
        assert policy.times == [timesteps[node] for node in nodes]


@pytest.mark.parametrize("solver", SOLVERS)
def test_evaluations_are_counted_and_chunks_do_not_matter(solver):
    usage, schedule = Usage(), shifted_schedule(6)
    complete = end(solver, schedule, usage=usage)
    calls = 11 if solver == "heun" else 6
    assert (usage.calls, usage.nfe) == (calls, ROWS * calls)
    torch.testing.assert_close(complete, end(solver, schedule, max_batch=33))


def test_an_unknown_solver_is_named():
    with pytest.raises(ConfigError, match="solver = 'rk4' is not allowed; allowed: one of euler,"):
        preset("tiny").apply(world="mixture", eval_solver="rk4")
