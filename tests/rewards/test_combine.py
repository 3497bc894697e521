"""Sums, and rewards that compare the members of a group: closed forms, whole groups everywhere,
evaluations, refusals.
"""

import pytest
import torch
from rollouts import DIRECTIONS, SQUARES, rolled
from seeded import rand
from small_run import TINY_RUN, words

from flowrl.bench.probes import SomeMembers
from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, RewardContractError, RewardError
from flowrl.probes import Branch, Continuation, NoProbe, Substeps
from flowrl.rewards import (
    Clipped,
    FunctionReward,
    GroupSum,
    JPEGCompressibility,
    WeightedSum,
    WinRate,
    win_rates,
)
from flowrl.rollout import Usage, score_rollout
from flowrl.run.build import make_reward, make_world
from flowrl.run.config import preset
from flowrl.run.evaluation import make_heldout_metrics
from flowrl.run.parts.registry import build
from flowrl.run.records import load_run
from flowrl.serving import ServerSettings, create_app

NAN = float("nan")
SIZE = FunctionReward(lambda images, prompts: images.flatten(1).mean(1))
SUM = GroupSum({"win": WinRate(SQUARES), "size": SIZE}, {"size": 0.5})
DIRECTION = "flowrl.worlds.mixture:DirectionReward"
WIN = f"win-rate(reward='{DIRECTION}')"
NOISY = TINY_RUN.replace(reward=WIN, reward_noise=0.1)
HELDOUT = preset("tiny").apply(heldout_rewards=("win-rate(reward='jpeg-compressibility')",))


def test_win_rates_by_hand():
    scores = torch.tensor(
        [[1.0, 3.0, 2.0, 2.0], [-1.0, 0.0, 1.0, 1e9], [1.0, NAN, 2.0, 3.0], [NAN, NAN, NAN, 1.0]]
    )
    wanted = torch.tensor(
        [[0.0, 1.0, 0.5, 0.5], [0.0, 1 / 3, 2 / 3, 1.0], [0.0, NAN, 0.5, 1.0], [NAN, NAN, NAN, NAN]]
    )
    torch.testing.assert_close(win_rates(scores), wanted, equal_nan=True)


def test_a_sum_adds_rewards_of_both_kinds():
    images = rand(3, 4, 3, 4, 4)
    scores = torch.stack([SQUARES.score(group, DIRECTIONS[:1] * 4) for group in images])
    wins, sizes = WinRate(SQUARES).score_groups(images, DIRECTIONS), images.flatten(2).mean(2)
    assert torch.equal(wins, win_rates(scores))
    assert torch.allclose(SUM.score_groups(images, DIRECTIONS), wins + 0.5 * sizes)
    assert SUM.evaluation == WeightedSum({"win": SQUARES, "size": SIZE}, {"size": 0.5})
    with pytest.raises(RewardError, match="groups have one sample; allowed: 2 or more"):
        WinRate(SIZE).score_groups(images[:, :1], DIRECTIONS)
    broken = FunctionReward(lambda images, prompts: images.flatten(1).mean(1).double() * 1e300)
    message = "the reward of win-rate returned 12 of 12 values that are not finite"
    with pytest.raises(RewardContractError, match=message):
        WinRate(broken).score_groups(images, DIRECTIONS)


def sampled(policy, probe, **options):
    return rolled(policy, probe, steps=5, prompts=DIRECTIONS, **options)[0]


def totals(policy, result, *rewards):
    return [score_rollout(policy, reward, result, DIRECTIONS).values for reward in rewards]


def test_members_are_compared_decision_by_decision_and_copy_by_copy(mixture_policy):
    result = sampled(mixture_policy, Substeps(2), shared=True)
    scores, rates = totals(mixture_policy, result, SQUARES, WinRate(SQUARES))
    expected = torch.stack([win_rates(column) for column in scores.unbind(-1)], -1)
    assert torch.equal(rates.nan_to_num(9), expected.nan_to_num(9))
    assert (rates[..., 0] == 0.5).all()  # all members have the same state
    result = sampled(mixture_policy, Continuation(3))
    (rates,) = totals(mixture_policy, result, WinRate(SQUARES))
    ends = [result.estimates[str(number), 2].view(3, 4, -1) for number in range(3)]
    scores = [(latents - 0.3).square().mean(2) for latents in ends]
    expected = torch.stack([win_rates(column) for column in scores]).mean(0)
    assert torch.allclose(rates[..., 2], expected)


