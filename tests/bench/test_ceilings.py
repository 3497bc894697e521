"""Ceilings of credit rules against closed forms and exact values; the correction for noise with 0/1
rewards.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from all_but_last import AllButLast
from flowrl_bench.ceilings import LEVELS, ceiling, ceiling_sums, group_ceiling, with_values
from flowrl_bench.continuations import (
    Look,
    TrueAdvantages,
    continuation_rewards,
    from_continuations,
)
from flowrl_bench.gradients import Setting
from flowrl_bench.true_advantage import compare_credit, correlation, credit_sums

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Experience
from flowrl.core.types import Prompt
from flowrl.flow import uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.parts.registry import build
from flowrl.policies.mixture import MixturePolicy
from flowrl.rollout import Rollout
from flowrl.samplers import FlowSDE
from flowrl.worlds.mixture import DirectionReward, angle_of, target

JOINT, BY_STEP, UNIFORM = "stepwise-gain", "stepwise-gain(normalise=step)", "uniform"
PROMPTS = [Prompt(f"towards {angle} degrees") for angle in (0, 100, 200)]


@dataclass(frozen=True)
class Walk:
    """Trajectories, their record, exact values [prompt, member, decision+1] and scores of
    continuations.
    """

    result: Rollout
    record: Experience
    exact: torch.Tensor
    scores: torch.Tensor

    def ceiling(self, spec: str) -> float:
        """The ceiling of a rule, from the exact values."""
        gains = self.exact.diff(dim=-1)
        none = torch.zeros_like(self.exact)
        truth = TrueAdvantages(
            gains, none[..., 1:], self.exact, none, tuple(range(gains.shape[-1]))
        )
        return correlation(
            credit_sums(with_values(build("credit", spec), self.record, self.exact), truth)
        )

    def sums(self, spec: str) -> torch.Tensor:
        """`ceiling_sums` of a rule."""
        return ceiling_sums(lambda: build("credit", spec), self.scores, self.result, self.record)


def walk(scales: torch.Tensor, noise: float, groups: int = 60, continuations: int = 16) -> Walk:
    """Trajectories of the 2-D world whose values are replaced by a random walk with increments of
    these standard deviations by decision; the scores are the value and `noise` x the walk's own
    future.
    """
    one = GaussianMixture(torch.tensor([[1.2, 0.4]]), 0.6, torch.ones(1))
    policy, steps = MixturePolicy(one, angle_of), len(scales) + 1
    setting = Setting(
        policy,
        AllButLast(FlowSDE(0.7)),
        uniform_schedule(steps),
        DirectionReward(),
        PROMPTS[:1] * groups,
    )
    result = Look(setting, 12, 0).trajectories(True)
    generator = torch.Generator().manual_seed(1)
    increments = torch.randn(groups, 12, len(scales), generator=generator) * scales
    exact = torch.cat([torch.zeros(groups, 12, 1), increments.cumsum(2)], 2)
    left = torch.cat([scales.square().flip(0).cumsum(0).flip(0), torch.zeros(1)]).sqrt()
    future = left[:, None] * torch.randn(
        groups * 12, len(scales) + 1, continuations, generator=generator
    )
    scores = exact.flatten(0, 1)[..., None] + noise * future
    scores[:, -1:] = exact.flatten(0, 1)[:, -1:, None]  # nothing is left to chance there
    return Walk(result, setting.experience(result), exact, scores)


SCALES = torch.tensor([1.0, 0.5, 0.25, 0.25])


def test_ceilings_in_closed_form() -> None:
    """Groups of 12 members of independent decisions with stds s_k. Z by decision: c mean(s) /
    rms(s), where c = E[std] / sigma of 12 normal numbers; Z over the group: nearly 1; uniform: c
    times the correlation of a sum of 4 terms with one of them.
    """
    known = walk(SCALES, 0.0)
    rms = float(SCALES.square().mean().sqrt())
    # mean population std of 12 standard normal numbers
    spread = math.sqrt(2 / 12) * math.gamma(6) / math.gamma(5.5)
    assert known.ceiling(BY_STEP) == pytest.approx(spread * float(SCALES.mean()) / rms, abs=0.02)
    assert known.ceiling(JOINT) == pytest.approx(1.0, abs=0.04)
    assert known.ceiling(UNIFORM) == pytest.approx(spread * 0.5, abs=0.02)
    gains = known.exact.diff(dim=-1)
    by_step = [gains[g, :, i] for g in range(len(gains)) for i in range(len(SCALES))]
    assert known.ceiling(BY_STEP) == pytest.approx(group_ceiling(by_step), abs=2e-3)
    assert known.ceiling(JOINT) == pytest.approx(group_ceiling(list(gains)), abs=5e-3)


def test_sets_without_spread_have_no_credit() -> None:
    """A set without advantages costs nothing; two sets with stds 1 and 3 have the ceiling mean /
    rms = 2 / sqrt(5).
    """
    values = torch.tensor([1.0, -1.0])
    assert group_ceiling([values, torch.zeros(2)]) == pytest.approx(1.0)
    assert group_ceiling([values]) == pytest.approx(1.0)
    assert group_ceiling([values, 3 * values]) == pytest.approx(2 / math.sqrt(5))


@pytest.mark.parametrize("spec", [JOINT, BY_STEP, UNIFORM, "turning-point", "stepwise-gain(lam=1)"])
def test_noise_of_the_values_is_extrapolated_away(spec: str) -> None:
    """A truth of reliability 0.87: within 0.02 of the exact ceiling; the plain table of values is
    more than 0.05 too low.
    """
    noisy = walk(SCALES, 1.4, groups=200, continuations=24)
    assert 0.85 < from_continuations(noisy.scores, noisy.result).reliability < 0.9
    sums = noisy.sums(spec)
    known, found, raw = noisy.ceiling(spec), ceiling(sums), correlation(sums[0])
    assert found == pytest.approx(known, abs=0.02)
    if spec in (JOINT, BY_STEP, "turning-point"):
        assert known - raw > 0.05
    if spec == UNIFORM:
        assert raw == pytest.approx(known, abs=0.01)


def test_a_perfect_rule_without_noise_has_a_flat_ceiling() -> None:
    sums = walk(SCALES, 0.0).sums(JOINT)
    assert [correlation(row) for row in sums] == pytest.approx([correlation(sums[0])] * len(LEVELS))


def test_too_few_continuations_are_refused() -> None:
    few = walk(SCALES, 0.1, groups=2, continuations=6)
    with pytest.raises(ConfigError, match="continuations for ceilings = 6"):
        few.sums(JOINT)


def test_the_noise_of_0_1_rewards_is_taken_out() -> None:
    """V is a probability and the continuations are coins: the corrected correlation of exact credit
    is 1, and that of credit with a known fraction of noise is as computed; without correction it is
    far lower.
    """
    result = walk(SCALES, 0.0, groups=150).result
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat(
        [torch.zeros(150 * 12, 1), (0.8 * torch.randn(150 * 12, 4, generator=generator)).cumsum(1)],
        1,
    )
    chances = logits.sigmoid()
    coins = (torch.rand(150 * 12, 5, 12, generator=generator) < chances[..., None]).float()
    coins[:, -1:] = coins[:, -1:, :1]  # the finished image's reward
    truth = from_continuations(coins, result)
    exact = torch.cat([chances[:, :4], coins[:, 4:, 0]], 1).view(150, 12, -1).diff(dim=-1)
    report = compare_credit(exact, truth)
    assert (
        report.overall.raw_correlation < 0.95
        and report.overall.correlation.value == pytest.approx(1.0, abs=0.02)
    )
    own = torch.randn(exact.shape, generator=generator) * exact.std()
    noisy = compare_credit(exact + own, truth, draws=2).overall
    assert noisy.correlation.value == pytest.approx(
        float(exact.std() / torch.hypot(exact.std(), own.std())), abs=0.03
    )


def test_a_strict_reward_has_the_values_of_a_closed_form() -> None:
    """One mode: the finished point given a node is Gaussian, so P(distance < 0.8) is a noncentral
    chi-square probability. |z| < 5 wherever it is between 0.02 and 0.98, and the mean of z^2 is 1.
    """
    from scipy import stats

    one = GaussianMixture(torch.tensor([[1.2, 0.4]]), 0.6, torch.ones(1))
    setting = Setting(
        MixturePolicy(one, angle_of),
        AllButLast(FlowSDE(0.7)),
        uniform_schedule(4),
        DirectionReward("strict"),
        PROMPTS,
    )
    result = Look(setting, 24, 3).trajectories(False)
    soft, strict = continuation_rewards(
        setting, result, 400, [DirectionReward("soft"), DirectionReward("strict")], 5
    )
    assert set(strict.unique().tolist()) <= {0.0, 1.0} and len(soft.unique()) > 1000
    found = from_continuations(strict, result)
    goals = torch.tensor([target(prompt) for prompt in PROMPTS for _ in range(24)])
    points = continued_points(setting, result, 4000)
    z = []
    for node in range(3):
        mean, spread = points[:, node].mean(1), points[:, node].var(1).mean()
        gap = (mean - goals).square().sum(1) / spread
        chance = torch.tensor(stats.ncx2.cdf(0.64 / float(spread), 2, gap.numpy()))
        fair = (chance > 0.02) & (chance < 0.98)
        z.append(
            (
                (found.state_values.flatten(0, 1)[:, node] - chance)
                / (chance * (1 - chance) / 400).sqrt()
            )[fair]
        )
    every = torch.cat(z)
    assert len(every) > 60
    assert float(every.abs().max()) < 5 and float(every.square().mean()) == pytest.approx(
        1.0, abs=0.5
    )


def continued_points(setting: Setting, result: Rollout, count: int) -> torch.Tensor:
    """Finished points [sample, decision+1, continuation, 2] by a reward that returns a
    coordinate.
    """

    class Coordinate:
        def __init__(self, axis: int) -> None:
            self.axis = axis

        def score(self, images, prompts):
            return images.flatten(1)[:, self.axis]

    return torch.stack(
        list(continuation_rewards(setting, result, count, [Coordinate(0), Coordinate(1)], 9)), -1
    )
