"""The weights of transitions in the loss: samples that a reward marks invalid, samples without
advantage, shared edges, and a rule's own factors.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from rollouts import Compared, tree_weights
from seeded import rand, randn
from small_run import TINY_RUN, trainer_of, weights
from torch.testing import assert_close

from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit, Decisions
from flowrl.core.types import Prompt
from flowrl.credit import Uniform
from flowrl.losses import ClippedLoss, PolicyGradientLoss
from flowrl.methods import Method
from flowrl.probes import Branch, Comb, NoProbe
from flowrl.rewards import Clipped, FunctionReward, WeightedSum
from flowrl.rewards.contract import marks_invalid
from flowrl.rollout import score, transition_weights, usable
from flowrl.rollout.values import require_usable
from flowrl.run.build import make_reward, make_world, trial_stds
from flowrl.run.evaluation import evaluate
from flowrl.samplers import FixedWindow, FlowSDE

NAN = float("nan")


def test_a_sample_left_alone_does_not_count():
    valid = torch.tensor([[False, False, True], [True, False, True]])
    assert usable(valid).tolist() == [[False] * 3, [True, False, True]]
    require_usable(valid)
    valid[1, 0] = False
    with pytest.raises(
        RewardError, match="marked 4 of 6 samples invalid; no prompt has two valid samples left"
    ):
        require_usable(valid)


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
    mean = FunctionReward(lambda images, prompts: images.mean((1, 2, 3)))
    marking, images, prompts = Unsure(mean), torch.rand(4, 3, 2, 2), [Prompt("x")] * 4
    assert score(marking, images, prompts).total.isnan().tolist() == [True, False, False, True]
    infinite = FunctionReward(lambda i, p: torch.full((4,), math.inf), marks_invalid=True)
    silent = replace(marking, marks_invalid=False)
    for reward, invalid, bad in ((silent, True, 2), (marking, False, 2), (infinite, True, 4)):
        with pytest.raises(RewardError, match=f"{bad} of 4 values that are not finite"):
            score(reward, images, prompts, invalid=invalid)
    for reward, marks in ((marking, True), (mean, False)):
        assert marks_invalid(Clipped(reward)) == marks
        assert marks_invalid(WeightedSum({"a": mean, "b": reward})) == marks


@pytest.mark.parametrize(
    ("groups", "members", "kl_weight", "invalid", "trained"), [(2, 6, 0.0, 4, 8), (3, 2, 0.1, 2, 4)]
)
def test_training_leaves_invalid_samples_out(groups, members, kl_weight, invalid, trained):
    """Every third sample is invalid. In groups of 2, only the third group has two left; it is
    evaluated twice, for the penalty.
    """
    config = TINY_RUN.replace(groups=groups, group_size=members, kl_weight=kl_weight)
    trainer = trainer_of(config, reward=Unsure(make_reward(config)))
    row, drawn = trainer.iteration(), int((trial_stds(config) > 0).sum())
    assert (row["invalid"], row["train_nfe"]) == (invalid, trained * drawn)
    assert math.isfinite(row["reward_mean"])
    given = trainer.policy, make_world(config), "direction", "soft", 4, 2
    measured = evaluate(*given, reward=trainer.reward)
    assert math.isfinite(measured.row["reward"]) and measured.image_scores.isnan().sum() == 2


def dropping(reward):
    """A trainer of 2 groups of 4 that leaves out samples without advantage."""
    settings = dict(groups=2, group_size=4, minibatches=1, drop_zero_advantages=True)
    return trainer_of(TINY_RUN.replace(**settings), reward=reward)


def test_a_batch_without_any_advantage_changes_nothing():
    trainer = dropping(FunctionReward(lambda i, p: torch.zeros(len(i))))
    before, row = weights(trainer), trainer.iteration()
    trainer.iteration()
    assert (row["dropped"], row["train_nfe"], row["abs_advantage"]) == (8, 0, 0.0)
    assert "loss" not in row and not trainer.optimizer.state
    assert torch.equal(before, weights(trainer))


def test_invalid_samples_are_not_counted_as_dropped():
    one_group = FunctionReward(
        lambda images, prompts: (
            images[:, 0, 0, 0] * torch.tensor([p == prompts[0] for p in prompts])
        )
    )
    row = dropping(Unsure(one_group)).iteration()
    # of the second group's samples three are valid
    assert (row["invalid"], row["dropped"]) == (3, 3)


def test_one_trained_decision_with_an_advantage_is_enough():
    """`drop_zero` leaves out whole members, never single decisions: the KL of a kept member counts
    everywhere. A rule's own factors multiply the weights within the mask.
    """
    decisions, advantages = Decisions.like(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 4)
    advantages[0, 0, 1], advantages[0, 1, 3] = 0.5, 0.5
    factors = rand(1, 3, 4, seed=5) + 0.1
    for mask, kept in (([True] * 4, 2), ([True, True, False, False], 1), ([False] * 4, 0)):
        trained = torch.tensor(mask).expand(1, 3, 4)
        some = replace(decisions, mask=trained)
        credit = Credit(advantages, factors.masked_fill(~trained, NAN))
        expected = torch.where(trained, factors, 0.0)
        assert torch.equal(transition_weights(credit, some), expected)
        expected[:, kept:] = 0
        assert torch.equal(transition_weights(credit, some, drop_zero=True), expected)


@pytest.mark.parametrize(
    ("weight", "sharing"), [("leaf", [[1.0] * 6] * 2), ("edge", [[3.0] * 6, [2, 2, 2, 1, 1, 1]])]
)
def test_members_that_share_a_transition_share_its_weight_if_edges_count(weight, sharing):
    """Two children at the first step, three at the second; only valid members share."""
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, [0, 3, 4]] = False
    tree = Branch((2, 3), weight=weight).tree(3, (0, 1), 6, False, torch.Generator())
    first, second = tree_weights(tree, torch.tensor([0.5, 0.5, 0.0]), valid).unbind(-1)
    assert_close(first, valid / torch.tensor(sharing))
    assert_close(second, valid.float())


def test_all_steps_of_a_comb_weigh_the_same_if_steps_count():
    tree = Comb((6, 6, 8, 10), weight="step").tree(10, range(9), 60, False, torch.Generator())
    assert sum(tree.counts[:-1]) == 2 * 222  # evaluations of two trunks
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[1, :7] = False
    shares = tree_weights(tree, torch.ones(10), valid).sum((0, 1))
    assert_close(shares, torch.full((4,), 113 / 4))


class Factors(Uniform):
    """Uniform credit with random factors of the transitions, some of them 0."""

    def assign(self, values, decisions):
        shape = decisions.mask.shape
        factors = rand(*shape, seed=7)
        return Credit(randn(*shape, seed=8), torch.where(factors > 0.2, factors, 0.0))


@pytest.mark.parametrize(
    ("loss", "probe", "micro_batch"),
    [
        (ClippedLoss(kl_weight=0.1), NoProbe(), 3),
        (PolicyGradientLoss(), Branch((1, 3), weight="edge"), 3),
        (PolicyGradientLoss(), NoProbe(), 1000),
    ],
    ids=["clipped", "edges", "one micro-batch"],
)
def test_the_gradient_is_that_of_one_loss_over_all_rows(loss, probe, micro_batch):
    """With unequal weights, one invalid sample, and any number of rows in a micro-batch."""
    method = Method("weighted", FlowSDE(0.7), FixedWindow(stop=-1), Factors(probe=probe), loss)
    reward = FunctionReward(
        lambda images, prompts: torch.tensor([NAN, *range(1, len(images))]), marks_invalid=True
    )
    settings = dict(groups=2, group_size=6, num_steps=4, minibatches=2, learning_rate=1e-2)
    config = TINY_RUN.replace(**settings, micro_batch=micro_batch)
    trainer = trainer_of(config, method, reward, kind=Compared)
    row = trainer.iteration()
    assert not trainer.left and row["invalid"] == 1 and not trainer.weights[0, 0].any()
    spread = torch.cat([rows.weight for rows in trainer.rows])
    assert torch.equal(spread.sort().values, trainer.weights[trainer.weights > 0].sort().values)
    assert len(spread.unique()) > 10
