"""Credit rules: golden values, worked examples, reductions between rules, and the contract."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.protocols import CreditAssigner
from flowrl.credit import (
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    balanced,
    check_signature,
    credit_of,
    example,
    gains,
    generalised_gains,
    process_rewards,
    read_columns,
    reward_to_go,
    turning_points,
    zscore,
)
from flowrl.probes import Completion

GOLDEN = Path(__file__).parents[1] / "golden"
COUNT = 4
RULES = [
    Uniform(),
    Uniform(std="batch"),
    Weighted(),
    Weighted((1.8, 1.0, 1.0, 1.3), Uniform(std="batch")),
    StepwiseGain(),
    StepwiseGain(normalise="step", lam=0.5, gamma=0.9),
    StepwiseGain(pool="batch", clamp=None),
    TurningPoint(),
    TurningPoint(consistent=False, balance="trend", balance_scope="prompt"),
    TurningPoint(balance=None, normalise="joint", first_step=False),
]
E1 = torch.tensor(
    [
        [
            [0.50, 0.40, 0.30, 0.45, 0.60],
            [0.50, 0.60, 0.70, 0.55, 0.40],
            [0.50, 0.55, 0.52, 0.65, 0.62],
        ]
    ]
)
E2 = torch.tensor([[[0.0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]])
E4 = torch.tensor([[[0.50, 0.70, 0.75, 0.72, 0.80], [0.50, 0.55, 0.60, 0.70, 0.72]]])


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text())


def table(seed: int, prompts: int = 3, members: int = 5, columns: int = COUNT + 1) -> torch.Tensor:
    return torch.rand(
        prompts,
        members,
        columns,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


def credit(rule: CreditAssigner, values: torch.Tensor) -> torch.Tensor:
    """Advantages with decisions that are all drawn, trained and valid."""
    return rule.assign(values, Decisions.like(values))


def masked(values: torch.Tensor, mask: torch.Tensor) -> Decisions:
    """Decisions of which only the entries of `mask` count."""
    return replace(Decisions.like(values), mask=mask.expand(*values.shape[:2], values.shape[2] - 1))


# Golden values and worked examples


@pytest.mark.parametrize("case", load("advantages.json"), ids=lambda c: f"global-{c['global_std']}")
def test_uniform_matches_the_public_flow_grpo_code(case: dict[str, Any]) -> None:
    """yifan123/flow_grpo ac4c86e; every column but the last is NaN: the rule must not read it."""
    final = torch.tensor(case["rewards"])
    rewards = torch.full((*final.shape, 3), torch.nan)
    rewards[..., -1] = final
    advantages = credit(Uniform(std="batch" if case["global_std"] else "group"), rewards)
    expected = torch.tensor(case["advantages"]).unsqueeze(-1).expand(-1, -1, 2)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


VARIANTS = {
    "paper_consistent_balanced": TurningPoint(balance="trend"),
    "consistent_unbalanced": TurningPoint(balance=None),
    "unconstrained_balanced": TurningPoint(consistent=False, balance="trend"),
    "unconstrained_unbalanced": TurningPoint(consistent=False, balance=None),
    "no_first_step": TurningPoint(balance="trend", first_step=False),
}


# the one golden table where the public code's sort let an exact tie between two steps fall the
# other way
TIED = 25


@pytest.mark.parametrize("index", range(30))
def test_turning_points_match_the_public_tp_grpo_code(index: int) -> None:
    """YunzeTong/TurningPoint-GRPO 994d26a, one table = one balancing batch."""
    case = load("turning_points.json")[index]
    rewards = torch.tensor(case["rewards"]).unsqueeze(0)
    selected, expected = (
        VARIANTS[case["variant"]].selected(rewards),
        torch.tensor(case["turning_points"]) > 0,
    )
    if index == TIED:  # as many per trajectory, all of which have the size |D|
        assert selected[0].sum(dim=-1).tolist() == expected.sum(dim=-1).tolist()
        assert bool(turning_points(rewards)[0][expected].all())
    else:
        assert torch.equal(selected[0], expected)
    theirs = torch.tensor(case["process_rewards"])
    torch.testing.assert_close(
        process_rewards(rewards, expected.unsqueeze(0))[0], theirs, rtol=1e-5, atol=1e-6
    )


def test_ties_go_to_the_later_step_whatever_the_order_of_the_members() -> None:
    """Under "trend" the turning points of one trajectory all have the size |D|."""
    rows = torch.tensor(
        [
            [0.0, 0.3, 0.2, 0.5, 0.4, 0.9],
            [0.9, 0.9, 0.95, 0.7, 0.7, 0.6],
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        ]
    )
    for order in ([0, 1, 2], [1, 2, 0], [2, 1, 0]):
        rewards = rows[order].unsqueeze(0)
        turns = turning_points(rewards, consistent=False)
        assert turns[0, order.index(0)].tolist() == [True, False, True, False, True]
        kept = balanced(rewards, turns, by="trend")[0]
        assert kept[order.index(0)].tolist() == [False, False, False, False, True]
        assert kept[order.index(1)].tolist() == [False, False, True, False, False]


def test_turning_point_worked_example() -> None:
    """Executed with the public code: a's turning point at step 2 is dropped by balancing."""
    rule = TurningPoint(balance="trend")
    assert turning_points(E1)[0].nonzero().tolist() == [[0, 2], [1, 2], [2, 0]]
    assert rule.selected(E1)[0].nonzero().tolist() == [[1, 2], [2, 0]]
    rewards = [[-0.10, -0.10, 0.15, 0.15], [0.10, 0.10, -0.30, -0.15], [0.12, -0.03, 0.13, -0.03]]
    torch.testing.assert_close(
        process_rewards(E1, rule.selected(E1))[0], torch.tensor(rewards), rtol=0, atol=1e-6
    )
    advantages = [
        [-1.4080, -1.0848, 0.7544, 1.2967],
        [0.6034, 1.3259, -1.4124, -1.1346],
        [0.8046, -0.2411, 0.6581, -0.1621],
    ]
    torch.testing.assert_close(credit(rule, E1)[0], torch.tensor(advantages), rtol=0, atol=6e-5)
    uniform = torch.tensor([0.6034, -1.4080, 0.8046]).unsqueeze(-1).expand(3, 4)
    torch.testing.assert_close(credit(Uniform(), E1)[0], uniform, rtol=0, atol=6e-5)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_zero_one_rewards_never_have_a_consistent_turning_point(seed: int) -> None:
    assert not bool(turning_points((table(seed) > 0.5).double()).any())


