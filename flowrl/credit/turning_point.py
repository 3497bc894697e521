"""TP-GRPO's credit: a decision that turns a trajectory towards its final trend gets its long-term
reward.

TP-GRPO's steps are decisions here, as in its released code; its first step is decision 0. Besides
the paper's selection of steps (`turning_points`, `balanced`) there are stricter criteria
(`large_aggregates`, `clear_swings`, `likely_turns`) and a control that keeps the number of selected
steps but not their positions (`random_steps`).
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.errors import MAX_SEED, require
from flowrl.core.experience import CreditTable, Decisions, Mask, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.orders import order_moments
from flowrl.credit.table import (
    gain_columns,
    gains,
    last_column,
    masked_std,
    require_clamp,
    require_columns,
    reward_to_go,
    zscore,
)
from flowrl.probes import Completion, Probe

Balance = Literal["aggregate", "trend"]
Where = Literal["turning", "random", "none"]
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
    if not first_step:
        turns[..., 0] = False
    return turns


def deciding_columns(table: Tensor) -> Mapping[str, Tensor]:
    """The entries [..., decision] of a table [..., decision+1] that decide whether decision k is a
    turning point, by letter.

    v: column 0; w: k - 1 (0 for the first decision); x: k; y: k + 1; z: the last.
    """
    x = table[..., :-1]
    return {
        "v": table[..., :1].expand_as(x),
        "w": torch.cat([table[..., :1], x[..., :-1]], dim=-1),
        "x": x,
        "y": table[..., 1:],
        "z": table[..., -1:].expand_as(x),
    }


def turn_orders(first: bool, consistent: bool, at_start: bool, at_end: bool) -> tuple[str, ...]:
    """The orders of the values at `deciding_columns` that make a decision an upward turning point,
    as in `turning_points`.

    They are mutually exclusive alternatives for `order_moments`; without one it never qualifies.
    `first`: it is decision 0. `at_start`: w and v are one value; `at_end`: y and z are one, written
    y. A downward turning point has all relations reversed.
    """
    if consistent and at_end:
        return ()
    if first:
        return ("x<y y<z",) if consistent else ("x<y",) if at_end else ("x<y x<z",)
    if consistent:
        return ("x<w w<y y<z", "x<y y<w w<z") if at_start else ("x<w x<y y<z v<z",)
    if at_end:
        return ("x<w w<y",) if at_start else ("x<w x<y v<y",)
    return ("x<y x<w w<z",) if at_start else ("x<w x<y v<z",)


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
    equal size (under "trend", all of a trajectory) the later decision is removed first, then the
    later sample. The public code leaves the order of ties to its sorting routine. The order of the
    members can matter only if rewards take few values. Source: TP-GRPO (arXiv 2602.06422).

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        turns: mask of turning points [prompt, member, decision].
        by: sign and size of R - V_k ("aggregate", the paper's text) or of D = R - V_0 ("trend", the
            public code).
        scope: balance within each prompt ("prompt") or over all prompts of the table ("batch").

    Returns:
        A Boolean mask [prompt, member, decision], a subset of `turns`.

    Raises:
        ConfigError: `by` or `scope` is unknown.
    """
    require(by in ("aggregate", "trend"), "by", by, "'aggregate' or 'trend'")
    require(scope in ("prompt", "batch"), "scope", scope, "'prompt' or 'batch'")
    trend = values[..., -1:] - values[..., :1]
    size = reward_to_go(values) if by == "aggregate" else trend.expand_as(turns)
    if scope == "batch":
        return _balanced_scope(turns, size)
    return torch.stack([_balanced_scope(*prompt) for prompt in zip(turns, size, strict=True)])


def _balanced_scope(
    turns: Bool[Tensor, "*entry"], size: Float[Tensor, "*entry"]
) -> Bool[Tensor, "*entry"]:
    """Balance the entries of one scope, signed and ranked by `size`; entries of size 0 have no sign
    and remain.
    """
    positive, negative = turns & (size > 0), turns & (size < 0)
    count = min(int(positive.sum()), int(negative.sum()))
    if count == 0:
        return turns
    return (
        _largest(positive, size, count) | _largest(negative, -size, count) | (turns & (size == 0))
    )


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


def large_aggregates(values: ValueTable, least: float) -> Steps:
    """Mask of |R - V_k| >= `least`: a magnitude threshold.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        least: threshold in units of the reward; 0 keeps every decision.

    Returns:
        A Boolean mask [prompt, member, decision].
    """
    return reward_to_go(values).abs() >= least


