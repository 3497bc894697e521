"""Credit rules: golden values, worked examples, reductions between rules, memory, and refusals."""

import itertools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import ROOT
from seeded import rand
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.experience import Credit, Decisions, Needs
from flowrl.core.types import Schedule
from flowrl.credit import (
    GDPO,
    BackedUp,
    MovingAverageGain,
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    balanced,
    credit_of,
    example,
    gains,
    generalised_gains,
    probed,
    process_rewards,
    read_columns,
    reward_to_go,
    turning_points,
    zscore,
)
from flowrl.probes import Completion, Tweedie
from flowrl.run.parts.registry import check_part
from flowrl.samplers import FlowSDE

GOLDEN = ROOT / "tests" / "golden"
COUNT = 4
RULES = [
    Uniform(std="batch"),
    Weighted((1.8, 1.0, 1.0, 1.3), Uniform(std="batch")),
    StepwiseGain(normalise="step", lam=0.5, gamma=0.9),
    StepwiseGain(pool="batch", clamp=None),
    TurningPoint(),
    TurningPoint(balance=None, normalise="joint", first_step=False),
]
seeds = settings(max_examples=10, derandomize=True, deadline=None)(given(seed=st.integers(0, 9999)))


def load(name):
    return json.loads((GOLDEN / name).read_text())


def table(seed, prompts=3, members=5, columns=COUNT + 1):
    return rand(prompts, members, columns, seed=seed, dtype=torch.float64)


def credit(rule, values):
    """Advantages with decisions that are all drawn, trained and valid."""
    given = rule.assign(values, Decisions.like(values))
    return given.advantages if isinstance(given, Credit) else given


def random_mask(*shape, seed=1):
    return rand(*shape, seed=seed) > 0.4


# Golden values and worked examples


def test_uniform_matches_the_public_flow_grpo_code():
    """yifan123/flow_grpo ac4c86e; every column but the last is NaN: the rule must not read it."""
    for case in load("advantages.json"):
        final = torch.tensor(case["rewards"])
        values = torch.full((*final.shape, 3), torch.nan)
        values[..., -1] = final
        advantages = credit(Uniform(std="batch" if case["global_std"] else "group"), values)
        expected = torch.tensor(case["advantages"]).unsqueeze(-1).expand(-1, -1, 2)
        assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


VARIANTS = {
    "paper_consistent_balanced": TurningPoint(balance="trend"),
    "consistent_unbalanced": TurningPoint(balance=None),
    "unconstrained_balanced": TurningPoint(consistent=False, balance="trend"),
    "unconstrained_unbalanced": TurningPoint(consistent=False, balance=None),
    "no_first_step": TurningPoint(balance="trend", first_step=False),
}
TIED = 25
"""The golden table in which the public code's sort resolves a tie between two steps the other
way.
"""


def test_turning_points_match_the_public_tp_grpo_code():
    """YunzeTong/TurningPoint-GRPO 994d26a, one table = one balancing batch."""
    for index, case in enumerate(load("turning_points.json")):
        values = torch.tensor(case["rewards"])[None]
        selected = VARIANTS[case["variant"]].selected(values)
        expected = torch.tensor(case["turning_points"])[None] > 0
        if index == TIED:  # as many per trajectory, all of which have the size |D|
            assert torch.equal(selected.sum(-1), expected.sum(-1))
        else:
            assert torch.equal(selected, expected), index
        rewards = torch.tensor(case["process_rewards"])
        assert_close(process_rewards(values, expected)[0], rewards, rtol=1e-5, atol=1e-6)
    still = torch.tensor([[[0.5, 0.4, 0.4, 0.6, 0.6, 0.7], [0.5, 0.5, 0.4, 0.4, 0.4, 0.6]]])
    assert not turning_points(still, consistent=False).any()  # a gain of 0 has no direction


E1 = torch.tensor(
    [
        [
            [0.50, 0.40, 0.30, 0.45, 0.60],
            [0.50, 0.60, 0.70, 0.55, 0.40],
            [0.50, 0.55, 0.52, 0.65, 0.62],
        ]
    ]
)
E4 = torch.tensor([[[0.50, 0.70, 0.75, 0.72, 0.80], [0.50, 0.55, 0.60, 0.70, 0.72]]])


