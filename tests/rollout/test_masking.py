"""Samples that a reward marks invalid: left out of their group, not trained on, counted."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.credit import GDPO, StepwiseGain, TurningPoint, Uniform
from flowrl.errors import RewardError
from flowrl.flow import uniform_schedule
from flowrl.rewards import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.rollout import RewardTables, score
from flowrl.rollout.masking import valid_credit, with_advantage
from flowrl.testing import check_reward
from flowrl.training.build import make_method, make_reward, make_world, policy_options, trial_schedule
from flowrl.training.config import preset
from flowrl.training.evaluation import evaluate
from flowrl.training.monitors import Limits, notices
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

NAN = float("nan")
GRID = uniform_schedule(4)


def tables_of(total):
    return RewardTables(total, {}, total.isfinite().all(2))


@pytest.mark.parametrize("rule", [Uniform(), StepwiseGain(), TurningPoint()], ids=lambda r: type(r).__name__)
def test_the_others_get_what_a_group_without_it_gets(rule):
    total = torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(0))
    total[1, 2] = NAN
    total[3, [0, 5]] = NAN
    advantages, used = valid_credit(tables_of(total), GRID, lambda t, _: rule.assign(t.total, None))
    for prompt in range(4):
        kept = total[prompt, :, 0].isfinite()
        alone = rule.assign(total[prompt : prompt + 1, kept], None)[0]
        assert torch.allclose(advantages[prompt, kept], alone, atol=1e-6)
        assert torch.equal(used[prompt], kept)
    assert bool((advantages[~used] == 0).all())


def test_parts_are_cut_in_the_same_way():
    total = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1))
    other = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(2))
    total[0, 1], other[0, 1] = NAN, NAN
    tables = RewardTables(total, {"a": total, "b": other}, total.isfinite().all(2))
    rule = GDPO(batch=False)
    advantages, _ = valid_credit(tables, GRID, lambda t, _: rule.assign_parts(t.parts, None))
    kept = [0, 2, 3]
    alone = rule.assign_parts({"a": total[:1, kept], "b": other[:1, kept]}, None)
    assert torch.allclose(advantages[0, kept], alone[0], atol=1e-6)


def test_a_sample_left_alone_does_not_count():
    total = torch.rand(2, 3, 4)
    total[0, :2] = NAN
    advantages, used = valid_credit(tables_of(total), GRID, lambda t, _: Uniform().assign(t.total, None))
    assert used.tolist() == [[False] * 3, [True] * 3] and bool((advantages[0] == 0).all())
    total[1, 1:] = NAN
    with pytest.raises(RewardError, match="marked 4 of 6 samples invalid; no prompt has two left"):
        valid_credit(tables_of(total), GRID, lambda t, _: Uniform().assign(t.total, None))


@dataclass
class Unsure:
    """Another reward, which cannot judge every third sample of a call."""

    model: object
    marks_invalid: bool = True

    def score(self, images, prompts):
        scores = self.model.score(images, prompts).clone()
        scores[::3] = NAN
        return scores


def test_only_a_reward_that_says_so_may_mark():
    silent = Unsure(FunctionReward(lambda images, prompts: images.mean((1, 2, 3))), marks_invalid=False)
    images, prompts = torch.rand(4, 3, 2, 2), [Prompt("x")] * 4
    with pytest.raises(RewardError, match="2 of 4 values that are not finite"):
        score(silent, images, prompts, invalid=True)
    loud = replace(silent, marks_invalid=True)
    assert score(loud, images, prompts, invalid=True).isnan().tolist() == [True, False, False, True]
    with pytest.raises(RewardError, match="not finite"):
        score(loud, images, prompts)
    infinite = FunctionReward(lambda images, prompts: torch.full((4,), float("inf")), marks_invalid=True)
    with pytest.raises(RewardError, match="4 of 4 values that are not finite"):
        score(infinite, images, prompts, invalid=True)


def test_marks_pass_through_combinations():
    dark = FunctionReward(lambda i, p: torch.where(i.mean((1, 2, 3)) > 0.5, i.mean((1, 2, 3)), NAN), marks_invalid=True)
    plain = FunctionReward(lambda i, p: i.amax((1, 2, 3)))
    for reward in (WeightedSum({"a": dark, "b": plain}), NoisyReward(dark, 0.1), Clipped(dark, high=0.7), dark):
        assert reward.marks_invalid and check_reward(reward).ok
        images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
        assert reward.score(images, [Prompt("x")] * 2).isnan().tolist() == [True, False]
    assert not WeightedSum({"b": plain}).marks_invalid
    assert check_reward(FunctionReward(dark.function)).broken


def test_clipped_limits():
    reward = Clipped(FunctionReward(lambda i, p: torch.tensor([-2.0, 0.3, 2.0])), low=0.0, high=1.0)
    assert reward.score(torch.zeros(3, 3, 1, 1), [Prompt("x")] * 3).tolist() == pytest.approx([0.0, 0.3, 1.0])


def test_training_leaves_them_out_and_counts_them():
    config = preset("tiny").apply(world="mixture", groups=2, group_size=6, iterations=2)
    world = make_world(config)
    policy = world.policy(policy_options(config))
    reward = Unsure(make_reward(config))
    trainer = Trainer(policy, make_method(config), reward, world.prompts(config.environment.task, "train"), config)
    rows = [trainer.iteration() for _ in range(2)]
    assert [row["invalid"] for row in rows] == [4, 4]
    stochastic = int(trial_schedule(config).stochastic.sum())
    assert rows[0]["train_nfe"] == 8 * stochastic
    assert all(torch.isfinite(torch.tensor(row["reward_mean"])) for row in rows)
    found = evaluate(policy, world, config.environment.task, config.environment.reward_form, 4, 2, reward=reward)
    assert found.custom_reward is not None and not math.isnan(found.custom_reward)
    assert found.image_scores.isnan().sum() == 2


def test_without_marks_nothing_changes():
    def run(wrapped):
        config = preset("tiny").apply(world="mixture", groups=2, group_size=4)
        world = make_world(config)
        policy = world.policy(policy_options(config))
        reward = make_reward(config)
        reward = FunctionReward(reward.score, marks_invalid=True) if wrapped else reward
        trainer = Trainer(policy, make_method(config), reward, world.prompts(config.environment.task, "train"), config)
        return [{k: v for k, v in trainer.iteration().items() if k not in ("seconds", "phases")} for _ in range(2)]

    assert run(False) == run(True)


def dropping(drop, reward, kl_weight=0.0):
    """One iteration on the mixture world with 2 groups of 4 and one update; the row and the trainer."""
    config = preset("tiny").apply(
        world="mixture", groups=2, group_size=4, minibatches=1, kl_weight=kl_weight, drop_zero_advantages=drop, learning_rate=1e-2
    )
    world = make_world(config)
    prompts = world.prompts(config.environment.task, "train")[:2]
    trainer = Trainer(world.policy(policy_options(config)), make_method(config), reward(prompts), prompts, config)
    return trainer.iteration(), trainer


def equal_for_one(prompts):
    """A reward that gives all images of one prompt the same score."""
    return FunctionReward(
        lambda images, asked: images.flatten(1)[:, 0] * torch.tensor([float(p.text == prompts[0].text) for p in asked])
    )


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_samples_without_advantage_leave_the_mean_if_they_are_dropped(kl_weight):
    """Half of the samples have advantage 0: without them the mean and the gradient are twice as large. They are evaluated for the
    penalty only."""
    (kept, _), (dropped, _) = (dropping(drop, equal_for_one, kl_weight) for drop in (False, True))
    assert "dropped" not in kept and dropped["dropped"] == 4
    more = 2 if kl_weight else 1
    assert dropped["train_nfe"] * more == kept["train_nfe"] and dropped["abs_advantage"] == kept["abs_advantage"]
    assert dropped["grad_norm"] == pytest.approx(2 * kept["grad_norm"], rel=1e-5)
    assert dropped["policy_loss"] == pytest.approx(more * kept["policy_loss"], abs=1e-7)


def test_a_batch_without_any_advantage_changes_nothing():
    row, trainer = dropping(True, lambda prompts: FunctionReward(lambda images, asked: torch.zeros(len(images))))
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    again = trainer.iteration()
    assert (row["dropped"], row["train_nfe"], row["abs_advantage"]) == (8, 0, 0.0) and "loss" not in row
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True)) and not trainer.optimizer.state
    assert [notice.kind for notice in notices([row, again], Limits())] == ["no-update"]


def test_one_trained_step_with_an_advantage_is_enough():
    advantages = torch.zeros(1, 3, 4)
    advantages[0, 0, 1], advantages[0, 1, 3] = 0.5, 0.5
    used = torch.tensor([[True, True, True]])
    assert with_advantage(used, advantages, torch.arange(4)).tolist() == [[True, True, False]]
    assert with_advantage(used, advantages, torch.tensor([0, 1])).tolist() == [[True, False, False]]
    assert with_advantage(~used, advantages, torch.arange(4)).tolist() == [[False] * 3]
