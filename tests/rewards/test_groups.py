"""Rewards that compare the members of a group: closed forms, whole groups everywhere, evaluations, and what is refused."""

import json
from dataclasses import dataclass

import pytest
import torch
from all_but_last import AllButLast
from hypothesis import given
from hypothesis import strategies as st

from flowrl.cli import main
from flowrl.errors import ConfigError, RewardContractError, RewardError
from flowrl.probes import Branch, Completion, Continuation, NoProbe, Substeps
from flowrl.protocols import GroupReward, RewardModel
from flowrl.registry import build
from flowrl.rewards import (
    Clipped,
    FunctionReward,
    GroupSum,
    WeightedSum,
    WinRate,
    component_methods,
    evaluation_reward,
    require_single,
    win_rates,
)
from flowrl.rollout import Groups, Usage, rollout, score_rollout
from flowrl.samplers import FlowSDE
from flowrl.serving import ServerSettings, create_app
from flowrl.training.build import make_reward, make_trainer, make_world
from flowrl.training.config import preset
from flowrl.training.evaluation import evaluate
from flowrl.training.heldout import make_heldout_metrics
from flowrl.training.monitors import limits_of, notices
from flowrl.types import Prompt
from flowrl.worlds.base import ModelWorld

NAN = float("nan")
PROMPTS = [Prompt(f"towards {angle} degrees", {"angle": float(angle)}) for angle in (0, 90, 180)]
BASE = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))
SIZE = FunctionReward(lambda images, prompts: images.flatten(1).mean(1))
DIRECTION = "flowrl.worlds.mixture:DirectionReward"
MIXTURE = preset("tiny").apply(world="mixture", task="direction", groups=3, group_size=4, minibatches=1, iterations=2)


# --- win rates ------------------------------------------------------------------------------------------------------


def test_win_rates_by_hand():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, 0.0, 1.0, 1e9]])
    wanted = torch.tensor([[0.0, 1.0, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.0, 1 / 3, 2 / 3, 1.0]])
    assert torch.allclose(win_rates(scores), wanted)


def test_invalid_members_are_not_compared():
    scores = torch.tensor([[1.0, NAN, 2.0, 3.0], [NAN, NAN, 1.0, 1.0], [NAN, NAN, NAN, 1.0]])
    wanted = torch.tensor([[0.0, NAN, 0.5, 1.0], [NAN, NAN, 0.5, 0.5], [NAN, NAN, NAN, NAN]])
    torch.testing.assert_close(win_rates(scores), wanted, equal_nan=True)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9))
def test_win_rates_are_ranks(values):
    scores = torch.tensor([values], dtype=torch.float32)
    rates = win_rates(scores)
    assert float(rates.mean()) == pytest.approx(0.5)
    assert torch.equal(rates, win_rates(scores.exp())) and torch.allclose(rates, 1 - win_rates(-scores))
    if len(set(values)) == len(values):
        count = len(values)
        assert float(rates.var(unbiased=False)) == pytest.approx((count + 1) / (12 * (count - 1)))