def test_worked_examples():
    """TP-GRPO's by the public code. Stepwise's mean is .065, its std .06265; the published numbers
    divide by the std alone.
    """
    advantages = [
        [-1.4080, -1.0848, 0.7544, 1.2967],
        [0.6034, 1.3259, -1.4124, -1.1346],
        [0.8046, -0.2411, 0.6581, -0.1621],
    ]
    credited = credit(TurningPoint(balance="trend"), E1)[0]
    assert_close(credited, torch.tensor(advantages), rtol=0, atol=6e-5)
    published = [[2.1548, -0.2394, -1.5164, 0.2394], [-0.2394, -0.2394, 0.5587, -0.7183]]
    exact = torch.tensor(published) * 0.06265 / (0.06265 + 1e-4)
    assert_close(credit(StepwiseGain(), E4)[0], exact, rtol=2e-4, atol=1e-4)


def test_with_rewards_of_0_and_1_no_decision_is_a_consistent_turning_point():
    values = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)))[None]
    assert turning_points(values, consistent=False).any() and not turning_points(values).any()


def test_process_rewards_by_hand():
    values = torch.tensor([[[0.0, 1.0, 3.0, 7.0]]])
    selected = torch.tensor([[[True, False, False]]])
    assert process_rewards(values, selected).tolist() == [[[7.0, 2.0, 4.0]]]
    assert process_rewards(values, selected, add=True).tolist() == [[[8.0, 2.0, 4.0]]]


# Balancing


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_balancing_leaves_entries_without_size_out_of_the_count(sign):
    """One turning point upwards, two downwards and one of size 0, which remains."""
    last = torch.tensor([[3.0, -2.0, -1.0, 0.0]]) * sign
    values = torch.stack([torch.zeros(1, 4), last], dim=-1)
    kept = balanced(values, torch.ones(1, 4, 1, dtype=torch.bool))
    assert kept[0, :, 0].tolist() == [True, True, False, True]


def test_of_equal_turning_points_the_earlier_is_removed():
    """By trend, both turning points of the first member have the size 1, and one must go."""
    values = torch.tensor([[[0.0, 0.5, 0.2, 1.0], [1.0, 0.5, 0.2, 0.0]]])
    turns = torch.tensor([[[True, False, True], [False, True, False]]])
    kept = balanced(values, turns, by="trend")
    assert kept.tolist() == [[[False, False, True], [False, True, False]]]


# Reductions between rules


@seeds
def test_rules_reduce_to_each_other(seed):
    values, everywhere = table(seed), torch.ones(3, 5, COUNT, dtype=torch.bool)
    monotone = values.sort(dim=-1).values  # at most the first step is a turning point
    one_step = table(seed, columns=2)
    one_step[..., 0] = one_step[:, :1, 0]  # from shared noise: the gain is R minus a constant
    final, uniform = values[..., -1:], credit(Uniform(), values)
    by_step, later = StepwiseGain(normalise="step"), StepwiseGain(normalise="step", lam=1.0)
    rule = TurningPoint(balance_scope="prompt")
    for advantages, expected in (
        (generalised_gains(values, lam=1.0), reward_to_go(values)),
        (zscore(process_rewards(values, everywhere), ("member",)), credit(later, values)),
        (credit(TurningPoint(first_step=False), monotone), credit(by_step, monotone)),
        (credit(rule, values), torch.cat([credit(rule, row[None]) for row in values])),
        (credit(StepwiseGain(lam=0.7), one_step), credit(Uniform(), one_step)),
        (credit(Uniform(clamp=3.0, limit="tanh"), values), 3 * (uniform / 3).tanh()),
        (credit(Uniform(std=None), values), (final - final.mean(1, keepdim=True)).repeat(1, 1, 4)),
        (credit(TurningPoint(), one_step), credit(Uniform(), one_step)),
        (credit(GDPO(Uniform(), batch=False), values), uniform),
    ):
        assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_turning_points_do_not_depend_on_the_window():
    values = table(9, columns=4)
    early = Decisions.like(values, times=(1.0, 0.9, 0.8))
    late = replace(Decisions.like(values, times=(0.8, 0.7, 0.6)), step=early.step + 2)
    rule = TurningPoint(balance=None)
    assert torch.equal(rule.assign(values, early), rule.assign(values, late))
    assert rule.selected(values)[..., 0].any()


