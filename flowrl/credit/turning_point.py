"""TP-GRPO's credit: a decision that turns a trajectory towards its final trend gets its long-term
reward.

TP-GRPO's steps are decisions here, as in its released code; its first step is decision 0.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Decisions, Mask, Needs, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import (
    Clamp,
    Columns,
    gain_columns,
    gains,
    last_column,
    require_columns,
    reward_to_go,
    zscore,
)
from flowrl.probes import Completion, Probe

Balance = Literal["aggregate", "trend"]
BalanceScope = Literal["prompt", "batch"]
Steps = Bool[Tensor, "prompt member decision"]


def turning_points(values: ValueTable, consistent: bool = True, first_step: bool = True) -> Steps:
    """Mask of the turning points, before balancing.

    With d_k = V_{k+1} - V_k and D = R - V_0, decision k >= 1 is a turning point if sign(d_{k-1})
    sign(D) < 0 < sign(d_k) sign(D). A zero difference never qualifies. Under the consistent rule
    the last decision never qualifies, and with 0/1 rewards none does (three values are needed).
    Source: TP-GRPO (arXiv 2602.06422, definitions of turning points, remark 5.2).

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        consistent: require d_k (R - V_{k+1}) > 0 as well, so that the rest of the trajectory has
            its sign.
        first_step: let decision 0 qualify, if d_0 (R - V_1) > 0 (`consistent`) or d_0 D > 0
            (otherwise).

    Returns:
        A Boolean mask [prompt, member, decision].
    """
    step_sign = gains(values).sign()
    trend_sign = (values[..., -1:] - values[..., :1]).sign()
    follow_sign = (values[..., -1:] - values[..., 1:]).sign()
    along = step_sign * trend_sign
    turns = torch.zeros_like(along, dtype=torch.bool)
    turns[..., 1:] = (along[..., :-1] < 0) & (along[..., 1:] > 0)
    turns[..., 0] = along[..., 0] > 0
    if consistent:
        # At decision 0 this alone is enough: if its gain and what follows agree, the trend has
        # their sign too.
        turns = turns & (step_sign * follow_sign > 0)
    turns[..., 0] &= first_step
    return turns


def process_rewards(values: ValueTable, selected: Steps, add: bool = False) -> CreditTable:
    """R - V_k at the `selected` decisions, d_k = V_{k+1} - V_k elsewhere.

    Source: TP-GRPO (arXiv 2602.06422), where the aggregated reward replaces the increment; `add` is
    an ablation of this package.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        selected: mask of the aggregated decisions [prompt, member, decision].
        add: use d_k + (R - V_k) at the selected decisions.

    Returns:
        Process rewards [prompt, member, decision], in units of the reward.
    """
    increments = gains(values)
    long_term = reward_to_go(values) + increments if add else reward_to_go(values)
    return torch.where(selected, long_term, increments)


def balanced(
    values: ValueTable, turns: Steps, by: Balance = "aggregate", scope: BalanceScope = "batch"
) -> Steps:
    """The turning points that remain after both signs are reduced to the same number.

    Let n+ and n- be the numbers of positive and negative turning points within a `scope`. If both
    are above 0, the min(n+, n-) largest of each sign remain; otherwise all remain. Among entries of
    equal size (under "trend", all of a trajectory) the earlier decision is removed first, then the
    earlier sample. The public code leaves the order of ties to its sorting routine. The order of
    the members can matter only if rewards take few values. Source: TP-GRPO (arXiv 2602.06422).

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        turns: mask of turning points [prompt, member, decision].
        by: sign and size of R - V_k ("aggregate", the paper's text) or of D = R - V_0 ("trend", the
            public code).
        scope: balance within each prompt ("prompt") or over all prompts of the table ("batch").

    Returns:
        A Boolean mask [prompt, member, decision], a subset of `turns`.
    """
    trend = values[..., -1:] - values[..., :1]
    size = reward_to_go(values) if by == "aggregate" else trend.expand_as(turns)
    if scope == "batch":
        return _balanced(turns, size)
    return torch.stack([_balanced(*prompt) for prompt in zip(turns, size, strict=True)])


def _balanced(
    turns: Bool[Tensor, "*entry"], size: Float[Tensor, "*entry"]
) -> Bool[Tensor, "*entry"]:
    """Balance the entries of one scope, signed and ranked by `size`; entries of size 0 have no sign
    and remain.
    """
    up, down = turns & (size > 0), turns & (size < 0)
    count = min(int(up.sum()), int(down.sum()))
    if count == 0:
        return turns
    return _largest(up, size, count) | _largest(down, -size, count) | (turns & (size == 0))


def _largest(
    candidates: Bool[Tensor, "*entry"], size: Float[Tensor, "*entry"], count: int
) -> Bool[Tensor, "*entry"]:
    """The `count` largest of the `candidates`; of equals the later decision (the last axis), then
    the later sample.
    """
    ranked = torch.where(candidates, size, -torch.inf).movedim(-1, 0)
    kept = torch.zeros(ranked.numel(), dtype=torch.bool, device=ranked.device)
    kept[ranked.flatten().argsort(stable=True)[-count:]] = True
    return kept.reshape(ranked.shape).movedim(0, -1)


def turning_columns(mask: Bool[Tensor, "*group decision"]) -> Columns:
    """The columns 0, k - 1, k, k + 1 and the last of the decisions k of `mask`."""
    before = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], -1)
    ends = last_column(mask)
    return gain_columns(mask | before) | ends | ends.flip(-1)


@checked_options
@dataclass(frozen=True)
class TurningPoint:
    """Credits a decision with its gain, and at a turning point with its whole long-term effect.

    A = Z(r), r_k = R - V_k at turning points and d_k = V_{k+1} - V_k elsewhere, clamped to
    +-`clamp`.

    Z(y) = (y - mean) / (std + 1e-4) per prompt. With 0/1 rewards the consistent rule finds no
    turning point. With `normalise` = "step", members with R - V_k and members with d_k are compared
    with each other at one decision. `assign` raises `CreditError` if a value that the credit reads
    is not finite. Source: TP-GRPO (arXiv 2602.06422), rewards by ODE completion; `combine` is an
    ablation of this package.

    Args:
        consistent: TP-GRPO's stricter definition of a turning point, whose long-term effect has the
            sign of the decision's gain.
        balance: reduce both signs to the same number, by the sign of R - V_k ("aggregate", the
            paper's text) or of R - V_0 ("trend", the public code); None keeps all.
        balance_scope: balance within each prompt ("prompt"), or over the table ("batch"), as in
            published mini-batches.
        first_step: let decision 0 be a turning point.
        normalise: "step": Z over members, decision by decision, as published; "joint": over members
            and decisions.
        combine: "replace", or "add": d_k + (R - V_k) instead of R - V_k.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    needs: ClassVar[Needs] = Needs(columns=turning_columns)

    consistent: bool = True
    balance: Balance | None = "aggregate"
    balance_scope: BalanceScope = "batch"
    first_step: bool = True
    normalise: Literal["step", "joint"] = "step"
    combine: Literal["replace", "add"] = "replace"
    clamp: Clamp = 5.0
    probe: Probe = Completion()

    def selected(self, values: ValueTable, mask: Mask | None = None) -> Steps:
        """Mask of the decisions that get their long-term reward: turning points after balancing.

        `mask`: the entries that count; None for all.
        """
        turns = turning_points(values, self.consistent, self.first_step)
        turns = turns if mask is None else turns & mask
        if self.balance is None:
            return turns
        return balanced(values, turns, self.balance, self.balance_scope)

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self)
        return self.scores(values, decisions, self.selected(values, decisions.mask))

    def scores(self, values: ValueTable, decisions: Decisions, selected: Steps) -> CreditTable:
        """Advantages with the long-term reward at the `selected` decisions."""
        over = ("member",) if self.normalise == "step" else ("member", "decision")
        rewards = process_rewards(values, selected, add=self.combine == "add")
        return zscore(rewards, over, clamp=self.clamp, mask=decisions.mask)
