"""Ablations and controls of the credit rules: by hand, as reductions to one another, and as properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.credit import (
    GDPO,
    MovingAverageGain,
    StepwiseGain,
    TurningPoint,
    Uniform,
    balanced,
    clear_swings,
    gains,
    large_aggregates,
    process_rewards,
    random_steps,
    reward_to_go,
    turning_points,
    zscore,
)
from flowrl.errors import ConfigError, CreditError
from flowrl.probes import Completion, NoProbe, Substeps, Tweedie
from flowrl.registry import build

seeds = st.integers(0, 10_000)


def table(seed: int, prompts: int = 3, members: int = 6, nodes: int = 11) -> torch.Tensor:
    return torch.rand(prompts, members, nodes, generator=torch.Generator().manual_seed(seed))


# Turning points: filters, controls, combinations


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_random_steps_keep_the_density_of_every_trajectory_and_nothing_else(seed: int) -> None:
    rewards = table(seed)
    turns = turning_points(rewards)
    moved = random_steps(rewards, turns, seed=seed)
    assert torch.equal(moved.sum(-1), turns.sum(-1))
    order = torch.randperm(rewards.shape[1], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(random_steps(rewards[:, order], turns[:, order], seed), moved[:, order])
    assert torch.equal(random_steps(rewards + 0.5, turns, seed), moved)


def test_random_steps_fall_on_every_step_alike() -> None:
    """4000 trajectories, one step each: counts are binomial; |z| < 5 per step holds but for 6e-6 of all seeds."""
    rewards = table(1, 20, 200)
    one = torch.zeros(20, 200, 10, dtype=torch.bool)
    one[..., 0] = True
    counts = random_steps(rewards, one).flatten(0, 1).sum(0).double()
    n, p = 4000, 0.1
    assert float(((counts - n * p).abs() / math.sqrt(n * p * (1 - p))).max()) < 5


def test_another_seed_chooses_other_steps() -> None:
    rewards = table(2)
    turns = turning_points(rewards)
    assert not torch.equal(random_steps(rewards, turns, 0), random_steps(rewards, turns, 1))


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_without_a_place_turning_points_are_dense_gains(seed: int) -> None:
    rewards = table(seed)
    dense = build("credit", "dense-gain")
    assert dense.probe == Completion()
    torch.testing.assert_close(TurningPoint(where="none").assign(rewards), dense.assign(rewards))


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_aggregating_at_every_step_is_lambda_one(seed: int) -> None:
    rewards = table(seed)
    everywhere = torch.ones_like(gains(rewards), dtype=torch.bool)
    lam_one = StepwiseGain(lam=1.0, normalise="step").assign(rewards)
    torch.testing.assert_close(zscore(process_rewards(rewards, everywhere), over=("member",)), lam_one)
    torch.testing.assert_close(zscore(reward_to_go(rewards), over=("member",)), lam_one)


@given(seeds, st.sampled_from(["joint", "step"]), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_one_step_from_shared_noise_is_uniform_credit(seed: int, normalise, lam: float) -> None:
    """With a single step and R_0 shared by the group, the gain differs from R_T by a constant."""
    rewards = table(seed, nodes=2)
    rewards[..., 0] = rewards[:, :1, 0]
    uniform = Uniform().assign(rewards)
    torch.testing.assert_close(StepwiseGain(normalise=normalise, lam=lam).assign(rewards), uniform, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(TurningPoint(normalise=normalise).assign(rewards), uniform, atol=2e-5, rtol=1e-4)


def test_filters_by_hand() -> None:
    rewards = torch.tensor([[[0.5, 0.4, 0.3, 0.45, 0.6], [0.5, 0.6, 0.7, 0.55, 0.4], [0.5, 0.55, 0.52, 0.65, 0.62]]])
    turns = turning_points(rewards)
    assert turns.nonzero().tolist() == [[0, 0, 2], [0, 1, 2], [0, 2, 0]]
    assert (turns & large_aggregates(rewards, 0.2)).nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    # std of d_0 over the members is 0.0850, of d_2 0.1370: c's first step (0.05) is small against it, the others' (0.15) are not
    assert (turns & clear_swings(rewards, 1.0)).nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    assert (turns & clear_swings(rewards, 0.5)).sum() == 3
    assert (turns & clear_swings(rewards, 1.1)).sum() == 0
    rule = TurningPoint(balance=None, min_size=0.2)
    assert rule.selected(rewards).sum() == 2
    assert TurningPoint(balance=None, confidence=1.1).selected(rewards).sum() == 0


def test_adding_instead_of_replacing() -> None:
    rewards = torch.tensor([[[0.0, 1.0, 0.5, 2.0]]])
    selected = torch.tensor([[[True, False, False]]])
    assert process_rewards(rewards, selected).tolist() == [[[2.0, -0.5, 1.5]]]
    assert process_rewards(rewards, selected, add=True).tolist() == [[[3.0, -0.5, 1.5]]]
    rewards = table(5)
    added = TurningPoint(combine="add").assign(rewards)
    assert not torch.allclose(added, TurningPoint().assign(rewards))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_balancing_leaves_entries_without_size_out_of_the_count(sign: float) -> None:
    """One turning point upwards, two downwards and one of size 0: the larger of the two goes with the one; size 0 remains."""
    last = torch.tensor([[3.0, -2.0, -1.0, 0.0]]) * sign
    rewards = torch.stack([torch.zeros(1, 4), last], dim=-1)
    turns = torch.ones(1, 4, 1, dtype=torch.bool)
    assert balanced(rewards, turns)[0, :, 0].tolist() == [True, True, False, True]


# A baseline with memory


def test_moving_average_by_hand() -> None:
    rule = MovingAverageGain(decay=0.5, clamp=None)
    first = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 3.0, 4.0]]])  # gains (1, 0), (3, 1): mean (2, .5)
    got = rule.assign(first)
    centred = torch.tensor([[[-1.0, -0.5], [1.0, 0.5]]])
    torch.testing.assert_close(got, centred / (math.sqrt(2.5 / 4) + 1e-4))
    second = torch.tensor([[[0.0, 4.0, 4.5], [0.0, 4.0, 4.5]]])  # gains (4, .5): mean (4, .5); baseline (2, .5)
    torch.testing.assert_close(rule.assign(second), torch.tensor([[[1.0, -1.0]] * 2]) / (1 + 1e-4))
    torch.testing.assert_close(rule.state_dict()["baseline"], torch.tensor([3.0, 0.5]))


def test_moving_average_goes_on_from_its_state() -> None:
    tables = [table(s) for s in range(4)]
    whole, first, second = MovingAverageGain(), MovingAverageGain(), MovingAverageGain()
    expected = [whole.assign(t) for t in tables]
    got = [first.assign(t) for t in tables[:2]]
    second.load_state_dict(first.state_dict())
    got += [second.assign(t) for t in tables[2:]]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert MovingAverageGain().state_dict() == {}


def test_a_silent_group_gets_zero_whatever_the_baseline() -> None:
    rule = MovingAverageGain()
    rule.assign(table(0))
    quiet = table(1)
    quiet[1] = 0.3
    got = rule.assign(quiet)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert bool((got[0] != 0).any())


def test_a_baseline_belongs_to_a_number_of_steps() -> None:
    rule = MovingAverageGain()
    rule.assign(table(0))
    with pytest.raises(CreditError, match="baseline of 10 steps, but the table has 4"):
        rule.assign(table(0, nodes=5))


# Several rewards


def test_gdpo_by_hand() -> None:
    """Two rewards that order the members oppositely: they cancel at equal weight, whatever their scales."""
    a = torch.tensor([[0.0, 1.0, 2.0]])
    b = torch.tensor([[20.0, 10.0, 0.0]])
    nodes = torch.full((1, 3, 4), float("nan"))
    parts = {name: torch.cat([nodes, v[..., None]], dim=-1) for name, v in (("a", a), ("b", b))}
    z = (a - 1) / (math.sqrt(2 / 3) + 1e-4)
    even = GDPO(batch=False).assign_parts(parts)
    torch.testing.assert_close(even, torch.zeros_like(even), atol=2e-4, rtol=0)
    double = GDPO(batch=False, weights={"a": 2.0}).assign_parts(parts)
    torch.testing.assert_close(double[..., 0], z, atol=2e-4, rtol=1e-3)
    scaled = GDPO(weights={"a": 2.0}).assign_parts(parts)
    torch.testing.assert_close(scaled, double / (double.std(unbiased=False) + 1e-4))
    summed = {"a": 0.01 * parts["a"] + parts["b"]}
    assert float((Uniform().assign(summed["a"])[0, 0, 0] - 1.2245).abs()) < 1e-3  # b decides alone


@given(seeds, st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_gdpo_does_not_care_for_the_scale_of_a_reward(seed: int, scale: float) -> None:
    a, b = table(seed), table(seed + 1)
    rule = GDPO(StepwiseGain())
    torch.testing.assert_close(
        rule.assign_parts({"a": a, "b": b}), rule.assign_parts({"a": a, "b": scale * b}), atol=0.2 / scale + 1e-3, rtol=1e-2
    )


def test_gdpo_of_one_reward_is_its_rule() -> None:
    rewards = table(3)
    assert torch.equal(GDPO(Uniform(), batch=False).assign(rewards), Uniform().assign(rewards))
    assert GDPO(StepwiseGain(probe=Tweedie())).probe == Tweedie()
    assert GDPO().probe == NoProbe()
    assert GDPO(StepwiseGain()).shared_noise
    assert not GDPO().shared_noise
    quiet = torch.cat([rewards, torch.full_like(rewards[:1], 0.2)])
    assert float(GDPO().assign(quiet)[-1].abs().max()) == 0.0


def test_gdpo_names_weights_without_a_reward() -> None:
    with pytest.raises(CreditError, match=r"names rewards look; there are a"):
        GDPO(weights={"look": 1.0}).assign_parts({"a": table(0)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TurningPoint(where="there"), "TurningPoint.where"),  # pyright: ignore[reportArgumentType]
        (lambda: TurningPoint(combine="mix"), "TurningPoint.combine"),  # pyright: ignore[reportArgumentType]
        (lambda: TurningPoint(min_size=-1.0), "TurningPoint.min_size"),
        (lambda: TurningPoint(confidence=math.nan), "TurningPoint.confidence"),
        (lambda: MovingAverageGain(decay=1.0), "MovingAverageGain.decay"),
        (lambda: MovingAverageGain(clamp=0.0), "MovingAverageGain.clamp"),
        (lambda: GDPO(rule="uniform"), "GDPO.rule"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_settings_are_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_substeps_of_the_paper_are_one_option() -> None:
    for count in (1, 2, 5, 8):
        assert build("credit", f'stepwise-gain(probe="substeps:{count}")').probe == Substeps(count)
    assert build("credit", "stepwise-gain(probe=completion)").probe == Completion()


def test_a_step_that_changes_nothing_is_no_turning_point_under_either_rule() -> None:
    """After a fall, a step of difference 0: neither it nor the rise after it turns."""
    flat = torch.tensor([[[0.5, 0.4, 0.4, 0.6]]])
    for consistent in (True, False):
        assert turning_points(flat, consistent=consistent).tolist() == [[[False, False, False]]]