# Weights and several rewards


def test_weights_multiply_the_advantages():
    values, uniform = table(0), credit(Uniform(), table(0))
    ratio = credit(Weighted(weights=lambda time: 2 * time), values) / uniform
    assert ratio[0, 0].tolist() == pytest.approx([2.0, 1.5, 1.0, 0.5])
    decisions = Decisions.like(values, stds=(0.8, 0.2, 0.4, 0.6))
    decisions = replace(decisions, trained=torch.tensor([False, True, True, False]))
    ratio = (
        Weighted().assign(values, decisions).advantages / uniform
    )  # mean 1 over the trained decisions
    assert ratio[0, 0].tolist() == pytest.approx([8 / 3, 2 / 3, 4 / 3, 2.0])
    for weights in ((), (1.0, math.nan), "loud"):
        with pytest.raises(ConfigError, match=r"Weighted\.weights = .* is not allowed"):
            Weighted(weights=weights)
    with pytest.raises(CreditError, match=r"weights \(1,\), but the table has 4 decisions"):
        credit(Weighted(weights=(1.0,)), values)


def test_weights_by_velocity_give_all_gradients_in_v_the_same_spread():
    """Flow-SDE on an uneven grid: weight x |d mean / d v| / std is the same at t < 1."""
    schedule, values = Schedule(torch.tensor([1.0, 0.94, 0.86, 0.75, 0.6, 0.0])), table(0)
    step, zeros = torch.arange(1, 5), torch.zeros(4, 1)
    unit = FlowSDE(0.7).transition(zeros, torch.ones(4, 1), schedule, step)
    known = Decisions.like(values, unit.std.tolist(), schedule.times[1:5].tolist())
    credited = Weighted(weights="velocity").assign(values, known).advantages
    weights = (credited / credit(Uniform(), values))[0, 0].float()
    gradients = weights * unit.mean[:, 0].abs() / unit.std
    assert_close(gradients, gradients[:1].expand(4))
    assert float(weights.mean()) == pytest.approx(1.0)


def test_gdpo_by_hand():
    """Two rewards that order the members oppositely cancel at equal weights, whatever their
    scales.
    """
    first, second = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[20.0, 10.0, 0.0]])
    nodes = torch.full((1, 3, 4), torch.nan)
    parts = {n: torch.cat([nodes, v[..., None]], -1) for n, v in (("a", first), ("b", second))}
    record = replace(example(parts["a"], Completion()), parts=parts)

    def of_parts(**options):
        return credit_of(GDPO(**options), record).advantages

    assert of_parts(batch=False).abs().max() < 2e-4
    double = of_parts(batch=False, weights={"a": 2.0})
    expected = (first - 1) / (math.sqrt(2 / 3) + 1e-4)
    assert_close(double[..., 0], expected, atol=2e-4, rtol=1e-3)
    scaled = of_parts(weights={"a": 2.0})
    assert_close(scaled, double / (double.std(unbiased=False) + 1e-4))
    with pytest.raises(CreditError, match=r"names unknown rewards look; allowed: a, b"):
        of_parts(weights={"look": 1.0})


class Halved(Uniform):
    """Its weights are 1/2 where the reward is above 1, and 1 elsewhere."""

    def assign(self, values, decisions):
        advantages = super().assign(values, decisions)
        above = (values[..., -1:] > 1).expand_as(advantages)
        return Credit(advantages, torch.where(above, 0.5, 1.0))


