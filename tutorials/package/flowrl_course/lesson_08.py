"""Checks of lesson 8, a credit rule of one's own: a rule mended, values by continuation, reward to go, three projects."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import gains, reward_to_go, zscore
from flowrl.testing import check_credit
from flowrl.testing.credit import schedule_for
from flowrl.types import NoProbe, Probe, Substeps
from flowrl_course.checking import Unsolved, answered, check, close, expect, same, tensor

Answer = Callable[..., Any]


def _tables(count: int = 3) -> list[Tensor]:
    """Reward tables [prompt, member, node] whose groups differ in level and spread, as those of different prompts do."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(40 + seed)
        level = torch.rand(4, 1, 1, generator=generator)
        spread = 0.05 + 0.3 * torch.rand(4, 1, 1, generator=generator)
        walk = torch.randn(4, 5, 7, generator=generator).cumsum(-1)
        found.append(level + spread * walk)
    return found


def _made(rule: Any) -> Any:
    """A rule from a class or an object; `Unsolved` where its `assign` still has the dots."""
    answered(rule, "the rule")
    made: Any = rule() if inspect.isclass(rule) else rule
    expect(callable(getattr(made, "assign", None)), "the rule has no method assign(rewards, schedule)")
    try:
        found = copy.deepcopy(made).assign(_tables(1)[0], schedule_for(6))
    except Exception:  # the contract suite says more about it
        return made
    answered(found, "assign")
    return made


def _silent_but_for_rounding(rule: Any) -> bool:
    """Whether a group of equal rewards gets 0 up to what the group's mean is rounded by."""
    table = _tables(1)[0]
    table[1] = 0.3
    return float(_advantages(copy.deepcopy(rule), table)[1].abs().max()) < 1e-2


def _keeps(rule: Any, hints: Mapping[str, str], rounding: bool = False) -> None:
    """Raise `Unsolved` for the first promise of `flowrl.testing` that is broken, with a hint of ours where there is one.

    With `rounding`, a group of equal rewards may get what rounding leaves, where the promise wants exactly 0.
    """
    for finding in check_credit(rule):
        if rounding and finding.promise == "gives_a_silent_group_zero" and not finding.ok and _silent_but_for_rounding(rule):
            continue
        told = finding.message.rpartition("): ")[2] or finding.message
        expect(finding.ok, hints.get(finding.promise, f"the promise {finding.promise!r} is broken: {told}"))


def _advantages(rule: Any, table: Tensor) -> Tensor:
    prompts, members, nodes = table.shape
    got = rule.assign(table.clone(), schedule_for(nodes - 1))
    return tensor(got, (prompts, members, nodes - 1), "the advantages")


def _compare(rule: Any, wanted: Answer, otherwise: str, mistakes: Mapping[str, Answer]) -> None:
    for table in _tables():
        told = {message: wrong(table) for message, wrong in mistakes.items()}
        close(_advantages(rule, table), wanted(table), otherwise, told, 2e-3)


def _one_step(rule: Any) -> None:
    probe: Probe = rule.probe
    expect(probe == Substeps(1), f"the probe is {probe}; the one-step estimate is Tweedie()")


_SILENT = "a group of equal rewards must get exactly 0: its std is 0, so add 1e-4 to it (or use zscore)"


@check("Exercise 1")
def check_mended(rule: Any) -> None:
    """`rule` is the class EstimateGain without its faults."""
    made = _made(rule)
    _keeps(
        made,
        {
            "declares_a_probe": "`probe` is a function, not a probe: write Tweedie(), with brackets",
            "reads_only_what_its_probe_fills": "NoProbe() scores the last node only, and the rule reads all: ask for Tweedie()",
            "leaves_its_input_alone": "the reward table is changed: -= works in place. Other rules read the same table",
            "gives_a_silent_group_zero": _SILENT,
            "survives_extremes": "advantages are not finite for a group of one or for equal rewards: divide by std + 1e-4",
        },
    )
    _one_step(made)
    expect(getattr(made, "shared_noise", False), "shared_noise = True is gone: then members start from different noise")
    both = ("member", "step")
    _compare(
        made,
        lambda table: zscore(gains(table), over=both),
        "the advantages are not Z over members and steps of the gains R_{i+1} - R_i",
        {
            "every step is normalised by itself; the mean and the std run over members and steps together": lambda table: zscore(
                gains(table), over=("member",)
            ),
            "the mean and the std run over the prompts too; a group is compared with itself only": lambda table: (
                (gains(table) - gains(table).mean()) / (gains(table).std(unbiased=False) + 1e-4)
            ),
            "the sign is wrong: a step is paid R_{i+1} - R_i": lambda table: zscore(-gains(table), over=both),
            "the std divides by n - 1; take the population's, unbiased=False": lambda table: (
                (gains(table) - gains(table).mean((1, 2), keepdim=True)) / (gains(table).std((1, 2), keepdim=True) + 1e-4)
            ),
        },
    )


