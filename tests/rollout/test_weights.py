"""The weights of transitions in the loss: samples that a reward marks invalid, samples without
advantage, shared edges, and a rule's own factors.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from rollouts import Compared

from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.types import Prompt
from flowrl.credit import (
    GDPO,
    BackedUp,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    credit_of,
)
from flowrl.flow import uniform_schedule
from flowrl.losses import ClippedLoss, PolicyGradientLoss
from flowrl.methods import Method
from flowrl.probes import Branch, NoProbe
from flowrl.rewards import Clipped, FunctionReward, WeightedSum
from flowrl.rewards.contract import marks_invalid
from flowrl.rollout import score, transition_weights, usable
from flowrl.samplers import FixedWindow, FlowSDE
from flowrl.training.build import make_method, make_reward, make_world, policy_options, trial_stds
from flowrl.training.config import preset
from flowrl.training.evaluation import evaluate
from flowrl.training.monitors import Limits, notices
from flowrl.training.trainer import Trainer

NAN = float("nan")


def table(prompts, members, columns, seed=0, invalid=()):
    """A random value table [prompt, member, decision+1]; NaN for the `invalid` (prompt, member)."""
    values = torch.rand(prompts, members, columns, generator=torch.Generator().manual_seed(seed))
    for place in invalid:
        values[place] = NAN
    return values


def record(values, parts=None):
    """The record of a table whose samples with NaN are invalid."""
    valid, decisions = values.isfinite().all(2), Decisions.like(values)
    decisions = replace(decisions, mask=decisions.mask & usable(valid)[:, :, None])
    prompts = [Prompt(f"prompt {row}") for row in range(len(values))]
    return Experience(prompts, values, decisions, valid, parts or {})


INVALID = ((1, 2), (3, 0), (3, 5))


@pytest.mark.parametrize(
    "rule",
    [
        Uniform(),
        StepwiseGain(),
        StepwiseGain(normalise="step", lam=0.5),
        TurningPoint(balance_scope="prompt"),
        GDPO(batch=False),
    ],
    ids=repr,
)
def test_the_others_get_what_a_group_without_it_gets(rule):
    """And groups without an invalid sample get, bit for bit, what they get in a table without
    any.
    """

    def credit(prompts=slice(None), members=slice(None), invalid=INVALID):
        parts = {name: table(4, 6, 5, seed, invalid) for name, seed in (("a", 0), ("b", 1))}
        parts = {name: part[prompts][:, members] for name, part in parts.items()}
        return credit_of(rule, record(parts["a"], parts))

    credited, valid = credit(), table(4, 6, 5, invalid=INVALID)[..., 0].isfinite()
    for prompt in range(4):
        alone = credit(slice(prompt, prompt + 1), valid[prompt]).advantages[0]
        advantages = credited.advantages[prompt, valid[prompt]]
        torch.testing.assert_close(advantages, alone, atol=1e-6, rtol=1e-5)
    assert not credited.advantages[~valid].any() and not credited.weights[~valid].any()
    assert torch.equal(credited.advantages[[0, 2]], credit(invalid=()).advantages[[0, 2]])


@pytest.mark.parametrize(
    ("rule", "gains", "joint"),
    [
        (Uniform(std="batch"), False, True),
        (StepwiseGain(pool="batch"), True, True),
        (StepwiseGain(pool="batch", normalise="step"), True, False),
    ],
    ids=repr,
)
def test_statistics_of_the_batch_are_those_of_a_loop_over_valid_samples(rule, gains, joint):
    """Z with the means of groups and the std of the batch, sample by sample."""
    values = table(4, 6, 5, invalid=INVALID)
    found = credit_of(rule, record(values)).advantages
    scores = (values.diff(dim=-1) if gains else values[..., -1:].expand(-1, -1, 4)).double()
    valid = scores.isfinite().all(2)
    expected = torch.zeros_like(scores)
    for columns in [slice(None)] if joint else [slice(k, k + 1) for k in range(4)]:
        centred = scores[..., columns].clone()
        for prompt in range(4):
            centred[prompt] -= scores[prompt, valid[prompt]][:, columns].mean()
        std = torch.cat([scores[p, valid[p]][:, columns] for p in range(4)]).std(unbiased=False)
        expected[..., columns] = (centred / (std + 1e-4)).clamp(-5, 5)
    expected[~valid] = 0
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [SiblingRelative(probe=Branch((2, 3))), BackedUp("mean", probe=Branch((2, 3)))],
    ids=repr,
)
def test_a_tree_gets_credit_from_its_valid_leaves(rule):
    """Siblings are compared without the invalid leaf, and the other group's credit has the same
    bits.
    """
    stds, final = torch.full((4,), 0.5), table(2, 6, 1, seed=3)[..., 0]
    tree = rule.probe.tree(4, range(4), 6, False, torch.Generator())

    def credit(final):
        valid = final.isfinite()
        decisions = Decisions.of(uniform_schedule(4), stds, tree, usable(valid))
        values = tree.value_table(tree.values(final)).masked_fill(~valid[..., None], NAN)
        prompts = [Prompt("a"), Prompt("b")]
        return credit_of(rule, Experience(prompts, values, decisions, valid)).advantages

    complete, some = credit(final), final.clone()
    some[0, 1] = NAN
    found = credit(some)
    assert torch.equal(found[1], complete[1]) and not found[0, 1].any()
    assert not torch.equal(found[0, 0, 1], complete[0, 0, 1])  # its siblings are fewer
    left = final[0, [0, 2]]
    expected = (left - left.mean()) / (left.std(unbiased=False) + 1e-4)
    if isinstance(rule, SiblingRelative):
        torch.testing.assert_close(found[0, [0, 2], 1], expected)


def test_a_sample_left_alone_does_not_count():
    valid = torch.tensor([[False, False, True], [True, False, True]])
    assert usable(valid).tolist() == [[False] * 3, [True, False, True]]
    values = table(2, 3, 4, invalid=[(0, 0), (0, 1)])
    assert not credit_of(Uniform(), record(values)).advantages[0].any()
    valid[1, 0] = False
    with pytest.raises(RewardError, match="marked 4 of 6 samples invalid; no prompt has two left"):
        usable(valid)


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
    loud = Unsure(FunctionReward(lambda images, prompts: images.mean((1, 2, 3))))
    images, prompts = torch.rand(4, 3, 2, 2), [Prompt("x")] * 4
    assert score(loud, images, prompts, invalid=True).isnan().tolist() == [True, False, False, True]
    infinite = FunctionReward(lambda i, p: torch.full((4,), math.inf), marks_invalid=True)
    for reward, invalid, bad in (
        (replace(loud, marks_invalid=False), True, 2),
        (loud, False, 2),
        (infinite, True, 4),
    ):
        with pytest.raises(RewardError, match=f"{bad} of 4 values that are not finite"):
            score(reward, images, prompts, invalid=invalid)
    silent = FunctionReward(lambda i, p: i.amax((1, 2, 3)))
    assert marks_invalid(WeightedSum({"a": loud, "b": silent})) and marks_invalid(Clipped(loud))
    assert not marks_invalid(WeightedSum({"b": silent})) and not marks_invalid(Clipped(silent))


def trainer_of(reward, kind=Trainer, method=None, **settings):
    """On the mixture world; `reward` makes the reward from that of the world and the prompts."""
    config = preset("tiny").apply(world="mixture", **settings)
    world = make_world(config)
    prompts = world.prompts(config.environment.task, "train")[: config.rollout.groups]
    policy, method = world.policy(policy_options(config)), method or make_method(config)
    return kind(policy, method, reward(make_reward(config), prompts), prompts, config)


def test_training_leaves_them_out_and_counts_them():
    trainer = trainer_of(lambda reward, prompts: Unsure(reward), groups=2, group_size=6)
    rows = [trainer.iteration() for _ in range(2)]
    assert [row["invalid"] for row in rows] == [4, 4]
    assert rows[0]["train_nfe"] == 8 * int((trial_stds(trainer.config) > 0).sum())
    assert all(math.isfinite(row["reward_mean"]) for row in rows)
    world, part = make_world(trainer.config), trainer.config.environment
    given = trainer.policy, world, part.task, part.reward_form, 4, 2
    found = evaluate(*given, reward=trainer.reward)
    assert found.custom_reward is not None and math.isfinite(found.custom_reward)
    assert found.image_scores.isnan().sum() == 2


def test_groups_with_one_valid_sample_are_not_trained():
    """Every third of 6 samples in groups of 2 is invalid: only the third group is left, with its
    penalty.
    """
    settings = dict(groups=3, group_size=2, kl_weight=0.1)
    trainer = trainer_of(lambda reward, prompts: Unsure(reward), **settings)
    row, drawn = trainer.iteration(), int((trial_stds(trainer.config) > 0).sum())
    assert (row["invalid"], row["train_nfe"]) == (2, 2 * drawn * 2)


def dropping(drop, reward, kl_weight=0.0):
    """One iteration with 2 groups of 4 and one update; the row and the trainer."""
    settings = dict(groups=2, group_size=4, minibatches=1, learning_rate=1e-2)
    settings |= dict(drop_zero_advantages=drop, kl_weight=kl_weight)
    trainer = trainer_of(lambda _, prompts: reward(prompts), **settings)
    return trainer.iteration(), trainer


def equal_for_one(prompts):
    """A reward that gives all images of one prompt the same score."""

    def score(images, asked):
        return images.flatten(1)[:, 0] * torch.tensor([float(p == prompts[0]) for p in asked])

    return FunctionReward(score)


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_samples_without_advantage_leave_the_mean_if_they_are_dropped(kl_weight):
    """Half of the samples have advantage 0: without them the mean and the gradient are twice as
    large. They are evaluated for the penalty only.
    """
    (kept, _), (dropped, _) = (dropping(drop, equal_for_one, kl_weight) for drop in (False, True))
    more = 2 if kl_weight else 1
    assert "dropped" not in kept and dropped["dropped"] == 4
    assert dropped["train_nfe"] * more == kept["train_nfe"]
    assert dropped["abs_advantage"] == kept["abs_advantage"]
    assert dropped["grad_norm"] == pytest.approx(2 * kept["grad_norm"], rel=1e-5)
    assert dropped["policy_loss"] == pytest.approx(more * kept["policy_loss"], abs=1e-7)


def test_a_batch_without_any_advantage_changes_nothing():
    row, trainer = dropping(True, lambda _: FunctionReward(lambda i, p: torch.zeros(len(i))))
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    again = trainer.iteration()
    assert (row["dropped"], row["train_nfe"], row["abs_advantage"]) == (8, 0, 0.0)
    assert "loss" not in row and not trainer.optimizer.state
    assert all(map(torch.equal, before, trainer.parameters))
    assert [notice.kind for notice in notices([row, again], Limits())] == ["no-update"]


def test_invalid_samples_are_not_counted_as_dropped():
    row, _ = dropping(True, lambda prompts: Unsure(equal_for_one(prompts)))
    # of the second group's samples three are valid
    assert (row["invalid"], row["dropped"]) == (3, 3)


def test_one_trained_decision_with_an_advantage_is_enough():
    """`drop_zero` leaves out whole members, never single decisions: the KL of a kept member counts
    everywhere.
    """
    decisions, advantages = Decisions.like(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 4)
    advantages[0, 0, 1], advantages[0, 1, 3] = 0.5, 0.5
    credit = Credit(advantages)
    for mask, kept in (([True] * 4, 2), ([True, True, False, False], 1), ([False] * 4, 0)):
        some = replace(decisions, mask=torch.tensor(mask).expand(1, 3, 4))
        weights = transition_weights(credit, some, drop_zero=True)[0].bool().tolist()
        assert weights == [mask] * kept + [[False] * 4] * (3 - kept)
        assert transition_weights(credit, some).bool().tolist() == [[mask] * 3]


def test_a_rules_weights_multiply_the_others_and_count_within_the_mask_only():
    values, factors = table(2, 4, 4, invalid=[(0, 2)]), table(2, 4, 3, 5)
    factors[0, 2] = NAN
    decisions, advantages = record(values).decisions, torch.ones(2, 4, 3)
    advantages[1, 3] = 0.0
    found = transition_weights(Credit(advantages, factors), decisions, drop_zero=True)
    expected = factors.nan_to_num() * torch.tensor([[1.0, 1, 0, 1], [1, 1, 1, 0]])[..., None]
    assert torch.equal(found, expected) and bool((factors[1, 3] > 0).all())


def test_members_that_share_a_transition_share_its_weight_if_edges_count():
    """n counts the valid members: a tree of two children at the first step and three at the
    second.
    """
    grid, stds = uniform_schedule(3), torch.tensor([0.5, 0.5, 0.0])
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, [0, 3, 4]] = False
    counts = {"leaf": torch.ones(2, 6), "edge": torch.tensor([[3.0] * 6, [2, 2, 2, 1, 1, 1]])}
    for kind, shared in counts.items():
        tree = Branch((2, 3), weight=kind).tree(3, (0, 1), 6, False, torch.Generator())
        decisions = Decisions.of(grid, stds, tree, valid)
        half = torch.full(decisions.mask.shape, 0.5)
        weights = transition_weights(Credit(torch.ones_like(half), half), decisions)
        torch.testing.assert_close(weights[..., 0], 0.5 * valid / shared)
        torch.testing.assert_close(weights[..., 1], 0.5 * valid.float())


class Factors(Uniform):
    """Uniform credit with random factors of the transitions, some of them 0."""

    def credit(self, experience):
        values = experience.values
        shape = (*values.shape[:2], len(experience.decisions))
        factors = torch.rand(shape, generator=torch.Generator().manual_seed(7))
        advantages = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        return Credit(advantages, torch.where(factors > 0.2, factors, 0.0))


@pytest.mark.parametrize("micro_batch", [3, 1000])
@pytest.mark.parametrize("probe", [NoProbe(), Branch((1, 3), weight="edge")], ids=repr)
@pytest.mark.parametrize(
    "loss", [ClippedLoss(kl_weight=0.1), PolicyGradientLoss()], ids=lambda loss: type(loss).__name__
)
def test_the_gradient_is_that_of_one_loss_over_all_rows(micro_batch, probe, loss):
    """With unequal weights, one invalid sample, and any number of rows in a micro-batch."""
    method = Method("weighted", FlowSDE(0.7), FixedWindow(stop=-1), Factors(probe=probe), loss)
    reward = FunctionReward(
        lambda images, prompts: torch.tensor([NAN, *range(1, len(images))]), marks_invalid=True
    )
    settings = dict(groups=2, group_size=6, num_steps=4, minibatches=2, learning_rate=1e-2)
    settings |= dict(kind=Compared, method=method, micro_batch=micro_batch)
    trainer = trainer_of(lambda *_: reward, **settings)
    row = trainer.iteration()
    assert not trainer.left and row["invalid"] == 1 and not trainer.weights[0, 0].any()
    weights = torch.cat([rows.weight for rows in trainer.rows])
    assert torch.equal(weights.sort().values, trainer.weights[trainer.weights > 0].sort().values)
    assert len(weights.unique()) > 10
