"""The trainer: it learns, repeats its numbers, counts its work, and errors name their cause."""

from dataclasses import replace

import pytest
import torch
from rollouts import tree_weights
from small_run import TINY_RUN, trained, trainer_of, weights
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.types import Prompt
from flowrl.credit import GDPO, SiblingRelative, Uniform, Weighted, credit_of
from flowrl.flow.mixture import GaussianMixture
from flowrl.losses import GSPO
from flowrl.policies.mixture import MixturePolicy
from flowrl.probes import Branch, NoProbe
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.rollout import minibatch_rows
from flowrl.rollout.batches import Rows
from flowrl.rollout.groups import PromptStream
from flowrl.run.build import check, make_method, named_method, steps_of, trial_stds
from flowrl.run.config import RunConfig, preset
from flowrl.run.evaluation import evaluate
from flowrl.run.job import Run
from flowrl.run.parts.registry import build
from flowrl.run.worlds import world
from flowrl.samplers import RandomWindow
from flowrl.trainer import asks_for_all

TINY = TINY_RUN.replace(iterations=4, minibatches=2)


VALUE = "latent_reward='closed_form:ExactValue', times=steps(count=9, steps=9)"
LEARN = {
    "flow-grpo": {},
    "tp-grpo": dict(method="tp-grpo"),
    "ascent": dict(loss=f"ascent({VALUE})", window=":-1", noise_level=0.7),
    "direct": dict(loss="ascent", sampler="ode"),
}


@pytest.mark.satellite
@pytest.mark.parametrize("case", LEARN)
def test_methods_learn_the_two_dimensional_world(case):
    config = preset("default").apply(world="mixture", iterations=20, **LEARN[case])
    trainer = trainer_of(config)
    trained(trainer, 20)
    with trainer.averaged():
        result = evaluate(trainer.policy, world("mixture"), "direction", "soft", 240, 20)
    start = GaussianMixture.ring().expected_bump(torch.tensor([2.0, 0.0]), 1.0)
    assert result.scores["soft"] > start + 0.15


def test_kl_to_the_reference_grows():
    """The steps with noise have shares of the update."""
    rows, _ = trained(trainer_of(TINY.replace(kl_weight=0.1, learning_rate=1e-2)), 4)
    assert rows[0]["kl"] < rows[-1]["kl"]
    assert [share > 0 for share in rows[0]["step_shares"]] == (trial_stds(TINY) > 0).tolist()


def test_equal_rewards_change_nothing():
    equal = FunctionReward(lambda images, prompts: torch.ones(len(images)))
    trainer = trainer_of(TINY.replace(weight_decay=0.0), reward=equal)
    before = weights(trainer)
    (row,), after = trained(trainer, 1)
    assert row["zero_spread_groups"] == 1.0 and row["grad_norm"] == 0.0
    assert torch.equal(before, after)


def test_components_are_logged_and_credited_separately():
    """Under GDPO, unlike under credit of the sum, a component of a thousand times the scale counts
    as much as the other.
    """

    def along(direction):
        return FunctionReward(lambda images, prompts: images.flatten(1)[:, direction])

    reward = WeightedSum({"small": along(0), "large": along(1)}, {"large": 1000.0})
    trainer = trainer_of(TINY, named_method("gdpo", credit="gdpo"), reward)
    trainer.recorded = ("parts",)
    row = trainer.iteration()
    parts = row["parts"]
    assert row["reward_mean"] == pytest.approx(parts["small"] + 1000 * parts["large"], rel=1e-4)
    assert row["reward_calls"] == 2 * 3  # a composite reward is evaluated once
    record = row.experience
    assert set(record.parts) == set(parts) == {"small", "large"}
    small = replace(record, parts={"small": record.parts["small"]})
    expected = Uniform().assign(record.parts["small"], record.decisions)
    assert_close(credit_of(GDPO(batch=False), small).advantages, expected)
    assert trainer_of(TINY, reward=reward).iteration()["parts"].keys() == parts.keys()