@pytest.mark.parametrize(("max_batch", "groups"), [(9, 2), (512, 12)])
def test_batches_are_whole_groups(mixture_policy, max_batch, groups):
    result, usage, counts = sampled(mixture_policy, Substeps(2)), Usage(), []

    class Watched(WinRate):
        def score_groups(self, images, prompts):
            counts.append(len(prompts))
            return super().score_groups(images, prompts)

    watched = Watched(SQUARES)
    scores = score_rollout(mixture_policy, watched, result, DIRECTIONS, usage, max_batch)
    assert torch.equal(scores.values, totals(mixture_policy, result, WinRate(SQUARES))[0])
    assert max(counts) == groups and usage.reward_calls == sum(counts) * 4 == 3 * 4 * 5


def test_leaves_of_a_tree_are_compared_and_states_have_the_mean_win_rate_behind_them(
    mixture_policy,
):
    result = sampled(mixture_policy, Branch((2, 2)), members=8)
    scores, rates = totals(mixture_policy, result, SQUARES, WinRate(SQUARES))
    tree = result.trajectories.tree
    assert torch.allclose(rates, tree.value_table(tree.values(win_rates(scores[..., -1]))))


def test_parts_have_tables_of_their_own_and_broken_scores_are_refused(mixture_policy):
    result = sampled(mixture_policy, Substeps(2))
    scores = score_rollout(mixture_policy, SUM, result, DIRECTIONS)
    wins, sizes = totals(mixture_policy, result, WinRate(SQUARES), SIZE)
    torch.testing.assert_close(scores.parts, {"win": wins, "size": sizes})
    assert torch.allclose(scores.values, wins + 0.5 * sizes)

    class Flat(WinRate):
        def score_groups(self, images, prompts):
            return super().score_groups(images, prompts).flatten()

    problem = r"Flat.score_groups returned shape \(12,\) for 3 groups of 4 .* allowed: \(3, 4\)"
    with pytest.raises(RewardContractError, match=problem):
        totals(mixture_policy, sampled(mixture_policy, NoProbe()), Flat(SQUARES))
    some = sampled(mixture_policy, SomeMembers(Substeps(2), fraction=0.5))
    with pytest.raises(ConfigError, match="a probe that scores all members: "):
        totals(mixture_policy, some, WinRate(SQUARES))


def test_a_run_is_evaluated_by_the_reward_that_is_compared(tmp_path):
    run = str(tmp_path / "run")
    reward = f"group-sum(models={{'win': \"{WIN}\", 'own': '{DIRECTION}'}}, weights={{'own': 2.0}})"
    sizes = words(world="mixture", groups=2, group_size=4, iterations=1, eval_samples=4)
    assert main(["train", *sizes, "--reward", reward, "--out", run, "--trust"]) == 0
    row = load_run(tmp_path / "run").rows[-1]
    assert row["parts"]["win"] == pytest.approx(0.5)
    # the own reward once and twice
    assert row["evaluation"]["reward"] == pytest.approx(3 * row["evaluation"]["soft"], abs=1e-5)


def test_rewards_within_a_reward_take_their_options_and_the_device():
    models = "{size: jpeg-compressibility(quality=50), cut: clipped(reward=clipscore, high=1)}"
    reward = build("reward", f"weighted-sum(models={models})", device="meta")
    cut = Clipped(build("reward", "clipscore(device=meta)"), high=1)
    assert reward == WeightedSum({"size": JPEGCompressibility(50), "cut": cut})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clipped(WinRate(SQUARES), high=1.0), "Clipped.reward = .*a RewardModel"),
        (lambda: Clipped(SQUARES, 1.0, 0.0), "allowed: low below high"),
        (lambda: WeightedSum({"a": WinRate(SQUARES)}), r"models = \['a'\] .*group-sum adds"),
        (lambda: WeightedSum({}), r"WeightedSum.weights = \{\} is not allowed"),
        (lambda: GroupSum({"a": SQUARES}, {"b": 1.0}), "finite numbers for some of the models a"),
        (lambda: GroupSum({"a": SQUARES}, {"a": "x"}), "finite numbers for some of"),
        (
            lambda: make_reward(NOISY),
            r"reward_noise, reward_bias = .* 0 with WinRate",
        ),
        (
            lambda: make_heldout_metrics(HELDOUT, make_world(HELDOUT)),
            r"heldout_rewards = .*as JPEGCompress.*WinRate compares members of a group",
        ),
        (
            lambda: create_app(WinRate(SQUARES), ServerSettings()),
            "reward = 'reward' .*WinRate compares members of a group",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
