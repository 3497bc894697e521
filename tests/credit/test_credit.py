"""Credit rules: golden values, worked examples, reductions between rules, and the contract."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from flowrl.credit import (
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    balanced,
    check_advantages,
    gains,
    generalised_gains,
    process_rewards,
    reward_to_go,
    turning_points,
    zscore,
)
from flowrl.errors import ConfigError, CreditError
from flowrl.flow import uniform_schedule
from flowrl.probes import Completion, NoProbe, Substeps
from flowrl.protocols import CreditAssigner
from flowrl.types import CHECKS_ON, Schedule

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 4
SCHEDULE = replace(uniform_schedule(STEPS), stds=torch.tensor([0.0, 0.2, 0.4, 0.0]))
RULES = [
    Uniform(),
    Uniform(std="batch"),
    Weighted(),
    Weighted(weights=(1.8, 1.0, 1.0, 1.3), std="batch"),
    StepwiseGain(),
    StepwiseGain(normalise="step", lam=0.5, gamma=0.9),
    StepwiseGain(pool="batch", clamp=None),
    TurningPoint(),
    TurningPoint(consistent=False, balance="trend", balance_scope="prompt"),
    TurningPoint(balance=None, normalise="joint", first_step=False),
]
E1 = torch.tensor([[[0.50, 0.40, 0.30, 0.45, 0.60], [0.50, 0.60, 0.70, 0.55, 0.40], [0.50, 0.55, 0.52, 0.65, 0.62]]])
E2 = torch.tensor([[[0.0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]])
E4 = torch.tensor([[[0.50, 0.70, 0.75, 0.72, 0.80], [0.50, 0.55, 0.60, 0.70, 0.72]]])


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text())


def table(seed: int, prompts: int = 3, members: int = 5, nodes: int = STEPS + 1) -> torch.Tensor:
    return torch.rand(prompts, members, nodes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Golden values and worked examples


@pytest.mark.parametrize("case", load("advantages.json"), ids=lambda c: f"global-{c['global_std']}")
def test_uniform_matches_the_public_flow_grpo_code(case: dict[str, Any]) -> None:
    """yifan123/flow_grpo ac4c86e; every node but the last is NaN: the rule must not read it."""
    final = torch.tensor(case["rewards"])
    rewards = torch.full((*final.shape, 3), torch.nan)
    rewards[..., -1] = final
    advantages = Uniform(std="batch" if case["global_std"] else "group").assign(rewards)
    expected = torch.tensor(case["advantages"]).unsqueeze(-1).expand(-1, -1, 2)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


VARIANTS = {
    "paper_consistent_balanced": TurningPoint(balance="trend"),
    "consistent_unbalanced": TurningPoint(balance=None),
    "unconstrained_balanced": TurningPoint(consistent=False, balance="trend"),
    "unconstrained_unbalanced": TurningPoint(consistent=False, balance=None),
    "no_first_step": TurningPoint(balance="trend", first_step=False),
}


TIED = 25  # the one golden table where the public code's sort let an exact tie between two steps fall the other way


@pytest.mark.parametrize("index", range(30))
def test_turning_points_match_the_public_tp_grpo_code(index: int) -> None:
    """YunzeTong/TurningPoint-GRPO 994d26a, one table = one balancing batch."""
    case = load("turning_points.json")[index]
    rewards = torch.tensor(case["rewards"]).unsqueeze(0)
    selected, expected = VARIANTS[case["variant"]].selected(rewards), torch.tensor(case["turning_points"]) > 0
    if index == TIED:  # as many per trajectory, all of which have the size |D|
        assert selected[0].sum(dim=-1).tolist() == expected.sum(dim=-1).tolist()
        assert bool(turning_points(rewards)[0][expected].all())
    else:
        assert torch.equal(selected[0], expected)
    theirs = torch.tensor(case["process_rewards"])
    torch.testing.assert_close(process_rewards(rewards, expected.unsqueeze(0))[0], theirs, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_later_step_whatever_the_order_of_the_members() -> None:
    """Under "trend" the turning points of one trajectory all have the size |D|."""
    rows = torch.tensor([[0.0, 0.3, 0.2, 0.5, 0.4, 0.9], [0.9, 0.9, 0.95, 0.7, 0.7, 0.6], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
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
    torch.testing.assert_close(process_rewards(E1, rule.selected(E1))[0], torch.tensor(rewards), rtol=0, atol=1e-6)
    advantages = [
        [-1.4080, -1.0848, 0.7544, 1.2967],
        [0.6034, 1.3259, -1.4124, -1.1346],
        [0.8046, -0.2411, 0.6581, -0.1621],
    ]
    torch.testing.assert_close(rule.assign(E1)[0], torch.tensor(advantages), rtol=0, atol=6e-5)
    uniform = torch.tensor([0.6034, -1.4080, 0.8046]).unsqueeze(-1).expand(3, 4)
    torch.testing.assert_close(Uniform().assign(E1)[0], uniform, rtol=0, atol=6e-5)


def test_balancing_by_the_aggregate_can_keep_another_turning_point() -> None:
    """In E1 |R_T - R_i| is 0.30 for a at step 2 and 0.12 for c at step 0, while |D| is 0.10 and 0.12."""
    assert TurningPoint(balance="aggregate").selected(E1)[0].nonzero().tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize("consistent", [True, False])
def test_a_table_of_zeros_and_ones_without_turning_points(consistent: bool) -> None:
    turns = turning_points(E2, consistent=consistent)
    assert not bool(turns.any())
    assert torch.equal(process_rewards(E2, turns), gains(E2))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_zero_one_rewards_never_have_a_consistent_turning_point(seed: int) -> None:
    assert not bool(turning_points((table(seed) > 0.5).double()).any())


def test_stepwise_worked_example() -> None:
    """Mean .065, std .06265; the published numbers divide by the std alone, the 1e-4 moves the third digit."""
    without_epsilon = [[2.1548, -0.2394, -1.5164, 0.2394], [-0.2394, -0.2394, 0.5587, -0.7183]]
    torch.testing.assert_close(StepwiseGain().assign(E4)[0], torch.tensor(without_epsilon), rtol=2e-3, atol=1e-4)
    exact = torch.tensor(without_epsilon) * 0.06265 / (0.06265 + 1e-4)
    torch.testing.assert_close(StepwiseGain().assign(E4)[0], exact, rtol=2e-4, atol=1e-4)


def test_the_consistent_first_step_rule() -> None:
    rewards = torch.tensor([[[0.0, 0.1, 0.3], [0.0, 0.4, 0.3], [0.0, 0.3, 0.3], [0.5, 0.3, 0.1]]])
    assert turning_points(rewards, consistent=True)[0, :, 0].tolist() == [True, False, False, True]
    assert turning_points(rewards, consistent=False)[0, :, 0].tolist() == [True, True, True, True]
    assert turning_points(rewards, consistent=False, first_step=False)[0, :, 0].tolist() == [False] * 4


def test_turning_points_of_noise_have_the_null_density() -> None:
    """I.i.d. rewards, 9 steps, both rules: 3.33 and 1.60 a trajectory; 5 standard errors plus rounding to 2 digits."""
    n = 20_000
    rewards = torch.randn(1, n, 10, generator=torch.Generator().manual_seed(0))
    for consistent, expected in ((False, 3.33), (True, 1.60)):
        counts = turning_points(rewards, consistent=consistent)[0].double().sum(dim=-1)
        assert float(counts.mean()) == pytest.approx(expected, abs=5 * float(counts.std()) / math.sqrt(n) + 0.005)


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
    size = reward_to_go(rewards) if by == "aggregate" else (rewards[..., -1:] - rewards[..., :1]).expand_as(turns)
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
    alone = torch.cat([rule.assign(row.unsqueeze(0)) for row in rewards])
    torch.testing.assert_close(rule.assign(rewards), alone)


def test_balancing_refuses_unknown_options() -> None:
    for options in ({"by": "size"}, {"scope": "world"}):
        with pytest.raises(ConfigError, match="is not allowed"):
            balanced(E1, turning_points(E1), **options)  # pyright: ignore[reportArgumentType]


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
    assert generalised_gains(rewards, lam=0.625, gamma=0.8)[0, 0].tolist() == pytest.approx([3.0, 4.0, 4.0])


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_gains_telescope(seed: int) -> None:
    """And with a shared start the row sums of the joint advantages are the final rewards' deviations over one std."""
    rewards = table(seed)
    rewards[..., 0] = rewards[:, :1, 0]
    torch.testing.assert_close(gains(rewards).sum(dim=-1), rewards[..., -1] - rewards[..., 0])
    sums = StepwiseGain(clamp=None).assign(rewards).sum(dim=-1)
    std = gains(rewards).std(dim=(1, 2), correction=0).unsqueeze(-1) + 1e-4
    final = rewards[..., -1]
    torch.testing.assert_close(sums, (final - final.mean(dim=-1, keepdim=True)) / std)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_without_turning_points_tp_is_per_step_stepwise(seed: int) -> None:
    rewards = table(seed).sort(dim=-1).values  # monotone, so at most the first step qualifies
    tp = TurningPoint(first_step=False).assign(rewards)
    torch.testing.assert_close(tp, StepwiseGain(normalise="step").assign(rewards))