def test_gdpo_takes_weights_probe_and_noise_from_its_rule():
    values = table(0, 1, 3) * 0.5
    first, second = values.clone(), values.clone()
    first[0, 0, -1] = second[0, 2, -1] = 2.0
    record = replace(example(values, Completion()), parts={"first": first, "second": second})
    assigned = credit_of(GDPO(Halved()), record)
    assert assigned.weights[0, :, 0].tolist() == [0.5, 1.0, 0.5]
    rule = GDPO(StepwiseGain(probe=Tweedie()))
    assert rule.probe == Tweedie() and rule.needs.shared_noise
    assert GDPO().needs == Needs(fields=("parts",))
    assert GDPO(BackedUp(), {"a": 2.0}).needs == Needs(("parts", "log_probs"), parts=("a",))


def test_the_sum_of_several_rewards_is_divided_by_its_std_over_the_mask():
    values, mask = table(4), random_mask(3, 5, COUNT)
    decisions = replace(Decisions.like(values), mask=mask)
    got = GDPO(StepwiseGain(pool="batch")).assign(values, decisions).advantages
    assert got[mask].std(correction=0) == pytest.approx(1, abs=1e-3)


# A baseline with memory


def test_moving_average_by_hand():
    rule = MovingAverageGain(decay=0.5, clamp=None)
    first = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 3.0, 4.0]]])  # gains (1, 0), (3, 1): mean (2, .5)
    centred = torch.tensor([[[-1.0, -0.5], [1.0, 0.5]]])
    assert_close(credit(rule, first), centred / (math.sqrt(2.5 / 4) + 1e-4))
    restored = MovingAverageGain(decay=0.5, clamp=None)
    restored.load_state_dict(rule.state_dict())
    # gains (4, .5): mean (4, .5); baseline (2, .5)
    second = torch.tensor([[[0.0, 4.0, 4.5], [0.0, 4.0, 4.5]]])
    expected = torch.tensor([[[1.0, -1.0]] * 2]) / (1 + 1e-4)
    assert_close(credit(restored, second), expected)
    assert restored.state_dict()["baseline"].tolist() == [3.0, 0.5]
    equal = torch.cat([second, second.new_full((1, 2, 3), 0.3)])
    advantages = credit(restored, equal)
    assert advantages[0].any() and not advantages[1].any()


def test_a_baseline_belongs_to_a_time_and_is_the_mean_over_the_mask():
    """A window moves by one decision: the shared time keeps its baseline, a new one starts with its
    mean gain.
    """
    rule, values, moved = MovingAverageGain(decay=0.5), table(0, columns=3), table(1, columns=3)
    mask = random_mask(3, 5, 2)
    decisions = Decisions.like(values, times=(0.9, 0.6))
    rule.assign(values, replace(decisions, mask=mask))
    early, shared = (float(gains(values)[..., k][mask[..., k]].mean()) for k in (0, 1))
    assert rule.state_dict()["baseline"].tolist() == pytest.approx([early, shared])
    new = gains(moved).mean((0, 1))
    got = rule.assign(moved, Decisions.like(moved, times=(0.6, 0.3)))
    baseline = torch.tensor([shared, float(new[1])])
    assert_close(got, zscore(gains(moved) - baseline, ("member", "decision")))
    expected = [early, (shared + float(new[0])) / 2, float(new[1])]
    assert rule.state_dict()["baseline"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "factor", "order"),
    [
        (Uniform(std="mean", clamp=None), 2.440, 3),
        (Uniform(std="mean", clamp=None, all_failed="keep"), 2.952, 4),
    ],
)
def test_the_expected_gradient_divided_by_the_mean_has_the_order_of_its_group(rule, factor, order):
    """All 16 outcomes of four rewards of 0 and 1, p = 0.2: the sum of P(outcome) mean_i A_i dlog
    P(r_i) / dp is (1 - q^order) / p.
    """
    p = 0.2
    outcomes = torch.tensor([*itertools.product((0.0, 1.0), repeat=4)])[..., None]
    advantages = credit(rule, outcomes.repeat(1, 1, 2))[..., 0]
    rewards = outcomes[..., 0]
    chance = torch.where(rewards > 0, p, 1 - p).prod(1)
    score = (rewards - p) / (p * (1 - p))
    expected = float((chance * (advantages * score).mean(1)).sum())
    assert expected == pytest.approx(factor, abs=5e-7)
    assert expected == pytest.approx((1 - (1 - p) ** order) / p)


