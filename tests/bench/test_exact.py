"""Exact values against closed forms and continuations, the probe `exact` in training; true
advantages against exact ones, and the agreement of rules whose credit is known.

z-scores are held to |z| < 5 (a correct estimator fails one of 400 with probability 2e-4); seeds are
fixed.
"""

import dataclasses
import math

import pytest
import torch
from closed_form import PROMPTS, exact_values, gaussian_setting
from rollouts import AllButLast
from seeded import randn, seeded

from flowrl.bench.continuations import continuation_rewards
from flowrl.bench.exact import Exact, ValueGrid, exact_advantages
from flowrl.bench.gradients import Setting
from flowrl.bench.true_advantage import (
    LEAST_RELIABILITY,
    Look,
    TrueAdvantages,
    compare_credit,
    true_advantages,
)
from flowrl.core.errors import ConfigError
from flowrl.probes import Branch, Comb, NoProbe, Shape
from flowrl.rollout import Usage
from flowrl.run.build import make_trainer, make_world
from flowrl.run.config import preset
from flowrl.samplers import CPS, DDIMSDE, DanceSDE, ExponentialSDE, FlowSDE, Windowed
from flowrl.worlds.mixture import DirectionReward

SAMPLERS = {
    "flow-sde": AllButLast(FlowSDE(0.7)),
    "window": Windowed(FlowSDE(1.0), range(1, 4)),
    "gaps": Windowed(CPS(0.7), (0, 2, 3)),
    "cps": CPS(0.5),
    "dance": DanceSDE(0.3),
    "ddim": DDIMSDE(0.7),
    "exponential": ExponentialSDE(0.7),
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


# True advantages

CASES = {
    "all but last": (NoProbe(), AllButLast(FlowSDE(0.7))),
    "window": (NoProbe(), Windowed(FlowSDE(1.0), range(1, 4))),
    "splits": (Branch((2, 1, 2)), AllButLast(FlowSDE(0.7))),
    "edges": (Branch((2, 2), weight="edge"), Windowed(FlowSDE(1.0), range(1, 4))),
    "comb": (Comb(2, count=1), Windowed(FlowSDE(1.0), range(1, 4))),
}


@pytest.mark.parametrize("case", CASES)
def test_true_advantages_are_the_exact_ones_of_a_gaussian(case):
    """Against the closed form along every member's path, also of trees; the distinct states alone
    are continued, each once.
    """
    probe, sampler = CASES[case]
    setting, members, squares = gaussian_setting(sampler), 8, []
    for seed in range(4):
        usage = Usage()
        result = Look(setting, members, seed).trajectories(False, probe)
        truth = true_advantages(setting, result, 200, seed=5 + seed, usage=usage)
        tree, schedule = result.trajectories.tree, setting.schedule
        values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
        assert truth.steps == tuple(tree.drawn_steps)
        weights = truth.weights if tree.branched else torch.ones_like(truth.values)
        counted = weights > 0
        assert torch.equal(counted, tree.decisions[:, tree.drawn_steps].expand_as(counted))
        torch.testing.assert_close(truth.state_values[..., -1], values[..., -1], atol=1e-4, rtol=0)
        assert not truth.values[~counted].any() and not truth.state_errors[..., -1].any()
        uncertain = counted & (truth.errors > 0)
        exact = values.diff(dim=-1)[..., list(truth.steps)]
        z = (truth.values - exact)[uncertain] / truth.errors[uncertain]
        assert z.abs().max() < 5
        squares.append(float(z.square().mean()))
        ends = {*tree.drawn.nonzero().flatten().tolist(), *tree.parent[tree.drawn].tolist()}
        last, nodes = int(setting.stds.nonzero().max()), [int(tree.node[unit]) for unit in ends]
        continued = [(200 if node <= last else 1) * (schedule.steps - node) for node in nodes]
        assert not tree.branched or usage.nfe == 3 * sum(continued)
        by_edge = tree.branched and tree.weight == "edge"
        total = tree.drawn.sum() if by_edge else tree.decisions.sum()
        assert weights[0].sum() == pytest.approx(float(total))
    assert sum(squares) / 4 == pytest.approx(1.0, abs=0.4)


@pytest.fixture(scope="module")
def noisy():
    """Exact advantages of many groups, and a noisy estimate of them with known errors."""
    generator = seeded()
    exact = 0.3 * torch.randn(60, 10, 4, generator=generator)
    errors = torch.full_like(exact, 0.2)
    estimates = exact + 0.2 * torch.randn(exact.shape, generator=generator)
    state = torch.zeros(60, 10, 5)
    return exact, TrueAdvantages(estimates, errors, state, state, (0, 1, 2, 3))


def test_the_noise_of_the_truth_is_taken_out(noisy):
    exact, truth = noisy
    report = compare_credit(exact * 7, truth).overall
    assert report.raw_correlation == pytest.approx(0.3 / math.hypot(0.3, 0.2), abs=0.02)
    assert report.correlation.value == pytest.approx(1.0, abs=0.03)
    assert report.correlation.high - report.correlation.low < 0.04
    drowned = dataclasses.replace(truth, errors=torch.full_like(truth.errors, 9.0))
    faint = exact + 3.0 * randn(*exact.shape, seed=2)
    result = compare_credit(faint, drowned).overall
    assert 0.03 < result.raw_correlation < 0.2 and result.reliability == LEAST_RELIABILITY
    # and no further
    assert result.correlation.value == pytest.approx(
        result.raw_correlation / math.sqrt(LEAST_RELIABILITY)
    )
    reliability = 1 - truth.errors.square().mean() / truth.values.var()
    assert report.reliability == pytest.approx(float(reliability), abs=1e-3)
    assert report.sign.value > 0.95 and 0.2 < report.resolved < 0.5
    assert report.bias.value < 0.05
