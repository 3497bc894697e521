"""The engine of the credit rules: statistics over a mask, what a rule needs, and the checks of a
rule's input and output.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import CreditError, part_call, require
from flowrl.core.experience import (
    Credit,
    CreditTable,
    Decisions,
    Experience,
    Mask,
    ValueTable,
    needs_of,
)
from flowrl.core.protocols import CreditAssigner
from flowrl.core.types import tensor_problem

AXES = ("prompt", "member", "decision")
STD_EPSILON = 1e-4
Clamp = Annotated[float, Gt(0), Lt(math.inf)] | None
Columns = Bool[Tensor, "*group decision+1"]


def gains(values: ValueTable) -> CreditTable:
    """g_k = V_{k+1} - V_k, the increment of the value at decision k; the sum over decisions is R -
    V_0.

    Source: Stepwise-Flow-GRPO (arXiv 2603.28718); TP-GRPO's incremental reward (arXiv 2602.06422).
    """
    return values[..., 1:] - values[..., :-1]


def reward_to_go(values: ValueTable) -> CreditTable:
    """R - V_k: the total gain from decision k on. Source: TP-GRPO's aggregated reward (arXiv
    2602.06422).
    """
    return values[..., -1:] - values[..., :-1]


# Statistics over a mask


@checked
def zscore(
    values: Float[Tensor, "prompt member decision"],
    over: Sequence[str],
    std_over: Sequence[str] | None = None,
    clamp: float | None = 5.0,
    mask: Mask | None = None,
) -> Float[Tensor, "prompt member decision"]:
    """(y - mean) / (std + 1e-4) over the entries of `mask`, then clamped to [-`clamp`, `clamp`].

    Equal values along `over` give exactly 0 whatever their size: one of them is subtracted before
    the mean, so a large common offset costs no precision. A group with one member in the mask has
    no comparison: it gets exactly 0 and is left out of all statistics. Source: the advantage
    normalisation of Flow-GRPO (arXiv 2505.05470), public code.

    Args:
        values: values y [prompt, member, decision], in units of the reward; those outside the mask
            may be NaN.
        over: the axes of the mean: "prompt", "member", "decision".
        std_over: the axes of the population standard deviation; None for those of `over`.
        clamp: largest absolute score; None for no clamp.
        mask: the entries that count [prompt, member, decision]; None for all.

    Returns:
        Scores [prompt, member, decision], dimensionless; 0 outside the mask.

    Raises:
        ConfigError: an axis is unknown, or there is none.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    mask = mask & (mask.any(-1, keepdim=True).sum(1, keepdim=True) > 1)
    std = masked_std(values, std_over or over, mask)
    return clamped(centred(values, over, mask) / (std + STD_EPSILON), clamp)


def clamped(scores: Tensor, clamp: float | None) -> Tensor:
    """`scores` within +-`clamp`; None for no clamp."""
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def masked_mean(values: Tensor, over: Sequence[str], mask: Tensor) -> Tensor:
    """The mean over the entries of `mask` along the axes `over`, which are kept; 0 without such
    entries.
    """
    dims = _dims(over)
    total = values.masked_fill(~mask, 0.0).sum(dim=dims, keepdim=True)
    return total / mask.sum(dim=dims, keepdim=True).clamp(min=1)


def masked_std(values: Tensor, over: Sequence[str], mask: Tensor) -> Tensor:
    """The population standard deviation over the entries of `mask` along the axes `over`, which are
    kept.
    """
    return masked_mean(centred(values, over, mask).square(), over, mask).sqrt()


def centred(values: Tensor, over: Sequence[str], mask: Tensor) -> Tensor:
    """`values` minus their mean over `mask`; exactly 0 if they are all equal, and outside the
    mask.
    """
    shifted = (values - first_of(values, over, mask)).masked_fill(~mask, 0.0)
    return (shifted - masked_mean(shifted, over, mask)).masked_fill(~mask, 0.0)


def first_of(values: Tensor, over: Sequence[str], mask: Tensor) -> Tensor:
    """The first value within `mask` along the axes `over`, which are kept; 0 without such a
    value.
    """
    dims, count = _dims(over), len(over)
    ends = tuple(range(-count, 0))
    rows, among = (t.movedim(dims, ends).flatten(-count) for t in (values, mask.expand_as(values)))
    place = among.to(torch.uint8).argmax(-1, keepdim=True)
    first = rows.gather(-1, place).masked_fill(~among.any(-1, keepdim=True), 0.0)
    return first.reshape(*first.shape[:-1], *[1] * count).movedim(ends, dims)


def _dims(axes: Sequence[str]) -> tuple[int, ...]:
    fits = len(axes) > 0 and set(axes) <= set(AXES)
    require(fits, "zscore axes", tuple(axes), f"one or more of {', '.join(AXES)}")
    return tuple(AXES.index(axis) for axis in axes)


# What a rule needs


@checked
def gain_columns(mask: Bool[Tensor, "*group decision"]) -> Columns:
    """The columns that the gains of the decisions of `mask` read: k and k + 1."""
    none = torch.zeros_like(mask[..., :1])
    return torch.cat([mask, none], -1) | torch.cat([none, mask], -1)