def test_rewards_divided_by_their_mean_by_hand():
    """Of two members one success is +-1; groups that fail, members outside the mask, and negative
    rewards.
    """
    values = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 1.5], [2.0, 2.0]])[..., None].repeat(
        1, 1, 2
    )
    zero, keep = Uniform(std="mean"), Uniform(std="mean", all_failed="keep")
    for rule, failed in ((zero, 0.0), (keep, -1.0)):
        expected = [[1.0, -1.0], [failed, failed], [-0.5, 0.5], [0.0, 0.0]]
        assert credit(rule, values)[..., 0].tolist() == expected
    hidden = values.clone()
    hidden[0, 0] = -9.0
    mask = torch.ones(4, 2, 1, dtype=torch.bool)
    mask[0, 0] = False
    decisions = replace(Decisions.like(values), mask=mask)
    assert keep.assign(hidden, decisions)[0, :, 0].tolist() == [0.0, -1.0]
    with pytest.raises(CreditError, match=r"a reward is -9; allowed: rewards of 0 or more"):
        credit(zero, hidden)
    with pytest.raises(ConfigError, match=r"all_failed = 'keep' .* with std=mean only"):
        Uniform(all_failed="keep")


# The table: zeros, clamp, mask, columns


def test_equal_rewards_and_a_group_of_one_give_exactly_zero():
    values = table(1, members=7).float()
    for rule in RULES:
        for value in (0.1, 12345.678, 1e8 / 3, 1e30):
            values[1] = value
            assert not credit(rule, values)[1].any() and not credit(rule, values[1:2]).any()
        assert not credit(rule, table(2, members=1)).any()


def test_scores_are_clamped():
    values = torch.zeros(1, 100, 2)
    values[0, 0, 1] = 1.0
    rules = [Uniform(), StepwiseGain(), TurningPoint(), MovingAverageGain()]
    others = [(Uniform(clamp=2.0), 2.0), (Uniform(clamp=None), math.sqrt(99))]
    for rule, expected in [*((rule, 5.0) for rule in rules), *others]:
        assert credit(rule, values)[0, 0, 0] == pytest.approx(expected, rel=2e-3)


@seeds
def test_zscore_over_a_mask_is_a_loop_over_its_entries(seed):
    values = table(seed, prompts=2)
    mask = random_mask(*values.shape, seed=seed)
    masked = values.masked_fill(~mask, torch.nan)
    got = zscore(masked, over=("member", "decision"), mask=mask, clamp=None)
    assert not got[~mask].any()
    for prompt in range(2):
        inside = values[prompt][mask[prompt]]
        expected = (inside - inside.mean()) / (inside.std(correction=0) + 1e-4)
        if int(mask[prompt].any(-1).sum()) < 2:
            expected = torch.zeros_like(inside)
        assert_close(got[prompt][mask[prompt]], expected)


def test_columns_that_a_rule_reads():
    """Of the decision 2 of 4."""
    for rule, expected in (
        (Uniform(), [0, 1, 2, 3, 4]),
        (StepwiseGain(lam=0.5, gamma=0.0), [2, 3]),
        (StepwiseGain(lam=0.5), [2, 3, 4]),
        (Weighted(rule=StepwiseGain()), [2, 3]),
        (TurningPoint(), [0, 1, 2, 3, 4]),
    ):
        columns = read_columns(rule, torch.tensor([False, False, True, False]))
        assert columns.nonzero().flatten().tolist() == expected
        assert not read_columns(rule, torch.zeros(2, 3, 4).bool()).any()
    values = table(0, members=2)
    assert torch.equal(probed(values, Completion()), values)
    last = read_columns(TurningPoint(), torch.arange(5) == 4)
    assert last.nonzero().flatten().tolist() == [0, 3, 4, 5]


# Refusals