_NOISE = (0.8, 0.9, 0.4, 0.7)


@check("Exercise 2")
def check_state_value(answer: Answer) -> None:
    """`answer(latents, node, steps, go, score, count)` is the mean reward of stochastic continuations."""
    generator = torch.Generator().manual_seed(1)
    rows: list[int] = []
    visited: list[int] = []

    def go(latents: Tensor, step: int) -> Tensor:
        expect(0 <= int(step) < 4, f"go was asked for step {int(step)}; with 4 steps they are 0 to 3")
        rows.append(len(latents))
        visited.append(int(step))
        return latents + _NOISE[int(step)] * torch.randn(latents.shape, generator=generator)

    def score(latents: Tensor) -> Tensor:
        return latents.flatten(1).square().sum(1)

    latents, node, count = torch.tensor([2.0, 0.0, -1.0])[:, None, None], 1, 20_000
    got = answered(answer(latents, node, 4, go, score, count), "state_value")
    expect(bool(rows), "go was never called: from node j the steps j, j + 1, ..., T - 1 follow")
    expect(sum(rows) >= 2 * len(latents) * count, "there is only one continuation (or few) of each state; make `count` of them")
    got = tensor(got, (3,), "the values")
    base = latents[:, 0, 0].square()
    full = sum(_NOISE[i] ** 2 for i in range(node, 4))
    mistakes = {
        "the first step is missing: step j leads from node j to node j + 1, so start with it": base + full - _NOISE[node] ** 2,
        "the last step, T - 1, is missing: range(node, steps)": base + full - _NOISE[3] ** 2,
        "all steps from 0 are made; the state stands at `node` already": base + full + _NOISE[0] ** 2,
        "the states are averaged before they are scored; average the rewards": base,
        "the continuations of different states are mixed: repeat_interleave keeps those of one state together": (
            base.mean() + torch.full((3,), full)
        ),
    }
    close(got, base + full, "the values are not the mean rewards of the continuations", mistakes, 0.05)
    made = sorted(set(visited))
    expect(made == [1, 2, 3], f"from node 1 of 4 steps the steps 1, 2, 3 follow; you made {', '.join(map(str, made))}")


def _centred_to_go(table: Tensor) -> Tensor:
    return zscore(reward_to_go(table), over=("member",), std_over=("member", "step"))