def test_stepwise_worked_example() -> None:
    """Mean .065, std .06265; the published numbers divide by the std alone, the 1e-4 moves the
    third digit.
    """
    without_epsilon = [[2.1548, -0.2394, -1.5164, 0.2394], [-0.2394, -0.2394, 0.5587, -0.7183]]
    torch.testing.assert_close(
        credit(StepwiseGain(), E4)[0], torch.tensor(without_epsilon), rtol=2e-3, atol=1e-4
    )
    exact = torch.tensor(without_epsilon) * 0.06265 / (0.06265 + 1e-4)
    torch.testing.assert_close(credit(StepwiseGain(), E4)[0], exact, rtol=2e-4, atol=1e-4)


def test_the_consistent_first_step_rule() -> None:
    rewards = torch.tensor([[[0.0, 0.1, 0.3], [0.0, 0.4, 0.3], [0.0, 0.3, 0.3], [0.5, 0.3, 0.1]]])
    assert turning_points(rewards, consistent=True)[0, :, 0].tolist() == [True, False, False, True]
    assert turning_points(rewards, consistent=False)[0, :, 0].tolist() == [True, True, True, True]
    assert (
        turning_points(rewards, consistent=False, first_step=False)[0, :, 0].tolist() == [False] * 4
    )


def test_turning_points_of_noise_have_the_null_density() -> None:
    """I.i.d. rewards, 9 steps, both rules: 3.33 and 1.60 a trajectory; 5 standard errors plus
    rounding to 2 digits.
    """
    n = 20_000
    rewards = torch.randn(1, n, 10, generator=torch.Generator().manual_seed(0))
    for consistent, expected in ((False, 3.33), (True, 1.60)):
        counts = turning_points(rewards, consistent=consistent)[0].double().sum(dim=-1)
        assert float(counts.mean()) == pytest.approx(
            expected, abs=5 * float(counts.std()) / math.sqrt(n) + 0.005
        )