@pytest.mark.parametrize(
    ("steps", "every"),
    [("1:3", False), (":-1", False), ("random(fraction=0.5)", True)],
)
def test_all_values_are_estimated_if_the_trained_steps_are_no_slice(steps, every):
    """Whatever the name of what draws the steps, they are known after the rollout only."""
    assert asks_for_all(steps_of(steps), named_method("tp-grpo", "")) == every


def test_a_random_window_is_drawn_once_per_iteration():
    trainer = trainer_of(TINY.replace(window="random(size=2)"))
    assert trainer.method.window == RandomWindow(2)
    steps = {tuple(trainer.draw_sampler().steps) for _ in range(40)}  # pyright: ignore[reportAttributeAccessIssue]
    assert steps == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": "8:17"}, "within the schedule's 10 steps"),
        ({"heldout_rewards": ("clarityy",)}, "unknown reward 'clarityy'"),
        ({"diversity": "pixel"}, "unknown feature space 'pixel'.*did you mean 'pixels'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(RunConfig.of(**changes))


def test_prompts_come_in_shuffled_passes():
    stream = PromptStream([Prompt(str(i)) for i in range(5)], seed=0)
    taken = [p.text for p in stream.take(7)] + [p.text for p in stream.take(3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == list("01234")
    with pytest.raises(ConfigError, match="empty"):
        PromptStream([], seed=0)


def test_prompts_are_drawn_by_their_weights():
    """As often as their share of a pass rounded down or up, and so on average; equal weights draw
    as none do.
    """
    weights = [0.5, 1, 3, 2.2]
    stream = PromptStream([Prompt(str(i), weight=w) for i, w in enumerate(weights)], seed=0)
    counts = torch.zeros(4)
    for _ in range(2000):
        drawn = torch.tensor([int(p.text) for p in stream.take(4)]).bincount(minlength=4)
        share = 4 * torch.tensor(weights) / sum(weights)
        assert ((share.floor() <= drawn) & (drawn <= share.ceil())).all()
        counts += drawn
    assert torch.allclose(counts / 2000, share, atol=0.05)
    saved = stream.generator.get_state(), stream.order
    ahead = [p.text for p in stream.take(9)]
    stream.generator.set_state(saved[0])
    stream.order = saved[1]
    assert [p.text for p in stream.take(9)] == ahead
    equal, none = (PromptStream([Prompt(t, weight=w) for t in "abc"], 1) for w in (7, 1))
    assert [p.text for p in equal.take(8)] == [p.text for p in none.take(8)]


def test_upcoming_prompts_are_those_that_come():
    stream = PromptStream([Prompt(str(i % 9)) for i in range(12)], seed=3)
    stream.take(9)
    ahead, coming = ([p.text for p in make(9)] for make in (stream.upcoming, stream.take))
    assert ahead == list(dict.fromkeys(coming))


def test_no_network_call_of_a_run_is_larger_than_allowed(tmp_path, monkeypatch):
    """Evaluations and the trajectory at the end included."""
    sizes, velocity = [], MixturePolicy.velocity

    def counted(policy, latent, *more):
        sizes.append(len(latent))
        return velocity(policy, latent, *more)

    monkeypatch.setattr(MixturePolicy, "velocity", counted)
    assert Run(TINY.replace(max_batch=5, micro_batch=4, iterations=1), tmp_path).execute()
    assert max(sizes) == 5


# --- rows of advantage 0

WIDE = TINY.replace(
    groups=4, group_size=4, num_steps=6, window=":-1", micro_batch=7, learning_rate=1e-3
)


class HalfOfTheGroups:
    """Advantages of uniform credit in every second group and at every second decision; 0
    elsewhere.
    """

    probe = NoProbe()

    def __init__(self, scale=1.0):
        self.scale = scale

    def assign(self, values, decisions):
        advantages = self.scale * Uniform().assign(values, decisions)
        advantages[::2] = 0
        advantages[..., 1::2] = 0
        return advantages


HALF, TREE = HalfOfTheGroups(), SiblingRelative(probe=Branch((2, 2)))
PENALTY = build("loss", "kl-penalty")


@pytest.mark.parametrize(
    ("loss", "credit", "changes", "zeros"),
    [
        (None, HALF, {}, 56),
        (None, TREE, {}, None),
        (build("loss", "grpo-guard"), HALF, {}, 56),
        # other steps of a trajectory depend on all of it
        (GSPO(clip_range=0.003, by_step=True), HALF, {}, 40),
        (None, HalfOfTheGroups(0.0), {"weight_decay": 0.1}, 78),  # a row per update remains
        (None, HALF, {"kl_weight": 0.1}, 0),
        (PENALTY, HALF, {"learning_rate": 0.05}, 0),  # its trust region acts at advantage 0
    ],
)
def test_rows_of_advantage_0_are_evaluated_only_if_they_have_a_gradient(
    loss, credit, changes, zeros, monkeypatch
):
    """The gradient is the same up to the order of its sums, and its mean is over all rows."""
    config = WIDE.replace(**changes)
    method = make_method(config)
    method = replace(method, credit=credit, loss=loss or method.loss)
    few, result = trained(trainer_of(config, method))
    monkeypatch.setattr(Rows, "without_zeros", lambda rows, advantages: rows)
    every, expected = trained(trainer_of(config, method))
    assert_close(result, expected, atol=1e-6, rtol=1e-4)
    for row, other in zip(few, every, strict=True):
        assert row["zero_rows"] == zeros if zeros is not None else row["zero_rows"] > 0
        assert other["zero_rows"] == 0
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["step_shares"] == pytest.approx(other["step_shares"], abs=1e-5)
        if credit is HALF:
            assert other["train_nfe"] - row["train_nfe"] == zeros
    assert few[0]["ratio_mean"] == pytest.approx(1.0, abs=0.01)
    assert loss is not PENALTY or few[-1]["approx_kl"] > 0


# --- losses of whole trajectories


def test_a_loss_of_one_advantage_refuses_credit_by_step():
    """When it is built, and in an iteration."""
    config = WIDE.replace(loss="gspo", clip_range=0.003)
    message = "GSPO needs one advantage per trajectory, but the advantages of {} differ between"
    with pytest.raises(CreditError, match=message.format("TurningPoint")):
        make_method(config.replace(method="tp-grpo"))
    make_method(config.replace(method="tp-grpo", trained_steps="random(fraction=0.2)"))  # one step
    for credit in (Weighted("noise"), HALF):
        method = replace(make_method(config), credit=credit)
        with pytest.raises(CreditError, match=message.format(type(credit).__name__)):
            trainer_of(config, method).iteration()


@pytest.mark.parametrize("unit", ["trajectory", "group"])
@pytest.mark.parametrize("weight", ["leaf", "edge"])
def test_units_of_trees_stay_together(unit, weight):
    tree = Branch((2, 1, 2), weight=weight).tree(6, [0, 1, 2, 3, 4], 4, False, torch.Generator())
    stds = torch.tensor([0.5] * 5 + [0.0])
    weights = tree_weights(tree, stds, torch.ones(2, 4, dtype=torch.bool)).flatten(0, 1)
    parts = minibatch_rows(torch.arange(8).chunk(2), weights, tree, unit)
    keys = [p.sample if unit == "trajectory" else p.sample // 4 * 10 + p.column for p in parts]
    assert not torch.isin(*keys).any()
    for part, key in zip(parts, keys, strict=True):
        assert len(key.unique()) == len(key.unique_consecutive())
        assert all(len(piece) <= 6 for piece in part.pieces(6))
    assert sum(map(len, parts)) == 8 * 5