@checked
def last_column(mask: Bool[Tensor, "*group decision"]) -> Columns:
    """The column of the final reward, if a decision of `mask` is true."""
    return torch.cat([torch.zeros_like(mask), mask.any(-1, keepdim=True)], -1)


@checked
def read_columns(rule: CreditAssigner, trained: Bool[Tensor, "*group decision"]) -> Columns:
    """The columns of the value table that the rule's credit of the `trained` decisions reads.

    Args:
        rule: a credit rule; without `Needs.columns` it reads all columns.
        trained: mask of decisions; built-in rules also accept it per member.

    Returns:
        Mask of columns [..., decision+1].

    Raises:
        CreditError: `Needs.columns` returns something else.
    """
    reads, shape = needs_of(rule).columns, (*trained.shape[:-1], trained.shape[-1] + 1)
    if reads is None:
        return trained.any(-1, keepdim=True).expand(shape).clone()
    columns = reads(trained)
    if not isinstance(columns, Tensor) or columns.dtype != torch.bool or columns.shape != shape:
        call = f"{type(rule).__name__}.needs.columns"
        raise CreditError(f"{call} returned {_shown(columns)}, not a Boolean tensor {shape}")
    return columns


# Checks


def require_columns(
    values: ValueTable, decisions: Decisions, rule: CreditAssigner, columns: Tensor | None = None
) -> None:
    """Check a rule's input.

    Args:
        values: the value table.
        decisions: its axis.
        rule: the rule, for `read_columns` and the message.
        columns: the entries that the rule reads [prompt, member, decision+1]; None for those of
            `read_columns`.

    Raises:
        CreditError: table and decisions do not fit, or a value that the rule reads is not finite.
    """
    name, shape = type(rule).__name__, (*decisions.mask.shape[:2], len(decisions) + 1)
    if values.shape != shape or not values.is_floating_point():
        allowed = f"floating-point values [prompt, member, decision+1] = {shape}"
        raise CreditError(f"{name} needs {allowed}; got {_shown(values)}")
    columns = read_columns(rule, decisions.mask) if columns is None else columns
    missing = (columns & ~values.isfinite()).flatten(0, 1).any(0).nonzero().flatten().tolist()
    if missing:
        raise CreditError(
            f"{name} needs a finite value in column {', '.join(map(str, missing))} of"
            f" 0..{len(decisions)}: roll out with the probe {rule.probe} to fill it"
        )


def credit_of(rule: CreditAssigner, experience: Experience) -> Credit:
    """The checked credit of a rule: the result of ``assign(values, decisions)``, or of
    ``assign(values, decisions, record)`` if its `Needs` name fields of the record. If the prompts
    are from several sources, whose rewards need not be on one scale, the rule is applied to the
    groups of each source separately.

    Args:
        rule: the credit rule.
        experience: the record of an iteration.

    Returns:
        Detached advantages and weights [prompt, member, decision], 0 outside `decisions.mask`. A
        rule without weights has weight 1.

    Raises:
        CreditError: the result has a wrong type or shape, is not finite where the mask is true, or
            has weights outside [0, 1] or of 0 only.
    """
    groups = dict[str, list[int]]()
    for row, prompt in enumerate(experience.prompts):
        groups.setdefault(prompt.source, []).append(row)
    if len(groups) > 1:
        order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
        parts = [credit_of(rule, experience.groups(rows)) for rows in groups.values()]
        advantages, weights = (
            torch.cat([cast(Tensor, getattr(part, name)) for part in parts])[order]
            for name in ("advantages", "weights")
        )
        return Credit(advantages, weights)
    fields, mask = needs_of(rule).fields, experience.decisions.mask
    record = (experience.only(fields),) if fields else ()
    call, assign = f"{type(rule).__name__}.assign", cast(Any, rule.assign)
    with part_call(call):
        credit = assign(experience.values, experience.decisions, *record)
    if not isinstance(credit, Credit):
        credit = Credit(credit)
    advantages = _checked_table(credit.advantages, mask, f"{call} returned")
    if credit.weights is None:
        return Credit(advantages, mask.to(advantages))
    weights = _checked_table(credit.weights, mask, f"{call} returned weights:")
    low, high = float(weights.min()), float(weights.max())
    if low < 0 or high > 1 or (mask.any() and high == 0):
        allowed = "within [0, 1] and not all 0"
        raise CreditError(f"{call} returned weights from {low:g} to {high:g}, not {allowed}")
    return Credit(advantages, weights)


def _checked_table(table: Any, mask: Mask, what: str) -> Tensor:
    """`table`, detached and 0 outside the mask, if it is a table of floating point and finite
    within the mask.
    """
    if isinstance(table, Tensor) and tensor_problem(table):
        raise CreditError(f"{what} a tensor that {tensor_problem(table)}")
    fits = isinstance(table, Tensor) and table.shape == mask.shape and table.is_floating_point()
    if not fits:
        allowed = f"floating point of shape [prompt, member, decision] = {tuple(mask.shape)}"
        raise CreditError(f"{what} {_shown(table)}, not {allowed}")
    bad = (mask & ~table.isfinite()).nonzero().tolist()
    if bad:
        place = f"the first of {len(bad)} at [prompt, member, decision] = {bad[0]}"
        raise CreditError(f"{what} values that are not finite, {place}")
    return table.detach().masked_fill(~mask, 0.0)


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {kind}"
