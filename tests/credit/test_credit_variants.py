"""Ablations and controls of the credit rules: by hand, as reductions to one another, and as
properties.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core.errors import CreditError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.prompt import Prompt
from flowrl.core.protocols import CreditAssigner
from flowrl.credit import (
    GDPO,
    MovingAverageGain,
    StepwiseGain,
    TurningPoint,
    Uniform,
    balanced,
    credit_of,
    example,
    gains,
    process_rewards,
    reward_to_go,
    turning_points,
    zscore,
)
from flowrl.probes import Completion, NoProbe, Tweedie

seeds = st.integers(0, 10_000)


def table(seed: int, prompts: int = 3, members: int = 6, columns: int = 11) -> torch.Tensor:
    return torch.rand(prompts, members, columns, generator=torch.Generator().manual_seed(seed))


def credit(rule: CreditAssigner, values: torch.Tensor) -> torch.Tensor:
    """Advantages with decisions that are all drawn, trained and valid."""
    return rule.assign(values, Decisions.like(values))


def of_parts(rule: GDPO, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Advantages of a reward with these components."""
    values = next(iter(parts.values()))
    return credit_of(rule, example(values, Completion()).experience(parts=parts)).advantages


# Turning points


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_aggregating_at_every_step_is_lambda_one(seed: int) -> None:
    rewards = table(seed)
    everywhere = torch.ones_like(gains(rewards), dtype=torch.bool)
    lam_one = credit(StepwiseGain(lam=1.0, normalise="step"), rewards)
    torch.testing.assert_close(
        zscore(process_rewards(rewards, everywhere), over=("member",)), lam_one
    )
    torch.testing.assert_close(zscore(reward_to_go(rewards), over=("member",)), lam_one)


@given(seeds, st.sampled_from(["joint", "step"]), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_one_step_from_shared_noise_is_uniform_credit(seed: int, normalise, lam: float) -> None:
    """With a single step and R_0 shared by the group, the gain differs from R_T by a constant."""
    rewards = table(seed, columns=2)
    rewards[..., 0] = rewards[:, :1, 0]
    uniform = credit(Uniform(), rewards)
    torch.testing.assert_close(
        credit(StepwiseGain(normalise=normalise, lam=lam), rewards), uniform, atol=2e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        credit(TurningPoint(normalise=normalise), rewards), uniform, atol=2e-5, rtol=1e-4
    )


def test_adding_instead_of_replacing() -> None:
    rewards = torch.tensor([[[0.0, 1.0, 0.5, 2.0]]])
    selected = torch.tensor([[[True, False, False]]])
    assert process_rewards(rewards, selected).tolist() == [[[2.0, -0.5, 1.5]]]
    assert process_rewards(rewards, selected, add=True).tolist() == [[[3.0, -0.5, 1.5]]]
    rewards = table(5)
    added = credit(TurningPoint(combine="add"), rewards)
    assert not torch.allclose(added, credit(TurningPoint(), rewards))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_balancing_leaves_entries_without_size_out_of_the_count(sign: float) -> None:
    """One turning point upwards, two downwards and one of size 0: the larger of the two goes with
    the one; size 0 remains.
    """
    last = torch.tensor([[3.0, -2.0, -1.0, 0.0]]) * sign
    rewards = torch.stack([torch.zeros(1, 4), last], dim=-1)
    turns = torch.ones(1, 4, 1, dtype=torch.bool)
    assert balanced(rewards, turns)[0, :, 0].tolist() == [True, True, False, True]


# A baseline with memory


def test_moving_average_by_hand() -> None:
    rule = MovingAverageGain(decay=0.5, clamp=None)
    first = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 3.0, 4.0]]])  # gains (1, 0), (3, 1): mean (2, .5)
    got = credit(rule, first)
    centred = torch.tensor([[[-1.0, -0.5], [1.0, 0.5]]])
    torch.testing.assert_close(got, centred / (math.sqrt(2.5 / 4) + 1e-4))
    # gains (4, .5): mean (4, .5); baseline (2, .5)
    second = torch.tensor([[[0.0, 4.0, 4.5], [0.0, 4.0, 4.5]]])
    torch.testing.assert_close(credit(rule, second), torch.tensor([[[1.0, -1.0]] * 2]) / (1 + 1e-4))
    torch.testing.assert_close(rule.state_dict()["baseline"], torch.tensor([3.0, 0.5]).double())


def test_moving_average_goes_on_from_its_state() -> None:
    tables = [table(s) for s in range(4)]
    whole, first, second = MovingAverageGain(), MovingAverageGain(), MovingAverageGain()
    expected = [credit(whole, t) for t in tables]
    got = [credit(first, t) for t in tables[:2]]
    second.load_state_dict(first.state_dict())
    got += [credit(second, t) for t in tables[2:]]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert MovingAverageGain().state_dict() == {}


def test_a_silent_group_gets_zero_whatever_the_baseline() -> None:
    rule = MovingAverageGain()
    credit(rule, table(0))
    quiet = table(1)
    quiet[1] = 0.3
    got = credit(rule, quiet)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert bool((got[0] != 0).any())