def test_a_win_rate_is_that_of_its_reward():
    images = torch.rand(3, 5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([SIZE.score(group, [PROMPTS[0]] * 5) for group in images])
    assert torch.equal(WinRate(SIZE).score_groups(images, PROMPTS), win_rates(scores))
    assert WinRate(SIZE).evaluation is SIZE
    with pytest.raises(RewardError, match="groups have one sample; allowed: 2 or more"):
        WinRate(SIZE).score_groups(images[:, :1], PROMPTS)
    with pytest.raises(RewardContractError, match="the reward of win-rate returned 15 of 15 values that are not finite"):
        WinRate(FunctionReward(lambda images, prompts: images.flatten(1).mean(1) / 0)).score_groups(images, PROMPTS)


def test_a_sum_adds_rewards_of_both_kinds():
    images = torch.rand(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = GroupSum({"win": WinRate(BASE), "size": SIZE}, {"size": 0.5})
    wins, sizes = WinRate(BASE).score_groups(images, PROMPTS[:2]), images.flatten(2).mean(2)
    assert torch.allclose(found.score_groups(images, PROMPTS[:2]), wins + 0.5 * sizes)
    parts = found.group_parts(images, PROMPTS[:2])
    assert torch.equal(parts["win"], wins) and torch.allclose(parts["size"], sizes)
    assert found.evaluation == WeightedSum({"win": BASE, "size": SIZE}, {"size": 0.5})
    assert component_methods(found) == (found.group_parts, found.total) and component_methods(WinRate(BASE)) is None
    assert isinstance(found, GroupReward) and not isinstance(found, RewardModel)


# --- the reward table -----------------------------------------------------------------------------------------------


def sampled(policy, probe, members=4, shared=False):
    groups, generator = Groups(3, members, shared), torch.Generator().manual_seed(0)
    noise = groups.noise(policy.latent_shape, generator)
    condition, sampler = policy.encode(PROMPTS), AllButLast(FlowSDE(0.7))
    return rollout(policy, sampler, policy.schedule(5), condition, noise, generator, groups, probe)


@dataclass(frozen=True)
class Watched:
    """Keeps the shapes of what it is given."""

    seen: list

    evaluation = BASE

    def score_groups(self, images, prompts):
        self.seen.append((tuple(images.shape[:2]), [prompt.text for prompt in prompts]))
        return WinRate(BASE).score_groups(images, prompts)


@pytest.mark.parametrize("probe", [NoProbe(), Completion(), Substeps(2)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_members_are_compared_decision_by_decision(mixture_policy, probe, shared):
    result = sampled(mixture_policy, probe, shared=shared)
    scores, rates = (score_rollout(mixture_policy, reward, result, PROMPTS).total for reward in (BASE, WinRate(BASE)))
    filled = [*probe.fills(4), 4]
    assert scores.shape == (3, 4, 5)
    for column in range(5):
        if column in filled:
            assert torch.equal(rates[..., column], win_rates(scores[..., column]))
        else:
            assert bool(rates[..., column].isnan().all())
    if shared and not isinstance(probe, NoProbe):
        assert bool((rates[..., 0] == 0.5).all())  # all members have the same state


def test_copies_are_compared_with_those_of_the_same_number(mixture_policy):
    result = sampled(mixture_policy, Continuation(3))
    found = score_rollout(mixture_policy, WinRate(BASE), result, PROMPTS).total
    estimate = result.estimates[2].latents.view(3, 4, 3, -1)
    scores = (estimate - 0.3).square().mean(3)
    wanted = torch.stack([win_rates(scores[..., copy]) for copy in range(3)]).mean(0)
    assert torch.allclose(found[..., 2], wanted)


def test_leaves_of_a_tree_are_compared_and_states_have_the_mean_win_rate_behind_them(mixture_policy):
    result = sampled(mixture_policy, Branch((2, 2)), members=8)
    scores, rates = (score_rollout(mixture_policy, reward, result, PROMPTS).total for reward in (BASE, WinRate(BASE)))
    assert torch.equal(rates[..., -1], win_rates(scores[..., -1]))
    tree = result.trajectories.tree
    assert torch.allclose(rates, tree.value_table(tree.values(win_rates(scores[..., -1]))))


@pytest.mark.parametrize("max_batch", [1, 4, 9, 512])
def test_batches_are_whole_groups(mixture_policy, max_batch):
    result, usage, seen = sampled(mixture_policy, Substeps(2)), Usage(), []
    found = score_rollout(mixture_policy, Watched(seen), result, PROMPTS, usage, max_batch)
    assert torch.equal(found.total, score_rollout(mixture_policy, WinRate(BASE), result, PROMPTS).total)
    assert {shape[1] for shape, _ in seen} == {4}
    assert max(shape[0] for shape, _ in seen) == {1: 1, 4: 1, 9: 2, 512: 12}[max_batch]
    assert seen[0][1] == [prompt.text for prompt in PROMPTS][: seen[0][0][0]]
    assert usage.reward_calls == sum(rows * members for (rows, members), _ in seen) == 3 * 4 * 5


def test_parts_have_tables_of_their_own(mixture_policy):
    result = sampled(mixture_policy, Substeps(2))
    found = score_rollout(mixture_policy, GroupSum({"win": WinRate(BASE), "size": SIZE}, {"size": 0.5}), result, PROMPTS)
    wins, sizes = (score_rollout(mixture_policy, reward, result, PROMPTS).total for reward in (WinRate(BASE), SIZE))
    assert torch.equal(found.parts["win"], wins) and torch.allclose(found.parts["size"], sizes)
    assert torch.allclose(found.total, wins + 0.5 * sizes)


def test_broken_scores_and_probes_that_leave_out_members_are_refused(mixture_policy):
    class Flat(Watched):
        def score_groups(self, images, prompts):
            return images.flatten(2).mean(2).flatten()

    result = sampled(mixture_policy, NoProbe())
    message = r"Flat.score_groups returned shape \(12,\) for 3 groups of 4 images; allowed: \[prompt, member\] = \(3, 4\)"
    with pytest.raises(RewardContractError, match=message):
        score_rollout(mixture_policy, Flat([]), result, PROMPTS)
    some = sampled(mixture_policy, Substeps(2, fraction=0.5))
    with pytest.raises(ConfigError, match="a probe that scores all members of a group: WinRate compares them"):
        score_rollout(mixture_policy, WinRate(BASE), some, PROMPTS)


# --- runs -----------------------------------------------------------------------------------------------------------


def iterations(**changes):
    trainer = make_trainer(MIXTURE.replace(reward=f"win-rate(reward='{DIRECTION}')", **changes))
    rows = [trainer.iteration() for _ in range(2)]
    return trainer, [{k: v for k, v in row.items() if k not in ("seconds", "phases", "calls")} for row in rows]


@pytest.mark.parametrize("credit", ["uniform", "stepwise-gain"])
def test_chunks_and_threads_change_no_number(credit):
    (one, whole), (other, parts) = iterations(credit=credit), iterations(credit=credit, chunk=2, overlap_rewards=True)
    for first, second in zip(whole, parts, strict=True):
        assert first == {name: pytest.approx(value, abs=1e-9) for name, value in second.items()}
    assert all(torch.allclose(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))
    assert [row["reward_mean"] for row in whole] == [pytest.approx(0.5)] * 2


def test_training_on_win_rates_is_training_on_ranks():
    trainer, _ = iterations()
    seen = []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda *given: seen.append(collect(*given)) or seen[-1]
    trainer.iteration()
    assert set((seen[0].values.total[..., -1] * 3).round().int().unique().tolist()) == {0, 1, 2, 3}


def test_evaluations_measure_the_reward_that_is_compared():
    trainer, _ = iterations()
    world, reward = make_world(MIXTURE), trainer.reward
    assert isinstance(reward, GroupReward)
    found = evaluate(trainer.policy, world, "direction", "soft", 8, 3, reward=evaluation_reward(reward))
    assert found.custom_reward == pytest.approx(found.scores["soft"]) and found.custom_reward != 0.5


def test_a_run_evaluates_and_warns_of_no_collapse(tmp_path, capsys):
    reward = f"group-sum(models={{'win': \"win-rate(reward='{DIRECTION}')\", 'own': '{DIRECTION}'}}, weights={{'own': 2.0}})"
    options = ["--world", "mixture", "--groups", "2", "--group-size", "4", "--iterations", "1", "--eval-samples", "4"]
    assert main(["train", *options, "--reward", reward, "--out", str(tmp_path / "run"), "--trust"]) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["parts"]["win"] == pytest.approx(0.5)
    assert row["evaluation"]["reward"] == pytest.approx(3 * row["evaluation"]["soft"], abs=1e-5)  # the own reward once and twice
    assert json.loads((tmp_path / "run" / "trajectory.json").read_text())["rewards"]
    capsys.readouterr()
    assert main(["evaluate", "--weights", str(tmp_path / "run"), "--limit", "2", "--trust"]) == 0
    assert "evaluation of group-sum" in capsys.readouterr().out


def test_a_training_reward_whose_mean_cannot_rise_is_no_collapse():
    trainer, _ = iterations()
    limits = limits_of(trainer)
    rows = [{"iteration": i, "reward_mean": 0.5, "reward_std": 0.1, "evaluation": {"reward": 9.0 - 4 * i}} for i in range(3)]
    assert limits.compared and "collapse" not in {notice.kind for notice in notices(rows, limits)}


def test_the_world_of_a_model_evaluates_by_single_samples(tmp_path):
    (tmp_path / "prompts.txt").write_text("a fox\n")
    options = type("Options", (), {"device": "cpu"})()
    world = ModelWorld("model", str(tmp_path / "prompts.txt"), "", "win-rate(reward='jpeg-compressibility')", options)
    assert type(world.reward("reward")).__name__ == "JPEGCompressibility"


# --- what is refused ------------------------------------------------------------------------------------------------


def test_wrappers_of_single_samples_refuse_it():
    with pytest.raises(ConfigError, match=r"Clipped.reward = .* is not allowed; allowed: a RewardModel"):
        Clipped(WinRate(BASE), high=1.0)
    with pytest.raises(ConfigError, match=r"WinRate.reward = .* is not allowed; allowed: a RewardModel"):
        WinRate(WinRate(BASE))
    with pytest.raises(ConfigError, match=r"WeightedSum.models = \['a'\] is not allowed; allowed: .*group-sum adds them"):
        build("reward", "weighted-sum(models={'a': \"win-rate(reward='jpeg-compressibility')\"})")
    with pytest.raises(ConfigError, match=r"GroupSum.weights = \['b'\]"):
        GroupSum({"a": BASE}, {"b": 1.0})


def test_noise_held_out_rewards_and_servers_are_for_single_samples(capsys):
    win = f"win-rate(reward='{DIRECTION}')"
    with pytest.raises(ConfigError, match=r"reward_noise, reward_bias = \(0.1, 0.0\) are not allowed; allowed: 0 with WinRate"):
        make_reward(MIXTURE.replace(reward=win, reward_noise=0.1))
    with pytest.raises(
        ConfigError, match="WinRate compares members of a group; allowed: a reward of single samples, such as the"
    ):
        require_single(WinRate(BASE), "reward", "win-rate")
    shapes = preset("tiny").apply(heldout_rewards=("win-rate(reward='jpeg-compressibility')",))
    with pytest.raises(ConfigError, match=r"heldout_rewards = .*WinRate compares members of a group.*JPEGCompressibility"):
        make_heldout_metrics(shapes, make_world(shapes))
    with pytest.raises(ConfigError, match="reward = 'reward' is not allowed: WinRate"):
        create_app(WinRate(BASE), ServerSettings())
    assert main(["serve-reward", "win-rate(reward='jpeg-compressibility')", "--port", "0"]) == 2
    assert "WinRate compares members of a group" in capsys.readouterr().err