def _std_of_centred(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / (centred.std((1, 2), keepdim=True, unbiased=False) + 1e-4)


@check("Exercise 3")
def check_to_go(rule: Any) -> None:
    """`rule` pays R_T - R_i, centred step by step, scaled by one std for the group."""
    made = _made(rule)
    _keeps(made, {"gives_a_silent_group_zero": _SILENT})
    _one_step(made)
    _compare(
        made,
        _centred_to_go,
        "the advantages are not Z(R_T - R_i) with the mean over members and the std over members and steps",
        {
            "this pays R_T - R_{i+1}, what comes after the step; its own gain belongs to it: R_T - R_i": lambda table: zscore(
                table[..., -1:] - table[..., 1:], over=("member",), std_over=("member", "step")
            ),
            "these are the gains again; each step must be paid up to the end: R_T - R_i": lambda table: zscore(
                gains(table), over=("member",), std_over=("member", "step")
            ),
            "the std is each step's own, which blows up late steps: std_over=('member', 'step')": lambda table: zscore(
                reward_to_go(table), over=("member",)
            ),
            "the mean runs over the steps too, so that early steps are paid for being early: over=('member',)": lambda table: (
                zscore(reward_to_go(table), over=("member", "step"))
            ),
            "the std is taken after the mean was taken away; take that of the values as they are, as zscore does": lambda table: (
                _std_of_centred(reward_to_go(table))
            ),
            "the sign is wrong: R_T - R_i": lambda table: -_centred_to_go(table),
        },
    )


def _ranks(final: Tensor) -> Tensor:
    """Mid-ranks over the members, [prompt, member]."""
    above = (final[:, :, None] > final[:, None]).to(final).sum(-1)
    ties = (final[:, :, None] == final[:, None]).to(final).sum(-1)
    return above + (ties - 1) / 2


def _spread(values: Tensor, table: Tensor) -> Tensor:
    return zscore(values[..., None].expand(-1, -1, table.shape[-1] - 1).clone(), over=("member",))


@check("Exercise 4")
def check_rank(rule: Any) -> None:
    """`rule` is Z over the members of the ranks of R_T, ties sharing their mean rank, the same at every step."""
    made = _made(rule)
    ties = (
        "a silent group is not 0: equal rewards share their mean rank (sorting gives them different ones), and the mean goes away"
    )
    sorting = "one argsort says who is first, second, ...; the rank of a member is the argsort of that argsort"
    only = "with NoProbe() all nodes but the last are NaN: rank rewards[..., -1]"
    _keeps(made, {"gives_a_silent_group_zero": ties, "reads_only_what_its_probe_fills": only, "treats_members_alike": sorting})
    expect(isinstance(made.probe, NoProbe), "the probe costs network evaluations that a rank of R_T does not need: NoProbe()")
    mistakes = {
        sorting: lambda table: _spread(table[..., -1].argsort(1).to(table), table),
        "the best member has the lowest rank here; higher rewards are better": lambda table: _spread(
            -_ranks(table[..., -1]), table
        ),
        "the ranks are not normalised: Z over the members": lambda table: (_ranks(table[..., -1]) - 2.0)[..., None].expand(
            -1, -1, 6
        ),
        "these are the rewards' own z-scores (Uniform); take ranks first": lambda table: _spread(table[..., -1], table),
    }
    _compare(made, lambda table: _spread(_ranks(table[..., -1]), table), "these are not the z-scores of the ranks", mistakes)
    tied = _tables(1)[0]
    tied[:, 1] = tied[:, 0]
    close(_advantages(made, tied), _spread(_ranks(tied[..., -1]), tied), ties, None, 2e-3)


def _centre(table: Tensor) -> Tensor:
    shifted = table - table[:, :1]
    return shifted - shifted.mean(1, keepdim=True)


def _calibrated(table: Tensor, slopes: Tensor) -> Tensor:
    return zscore((slopes * _centre(table)).diff(dim=-1), over=("member",), std_over=("member", "step"))


def _slopes(table: Tensor, over: tuple[int, ...] = (0, 1), inverse: bool = False) -> Tensor:
    values = _centre(table)
    final = values[..., -1:]
    below = final.square().expand_as(values) if inverse else values.square()
    return (values * final).mean(over, keepdim=True) / (below.mean(over, keepdim=True) + 1e-8)


@check("Exercise 5")
def check_calibrated(rule: Any) -> None:
    """`rule` pays the gains of slope_j (R_j - group mean), slope_j regressed on R_T over the whole table."""
    made = _made(rule)
    shared = "a node that all members share (noise) has no spread: add 1e-8 to the denominator of the slope"
    level = "the slope is made by easy and hard prompts: subtract the group's mean from the rewards first"
    hints = {"gives_a_silent_group_zero": shared, "survives_extremes": shared, "ignores_a_constant": level}
    _keeps(made, hints, rounding=True)
    _one_step(made)

    after = "the slope multiplies the gain R_{j+1} - R_j; calibrate both values first, then take their difference"

    def late(table: Tensor, shift: int = 0) -> Tensor:
        slopes = _slopes(table)
        steps = slopes[..., shift : slopes.shape[-1] - 1 + shift] * _centre(table).diff(dim=-1)
        return zscore(steps, over=("member",), std_over=("member", "step"))

    _compare(
        made,
        lambda table: _calibrated(table, _slopes(table)),
        "the advantages are not those of the calibrated values slope_j (R_j - mean)",
        {
            "the slope is upside down: it predicts R_j from R_T. Divide by the spread of R_j": lambda table: _calibrated(
                table, _slopes(table, inverse=True)
            ),
            "every group has its own slope, which few members cannot tell; pool over prompts and members": lambda table: (
                _calibrated(table, _slopes(table, over=(1,)))
            ),
            after: late,
            f"{after} ": lambda table: late(table, 1),
            "the slopes are missing: these are plain gains": lambda table: _calibrated(table, torch.ones(table.shape[-1])),
        },
    )


def _remembered(
    tables: list[Tensor],
    decay: float,
    late: bool = False,
    roots: bool = False,
    start: Tensor | None = None,
    by_group: bool = False,
) -> Tensor:
    """The last table's advantages by a ruler kept over all tables."""
    memory = start
    values = torch.zeros(())
    ruler = torch.ones(())
    for table in tables:
        values = _centre(reward_to_go(table))
        squares = values.square().mean((1, 2), keepdim=True) if by_group else values.square().mean()
        new = squares.sqrt() if roots else squares
        before, memory = memory, new if memory is None else decay * memory + (1 - decay) * new
        ruler = before if late and before is not None else memory
        ruler = ruler if roots else ruler.sqrt()
    return (values / (ruler + 1e-4)).clamp(-5, 5)


@check("Exercise 6")
def check_remembers(rule: Any) -> None:
    """`rule` scales R_T - R_i by a running root mean square, and its memory survives a checkpoint."""
    first = _made(rule)
    expect(
        hasattr(first, "state_dict") and hasattr(first, "load_state_dict"),
        "a rule with memory has state_dict and load_state_dict",
    )
    expect(len(first.state_dict()) == 0, "before the first table there is nothing to remember: state_dict() must be empty")
    kept = "after load_state_dict(state_dict()) the rule goes on with other numbers: is the memory in state_dict, as a tensor?"
    _keeps(first, {"keeps_its_memory": kept, "gives_a_silent_group_zero": "centre over the members before you divide"})
    _one_step(first)
    tables = [_tables()[0], 3.0 * _tables()[1], _tables()[2]]
    got = [_advantages(first, table) for table in tables][-1]
    expect(bool(first.state_dict()), f"{kept} state_dict() is empty after three tables")
    wanted = _remembered(tables, 0.9)
    mistakes = {
        "this forgets: the ruler is that of the present table alone": _remembered(tables[-1:], 0.9),
        "the weights of the average are swapped: decay belongs to the memory": _remembered(tables, 0.1),
        "the table is measured by the ruler of the tables before it; take its own part in first": _remembered(
            tables, 0.9, late=True
        ),
        "this averages roots; average the squares, and take the root at the end": _remembered(tables, 0.9, roots=True),
        "each group has a ruler of its own: take the mean of the squares over the whole table": _remembered(
            tables, 0.9, by_group=True
        ),
        "the memory starts from 0; at the first table it is that table's mean square": _remembered(
            tables, 0.9, start=torch.zeros(())
        ),
        "this is one std for each group (exercise 3), and remembers nothing": _centred_to_go(tables[-1]),
    }
    close(
        got, wanted, "the third table's advantages are not (R_T - R_i - mean) / (running root mean square + 1e-4)", mistakes, 2e-3
    )
    again = _made(rule) if inspect.isclass(rule) else None
    if again is not None:
        again.load_state_dict(first.state_dict())
        for made in (again, first):
            got = _advantages(made, tables[0])
            expect(same(got, _remembered([*tables, tables[0]], 0.9), 2e-3), kept)
        _starts_and_forgets(rule, tables)


def _starts_and_forgets(rule: Any, tables: list[Tensor]) -> None:
    """An empty memory can be loaded, and `decay` decides how long memory lasts."""
    fresh = _made(rule)
    try:
        fresh.load_state_dict(fresh.state_dict())
    except Exception as error:
        told = "a rule that has seen no table is saved with an empty memory, and load_state_dict must take that too"
        raise Unsolved(f"{told}; yours raised {type(error).__name__}") from error
    forgetful = copy.deepcopy(fresh)
    if hasattr(forgetful, "decay"):
        forgetful.decay = 0.0
        got = [_advantages(forgetful, table) for table in tables][-1]
        told = "with decay = 0 the memory must hold the present table alone: is 0.9 written into the rule?"
        expect(same(got, _remembered(tables, 0.0), 2e-3), told)