# Balancing


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50, derandomize=True, deadline=None)
@pytest.mark.parametrize("by", ["aggregate", "trend"])
@pytest.mark.parametrize("scope", ["prompt", "batch"])
def test_balancing_leaves_equally_many_of_either_sign_and_the_largest(seed: int, by, scope) -> None:
    rewards = table(seed)
    turns = turning_points(rewards)
    kept = balanced(rewards, turns, by, scope)
    assert not bool((kept & ~turns).any())
    size = (
        reward_to_go(rewards)
        if by == "aggregate"
        else (rewards[..., -1:] - rewards[..., :1]).expand_as(turns)
    )
    scopes = [slice(None)] if scope == "batch" else [slice(p, p + 1) for p in range(len(rewards))]
    for part in scopes:
        for sign in (1, -1):
            mine, other = (turns[part] & (size[part] * s > 0) for s in (sign, -sign))
            expected = min(int(mine.sum()), int(other.sum())) or int(mine.sum())
            chosen, dropped = mine & kept[part], mine & ~kept[part]
            assert int(chosen.sum()) == expected
            if bool(chosen.any()) and bool(dropped.any()):
                assert size[part][chosen].abs().min() >= size[part][dropped].abs().max()


def test_balancing_within_a_prompt_ignores_the_other_prompts() -> None:
    rule, rewards = TurningPoint(balance_scope="prompt"), table(3)
    alone = torch.cat([credit(rule, row.unsqueeze(0)) for row in rewards])
    torch.testing.assert_close(credit(rule, rewards), alone)


# Reductions between rules


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_lambda_one_is_reward_to_go_and_lambda_zero_the_gain(seed: int) -> None:
    rewards = table(seed)
    torch.testing.assert_close(generalised_gains(rewards, lam=1.0), reward_to_go(rewards))
    assert torch.equal(generalised_gains(rewards, lam=0.0), gains(rewards))


def test_generalised_gains_by_hand() -> None:
    """gamma lam = 1/2, gains 1, 2, 4: 1 + 2/2 + 4/4, 2 + 4/2, 4."""
    rewards = torch.tensor([[[0.0, 1.0, 3.0, 7.0]]])
    assert generalised_gains(rewards, lam=0.625, gamma=0.8)[0, 0].tolist() == pytest.approx(
        [3.0, 4.0, 4.0]
    )


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_without_turning_points_tp_is_per_step_stepwise(seed: int) -> None:
    rewards = table(seed).sort(dim=-1).values  # monotone, so at most the first step qualifies
    tp = credit(TurningPoint(first_step=False), rewards)
    torch.testing.assert_close(tp, credit(StepwiseGain(normalise="step"), rewards))


def test_weights_of_a_function_of_the_time_multiply_uniform_credit() -> None:
    ratio = credit(Weighted(weights=lambda time: 2 * time), table(0)) / credit(Uniform(), table(0))
    torch.testing.assert_close(ratio[0, 0], torch.tensor([2.0, 1.5, 1.0, 0.5], dtype=torch.float64))
    for weights in ((), (1.0, math.nan), "loud"):
        with pytest.raises(ConfigError, match=r"Weighted\.weights = .* is not allowed"):
            Weighted(weights=weights)  # pyright: ignore[reportArgumentType]


def test_noise_weights_have_mean_one_over_the_trained_decisions() -> None:
    decisions = Decisions.like(table(0), stds=(0.8, 0.2, 0.4, 0.6))
    decisions = replace(decisions, trained=torch.tensor([False, True, True, False]))
    ratio = Weighted().assign(table(0), decisions) / credit(Uniform(), table(0))
    torch.testing.assert_close(
        ratio[0, 0], torch.tensor([8 / 3, 2 / 3, 4 / 3, 2.0], dtype=torch.float64)
    )


