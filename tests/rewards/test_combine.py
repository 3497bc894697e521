"""Sums, and rewards that compare the members of a group: closed forms, whole groups everywhere,
evaluations, refusals.
"""

import json
from dataclasses import dataclass

import pytest
import torch
from all_but_last import AllButLast
from hypothesis import given
from hypothesis import strategies as st
from tiny_rewards import tiny_clip

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, RewardContractError, RewardError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.probes import Branch, Completion, Continuation, NoProbe, Substeps
from flowrl.rewards import (
    Clipped,
    CLIPScore,
    FunctionReward,
    GroupSum,
    JPEGCompressibility,
    WeightedSum,
    WinRate,
    win_rates,
)
from flowrl.rollout import Groups, Usage, rollout, score_rollout
from flowrl.samplers import FlowSDE
from flowrl.serving import ServerSettings, create_app
from flowrl.testing.tiny import tiny_sd3
from flowrl.training.build import make_reward, make_trainer, make_world
from flowrl.training.config import preset
from flowrl.training.evaluation import make_heldout_metrics
from flowrl.training.monitors import limits_of, notices
from flowrl.training.results import load_run

NAN = float("nan")
PROMPTS = [Prompt(f"towards {angle} degrees", {"angle": float(angle)}) for angle in (0, 90, 180)]
BASE = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))
SIZE = FunctionReward(lambda images, prompts: images.flatten(1).mean(1))
SUM = GroupSum({"win": WinRate(BASE), "size": SIZE}, {"size": 0.5})
DIRECTION = "flowrl.worlds.mixture:DirectionReward"
WIN = f"win-rate(reward='{DIRECTION}')"
MIXTURE = preset("tiny").apply(
    world="mixture", task="direction", groups=3, group_size=4, minibatches=1, iterations=2
)


def test_win_rates_by_hand():
    scores = torch.tensor(
        [[1.0, 3.0, 2.0, 2.0], [-1.0, 0.0, 1.0, 1e9], [1.0, NAN, 2.0, 3.0], [NAN, NAN, NAN, 1.0]]
    )
    wanted = torch.tensor(
        [[0.0, 1.0, 0.5, 0.5], [0.0, 1 / 3, 2 / 3, 1.0], [0.0, NAN, 0.5, 1.0], [NAN, NAN, NAN, NAN]]
    )
    torch.testing.assert_close(win_rates(scores), wanted, equal_nan=True)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9))
def test_win_rates_are_ranks(values):
    scores, count = torch.tensor([values], dtype=torch.float32), len(values)
    rates = win_rates(scores)
    assert float(rates.mean()) == pytest.approx(0.5)
    assert torch.equal(rates, win_rates(scores.exp())) and torch.allclose(
        rates, 1 - win_rates(-scores)
    )
    if len(set(values)) == count:
        assert float(rates.var(unbiased=False)) == pytest.approx((count + 1) / (12 * (count - 1)))