def clear_swings(values: ValueTable, confidence: float, mask: Mask | None = None) -> Steps:
    """Mask of |d_k| >= `confidence` times the population std of d_k over the group's members in the
    mask at that decision.

    d_k = V_{k+1} - V_k. A turn that is small against the spread of its decision may be due to noise
    of the estimate.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        confidence: threshold in standard deviations; 0 keeps every decision.
        mask: the entries that count [prompt, member, decision]; None for all.

    Returns:
        A Boolean mask [prompt, member, decision].
    """
    increments = gains(values)
    mask = torch.ones_like(increments, dtype=torch.bool) if mask is None else mask
    spread = masked_std(increments, ("member",), mask)
    return increments.abs() >= confidence * spread


def turn_probability(
    values: ValueTable, turns: Steps, noise: float, consistent: bool = True
) -> CreditTable:
    """The probability that a decision of `turns` is a turning point of the same direction in the
    values without noise.

    The values are V_j = v_j + `noise` e_j with independent standard normal e_j; with a flat prior
    the v_j are independent and normal around V_j, with the same standard deviation. Equal values of
    a trajectory count as one score, because a completion that gives the same image has the same
    noise. The error is below 1e-9. If the noise is not small against the differences between true
    values, a flat prior is too optimistic.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        turns: mask of turning points [prompt, member, decision], from `turning_points`.
        noise: standard deviation of the reward's noise, in units of the reward.
        consistent: the definition by which `turns` were found.

    Returns:
        Probabilities [prompt, member, decision]; 0 outside `turns`.
    """
    known = {letter: table[turns] for letter, table in deciding_columns(values).items()}
    direction = (known["y"] - known["x"]).sign() / noise
    zero = torch.arange(turns.shape[-1], device=turns.device).expand_as(turns)[turns] == 0
    found = torch.zeros(len(zero), dtype=torch.float64, device=turns.device)
    for first, at_start, at_end in product((True, False), repeat=3):
        case = (
            (zero == first)
            & ((known["w"] == known["v"]) == at_start)
            & ((known["y"] == known["z"]) == at_end)
        )
        orders = turn_orders(first, consistent, at_start, at_end)
        if orders and bool(case.any()):
            found[case] = order_moments(
                {letter: (direction * value)[case] for letter, value in known.items()}, orders
            )[0]
    table = torch.zeros(turns.shape, dtype=torch.float64, device=turns.device)
    table[turns] = found
    return table


def likely_turns(
    values: ValueTable, turns: Steps, noise: float, confidence: float, consistent: bool = True
) -> Steps:
    """The entries of `turns` that are real with probability Phi(`confidence`) or more, given the
    reward's `noise`.

    `turn_probability` computes the probability. If only the sign of d_k = V_{k+1} - V_k is in
    doubt, the criterion is |d_k| >= `confidence` sqrt(2) `noise`, where sqrt(2) `noise` is the
    standard deviation of d_k.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        turns: mask of turning points [prompt, member, decision].
        noise: standard deviation of the reward's noise, in units of the reward.
        confidence: quantile of the standard normal; 0 is a probability of 0.5, 1 of 0.84, 1.64 of
            0.95.
        consistent: the definition by which `turns` were found (see `turning_points`).

    Returns:
        A Boolean mask [prompt, member, decision], a subset of `turns`.
    """
    least = 0.5 * (1 + math.erf(confidence / math.sqrt(2)))
    return turns & (turn_probability(values, turns, noise, consistent) >= least)