def test_weights_of_one_are_uniform_credit() -> None:
    rewards = table(0)
    assert torch.equal(Weighted(weights=(1.0,) * STEPS).assign(rewards), Uniform().assign(rewards))


def test_noise_weights_have_mean_one_over_the_stochastic_steps() -> None:
    ratio = Weighted().assign(table(0), SCHEDULE) / Uniform().assign(table(0))
    torch.testing.assert_close(ratio[0, 0], torch.tensor([0.0, 2 / 3, 4 / 3, 0.0], dtype=torch.float64))


def test_batch_pool_shares_one_std() -> None:
    """With two prompts, one of ten times the range, group stds hide the difference and the pooled one keeps it."""
    rewards = table(5, prompts=1).repeat(2, 1, 1)
    rewards[1] *= 10
    for group, batch in (
        (StepwiseGain(clamp=None), StepwiseGain(pool="batch", clamp=None)),
        (Uniform(), Uniform(std="batch")),
    ):
        first, second = group.assign(rewards)
        torch.testing.assert_close(first, second, rtol=5e-3, atol=0)
        first, second = batch.assign(rewards)
        torch.testing.assert_close(10 * first, second)


# The contract, for every rule


@pytest.mark.parametrize("rule", RULES, ids=repr)
class TestContract:
    """What every rule promises."""

    def test_is_a_credit_assigner(self, rule: CreditAssigner) -> None:
        assert isinstance(rule, CreditAssigner)

    @given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-6, 1.0, 1e6]))
    @settings(max_examples=15, derandomize=True, deadline=None)
    def test_is_finite_and_of_the_right_shape(self, rule: CreditAssigner, seed: int, scale: float) -> None:
        rewards = (table(seed) * scale).float()
        advantages = check_advantages(rule.assign(rewards, SCHEDULE), rewards, "rule")
        assert advantages.dtype == torch.float32

    @given(seed=st.integers(0, 10_000), shift=st.floats(-100, 100))
    @settings(max_examples=15, derandomize=True, deadline=None)
    def test_ignores_a_constant_added_to_all_rewards(self, rule: CreditAssigner, seed: int, shift: float) -> None:
        rewards = table(seed)
        shifted = rule.assign(rewards + shift, SCHEDULE)
        torch.testing.assert_close(shifted, rule.assign(rewards, SCHEDULE), rtol=1e-8, atol=1e-8)

    @given(seed=st.integers(0, 10_000), order=st.permutations(range(5)))
    @settings(max_examples=15, derandomize=True, deadline=None)
    def test_follows_a_permutation_of_the_members(self, rule: CreditAssigner, seed: int, order: list[int]) -> None:
        rewards = table(seed)
        permuted = rule.assign(rewards[:, order], SCHEDULE)
        torch.testing.assert_close(permuted, rule.assign(rewards, SCHEDULE)[:, order])

    @pytest.mark.parametrize("value", [0.1, -3.3, 12345.678, 1e8 / 3, 1e30])
    def test_is_exactly_zero_for_a_group_of_equal_rewards(self, rule: CreditAssigner, value: float) -> None:
        rewards = table(1, members=7).float()
        rewards[1] = value
        advantages = rule.assign(rewards, SCHEDULE)
        assert bool((advantages[1] == 0).all())
        assert bool((rule.assign(rewards[1:2], SCHEDULE) == 0).all())

    def test_is_exactly_zero_for_a_group_of_one(self, rule: CreditAssigner) -> None:
        assert bool((rule.assign(table(2, members=1), SCHEDULE) == 0).all())

    def test_names_missing_nodes_and_the_probe_that_fills_them(self, rule: CreditAssigner) -> None:
        rewards = table(2)
        rewards[0, 1, -1] = torch.nan
        with pytest.raises(CreditError, match=rf"node 4 of 0\.\.4: roll out with the probe {type(rule.probe).__name__}"):
            rule.assign(rewards, SCHEDULE)

    def test_refuses_a_table_without_steps(self, rule: CreditAssigner) -> None:
        with pytest.raises(CreditError, match="2 or more nodes"):
            rule.assign(table(0)[..., :1], None)

    @pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off")
    @pytest.mark.parametrize(
        "wrong", [torch.rand(3, 5), torch.rand(3, 5, 5, 1), torch.zeros(3, 5, 5).long()], ids=["two", "four", "integers"]
    )
    def test_refuses_wrong_axes_at_the_door(self, rule: CreditAssigner, wrong: torch.Tensor) -> None:
        with pytest.raises(TypeCheckError):
            rule.assign(wrong, SCHEDULE)

    def test_does_not_change_its_input(self, rule: CreditAssigner) -> None:
        rewards = table(4)
        before = rewards.clone()
        rule.assign(rewards, SCHEDULE).add_(1.0)
        assert torch.equal(rewards, before)


