"""What the checks of credit rules share: reward tables, the contract with hints, and comparison with the right advantages."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl import Schedule
from flowrl.credit import reward_to_go, zscore
from flowrl.probes import Probe, Substeps
from flowrl.testing import check_credit
from flowrl_course.checking import answered, close, expect, tensor

SCHEDULE = Schedule(torch.linspace(1, 0, 7), stds=torch.tensor([0.3, 0.26, 0.22, 0.18, 0.14, 0.0]))
"""The grid of `reward_tables`: 6 steps, the last one deterministic."""

SILENT = "a group of equal rewards must get exactly 0: its std is 0, so add 1e-4 to it (or use zscore)"
"""The message for a rule that gives a group of equal rewards something else than 0."""

joint = partial(zscore, over=("member", "step"))
"""Z over members and steps of values [prompt, member, step]."""
by_step = partial(zscore, over=("member",))
"""Z over the members, step by step."""
centred_by_step = partial(zscore, over=("member",), std_over=("member", "step"))
"""The mean over the members, step by step; one standard deviation for the group."""


def centred(table: Tensor) -> Tensor:
    """The values minus their mean over members; exactly 0 for equal values."""
    shifted = table - table[:, :1]
    return shifted - shifted.mean(1, keepdim=True)


def centred_to_go(table: Tensor) -> Tensor:
    """R_T - R_i, scaled as by `centred_by_step`."""
    return centred_by_step(reward_to_go(table))


def reward_tables(count: int = 3) -> list[Tensor]:
    """Reward tables [prompt, member, node] whose groups differ in level and spread, as groups of different prompts do."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(40 + seed)
        level = torch.rand(4, 1, 1, generator=generator)
        spread = 0.05 + 0.3 * torch.rand(4, 1, 1, generator=generator)
        walk = torch.randn(4, 5, SCHEDULE.steps + 1, generator=generator).cumsum(-1)
        found.append(level + spread * walk)
    return found


def make_rule(rule: Any) -> Any:
    """A rule from a class or an object; raises `Unsolved` if its `assign` still has the dots."""
    answered(rule, "the rule")
    made: Any = rule() if inspect.isclass(rule) else rule
    expect(callable(getattr(made, "assign", None)), "the rule has no method assign(rewards, schedule)")
    try:
        found = copy.deepcopy(made).assign(reward_tables(1)[0], SCHEDULE)
    except Exception:  # `check_contract` gives the reason
        return made
    answered(found, "assign")
    return made


def advantages_of(rule: Any, table: Tensor) -> Tensor:
    """The rule's advantages [prompt, member, step] for one of `reward_tables`; raises `Unsolved` for another shape."""
    prompts, members, _ = table.shape
    return tensor(rule.assign(table.clone(), SCHEDULE), (prompts, members, SCHEDULE.steps), "the advantages")


def check_contract(rule: Any, hints: Mapping[str, str], rounding: bool = False) -> None:
    """Raise `Unsolved` for the first broken promise of `flowrl.testing`, with its hint if `hints` has one.

    With `rounding`, a group of equal rewards may get advantages of up to 1e-2, which rounding of the group's mean leaves; the
    promise requires exactly 0.
    """
    for finding in check_credit(rule):
        if rounding and finding.promise == "gives_a_silent_group_zero" and not finding.ok and _nearly_silent(rule):
            continue
        reason = finding.message.rpartition("): ")[2] or finding.message
        expect(finding.ok, hints.get(finding.promise, f"the promise {finding.promise!r} is broken: {reason}"))


def _nearly_silent(rule: Any) -> bool:
    table = reward_tables(1)[0]
    table[1] = 0.3
    return float(advantages_of(copy.deepcopy(rule), table)[1].abs().max()) < 1e-2


def check_advantages(
    rule: Any, solution: Callable[[Tensor], Tensor], otherwise: str, mistakes: Mapping[str, Callable[[Tensor], Tensor]]
) -> None:
    """Raise `Unsolved` unless the rule agrees with `solution` on all tables; `mistakes` maps messages to wrong rules."""
    for table in reward_tables():
        wrong = {message: mistake(table) for message, mistake in mistakes.items()}
        close(advantages_of(rule, table), solution(table), otherwise, wrong, 2e-3)


def check_one_step_probe(rule: Any) -> None:
    """Raise `Unsolved` unless the rule scores unfinished samples by the one-step estimate."""
    probe: Probe = rule.probe
    expect(probe == Substeps(1), f"the probe is {probe}; the one-step estimate is Tweedie()")
