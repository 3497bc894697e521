"""Checks of the lesson Your own credit rule: a repaired rule, reward to go, a biased
estimate, a robust rule, a rule with memory.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.protocols import Stateful
from flowrl.credit import gains, reward_to_go
from flowrl.probes import NoProbe
from flowrl_course import rule_checks as rules
from flowrl_course.checking import Unsolved, check, choice, close, expect, quiz, same
from flowrl_course.rule_checks import (
    SILENT,
    by_step,
    centred,
    centred_by_step,
    centred_to_go,
    joint,
)


@check("Exercise 1")
def check_mended(rule: Any) -> None:
    """`rule` is the class EstimateGain without its faults."""
    made = rules.make_rule(rule)
    rules.check_equal_values(made, SILENT)
    hints = {
        "declares_a_probe": "`probe` is a function, not a probe: write Tweedie(), with brackets",
        "reads_only_what_its_probe_fills": (
            "NoProbe() fills the last column only, and the rule reads all columns: use Tweedie()"
        ),
        "leaves_its_input_alone": (
            "the value table is changed: -= works in place. Other code reads the same table"
        ),
        "gives_a_silent_group_zero": SILENT,
        **rules.MASKED,
        "survives_extremes": (
            "advantages are not finite for a group of one or for equal values: divide by std + 1e-4"
        ),
    }
    rules.check_contract(made, hints)
    rules.check_one_step_probe(made)
    rules.check_shared_noise(made)

    def scaled(values: Tensor, std: Tensor, over: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return (values - values.mean(over, keepdim=True)) / (std + 1e-4)

    mistakes = {
        "every decision is normalised by itself: the mean and the std run over members and "
        "decisions together": (by_step),
        "the mean and the std run over the prompts too: a group is compared with itself only": (
            lambda g: scaled(g, g.std(unbiased=False))
        ),
        "the sign is wrong: the credit of a decision is V_{k+1} - V_k": lambda g: joint(-g),
        "the std divides by n - 1: use the population's, unbiased=False": lambda g: scaled(
            g, g.std((1, 2), keepdim=True), (1, 2)
        ),
    }
    rules.check_advantages(
        made,
        lambda table: joint(gains(table)),
        "the advantages are not the z-score over members and decisions of the gains V_{k+1} - V_k",
        {
            message: lambda table, wrong=wrong: wrong(gains(table))
            for message, wrong in mistakes.items()
        },
    )


def _std_of_centred(values: Tensor) -> Tensor:
    deviations = values - values.mean(1, keepdim=True)
    return deviations / (deviations.std((1, 2), keepdim=True, unbiased=False) + 1e-4)


@check("Exercise 2")
def check_to_go(rule: Any) -> None:
    """`rule` gives R - V_k, centred decision by decision, scaled by one std for the group."""
    made = rules.make_rule(rule)
    rules.check_contract(made, {"gives_a_silent_group_zero": SILENT, **rules.MASKED})
    rules.check_one_step_probe(made)
    rules.check_shared_noise(made)
    mistakes = {
        "this is R - V_{k+1}, what comes after the decision; its own gain belongs to it: R - V_k": (
            lambda table: centred_by_step(table[..., -1:] - table[..., 1:])
        ),
        "these are the gains again; the credit of a decision runs to the end: R - V_k": (
            lambda table: centred_by_step(gains(table))
        ),
        "the std is each decision's own, which inflates late ones: std_over=('member', "
        "'decision')": lambda table: by_step(reward_to_go(table)),
        "the mean runs over the decisions too, so that early ones get credit for being "
        "early: over=('member',)": lambda table: joint(reward_to_go(table)),
        "the std is taken after the mean was subtracted: use that of the values themselves, "
        "as zscore does": lambda table: _std_of_centred(reward_to_go(table)),
        "the sign is wrong: R - V_k": lambda table: -centred_to_go(table),
    }
    otherwise = (
        "the advantages are not the z-scores of R - V_k with the mean over members and the std over"
        " members and decisions"
    )
    rules.check_advantages(made, centred_to_go, otherwise, mistakes)


@check("Exercise 3")
def check_bias(answer: str) -> None:
    """`answer` names the rules whose signs a common error of one column changes."""
    letter = choice(answer, "abcd")
    expect(
        letter != "d",
        "an error that all members share cancels only in a mean over members: does every rule take"
        " that mean decision by decision?",
    )
    expect(
        letter == "b",
        "the reward-to-go of decision 5 has the same error for all members: subtract the mean of"
        " the decision",
    )


def _every_decision(values: Tensor, table: Tensor) -> Tensor:
    """`values` [prompt, member] at every decision."""
    return values[..., None].repeat(1, 1, table.shape[-1] - 1)


@check("Exercise 4")
def check_robust(rule: Any) -> None:
    """`rule` has the same credit at every decision, and agrees with uniform credit on the correct
    rewards although some rewards fail.
    """
    made = rules.make_rule(rule)
    ties = (
        "a group of equal rewards is not 0: equal rewards need equal credit (sorting gives them"
        " different ranks)"
    )
    hints = {
        "gives_a_silent_group_zero": ties,
        "treats_members_alike": ties,
        "pays_the_better_member": "the best member gets the lowest credit: reverse the sign",
        "reads_only_what_its_probe_fills": (
            "with NoProbe() all columns but the last are NaN: read values[..., -1]"
        ),
        **rules.MASKED,
    }
    rules.check_contract(made, hints)
    expect(
        isinstance(made.probe, NoProbe),
        "the probe costs network evaluations that no value of this rule needs: NoProbe()",
    )
    generator = torch.Generator().manual_seed(3)
    rewards = torch.rand(60, 12, generator=generator)
    failed = 5.0 * (torch.rand(60, 12, generator=generator) < 0.2)
    table = rewards[..., None].repeat(1, 1, rules.COUNT + 1)
    correct = by_step(_every_decision(rewards, table))
    table[..., :-1] = torch.nan  # as NoProbe() leaves them
    for rewarded, wanted, situation in ((rewards, 0.8, "no"), (rewards + failed, 0.55, "a fifth")):
        table[..., -1] = rewarded
        got = rules.advantages_of(made, table)
        expect(
            got.isfinite().all() and got.std() > 0,
            "the credit is nan or 0: with NoProbe() all columns but the last are NaN, so read"
            " values[..., -1]",
        )
        expect(
            same(got, got[..., :1].expand_as(got)),
            "the credit differs between decisions: repeat one number per sample",
        )
        found = float(torch.corrcoef(torch.stack([got.flatten(), correct.flatten()]))[0, 1])
        expect(
            found >= wanted,
            f"with {situation} failures the correlation is {found:.2f} instead of {wanted} or more:"
            " the size of an outlier must not enter the mean, the scale or the credit of the"
            " others, and their order must be kept",
        )


def _one_ruler(
    tables: list[Tensor],
    decay: float,
    late: bool = False,
    roots: bool = False,
    start: Tensor | None = None,
    over: tuple[int, ...] = (0, 1, 2),
    centre: Callable[[Tensor], Tensor] = centred,
    limit: float = 5.0,
) -> Tensor:
    """The last table's advantages, scaled by a root mean square `over` some axes, kept over all
    tables.

    `roots` averages roots instead of squares.
    """
    memory = start
    values, scale = torch.zeros(()), torch.ones(())
    for table in tables:
        values = centre(reward_to_go(table))
        squares = values.square().mean(over, keepdim=True)
        new = squares.sqrt() if roots else squares
        before, memory = memory, new if memory is None else decay * memory + (1 - decay) * new
        scale = before if late and before is not None else memory
        scale = scale if roots else scale.sqrt()
    return (values / (scale + 1e-4)).clamp(-limit, limit)


def _without_root(tables: list[Tensor]) -> Tensor:
    memory, values = None, torch.zeros(())
    for table in tables:
        values = centred(reward_to_go(table))
        new = values.square().mean()
        memory = new if memory is None else 0.9 * memory + 0.1 * new
    return (values / (memory + 1e-4)).clamp(-5, 5) if memory is not None else values


@check("Exercise 5")
def check_remembers(rule: Any) -> None:
    """`rule` scales R - V_k by a running root mean square, and its memory survives a checkpoint."""
    first = rules.make_rule(rule)
    expect(isinstance(first, Stateful), "a rule with memory has state_dict and load_state_dict")
    expect(
        len(first.state_dict()) == 0,
        "before the first table the memory is empty: state_dict() must be {}",
    )
    kept = (
        "after load_state_dict(state_dict()) the rule gives other numbers: is the memory in"
        " state_dict, as a tensor?"
    )
    rules.check_equal_values(first, "a table of equal values gives 0/0: add 1e-4 to the root")
    outside = "entries outside decisions.mask enter a mean: set them to nan, and use nanmean"
    by_group = (
        "each group has a scale of its own: take the mean of the squares over the whole table"
    )
    hints = {
        "keeps_its_memory": kept,
        "treats_prompts_alike": by_group,  # a memory by the place of the group
        "gives_a_silent_group_zero": "centre over the members before you divide",
        **dict.fromkeys(rules.MASKED, outside),
    }
    rules.check_contract(first, hints)
    rules.check_one_step_probe(first)
    rules.check_shared_noise(first)
    tables = [
        table * factor for table, factor in zip(rules.value_tables(), (1.0, 3.0, 1.0), strict=True)
    ]
    got = [rules.advantages_of(first, table) for table in tables][-1]
    expect(bool(first.state_dict()), f"{kept} state_dict() is empty after three tables")
    mistakes = {
        "this has no memory: the scale is that of the present table alone": _one_ruler(
            tables[-1:], 0.9
        ),
        "the weights of the average are swapped: decay belongs to the memory": _one_ruler(
            tables, 0.1
        ),
        "the table is scaled by the tables before it: add its own squares first": _one_ruler(
            tables, 0.9, late=True
        ),
        "this averages roots: average the squares, and take the root at the end": _one_ruler(
            tables, 0.9, roots=True
        ),
        by_group: _one_ruler(tables, 0.9, over=(1, 2)),
        "each decision has a scale of its own: one number for the whole table": _one_ruler(
            tables, 0.9, over=(0, 1)
        ),
        "the values are not centred: subtract the mean over the members, decision by decision": (
            _one_ruler(tables, 0.9, centre=lambda values: values)
        ),
        "the mean runs over the decisions too: centre over the members, decision by decision": (
            _one_ruler(
                tables, 0.9, centre=lambda values: values - values.mean((1, 2), keepdim=True)
            )
        ),
        "the root of m is missing": _without_root(tables),
        "the memory starts from 0: at the first table it is that table's mean square": _one_ruler(
            tables, 0.9, start=torch.zeros(())
        ),
        "this is one std for each group (exercise 2), without memory": centred_to_go(tables[-1]),
    }
    otherwise = (
        "the third table's advantages are not the centred R - V_k in units of the running scale"
    )
    close(got, _one_ruler(tables, 0.9), otherwise, mistakes, 2e-3)
    for size, where in ((100.0, "above"), (-100.0, "below")):
        outlier = tables[0].clone()
        outlier[0, 0, -1] += size
        clamped = same(
            rules.advantages_of(copy.deepcopy(first), outlier),
            _one_ruler([*tables, outlier], 0.9),
            2e-3,
        )
        expect(
            clamped,
            f"with one reward far {where} all others advantages are beyond 5: clamp them to ±5",
        )
    if inspect.isclass(rule):
        again = rules.make_rule(rule)
        again.load_state_dict(first.state_dict())
        for made in (again, first):
            expect(
                same(
                    rules.advantages_of(made, tables[0]),
                    _one_ruler([*tables, tables[0]], 0.9),
                    2e-3,
                ),
                kept,
            )
        _check_memory_options(rule, tables)


def _check_memory_options(rule: Any, tables: list[Tensor]) -> None:
    """An empty memory can be loaded, and `decay` decides how long memory lasts."""
    fresh = rules.make_rule(rule)
    try:
        fresh.load_state_dict(fresh.state_dict())
    except Exception as error:
        empty = (
            "the state of a rule that has seen no table is empty, and load_state_dict must"
            " accept it"
        )
        raise Unsolved(f"{empty}; yours raised {type(error).__name__}") from error
    used = rules.make_rule(rule)
    rules.advantages_of(used, tables[0])
    used.load_state_dict({})
    expect(len(used.state_dict()) == 0, "loading an empty state must empty the memory")
    small = 1e-3 * tables[0]
    expect(
        same(rules.advantages_of(copy.deepcopy(fresh), small), _one_ruler([small], 0.9), 2e-3),
        "values of about 0.001 are divided by another scale: it is the root plus 1e-4",
    )
    forgetful = copy.deepcopy(fresh)
    if hasattr(forgetful, "decay"):
        forgetful.decay = 0.0
        got = [rules.advantages_of(forgetful, table) for table in tables][-1]
        fixed = (
            "with decay = 0 the memory must hold the present table alone: is 0.9 written into the"
            " rule?"
        )
        expect(same(got, _one_ruler(tables, 0.0), 2e-3), fixed)


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "a silent 0 would hide the mistake; columns that no probe fills have no number",
            "c": "the table is complete before assign is called; only the probe decides",
        },
    ),
    (
        "c",
        {
            "a": "the mask changes numbers: compute a mean with and without an invalid sample",
            "b": "advantages of 0 already prevent that; look at the rule's own statistics",
        },
    ),
    (
        "a",
        {
            "b": "a gain contains two values, so each value is part of two gains",
            "c": "later gains do not contain this value; they are differences of later values",
        },
    ),
    (
        "c",
        {
            "a": "two seeds and one setting: the difference may be chance or the setting",
            "b": "no evidence of a difference is not evidence of equality",
        },
    ),
    (
        "b",
        {
            "a": "this holds with one scale for all tables; Z divides by the group's own scale",
            "c": "the numerator and the scale shrink by the same factor",
        },
    ),
)