@pytest.mark.parametrize("rule", [StepwiseGain(), TurningPoint()], ids=repr)
def test_rules_of_increments_need_every_node(rule: CreditAssigner) -> None:
    rewards = table(0)
    rewards[2, 0, 1] = torch.nan
    rewards[0, 0, 3] = torch.inf
    with pytest.raises(CreditError, match="at nodes 1, 3 of"):
        rule.assign(rewards, None)


def test_declared_probes() -> None:
    assert [rule.probe for rule in (Uniform(), Weighted(), StepwiseGain(), TurningPoint())] == [
        NoProbe(),
        NoProbe(),
        Substeps(5),
        Completion(),
    ]


def test_a_large_common_offset_costs_little_precision() -> None:
    """Float32 around 1000 resolves 6e-5; the normalised result must not be worse than that rounding."""
    exact = table(0) + 1000.0
    rounded = exact.float()
    for rule in (Uniform(), StepwiseGain()):
        torch.testing.assert_close(rule.assign(rounded), rule.assign(rounded.double()).float(), rtol=1e-5, atol=1e-5)


def test_scores_are_clamped() -> None:
    rewards = torch.zeros(1, 100, 2)
    rewards[0, 0, 1] = 1.0
    assert Uniform().assign(rewards)[0, 0, 0] == 5.0
    assert float(Uniform(clamp=None).assign(rewards)[0, 0, 0]) == pytest.approx(math.sqrt(99), rel=2e-3)
    assert Uniform(clamp=2.0).assign(rewards)[0, 0, 0] == 2.0


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_zscore_has_mean_zero_and_std_almost_one(seed: int) -> None:
    values = table(seed)
    assume(float(values.std(dim=1, correction=0).min()) > 0.05)
    scores = zscore(values, over=("member",), clamp=None)
    torch.testing.assert_close(scores.mean(dim=1), torch.zeros_like(scores[:, 0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(scores.std(dim=1, correction=0), torch.ones_like(scores[:, 0]), rtol=3e-3, atol=0)


# Refusals


@pytest.mark.parametrize(
    "build",
    [
        lambda: Uniform(std="world"),  # pyright: ignore[reportArgumentType]
        lambda: Uniform(clamp=0.0),
        lambda: Weighted(weights=()),
        lambda: Weighted(weights=(1.0, math.nan)),
        lambda: Weighted(weights="loud"),  # pyright: ignore[reportArgumentType]
        lambda: StepwiseGain(lam=1.5),
        lambda: StepwiseGain(gamma=-0.1),
        lambda: StepwiseGain(normalise="member"),  # pyright: ignore[reportArgumentType]
        lambda: StepwiseGain(pool="world"),  # pyright: ignore[reportArgumentType]
        lambda: TurningPoint(balance="size"),  # pyright: ignore[reportArgumentType]
        lambda: TurningPoint(balance_scope="world"),  # pyright: ignore[reportArgumentType]
        lambda: TurningPoint(normalise="member"),  # pyright: ignore[reportArgumentType]
        lambda: TurningPoint(clamp=math.inf),
        lambda: zscore(table(0), over=("node",)),
        lambda: zscore(table(0), over=()),
    ],
)
def test_bad_settings_are_refused(build) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        build()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (None, "needs a schedule with stds"),
        (uniform_schedule(STEPS), "needs a schedule with stds"),
        (replace(uniform_schedule(3), stds=torch.ones(3)), "schedule of 3 steps, but the table has 4"),
        (replace(uniform_schedule(STEPS), stds=torch.zeros(STEPS)), "every std of the schedule is 0"),
    ],
)
def test_noise_weights_need_stds(schedule: Schedule | None, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        Weighted().assign(table(0), schedule)


def test_fixed_weights_must_fit_the_table() -> None:
    with pytest.raises(CreditError, match="3 weights, but the table has 4 steps"):
        Weighted(weights=(1.0, 1.0, 1.0)).assign(table(0))


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([[1.0]], "a list, not a torch.Tensor"),
        (torch.zeros(3, 5, STEPS + 1), r"shape \(3, 5, 5\), not .* \(3, 5, 4\)"),
        (torch.zeros(3, 5, STEPS, dtype=torch.long), "dtype torch.int64"),
        (torch.zeros(3, 5, STEPS).index_fill(2, torch.tensor([1]), torch.nan), r"values that are not finite, .* \(0, 0, 1\)"),
    ],
)
def test_a_broken_rule_is_told_what_it_broke(advantages: object, message: str) -> None:
    with pytest.raises(CreditError, match=rf"^MyRule\.assign returned .*{message}"):
        check_advantages(advantages, table(0), "MyRule")
