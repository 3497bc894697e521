"""The value tracker: closed forms of its statistics, prompts by their text, and its memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.core.types import Prompt
from flowrl.credit import GDPO, ValueTracker, Weighted, credit_of, example
from flowrl.credit.memory import MovingAverageGain, text_key
from flowrl.methods import flow_grpo, try_credit
from flowrl.probes import NoProbe

FOX, CAR = Prompt("a fox"), Prompt("a car")


def table(*groups):
    """Values [prompt, member, decision+1] of two decisions, of which only the final rewards are
    known; NaN: invalid.
    """
    final = torch.tensor(groups, dtype=torch.float64)
    return torch.cat(
        [torch.full((*final.shape, 2), float("nan"), dtype=torch.float64), final[..., None]], -1
    )


def visit(rule, values, prompts):
    """Advantages [prompt, member, decision] of these prompts."""
    decisions = Decisions.like(values)
    decisions = replace(decisions, mask=decisions.mask & values[..., -1:].isfinite())
    record = example(values, NoProbe(), decisions)
    return credit_of(rule, replace(record, prompts=prompts)).advantages


def credit(rule, groups, prompts):
    """Advantages [prompt, member] of one decision; both have the same."""
    advantages = visit(rule, table(*groups), prompts)
    assert torch.equal(advantages[..., 0], advantages[..., 1])
    return advantages[..., 0]


def tracked(rule, prompt):
    return rule.memory[text_key(prompt.text)]


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_after_n_visits_mean_and_variance_have_their_closed_form(visits, decay):
    rule = ValueTracker(decay=decay, clamp=None)
    for rewards in visits:
        visit(rule, table(rewards), [FOX])
    rewards = torch.tensor(visits, dtype=torch.float64)
    ages = torch.arange(len(visits) - 1, -1, -1, dtype=torch.float64)
    weights = (decay**ages)[:, None].expand_as(rewards)
    mean = (weights * rewards).sum() / weights.sum()
    variance = (weights * (rewards - mean) ** 2).sum() / weights.sum()
    wanted = [float(weights.sum()), float(mean), float(variance)]
    assert tracked(rule, FOX) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_advantages_by_hand():
    rule = ValueTracker(decay=0.5, clamp=None)
    assert credit(rule, [[1.0, 3.0]], [FOX])[0].tolist() == pytest.approx([-1 / 1.0001, 1 / 1.0001])
    # weights 1/2, 1/2, 1, 1: the mean of 1, 3, 4, 4 is 10/3, the variance (5.444/2 + .111/2)/3 + 2
    # (.444)/3
    variance = (0.5 * (7 / 3) ** 2 + 0.5 * (1 / 3) ** 2 + 2 * (2 / 3) ** 2) / 3
    assert credit(rule, [[4.0, 4.0]], [FOX])[0].tolist() == pytest.approx(
        [(2 / 3) / (variance**0.5 + 1e-4)] * 2
    )


def test_the_scale_of_a_batch_is_the_root_mean_square_of_all_deviations():
    rule = ValueTracker(std="batch", clamp=None)
    advantages = credit(rule, [[0.0, 2.0], [5.0, 11.0]], [FOX, CAR])
    scale = ((1 + 1 + 9 + 9) / 4) ** 0.5 + 1e-4
    expected = torch.tensor([[-1.0, 1.0], [-3.0, 3.0]], dtype=torch.float64) / scale
    torch.testing.assert_close(advantages, expected)


def test_members_outside_the_mask_are_not_remembered():
    nan, rule, other = float("nan"), ValueTracker(std="batch"), ValueTracker(std="batch")
    advantages = credit(rule, [[0.1, nan, 0.5], [nan, 0.7, 0.8]], [FOX, CAR])
    expected = credit(other, [[0.1, 0.5], [0.7, 0.8]], [FOX, CAR])
    torch.testing.assert_close(advantages[advantages != 0], expected.flatten())
    assert rule.memory == other.memory
    for prompt in (FOX, Prompt("unseen")):
        assert not credit(rule, [[nan, nan]], [prompt]).any() and rule.memory == other.memory


def test_equal_prompts_of_one_table_are_one_visit():
    split, joined = ValueTracker(), ValueTracker()
    for rewards in ([[0.1, 0.5], [0.3, 0.4]], [[0.6, 0.5], [0.2, 0.9]]):
        twice = credit(split, rewards, [FOX, FOX])
        once = credit(joined, [rewards[0] + rewards[1]], [FOX])
        assert torch.equal(twice.flatten(), once.flatten())
    assert tracked(split, FOX) == tracked(joined, FOX)


def test_a_trial_is_not_remembered():
    rule, values = ValueTracker(), table((1.0, 2.0), (3.0, 5.0))
    rule.assign(values, Decisions.like(values))
    try_credit(replace(flow_grpo(), credit=rule), torch.full((4,), 0.5), 3)
    assert not rule.memory


def test_rules_around_a_rule_refuse_one_with_a_memory():
    for wrapper in (GDPO, lambda rule: Weighted(rule=rule)):
        for rule in (ValueTracker(), MovingAverageGain()):
            with pytest.raises(ConfigError, match=r"\.rule = .* a rule without memory"):
                wrapper(rule)