# The contract beyond `flowrl.testing`: exact zeros


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(rule: CreditAssigner) -> None:
    values = table(1, members=7).float()
    for value in (0.1, 12345.678, 1e8 / 3, 1e30):
        values[1] = value
        assert not credit(rule, values)[1].any() and not credit(rule, values[1:2]).any()
    assert not credit(rule, table(2, members=1)).any()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_missing_values_and_wrong_shapes_are_named(rule: CreditAssigner) -> None:
    values = table(2)
    values[0, 1, -1] = torch.nan
    probe = type(rule.probe).__name__
    with pytest.raises(CreditError, match=rf"column 4 of 0\.\.4: .* probe {probe}"):
        credit(rule, values)
    for wrong in (torch.rand(3, 5, 4), torch.rand(2, 5, 5), torch.zeros(3, 5, 5).long()):
        with pytest.raises(CreditError, match=r"needs .* = \(3, 5, 5\)"):
            rule.assign(wrong, Decisions.like(table(0)))


def test_scores_are_clamped() -> None:
    rewards = torch.zeros(1, 100, 2)
    rewards[0, 0, 1] = 1.0
    assert credit(Uniform(), rewards)[0, 0, 0] == 5.0
    assert float(credit(Uniform(clamp=None), rewards)[0, 0, 0]) == pytest.approx(
        math.sqrt(99), rel=2e-3
    )
    assert credit(Uniform(clamp=2.0), rewards)[0, 0, 0] == 2.0


# Refusals


def test_fixed_weights_must_fit_the_table() -> None:
    with pytest.raises(CreditError, match=r"weights \(3,\), but the table has 4 decisions"):
        credit(Weighted(weights=(1.0, 1.0, 1.0)), table(0))


@dataclass(frozen=True)
class MyRule:
    """Returns whatever it is given."""

    found: object
    probe: Completion = Completion()

    def assign(self, values: torch.Tensor, decisions: Decisions) -> object:
        return self.found


@dataclass(frozen=True)
class MyRecordRule:
    """The same, for a record."""

    found: object
    probe: Completion = Completion()

    def credit(self, experience: Experience) -> object:
        return self.found