@dataclass(frozen=True)
class MyRule:
    """Returns what it is given."""

    result: Any
    probe: Completion = Completion()

    def assign(self, values, decisions):
        return self.result(values, decisions) if callable(self.result) else self.result


ZEROS = torch.zeros(3, 5, COUNT)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (MyRule([[1.0]]), r"MyRule\.assign returned a list, not floating point .* \(3, 5, 4\)"),
        (
            MyRule(ZEROS.mT),
            r"\(3, 4, 5\), not floating point of shape \[prompt, member.* \(3, 5, 4\)",
        ),
        (MyRule(ZEROS.long()), r"torch\.int64"),
        (MyRule(ZEROS.to_sparse()), "a tensor that is sparse"),
        (MyRule(ZEROS.index_fill(2, torch.tensor([1]), torch.nan)), r"not finite, .* \[0, 0, 1\]"),
        (MyRule((ZEROS, ZEROS)), r"MyRule\.assign returned a tuple, not floating point"),
        (MyRule(Credit(ZEROS, ZEROS + 1.5)), r"weights from 1.5 to 1.5, not within \[0, 1\]"),
        (MyRule(Credit(ZEROS, ZEROS - 0.5)), r"weights from -0\.5"),
        (MyRule(Credit(ZEROS, ZEROS)), "not all 0"),
    ],
)
def test_a_broken_rule_is_named_with_its_fault(rule, message):
    with pytest.raises(CreditError, match=message):
        credit_of(rule, example(table(0), Completion()))


class AsksForNothing(MyRule):
    def assign(self, values, decisions, record):
        return record.log_probs


class AsksForAll(AsksForNothing):
    needs = Needs(fields=("log_probs",), columns=lambda trained: trained)


class TwoArguments(MyRule):
    needs = Needs(fields=("log_probs",))


class NeedsNoise(MyRule):
    needs = "noise"


def test_what_a_rule_needs_is_checked():
    with pytest.raises(ConfigError, match=r"zscore axes = \(\) .* one or more of prompt"):
        zscore(table(0), ())
    with pytest.raises(ConfigError, match=r"Needs\.fields = \('log_prob',\) .* log_probs"):
        Needs(fields=("log_prob",))
    with pytest.raises(ConfigError, match=r"NeedsNoise\.needs = 'noise' .* a flowrl.*Needs"):
        check_part("credit", NeedsNoise(None))
    with pytest.raises(ConfigError, match=r"assign must be a method \(values, .* 'record'"):
        check_part("credit", AsksForNothing(None))
    check_part("credit", AsksForAll(None))
    with pytest.raises(ConfigError, match=r"\(values, decisions, record\): too many"):
        check_part("credit", TwoArguments(None))
    with pytest.raises(
        CreditError, match=r"AsksForAll\.needs\.columns returned torch\.bool \(4,\)"
    ):
        read_columns(AsksForAll(None), torch.ones(4).bool())


def test_a_rule_gets_the_larger_fields_that_it_names():
    record = example(table(0), Completion())
    seen = []

    class Looks(MyRule):
        needs = Needs(fields=("prompts", "condition"))

        def assign(self, values, decisions, record):
            seen.append(record)
            return torch.zeros_like(values[..., 1:])

    credit_of(Looks(None), record)
    (got,) = seen
    assert got.condition is record.condition and got.prompts == record.prompts
    assert got.log_probs is None and got.trajectories is None


@pytest.mark.parametrize("outside", [torch.nan, 1.0])
def test_credit_outside_the_mask_is_0_whatever_the_rule_returns(outside):
    mask = random_mask(3, 5, COUNT)
    result = torch.full((3, 5, COUNT), 2.0).masked_fill(~mask, outside).requires_grad_()
    decisions = replace(Decisions.like(table(0)), mask=mask)
    record = example(table(0), Completion(), decisions)
    rules = [MyRule(result), MyRule(Credit(result, result / 4))]
    for rule, weight in zip(rules, (1.0, 0.5), strict=True):
        got = credit_of(rule, record)
        for found, inside in ((got.advantages, 2.0), (got.weights, weight)):
            assert torch.equal(found, inside * mask) and not found.requires_grad