def random_steps(
    values: ValueTable, selected: Steps, seed: int = 0, mask: Mask | None = None
) -> Steps:
    """As many decisions per trajectory as in `selected`, at positions independent of the sizes and
    signs of the values.

    A control for whether the *position* of a turning point matters, or only that some decisions get
    R - V_k. The positions come from a pseudo-random permutation of the decisions, drawn from `seed`
    and the rank order of the trajectory's values. They do not change if members are permuted or a
    constant is added. Trajectories of the same rank order share the permutation.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is R.
        selected: mask of decisions [prompt, member, decision]; only the number per trajectory is
            used.
        seed: seed of the permutation.
        mask: the decisions among which positions are drawn [prompt, member, decision]; None for
            all.

    Returns:
        A Boolean mask [prompt, member, decision].
    """
    count = selected.shape[-1]
    orders = values.argsort(dim=-1, stable=True).flatten(0, 1).tolist()
    known: dict[tuple[int, ...], list[int]] = {}
    for order in map(tuple, orders):
        if order not in known:
            digest = hashlib.sha256(repr((seed, order)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            known[order] = torch.randperm(count, generator=generator).tolist()
    places = torch.tensor([known[tuple(order)] for order in orders], device=selected.device).view(
        selected.shape
    )
    if mask is not None:
        places = places.masked_fill(~mask, count).argsort(-1).argsort(-1)
    return places < selected.sum(dim=-1, keepdim=True)


@checked_options
@dataclass(frozen=True)
class TurningPoint:
    """A decision gets its gain, at a turning point its whole long-term effect.

    A = Z(r), r_k = R - V_k at turning points and d_k = V_{k+1} - V_k elsewhere, clamped to
    +-`clamp`.

    Z(y) = (y - mean) / (std + 1e-4) per prompt. With 0/1 rewards the consistent rule finds no
    turning point. With `normalise` = "step", members with R - V_k and members with d_k are compared
    with each other at one decision. `assign` raises `CreditError` if a value that the credit reads
    is not finite. Source: TP-GRPO (arXiv 2602.06422), rewards by ODE completion; `where`,
    `min_size`, `confidence`, `reward_noise` and `combine` are ablations and controls of this
    package.

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
        where: aggregate at turning points, at as many random decisions per trajectory
            (`random_steps`), or nowhere ("none").
        min_size: threshold of `large_aggregates`, in units of the reward.
        confidence: threshold of `clear_swings`, or of `likely_turns` if `reward_noise` > 0.
        reward_noise: standard deviation of the reward's noise, in units of the reward; 0: unknown.
        combine: "replace", or "add": d_k + (R - V_k) instead of R - V_k.
        seed: seed of `random_steps`.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    consistent: bool = True
    balance: Balance | None = "aggregate"
    balance_scope: BalanceScope = "batch"
    first_step: bool = True
    normalise: Literal["step", "joint"] = "step"
    where: Where = "turning"
    min_size: float = 0.0
    confidence: float = 0.0
    reward_noise: float = 0.0
    combine: Literal["replace", "add"] = "replace"
    seed: int = 0
    clamp: float | None = 5.0
    probe: Probe = Completion()

    def __post_init__(self) -> None:
        allowed = "'aggregate', 'trend' or None"
        require(
            self.balance in ("aggregate", "trend", None),
            "TurningPoint.balance",
            self.balance,
            allowed,
        )
        scopes = ("prompt", "batch")
        require(
            self.balance_scope in scopes,
            "TurningPoint.balance_scope",
            self.balance_scope,
            "'prompt' or 'batch'",
        )
        require(
            self.normalise in ("step", "joint"),
            "TurningPoint.normalise",
            self.normalise,
            "'step' or 'joint'",
        )
        places = ("turning", "random", "none")
        require(
            self.where in places, "TurningPoint.where", self.where, "'turning', 'random' or 'none'"
        )
        require(
            self.combine in ("replace", "add"),
            "TurningPoint.combine",
            self.combine,
            "'replace' or 'add'",
        )
        for name in ("min_size", "confidence", "reward_noise"):
            value = getattr(self, name)
            require(
                math.isfinite(value) and value >= 0,
                f"TurningPoint.{name}",
                value,
                "finite and 0 or more",
            )
        require(0 <= self.seed <= MAX_SEED, "TurningPoint.seed", self.seed, f"in [0, {MAX_SEED}]")
        require_clamp("TurningPoint", self.clamp)

    def selected(self, values: ValueTable, mask: Mask | None = None) -> Steps:
        """Mask of the decisions that get their long-term reward: turning points after filters and
        balancing, or the control's.

        `mask`: the entries that count; None for all.
        """
        mask = torch.ones_like(gains(values), dtype=torch.bool) if mask is None else mask
        if self.where == "none":
            return torch.zeros_like(mask)
        turns = turning_points(values, self.consistent, self.first_step) & mask
        if self.reward_noise > 0:
            turns = likely_turns(values, turns, self.reward_noise, self.confidence, self.consistent)
        else:
            turns = turns & clear_swings(values, self.confidence, mask)
        turns = turns & large_aggregates(values, self.min_size)
        if self.balance is not None:
            turns = balanced(values, turns, self.balance, self.balance_scope)
        return random_steps(values, turns, self.seed, mask) if self.where == "random" else turns

    def reads(self, trained: Tensor) -> Tensor:
        """Columns 0, k - 1, k, k + 1 and the last; k and k + 1 if `where` is "none"; all if it is
        "random".
        """
        if self.where == "none":
            return gain_columns(trained)
        before = torch.cat([trained[..., 1:], torch.zeros_like(trained[..., :1])], -1)
        ends = last_column(trained)
        found = gain_columns(trained | before) | ends | ends.flip(-1)
        return ends.any(-1, keepdim=True).expand_as(found) if self.where == "random" else found

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self)
        over = ("member",) if self.normalise == "step" else ("member", "decision")
        processed = process_rewards(
            values, self.selected(values, decisions.mask), add=self.combine == "add"
        )
        return zscore(processed, over, clamp=self.clamp, mask=decisions.mask)