def record(values: torch.Tensor, decisions: Decisions | None = None) -> Experience:
    return example(values, Completion(), decisions).experience()


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([[1.0]], "a list, not a torch.Tensor"),
        (torch.zeros(3, 5, COUNT + 1), r"\(3, 5, 5\), not .* \(3, 5, 4\)"),
        (torch.zeros(3, 5, COUNT, dtype=torch.long), "torch.int64"),
        (
            torch.zeros(3, 5, COUNT).index_fill(2, torch.tensor([1]), torch.nan),
            r"values that are not finite, .* \(0, 0, 1\)",
        ),
    ],
)
def test_a_broken_rule_is_told_what_it_broke(advantages: Any, message: str) -> None:
    with pytest.raises(CreditError, match=rf"^MyRule\.assign returned .*{message}"):
        credit_of(MyRule(advantages), record(table(0)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(CreditError, match=rf"^MyRecordRule\.credit returned .*{message}"):
        credit_of(MyRecordRule(Credit(advantages)), record(table(0)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (1.5, r"weights from 1.5 to 1.5, not within \[0, 1\]"),
        (-0.5, "not within"),
        (0.0, "nothing is left"),
    ],
)
def test_weights_are_within_0_and_1_and_not_all_0(weight: float, message: str) -> None:
    weights = torch.full((3, 5, COUNT), weight)
    with pytest.raises(CreditError, match=message):
        credit_of(MyRecordRule(Credit(weights, weights)), record(table(0)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("outside", [torch.nan, 1.0])
def test_credit_outside_the_mask_is_0_whatever_the_rule_returns(outside: float) -> None:
    mask = torch.rand(3, 5, COUNT, generator=torch.Generator().manual_seed(0)) > 0.3
    found = torch.full((3, 5, COUNT), 2.0).masked_fill(~mask, outside).requires_grad_()
    shown = record(table(0), masked(table(0), mask))
    for rule in (MyRule(found), MyRecordRule(Credit(found, found / 4))):
        got = credit_of(rule, shown)  # pyright: ignore[reportArgumentType]
        assert torch.equal(got.advantages, 2.0 * mask) and got.weights is not None
        assert torch.equal(got.weights, mask * (1.0 if hasattr(rule, "assign") else 0.5))
        assert not got.advantages.requires_grad and not got.weights.requires_grad


def test_a_rule_may_not_change_its_input() -> None:
    class InPlace(MyRule):
        def assign(self, values: torch.Tensor, decisions: Decisions) -> torch.Tensor:
            decisions.mask.logical_not_()
            return gains(values)

    with pytest.raises(CreditError, match=r"InPlace\.assign changed its input in place"):
        credit_of(InPlace(None), record(table(0), masked(table(0), torch.ones(3, 5, COUNT).bool())))


def test_a_rule_of_the_older_form_is_refused_with_the_change() -> None:
    class RewardToGo:
        probe = Completion()

        def assign(self, rewards: torch.Tensor, schedule: object = None) -> torch.Tensor:
            return reward_to_go(rewards)

    words = (
        r"RewardToGo\.assign\(rewards, schedule\) is the form of version 0\.1; write:\n.*def"
        r" assign\(self, values, decisions\)"
    )
    with pytest.raises(ConfigError, match=words):
        check_signature(RewardToGo())
    with pytest.raises(ConfigError, match=words):
        credit_of(RewardToGo(), record(table(0)))  # pyright: ignore[reportArgumentType]
    for rule in RULES:
        check_signature(rule)


# The mask


def out_of(values: torch.Tensor, *members: tuple[int, int]) -> Decisions:
    """Decisions without the members (prompt, member)."""
    mask = torch.ones(*values.shape[:2], values.shape[2] - 1, dtype=torch.bool)
    for prompt, member in members:
        mask[prompt, member] = False
    return replace(Decisions.like(values), mask=mask)


POOLED = [
    Uniform(std="batch"),
    StepwiseGain(pool="batch", clamp=None),
    Weighted((1.8, 1.0, 1.0, 1.3), Uniform(std="batch")),
]
SEPARATE = [
    rule for rule in RULES if rule not in POOLED and getattr(rule, "balance_scope", "") != "batch"
]


@pytest.mark.parametrize("rule", SEPARATE, ids=repr)
def test_an_invalid_sample_changes_no_other_group(rule: CreditAssigner) -> None:
    whole = table(5).float()
    values = whole.clone()
    values[1, 2] = torch.nan
    got, expected = rule.assign(values, out_of(values, (1, 2))), credit(rule, whole)
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    left = credit(rule, whole[1:2, [0, 1, 3, 4]])
    torch.testing.assert_close(got[1, [0, 1, 3, 4]], left[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected[1, [0, 1, 3, 4]], left[0], atol=1e-2)


def test_an_invalid_sample_is_left_out_of_the_standard_deviation_of_the_batch() -> None:
    values = table(6, prompts=4)
    # one member of the last group remains
    values[0, 1], values[2, 4], values[3, 1:] = torch.nan, torch.nan, torch.nan
    got = Uniform(std="batch").assign(
        values, out_of(values, (0, 1), (2, 4), *((3, m) for m in range(1, 5)))
    )
    groups = [[float(x) for x in row if x == x] for row in values[:3, :, -1]]
    pooled = [x for group in groups for x in group]
    mean = sum(pooled) / len(pooled)
    std = math.sqrt(sum((x - mean) ** 2 for x in pooled) / len(pooled))
    for prompt, group in enumerate(groups):
        expected = [(x - sum(group) / len(group)) / (std + 1e-4) for x in group]
        found = got[prompt, ~values[prompt, :, -1].isnan()]
        wanted = torch.tensor(expected, dtype=torch.float64)[:, None].expand(-1, COUNT)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not got[3].any() and not got.isnan().any()


@pytest.mark.parametrize("normalise", ["joint", "step"])
def test_decisions_that_are_not_trained_are_in_no_statistic(normalise: Any) -> None:
    values = table(7)
    decisions = masked(values, torch.tensor([False, True, True, False]))
    for rule in (
        StepwiseGain(normalise=normalise),
        TurningPoint(normalise=normalise, balance=None),
    ):
        got = rule.assign(values, decisions)
        assert not got[..., [0, 3]].any()
    got = StepwiseGain(normalise=normalise).assign(values, decisions)
    torch.testing.assert_close(
        got[..., 1:3], credit(StepwiseGain(normalise=normalise), values[..., 1:4])
    )


def test_turning_points_do_not_depend_on_the_window() -> None:
    values = table(9, columns=4)
    early, late = (
        Decisions.like(values, times=(1.0, 0.9, 0.8)),
        Decisions.like(values, times=(0.8, 0.7, 0.6)),
    )
    late = replace(late, step=late.step + 2)
    for rule in (
        TurningPoint(),
        TurningPoint(consistent=False, balance=None),
    ):
        assert torch.equal(rule.assign(values, early), rule.assign(values, late))
    assert bool(TurningPoint(balance=None).selected(values)[..., 0].any())


def test_balancing_counts_the_mask_only() -> None:
    rule, mask = TurningPoint(balance="aggregate"), torch.ones(1, 3, 4, dtype=torch.bool)
    assert rule.selected(E1, mask)[0].nonzero().tolist() == [[0, 2], [1, 2]]
    mask[0, 1] = False  # the only one downwards
    assert rule.selected(E1, mask)[0].nonzero().tolist() == [[0, 2], [2, 0]]


def test_a_biased_probe_shifts_the_last_gain_only() -> None:
    """V + c at all columns before the last: Z per decision is unchanged, joint Z gives the last
    decision the shift.
    """
    values, c = table(10, members=50), 0.8
    biased = values.clone()
    biased[..., :-1] += c
    step, joint = (StepwiseGain(normalise=normalise, clamp=None) for normalise in ("step", "joint"))
    torch.testing.assert_close(credit(step, biased), credit(step, values))
    std = (gains(biased) - gains(biased).mean((1, 2), keepdim=True)).square().mean(
        (1, 2)
    ).sqrt() + 1e-4
    plain = gains(values) - gains(values).mean((1, 2), keepdim=True)
    shift = torch.tensor([c / COUNT] * (COUNT - 1) + [-c * (1 - 1 / COUNT)])
    torch.testing.assert_close(credit(joint, biased), (plain + shift) / std[:, None, None])
    assert bool((credit(joint, biased)[..., -1].mean(1) < -0.5).all())


# Columns that are read

READS = {
    "uniform": (Uniform(), [True] * 5),
    "gain": (StepwiseGain(), [False, False, True, True, False]),
    "gamma 0": (StepwiseGain(lam=0.5, gamma=0.0), [False, False, True, True, False]),
    "lambda": (StepwiseGain(lam=0.5), [False, False, True, True, True]),
    "turning point": (TurningPoint(), [True, True, True, True, True]),
    "weighted": (Weighted(rule=StepwiseGain()), [False, False, True, True, False]),
}


@pytest.mark.parametrize("name", READS)
def test_columns_that_a_rule_reads(name: str) -> None:
    rule, expected = READS[name]
    trained = torch.tensor([False, False, True, False])
    assert read_columns(rule, trained).tolist() == expected
    assert read_columns(
        TurningPoint(), torch.tensor([False, False, False, False, True])
    ).tolist() == [
        True,
        *[False] * 2,
        *[True] * 3,
    ]
    assert not read_columns(rule, torch.zeros(4).bool()).any()


def test_columns_must_be_boolean_and_fit() -> None:
    class Reads(MyRule):
        def reads(self, trained: torch.Tensor) -> torch.Tensor:
            return trained

    with pytest.raises(
        CreditError, match=r"Reads\.reads returned torch\.bool \(4,\), not a Boolean tensor \(5,\)"
    ):
        read_columns(Reads(None), torch.ones(4).bool())  # pyright: ignore[reportArgumentType]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_zscore_over_a_mask_is_a_loop_over_its_entries(seed: int) -> None:
    values = table(seed, prompts=2)
    mask = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    got = zscore(
        values.masked_fill(~mask, torch.nan), over=("member", "decision"), mask=mask, clamp=None
    )
    assert not got[~mask].any()
    for prompt in range(2):
        inside = values[prompt][mask[prompt]]
        if int(mask[prompt].any(-1).sum()) < 2:
            assert not got[prompt].any()
        else:
            expected = (inside - inside.mean()) / (inside.std(correction=0) + 1e-4)
            torch.testing.assert_close(got[prompt][mask[prompt]], expected)
