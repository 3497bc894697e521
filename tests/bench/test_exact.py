"""Exact values against closed forms and continuations, and the probe `exact` in training."""

import pytest
import torch
from all_but_last import AllButLast
from closed_form import PROMPTS, exact_values, gaussian_setting
from flowrl_bench.continuations import Look, continuation_rewards
from flowrl_bench.exact import Exact, ValueGrid, exact_advantages
from flowrl_bench.gradients import Setting

from flowrl.core.errors import ConfigError
from flowrl.probes import Shape
from flowrl.rollout import Usage
from flowrl.samplers import CPS, DDIMSDE, DanceSDE, FlowSDE, Windowed
from flowrl.training.build import make_trainer, make_world
from flowrl.training.config import preset
from flowrl.worlds.mixture import DirectionReward

SAMPLERS = {
    "flow-sde": AllButLast(FlowSDE(0.7)),
    "window": Windowed(FlowSDE(1.0), range(1, 4)),
    "gaps": Windowed(CPS(0.7), (0, 2, 3)),
    "cps": CPS(0.5),
    "dance": DanceSDE(0.3),
    "ddim": DDIMSDE(0.7),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_values_are_those_of_the_closed_form(sampler):
    """One mode, whose velocity is affine: x_T given any state is Gaussian. Shared noise, too."""
    setting, members = gaussian_setting(SAMPLERS[sampler]), 6
    for shared in (False, True):
        result = Look(setting, members, seed=3).trajectories(shared)
        advantages = exact_advantages(setting, result)[0]
        values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
        exact = values[..., [*advantages.steps, -1]]
        assert (advantages.state_values - exact).abs().max() < 1e-3


def trained(iterations=0, **changes):
    """The 2-D world with an untrained or a trained policy."""
    run = preset("default").apply(world="mixture", method="flow-grpo", clip_range=0.18, **changes)
    trainer = make_trainer(run)
    for _ in range(iterations):
        trainer.iteration()
    reward, schedule = make_world(run).reward("soft"), trainer.schedule
    return Setting(trainer.policy, trainer.draw_sampler(), schedule, reward, PROMPTS)


@pytest.mark.parametrize(("iterations", "form"), [(0, "soft"), (0, "strict"), (3, "soft")], ids=str)
def test_continuations_agree_with_the_values(iterations, form):
    """Means of 500 continuations from 75 states. Standard errors are exact, too: E R^2 - V^2. A
    correct value fails with probability 1e-3 (max |z| < 5 of skewed z; mean z^2 of 75 < 1.7).
    """
    setting = trained(iterations, window="0:5")
    rewards = [DirectionReward(form), _Squared(form)]
    result = Look(setting, 5, seed=4).trajectories(False)
    first, second = exact_advantages(setting, result, rewards, ValueGrid(113))
    scores = continuation_rewards(setting, result, 500, rewards[0], seed=8)
    means = scores.mean(2).view(first.state_values.shape)[..., :-1]
    values = first.state_values[..., :-1]
    spread = (second.state_values[..., :-1] - values.square()).clamp(min=1e-6).sqrt()
    z = (means - values) / (spread / 500**0.5)
    assert z.abs().max() < 5 and z.square().mean() < 1.7


class _Squared(DirectionReward):
    """R^2."""

    def score(self, images, prompts):
        return super().score(images, prompts).square()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", ["0:5", "2:4"])
def test_the_probe_has_these_values_and_counts_its_cost(window, shared):
    """Also in one chunk of groups only, and if the first node is not the first step."""
    setting, probe = trained(window=window), Exact(29)
    usage, look = Usage(), Look(setting, 4, seed=5)
    result = look.trajectories(shared, probe, usage)
    plain = Usage()
    expected = exact_advantages(setting, look.trajectories(shared, usage=plain), (), probe.grid)[0]
    values = setting.experience(result, usage).values
    torch.testing.assert_close(values, expected.state_values, atol=1e-6, rtol=0)
    path = result.trajectories
    cost = probe.cost(Shape(3, setting.schedule, path.tree, result.nodes))
    assert usage.nfe - plain.nfe == cost.nfe
    assert usage.reward_calls == cost.images + result.groups.samples
    assert usage.calls - plain.calls == len(cost.calls)
    part = result.part(1, 1)
    with pytest.raises(ConfigError, match="groups of exact values"):
        setting.experience(part)