def test_a_baseline_belongs_to_a_time() -> None:
    """A window moves by one decision: the shared time keeps its baseline, a new one starts with its
    mean gain.
    """
    rule, values = MovingAverageGain(decay=0.5), table(0, columns=3)
    first = Decisions.like(values, times=(0.9, 0.6))
    rule.assign(values, first)
    assert rule.state_dict()["times"].tolist() == pytest.approx([0.9, 0.6])
    moved, mean = table(1, columns=3), gains(values).mean((0, 1))
    new = gains(moved).mean((0, 1))
    got = rule.assign(moved, Decisions.like(moved, times=(0.6, 0.3)))
    expected = zscore(gains(moved) - torch.stack([mean[1], new[1]]), over=("member", "decision"))
    torch.testing.assert_close(got, expected)
    assert rule.state_dict()["times"].tolist() == pytest.approx([0.9, 0.6, 0.3])
    kept = torch.stack([mean[0], (mean[1] + new[0]) / 2, new[1]]).double()
    torch.testing.assert_close(rule.state_dict()["baseline"], kept)


def test_a_baseline_is_the_mean_over_the_mask() -> None:
    values, rule = table(2, columns=3), MovingAverageGain()
    mask = torch.rand(3, 6, 2, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 1] = False
    rule.assign(
        values.masked_fill(~mask.any(-1, keepdim=True), torch.nan),
        replace(Decisions.like(values), mask=mask),
    )
    expected = gains(values)[..., 0][mask[..., 0]].mean()
    assert rule.state_dict()["times"].tolist() == [1.0]
    torch.testing.assert_close(rule.state_dict()["baseline"], expected.double()[None])


# Several rewards


def test_gdpo_by_hand() -> None:
    """Two rewards that order the members oppositely: they cancel at equal weight, whatever their
    scales.
    """
    a = torch.tensor([[0.0, 1.0, 2.0]])
    b = torch.tensor([[20.0, 10.0, 0.0]])
    nodes = torch.full((1, 3, 4), float("nan"))
    parts = {name: torch.cat([nodes, v[..., None]], dim=-1) for name, v in (("a", a), ("b", b))}
    z = (a - 1) / (math.sqrt(2 / 3) + 1e-4)
    even = of_parts(GDPO(batch=False), parts)
    torch.testing.assert_close(even, torch.zeros_like(even), atol=2e-4, rtol=0)
    double = of_parts(GDPO(batch=False, weights={"a": 2.0}), parts)
    torch.testing.assert_close(double[..., 0], z, atol=2e-4, rtol=1e-3)
    scaled = of_parts(GDPO(weights={"a": 2.0}), parts)
    torch.testing.assert_close(scaled, double / (double.std(unbiased=False) + 1e-4))
    summed = {"a": 0.01 * parts["a"] + parts["b"]}
    assert float((credit(Uniform(), summed["a"])[0, 0, 0] - 1.2245).abs()) < 1e-3  # b decides alone


class Halved(Uniform):
    """Its weights are 1/2 where the reward is above 1, and 1 elsewhere."""

    def credit(self, experience: Experience) -> Credit:
        advantages = self.assign(experience.values, experience.decisions)
        above = (experience.values[..., -1:] > 1).expand_as(advantages)
        return Credit(advantages, torch.where(above, 0.5, 1.0))


def test_gdpo_keeps_the_weights_of_its_rule() -> None:
    values = torch.rand(1, 3, 5) * 0.5
    first, second = values.clone(), values.clone()
    first[0, 0, -1] = second[0, 2, -1] = 2.0
    decisions = Decisions.like(values)
    valid = torch.ones(1, 3, dtype=torch.bool)
    record = Experience(
        [Prompt("a")], first + second, decisions, valid, {"first": first, "second": second}
    )
    found = GDPO(Halved()).credit(record)
    assert found.weights is not None and found.weights[0, :, 0].tolist() == [0.5, 1.0, 0.5]


def test_gdpo_of_one_reward_is_its_rule() -> None:
    rewards = table(3)
    assert torch.equal(credit(GDPO(Uniform(), batch=False), rewards), credit(Uniform(), rewards))
    assert GDPO(StepwiseGain(probe=Tweedie())).probe == Tweedie()
    assert GDPO().probe == NoProbe()
    assert GDPO(StepwiseGain()).shared_noise
    assert not GDPO().shared_noise
    quiet = torch.cat([rewards, torch.full_like(rewards[:1], 0.2)])
    assert float(credit(GDPO(), quiet)[-1].abs().max()) == 0.0


def test_gdpo_names_weights_without_a_reward() -> None:
    with pytest.raises(CreditError, match=r"names rewards look; there are a"):
        of_parts(GDPO(weights={"look": 1.0}), {"a": table(0)})


def test_the_sum_of_several_rewards_is_divided_by_its_std_over_the_mask() -> None:
    values = table(4)
    mask = torch.rand(3, 6, 10, generator=torch.Generator().manual_seed(1)) > 0.3
    got = GDPO(StepwiseGain(pool="batch")).assign(
        values, replace(Decisions.like(values), mask=mask)
    )
    assert float(got[mask].std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_a_step_that_changes_nothing_is_no_turning_point_under_either_rule() -> None:
    """After a fall, a step of difference 0: neither it nor the rise after it turns."""
    flat = torch.tensor([[[0.5, 0.4, 0.4, 0.6]]])
    for consistent in (True, False):
        assert turning_points(flat, consistent=consistent).tolist() == [[[False, False, False]]]
