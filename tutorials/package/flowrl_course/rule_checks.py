"""What the checks of credit rules share: value tables, the contract with hints, and comparison with
the right advantages.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.core.experience import Decisions, needs_of
from flowrl.credit import reward_to_go, zscore
from flowrl.probes import Probe, Substeps
from flowrl.testing import check_credit
from flowrl_course.checking import answered, close, expect, tensor

COUNT = 6
"""Decisions of `value_tables`."""

SILENT = (
    "a group of equal values must get exactly 0: its std is 0, so add 1e-4 to it (or use zscore)"
)
"""The message for a rule that gives a group of equal values something else than 0."""

MASKED = {
    "reads_nothing_outside_the_mask": (
        "entries outside the mask enter a mean or a std: pass mask=decisions.mask to zscore"
    )
}
"""The message for a rule that ignores the mask, by promise."""

joint = partial(zscore, over=("member", "decision"))
"""Z over members and decisions of values [prompt, member, decision]."""
by_step = partial(zscore, over=("member",))
"""Z over the members, decision by decision."""
centred_by_step = partial(zscore, over=("member",), std_over=("member", "decision"))
"""The mean over the members, decision by decision; one standard deviation for the group."""


def centred(table: Tensor) -> Tensor:
    """The values minus their mean over members; exactly 0 for equal values."""
    shifted = table - table[:, :1]
    return shifted - shifted.mean(1, keepdim=True)


def centred_to_go(table: Tensor) -> Tensor:
    """R - V_k, scaled as by `centred_by_step`."""
    return centred_by_step(reward_to_go(table))


def value_tables(count: int = 3) -> list[Tensor]:
    """Value tables [prompt, member, decision+1] whose groups differ in level and spread, as groups
    of different prompts do.
    """
    tables = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(40 + seed)
        level = torch.rand(4, 1, 1, generator=generator)
        spread = 0.05 + 0.3 * torch.rand(4, 1, 1, generator=generator)
        walk = torch.randn(4, 5, COUNT + 1, generator=generator).cumsum(-1)
        tables.append(level + spread * walk)
    return tables


def make_rule(rule: Any) -> Any:
    """A rule from a class or an object; raises `Unsolved` if its `assign` still has the dots."""
    answered(rule, "the rule")
    instance: Any = rule() if inspect.isclass(rule) else rule
    expect(
        callable(getattr(instance, "assign", None)),
        "the rule has no method assign(values, decisions)",
    )
    try:
        table = value_tables(1)[0]
        advantages = copy.deepcopy(instance).assign(table, Decisions.like(table))
    except Exception:  # `check_contract` gives the reason
        return instance
    answered(advantages, "assign")
    return instance


def advantages_of(rule: Any, table: Tensor) -> Tensor:
    """The rule's advantages [prompt, member, decision] for one of `value_tables`; raises `Unsolved`
    for another shape.
    """
    prompts, members, columns = table.shape
    advantages = rule.assign(table.clone(), Decisions.like(table))
    return tensor(advantages, (prompts, members, columns - 1), "the advantages")


def check_contract(rule: Any, hints: Mapping[str, str], rounding: bool = False) -> None:
    """Raise `Unsolved` for the first broken promise of `flowrl.testing`, with its hint if `hints`
    has one.

    With `rounding`, a group of equal values may get advantages of up to 1e-2, which rounding of the
    group's mean leaves; the promise requires exactly 0.
    """
    for finding in check_credit(rule):
        if (
            rounding
            and finding.promise == "gives_a_silent_group_zero"
            and not finding.ok
            and _nearly_silent(rule)
        ):
            continue
        reason = finding.message.rpartition("): ")[2] or finding.message
        expect(
            finding.ok,
            hints.get(finding.promise, f"the promise {finding.promise!r} is broken: {reason}"),
        )


def _nearly_silent(rule: Any) -> bool:
    table = value_tables(1)[0]
    table[1] = 0.3
    return float(advantages_of(copy.deepcopy(rule), table)[1].abs().max()) < 1e-2


def check_equal_values(rule: Any, message: str) -> None:
    """Raise `Unsolved` with `message` if a table of equal values gives NaN."""
    equal = torch.full((4, 5, COUNT + 1), 0.5)
    advantages = copy.deepcopy(rule).assign(equal, Decisions.like(equal))
    expect(not (isinstance(advantages, Tensor) and bool(advantages.isnan().any())), message)


def check_advantages(
    rule: Any,
    solution: Callable[[Tensor], Tensor],
    otherwise: str,
    mistakes: Mapping[str, Callable[[Tensor], Tensor]],
) -> None:
    """Raise `Unsolved` unless the rule agrees with `solution` on all tables; `mistakes` maps
    messages to wrong rules.
    """
    for table in value_tables():
        wrong = {message: mistake(table) for message, mistake in mistakes.items()}
        close(advantages_of(rule, table), solution(table), otherwise, wrong, 2e-3)


def check_shared_noise(rule: Any) -> None:
    """Raise `Unsolved` unless the members of a group start from the same noise."""
    expect(
        bool(needs_of(rule).shared_noise),
        "Needs(shared_noise=True) is gone: then members start from different noise",
    )


def check_one_step_probe(rule: Any) -> None:
    """Raise `Unsolved` unless the rule scores unfinished samples by the one-step estimate."""
    probe: Probe = rule.probe
    expect(probe == Substeps(1), f"the probe is {probe}; the one-step estimate is Tweedie()")