def test_a_sum_adds_rewards_of_both_kinds():
    images = torch.rand(3, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([BASE.score(group, PROMPTS[:1] * 4) for group in images])
    wins, sizes = WinRate(BASE).score_groups(images, PROMPTS), images.flatten(2).mean(2)
    assert torch.equal(wins, win_rates(scores))
    assert torch.allclose(SUM.score_groups(images, PROMPTS), wins + 0.5 * sizes)
    assert SUM.evaluation == WeightedSum({"win": BASE, "size": SIZE}, {"size": 0.5})
    with pytest.raises(RewardError, match="groups have one sample; allowed: 2 or more"):
        WinRate(SIZE).score_groups(images[:, :1], PROMPTS)
    with pytest.raises(
        RewardContractError,
        match="the reward of win-rate returned 12 of 12 values that are not finite",
    ):
        WinRate(FunctionReward(lambda images, prompts: images.flatten(1).mean(1) / 0)).score_groups(
            images, PROMPTS
        )


def sampled(policy, probe, members=4, shared=False):
    groups, generator = Groups(3, members, shared), torch.Generator().manual_seed(0)
    noise = groups.noise(policy.latent_shape, generator)
    condition, sampler = policy.encode(PROMPTS), AllButLast(FlowSDE(0.7))
    return rollout(policy, sampler, policy.schedule(5), condition, noise, generator, groups, probe)


@pytest.mark.parametrize("probe", [NoProbe(), Completion(), Substeps(2)], ids=str)
def test_members_are_compared_decision_by_decision(mixture_policy, probe):
    result = sampled(mixture_policy, probe, shared=True)
    scores, rates = (
        score_rollout(mixture_policy, reward, result, PROMPTS).total
        for reward in (BASE, WinRate(BASE))
    )
    for column in range(5):
        if column in [*probe.fills(4), 4]:
            assert torch.equal(rates[..., column], win_rates(scores[..., column]))
        else:
            assert bool(rates[..., column].isnan().all())
    if not isinstance(probe, NoProbe):
        assert bool((rates[..., 0] == 0.5).all())  # all members have the same state


def test_copies_are_compared_with_those_of_the_same_number(mixture_policy):
    result = sampled(mixture_policy, Continuation(3))
    rates = score_rollout(mixture_policy, WinRate(BASE), result, PROMPTS).total
    scores = (result.estimates[2].latents.view(3, 4, 3, -1) - 0.3).square().mean(3)
    wanted = torch.stack([win_rates(scores[..., copy]) for copy in range(3)]).mean(0)
    assert torch.allclose(rates[..., 2], wanted)


def test_leaves_of_a_tree_are_compared_and_states_have_the_mean_win_rate_behind_them(
    mixture_policy,
):
    result = sampled(mixture_policy, Branch((2, 2)), members=8)
    scores, rates = (
        score_rollout(mixture_policy, reward, result, PROMPTS).total
        for reward in (BASE, WinRate(BASE))
    )
    tree = result.trajectories.tree
    assert torch.allclose(rates, tree.value_table(tree.values(win_rates(scores[..., -1]))))


@dataclass(frozen=True)
class Watched:
    """Keeps the shapes of what it gets."""

    seen: list
    evaluation = BASE

    def score_groups(self, images, prompts):
        self.seen.append((tuple(images.shape[:2]), [prompt.text for prompt in prompts]))
        return WinRate(BASE).score_groups(images, prompts)


@pytest.mark.parametrize(("max_batch", "groups"), [(1, 1), (9, 2), (512, 12)])
def test_batches_are_whole_groups(mixture_policy, max_batch, groups):
    result, usage, seen = sampled(mixture_policy, Substeps(2)), Usage(), []
    scores = score_rollout(mixture_policy, Watched(seen), result, PROMPTS, usage, max_batch)
    assert torch.equal(
        scores.total, score_rollout(mixture_policy, WinRate(BASE), result, PROMPTS).total
    )
    assert {shape[1] for shape, _ in seen} == {4} and max(shape[0] for shape, _ in seen) == groups
    assert seen[0][1] == [prompt.text for prompt in PROMPTS][: seen[0][0][0]]
    assert usage.reward_calls == sum(rows * members for (rows, members), _ in seen) == 3 * 4 * 5


def test_parts_have_tables_of_their_own_and_broken_scores_are_refused(mixture_policy):
    result = sampled(mixture_policy, Substeps(2))
    scores = score_rollout(mixture_policy, SUM, result, PROMPTS)
    wins, sizes = (
        score_rollout(mixture_policy, reward, result, PROMPTS).total
        for reward in (WinRate(BASE), SIZE)
    )
    assert torch.equal(scores.parts["win"], wins) and torch.allclose(scores.parts["size"], sizes)
    assert torch.allclose(scores.total, wins + 0.5 * sizes)

    class Flat(Watched):
        def score_groups(self, images, prompts):
            return images.flatten(2).mean(2).flatten()

    message = (
        r"Flat.score_groups returned shape \(12,\) for 3 groups of 4 images; allowed: \(3, 4\)"
    )
    with pytest.raises(RewardContractError, match=message):
        score_rollout(mixture_policy, Flat([]), sampled(mixture_policy, NoProbe()), PROMPTS)
    some = sampled(mixture_policy, Substeps(2, fraction=0.5))
    with pytest.raises(
        ConfigError, match="a probe that scores all members of a group: WinRate compares them"
    ):
        score_rollout(mixture_policy, WinRate(BASE), some, PROMPTS)


# --- runs
# --------------------------------------------------------------------------------------------------


def iterations(**changes):
    trainer = make_trainer(MIXTURE.replace(reward=WIN, **changes))
    rows = [trainer.iteration() for _ in range(2)]
    return trainer, [
        {k: v for k, v in row.items() if k not in ("seconds", "phases", "calls")} for row in rows
    ]


def test_chunks_and_threads_change_no_number():
    changes = {"credit": "stepwise-gain"}
    (trainer, whole), (other, parts) = (
        iterations(**changes),
        iterations(**changes, chunk=2, overlap_rewards=True),
    )
    for first, second in zip(whole, parts, strict=True):
        assert first == {name: pytest.approx(value, abs=1e-9) for name, value in second.items()}
    assert all(
        torch.allclose(a, b) for a, b in zip(trainer.parameters, other.parameters, strict=True)
    )
    # which is no collapse:
    assert [row["reward_mean"] for row in whole] == [pytest.approx(0.5)] * 2
    limits = limits_of(trainer)
    rows = [
        {
            "iteration": i,
            "reward_mean": 0.5,
            "reward_std": 0.1,
            "evaluation": {"reward": 9.0 - 4 * i},
        }
        for i in range(3)
    ]
    assert limits.compared and "collapse" not in {notice.kind for notice in notices(rows, limits)}


def test_a_run_is_evaluated_by_the_reward_that_is_compared(tmp_path, capsys):
    reward = f"group-sum(models={{'win': \"{WIN}\", 'own': '{DIRECTION}'}}, weights={{'own': 2.0}})"
    options = [
        "--world",
        "mixture",
        "--groups",
        "2",
        "--group-size",
        "4",
        "--iterations",
        "1",
        "--eval-samples",
        "4",
    ]
    assert (
        main(["train", *options, "--reward", reward, "--out", str(tmp_path / "run"), "--trust"])
        == 0
    )
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["parts"]["win"] == pytest.approx(0.5)
    # the own reward once and twice
    assert row["evaluation"]["reward"] == pytest.approx(3 * row["evaluation"]["soft"], abs=1e-5)
    assert main(["evaluate", "--weights", str(tmp_path / "run"), "--limit", "2", "--trust"]) == 0
    assert "evaluation of group-sum" in capsys.readouterr().out


def test_training_a_model_with_two_rewards(tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "model")
    tiny_clip(tmp_path / "clip", size=16)
    assert (
        main(
            ["prompts", "compositional", "--count", "6", "--file", str(tmp_path / "prompts.jsonl")]
        )
        == 0
    )
    models = f"{{'size': 'jpeg-compressibility', 'clip': \"clipscore(model='{tmp_path}/clip')\"}}"
    options = {
        "model": tmp_path / "model",
        "prompts": tmp_path / "prompts.jsonl",
        "groups": 2,
        "out": tmp_path / "run",
        "reward": f"weighted-sum(models={models}, weights={{'clip': 2.0}})",
        "credit": "gdpo(weights={'size': 2.0})",
        "resolution": 16,
        "max-sequence-length": 24,
        "device": "cpu",
        "dtype": "float32",
        "lora-rank": 2,
        "lora-alpha": 8,
        "preset": "tiny",
        "iterations": 1,
    }
    assert (
        main(
            [
                "train",
                *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            ]
        )
        == 0
    )
    row = load_run(tmp_path / "run").rows[-1]
    assert row["reward_mean"] == pytest.approx(
        row["parts"]["size"] + 2 * row["parts"]["clip"], abs=1e-5
    )


def test_rewards_within_a_reward_take_their_options_and_the_device():
    models = (
        "{'size': 'jpeg-compressibility(quality=50)', 'cut': \"clipped(reward='clipscore',"
        ' high=1)"}'
    )
    reward = build("reward", f"weighted-sum(models={models})", device="meta")
    assert reward == WeightedSum(
        {"size": JPEGCompressibility(50), "cut": Clipped(CLIPScore(device="meta"), high=1)}
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: Clipped(WinRate(BASE), high=1.0),
            r"Clipped.reward = .* is not allowed; allowed: a RewardModel",
        ),
        (lambda: Clipped(BASE, 1.0, 0.0), "allowed: low below high"),
        (
            lambda: WeightedSum({"a": WinRate(BASE)}),
            r"WeightedSum.models = \['a'\] .*group-sum adds them",
        ),
        (lambda: WeightedSum({}), r"WeightedSum.weights = \{\} is not allowed"),
        (
            lambda: GroupSum({"a": BASE}, {"b": 1.0}),
            r"GroupSum.weights = .* finite numbers for some of the models a",
        ),
        *(
            (lambda w=w: GroupSum({"a": BASE}, {"a": w}), "finite numbers for some of")
            for w in ("x", NAN, None)
        ),
        (
            lambda: make_reward(MIXTURE.replace(reward=WIN, reward_noise=0.1)),
            r"reward_noise, reward_bias = .* 0 with WinRate",
        ),
        (
            lambda: create_app(WinRate(BASE), ServerSettings()),
            "reward = 'reward' .*WinRate compares members of a group",
        ),
    ],
)
def test_what_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_held_out_rewards_are_for_single_samples():
    shapes = preset("tiny").apply(heldout_rewards=("win-rate(reward='jpeg-compressibility')",))
    with pytest.raises(
        ConfigError,
        match=r"heldout_rewards = .*WinRate compares members of a group.*JPEGCompressibility",
    ):
        make_heldout_metrics(shapes, make_world(shapes))
