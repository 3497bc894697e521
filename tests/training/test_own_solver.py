"""A user's own multistep solver in a file, the one of docs/guides/sampler.md, with a
forward-process loss.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.types import Schedule
from flowrl.parts.registry import build
from flowrl.probes import Completion
from flowrl.rollout import Groups, Usage, rollout
from flowrl.samplers import Multistep, transition_stds
from flowrl.testing import check_solver
from flowrl.training.build import make_method, make_trainer
from flowrl.training.config import RunConfig, preset
from flowrl.worlds.base import PolicyOptions, world

PAGE = Path(__file__).parents[2] / "docs/guides/sampler.md"


@pytest.fixture
def spec(tmp_path):
    (code,) = re.findall(r"```python\n# my_solvers.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_solvers.py").write_text(code)
    return f"{tmp_path / 'my_solvers.py'}:AdamsBashforth"


def sampled(solver, steps=6, usage=None, probe=None):
    """Trajectories of two groups of three in the mixture world."""
    policy = world("mixture").policy(PolicyOptions())
    condition = policy.encode([world("mixture").parse(f"towards {a} degrees") for a in (0, 90)])
    groups, generator = Groups(2, 3), torch.Generator().manual_seed(0)
    noise = groups.noise(policy.latent_shape, generator)
    given = {} if probe is None else {"probe": probe}
    schedule = policy.schedule(steps)
    found = rollout(
        policy, solver, schedule, condition, noise, generator, groups, usage=usage, **given
    )
    return found, policy, condition.repeat(3), noise


def test_it_keeps_the_contract(spec):
    assert check_solver(build("sampler", spec)).ok


def test_the_rollout_follows_its_formula(spec):
    """Adams-Bashforth of order 2, in a loop; every state is evaluated once."""
    usage = Usage()
    found, policy, condition, x = sampled(build("sampler", spec), usage=usage)
    path = found.trajectories
    times, before = path.schedule.times, None
    for i in range(6):
        torch.testing.assert_close(path.at(i), x)
        with torch.no_grad():
            velocity = policy.velocity(
                x, path.schedule.network_timesteps[i].expand(len(x)), condition
            )
        length, slope = times[i] - times[i + 1], velocity
        if before is not None:
            slope = velocity + length / (times[i - 1] - times[i]) / 2 * (velocity - before)
        x, before = x - length * slope, velocity
    torch.testing.assert_close(path.images_latent, x)
    assert (usage.nfe, usage.calls) == (6 * 6, 6)
    assert path.stds.tolist() == [0.0] * 6 and not path.tree.drawn_steps


@dataclass(frozen=True)
class Halved(Multistep):
    """A solver on half of the steps."""

    def grid(self, schedule):
        return Schedule(schedule.times[::2])


def test_a_grid_of_another_length_is_one_error():
    with pytest.raises(
        ConfigError, match=r"Halved.grid = .* is not allowed; allowed: a Schedule of 6 steps"
    ):
        sampled(Halved())


def test_it_has_no_standard_deviations_and_no_estimates(spec):
    schedule = world("mixture").policy(PolicyOptions()).schedule(5)
    assert transition_stds(build("sampler", spec), schedule).tolist() == [0.0] * 5
    usage = Usage()
    assert set(sampled(build("sampler", spec), usage=usage, probe=Completion())[0].estimates) <= {6}
    assert usage.nfe == 36


def test_policy_losses_refuse_it(spec):
    message = "allowed: a stochastic sampler: the loss needs log-probabilities"
    with pytest.raises(ConfigError, match=message):
        make_method(RunConfig.of(world="mixture", task="direction", sampler=spec))


def test_it_trains_with_a_forward_process_loss(spec):
    """The mean reward of the last iterations is well above that of the first ones, as with
    DPM-Solver++.
    """
    config = preset("default").apply(
        world="mixture", method="diffusion-nft", sampler=spec, groups=8, minibatches=4
    )
    trainer = make_trainer(config)
    assert type(trainer.method.sampler).__name__ == "AdamsBashforth"
    rewards = [trainer.iteration()["reward_mean"] for _ in range(16)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
