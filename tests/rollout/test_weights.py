"""The weights of transitions in the loss: samples that a reward marks invalid, samples without
advantage, shared edges, and a rule's own factors.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.types import Prompt
from flowrl.credit import (
    GDPO,
    BackedUp,
    MovingAverageGain,
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
from flowrl.rewards import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.rewards.contract import marks_invalid
from flowrl.rollout import score, transition_weights, usable
from flowrl.samplers import FixedWindow, FlowSDE
from flowrl.testing import check_reward
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
        MovingAverageGain(decay=0.0),
    ],
    ids=repr,
)
def test_the_others_get_what_a_group_without_it_gets(rule):
    """And groups without an invalid sample get, bit for bit, what they get in a table without
    any.
    """
    values = table(4, 6, 5, invalid=INVALID)
    found = credit_of(rule, record(values))
    for prompt in range(4):
        kept = values[prompt, :, 0].isfinite()
        if not isinstance(rule, MovingAverageGain):  # its baseline is over all groups
            alone = credit_of(rule, record(values[prompt : prompt + 1, kept]))
            torch.testing.assert_close(
                found.advantages[prompt, kept], alone.advantages[0], atol=1e-6, rtol=1e-5
            )
        assert not found.advantages[prompt, ~kept].any() and not found.weights[prompt, ~kept].any()
    if not isinstance(rule, MovingAverageGain):
        whole = credit_of(rule, record(table(4, 6, 5)))
        assert torch.equal(found.advantages[[0, 2]], whole.advantages[[0, 2]])


def reference_loop(values, gains, joint):
    """Z with the means of groups and the std of the batch over valid samples, sample by sample."""
    kept = [
        [m for m in range(values.shape[1]) if bool(values[p, m].isfinite().all())]
        for p in range(len(values))
    ]
    scored = (
        values[..., 1:] - values[..., :-1]
        if gains
        else values[..., -1:].expand(-1, -1, values.shape[2] - 1)
    )
    scored = scored.double()
    columns = [slice(None)] if joint else [slice(k, k + 1) for k in range(scored.shape[2])]
    advantages = torch.zeros_like(scored)
    for column in columns:
        deviations = {}
        for p, members in enumerate(kept):
            mean = torch.stack([scored[p, m, column] for m in members]).mean()
            deviations |= {(p, m): scored[p, m, column] - mean for m in members}
        std = torch.cat(
            [scored[p, m, column] for p, members in enumerate(kept) for m in members]
        ).std(unbiased=False)
        for place, deviation in deviations.items():
            advantages[*place, column] = (deviation / (std + 1e-4)).clamp(-5, 5)
    return advantages


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
    values = table(4, 6, 5, invalid=INVALID)
    found = credit_of(rule, record(values)).advantages
    expected = reference_loop(values, gains, joint)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, credit_of(rule, record(table(4, 6, 5))).advantages, atol=1e-3)


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

    whole, some = credit(final), final.clone()
    some[0, 1] = NAN
    found = credit(some)
    assert torch.equal(found[1], whole[1]) and not found[0, 1].any()
    assert not torch.equal(found[0, 0, 1], whole[0, 0, 1])  # its siblings are fewer
    left = final[0, [0, 2]]
    expected = (left - left.mean()) / (left.std(unbiased=False) + 1e-4)
    if isinstance(rule, SiblingRelative):
        torch.testing.assert_close(found[0, [0, 2], 1], expected)


def test_parts_are_credited_in_the_same_way():
    parts = {"a": table(2, 4, 3, 1, [(0, 1)]), "b": table(2, 4, 3, 2, [(0, 1)])}
    rule, kept = GDPO(batch=False), [0, 2, 3]
    found = credit_of(rule, record(parts["a"], parts))
    fewer = {name: part[:1, kept] for name, part in parts.items()}
    alone = credit_of(rule, record(fewer["a"], fewer))
    torch.testing.assert_close(found.advantages[0, kept], alone.advantages[0], atol=1e-6, rtol=1e-5)
    assert not found.advantages[0, 1].any()


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
    silent = Unsure(
        FunctionReward(lambda images, prompts: images.mean((1, 2, 3))), marks_invalid=False
    )
    images, prompts = torch.rand(4, 3, 2, 2), [Prompt("x")] * 4
    with pytest.raises(RewardError, match="2 of 4 values that are not finite"):
        score(silent, images, prompts, invalid=True)
    loud = replace(silent, marks_invalid=True)
    assert score(loud, images, prompts, invalid=True).isnan().tolist() == [True, False, False, True]
    with pytest.raises(RewardError, match="not finite"):
        score(loud, images, prompts)
    infinite = FunctionReward(
        lambda images, prompts: torch.full((4,), float("inf")), marks_invalid=True
    )
    with pytest.raises(RewardError, match="4 of 4 values that are not finite"):
        score(infinite, images, prompts, invalid=True)


def test_marks_pass_through_combinations():
    dark = FunctionReward(
        lambda i, p: torch.where(i.mean((1, 2, 3)) > 0.5, i.mean((1, 2, 3)), NAN),
        marks_invalid=True,
    )
    plain = FunctionReward(lambda i, p: i.amax((1, 2, 3)))
    for reward in (
        WeightedSum({"a": dark, "b": plain}),
        NoisyReward(dark, 0.1),
        Clipped(dark, high=0.7),
        dark,
    ):
        assert marks_invalid(reward) and check_reward(reward).ok
        images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
        assert reward.score(images, [Prompt("x")] * 2).isnan().tolist() == [True, False]
    assert not marks_invalid(WeightedSum({"b": plain})) and not marks_invalid(
        Clipped(plain, high=0.7)
    )
    assert check_reward(FunctionReward(dark.function)).broken


def test_clipped_limits():
    reward = Clipped(FunctionReward(lambda i, p: torch.tensor([-2.0, 0.3, 2.0])), low=0.0, high=1.0)
    assert reward.score(torch.zeros(3, 3, 1, 1), [Prompt("x")] * 3).tolist() == pytest.approx(
        [0.0, 0.3, 1.0]
    )


def test_training_leaves_them_out_and_counts_them():
    config = preset("tiny").apply(world="mixture", groups=2, group_size=6, iterations=2)
    world = make_world(config)
    policy = world.policy(policy_options(config))
    reward = Unsure(make_reward(config))
    trainer = Trainer(
        policy, make_method(config), reward, world.prompts(config.environment.task, "train"), config
    )
    rows = [trainer.iteration() for _ in range(2)]
    assert [row["invalid"] for row in rows] == [4, 4]
    stochastic = int((trial_stds(config) > 0).sum())
    assert rows[0]["train_nfe"] == 8 * stochastic
    assert all(torch.isfinite(torch.tensor(row["reward_mean"])) for row in rows)
    found = evaluate(
        policy, world, config.environment.task, config.environment.reward_form, 4, 2, reward=reward
    )
    assert found.custom_reward is not None and not math.isnan(found.custom_reward)
    assert found.image_scores.isnan().sum() == 2


def test_groups_with_one_valid_sample_are_not_trained():
    """Every third of 6 samples in groups of 2 is invalid: only the third group is left, with its
    penalty.
    """
    config = preset("tiny").apply(world="mixture", groups=3, group_size=2, kl_weight=0.1)
    world = make_world(config)
    prompts, reward = world.prompts(config.environment.task, "train"), Unsure(make_reward(config))
    row = Trainer(
        world.policy(policy_options(config)), make_method(config), reward, prompts, config
    ).iteration()
    stochastic = int((trial_stds(config) > 0).sum())
    assert (row["invalid"], row["train_nfe"]) == (2, 2 * stochastic * 2)


def test_without_marks_nothing_changes():
    def run(wrapped):
        config = preset("tiny").apply(world="mixture", groups=2, group_size=4)
        world = make_world(config)
        policy = world.policy(policy_options(config))
        reward = make_reward(config)
        reward = FunctionReward(reward.score, marks_invalid=True) if wrapped else reward
        trainer = Trainer(
            policy,
            make_method(config),
            reward,
            world.prompts(config.environment.task, "train"),
            config,
        )
        return [
            {k: v for k, v in trainer.iteration().items() if k not in ("seconds", "phases")}
            for _ in range(2)
        ]

    assert run(False) == run(True)


def dropping(drop, reward, kl_weight=0.0):
    """One iteration on the mixture world with 2 groups of 4 and one update; the row and the
    trainer.
    """
    config = preset("tiny").apply(
        world="mixture",
        groups=2,
        group_size=4,
        minibatches=1,
        kl_weight=kl_weight,
        drop_zero_advantages=drop,
        learning_rate=1e-2,
    )
    world = make_world(config)
    prompts = world.prompts(config.environment.task, "train")[:2]
    trainer = Trainer(
        world.policy(policy_options(config)), make_method(config), reward(prompts), prompts, config
    )
    return trainer.iteration(), trainer


def equal_for_one(prompts):
    """A reward that gives all images of one prompt the same score."""
    return FunctionReward(
        lambda images, asked: (
            images.flatten(1)[:, 0]
            * torch.tensor([float(p.text == prompts[0].text) for p in asked])
        )
    )


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_samples_without_advantage_leave_the_mean_if_they_are_dropped(kl_weight):
    """Half of the samples have advantage 0: without them the mean and the gradient are twice as
    large. They are evaluated for the penalty only.
    """
    (kept, _), (dropped, _) = (dropping(drop, equal_for_one, kl_weight) for drop in (False, True))
    assert "dropped" not in kept and dropped["dropped"] == 4
    more = 2 if kl_weight else 1
    assert (
        dropped["train_nfe"] * more == kept["train_nfe"]
        and dropped["abs_advantage"] == kept["abs_advantage"]
    )
    assert dropped["grad_norm"] == pytest.approx(2 * kept["grad_norm"], rel=1e-5)
    assert dropped["policy_loss"] == pytest.approx(more * kept["policy_loss"], abs=1e-7)


def test_a_batch_without_any_advantage_changes_nothing():
    row, trainer = dropping(
        True, lambda prompts: FunctionReward(lambda images, asked: torch.zeros(len(images)))
    )
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    again = trainer.iteration()
    assert (row["dropped"], row["train_nfe"], row["abs_advantage"]) == (
        8,
        0,
        0.0,
    ) and "loss" not in row
    assert (
        all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
        and not trainer.optimizer.state
    )
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
    assert transition_weights(credit, decisions, drop_zero=True)[0].tolist() == [
        [1.0] * 4,
        [1.0] * 4,
        [0.0] * 4,
    ]
    some = replace(decisions, mask=torch.tensor([True, True, False, False]).expand(1, 3, 4))
    kept = transition_weights(credit, some, drop_zero=True)[0].tolist()
    assert kept == [[1.0, 1.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]
    none = replace(decisions, mask=torch.zeros(1, 3, 4, dtype=torch.bool))
    assert not transition_weights(credit, none, drop_zero=True).any()
    assert transition_weights(credit, decisions).tolist() == [[[1.0] * 4] * 3]


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
    grid, stds, valid = (
        uniform_schedule(3),
        torch.tensor([0.5, 0.5, 0.0]),
        torch.ones(2, 6, dtype=torch.bool),
    )
    valid[1, [0, 3, 4]] = False
    for kind in ("leaf", "edge"):
        tree = Branch((2, 3), weight=kind).tree(3, (0, 1), 6, False, torch.Generator())
        decisions = Decisions.of(grid, stds, tree, valid)
        credit = Credit(torch.ones(decisions.mask.shape), torch.full(decisions.mask.shape, 0.5))
        found = transition_weights(credit, decisions)
        shared = (
            torch.tensor([[3.0] * 6, [2, 2, 2, 1, 1, 1]]) if kind == "edge" else torch.ones(2, 6)
        )
        torch.testing.assert_close(found[..., 0], 0.5 * valid / shared)
        torch.testing.assert_close(found[..., 1], 0.5 * valid.float())


class Factors(Uniform):
    """Uniform credit with random factors of the transitions, some of them 0."""

    def credit(self, experience):
        values = experience.values
        shape = (*values.shape[:2], len(experience.decisions))
        factors = torch.rand(shape, generator=torch.Generator().manual_seed(7))
        advantages = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        return Credit(advantages, torch.where(factors > 0.2, factors, 0.0))


class Compared(Trainer):
    """Before each optimizer step, compares the gradient with that of one loss over all rows of the
    mini-batch.
    """

    compared, weights = 0, ()

    def loss_batches(self, *arguments):
        self.batches, self.rows = super().loss_batches(*arguments)
        self.weights, self.compared = arguments[-1], 0
        return self.batches, self.rows

    def optimizer_step(self, minibatch, check, metrics):
        rows = self.rows[self.compared]
        self.compared += 1
        self.batches.prepare([])
        whole = self.method.loss.loss(self.batches.of(rows.sample, rows.column))
        expected = torch.autograd.grad(whole.loss, self.parameters)
        for parameter, gradient in zip(self.parameters, expected, strict=True):
            scale = max(float(gradient.abs().max()), 1e-6)
            torch.testing.assert_close(
                parameter.grad / scale, gradient / scale, atol=2e-5, rtol=1e-4
            )
        assert sum(micro.weight for micro in minibatch) == pytest.approx(1.0)
        super().optimizer_step(minibatch, check, metrics)


@pytest.mark.parametrize("micro_batch", [1, 3, 1000])
@pytest.mark.parametrize("probe", [NoProbe(), Branch((1, 3), weight="edge")], ids=repr)
@pytest.mark.parametrize(
    "loss", [ClippedLoss(kl_weight=0.1), PolicyGradientLoss()], ids=lambda one: type(one).__name__
)
def test_the_gradient_is_that_of_one_loss_over_all_rows(micro_batch, probe, loss):
    """With unequal weights, one invalid sample, and any number of rows in a micro-batch."""
    config = preset("tiny").apply(
        world="mixture",
        groups=2,
        group_size=6,
        num_steps=4,
        minibatches=2,
        learning_rate=1e-2,
        micro_batch=micro_batch,
    )
    world = make_world(config)
    method = Method("weighted", FlowSDE(0.7), FixedWindow(stop=-1), Factors(probe=probe), loss)
    reward = FunctionReward(
        lambda images, prompts: torch.tensor([NAN, *range(1, len(images))]), marks_invalid=True
    )
    prompts = world.prompts(config.environment.task, "train")
    trainer = Compared(world.policy(policy_options(config)), method, reward, prompts, config)
    row = trainer.iteration()
    assert trainer.compared == 2 and row["invalid"] == 1 and not trainer.weights[0, 0].any()
    weights = torch.cat([rows.weight for rows in trainer.rows])
    assert torch.equal(weights.sort().values, trainer.weights[trainer.weights > 0].sort().values)
    assert len(weights.unique()) > 10
