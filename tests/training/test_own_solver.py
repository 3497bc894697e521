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
from flowrl.rollout import Groups, Usage, rollout
from flowrl.samplers import Multistep, transition_stds
from flowrl.testing import check_solver
from flowrl.training.build import make_method, make_trainer
from flowrl.training.config import preset
from flowrl.worlds.base import PolicyOptions, world

PAGE = Path(__file__).parents[2] / "docs/guides/sampler.md"


@pytest.fixture
def spec(tmp_path):
    (code,) = re.findall(r"```python\n# my_solvers.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_solvers.py").write_text(code)
    return f"{tmp_path / 'my_solvers.py'}:AdamsBashforth"


def sampled(solver, usage=None):
    """Trajectories of two groups of three in the mixture world."""
    mixture = world("mixture")
    policy, groups = mixture.policy(PolicyOptions()), Groups(2, 3)
    condition = policy.encode(mixture.prompts("direction", "train")[:2])
    generator = torch.Generator().manual_seed(0)
    noise = groups.noise(policy.latent_shape, generator)
    result = rollout(
        policy, solver, policy.schedule(6), condition, noise, generator, groups, usage=usage
    )
    return result.trajectories, policy, condition.repeat(3), noise


def test_the_rollout_follows_its_formula(spec):
    """Adams-Bashforth of order 2; every state is evaluated once."""
    solver, usage = build("sampler", spec), Usage()
    assert check_solver(solver).ok
    path, policy, condition, x = sampled(solver, usage)
    times, before = path.schedule.times, None
    for i in range(6):
        torch.testing.assert_close(path.at(i), x)
        timestep = path.schedule.network_timesteps[i].expand(len(x))
        with torch.no_grad():
            velocity = policy.velocity(x, timestep, condition)
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


def test_policy_losses_refuse_it_and_a_forward_process_loss_trains_with_it(spec):
    config = preset("tiny").apply(world="mixture", sampler=spec)
    with pytest.raises(ConfigError, match="allowed: a stochastic sampler: the loss needs"):
        make_method(config)
    trainer = make_trainer(config.replace(loss="diffusion-nft"))
    assert type(trainer.method.sampler).__name__ == "AdamsBashforth"
    assert not transition_stds(trainer.method.sampler, trainer.schedule).any()
    assert trainer.iteration()["grad_norm"] > 0
