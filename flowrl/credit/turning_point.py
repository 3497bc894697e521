"""TP-GRPO's credit: a step that turns a trajectory towards its final trend gets its long-term reward.

Besides the paper's selection of steps (`turning_points`, `balanced`) there are stricter criteria (`large_aggregates`,
`clear_swings`, `likely_turns`) and a control that keeps the number of selected steps but not their positions (`random_steps`).
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

from flowrl.credit.orders import order_moments
from flowrl.credit.table import gains, require_clamp, require_nodes, reward_to_go, zscore
from flowrl.errors import MAX_SEED, require
from flowrl.options import checked_options
from flowrl.probes import Completion, Probe
from flowrl.types import NodeTable, Schedule, StepTable, checked

Balance = Literal["aggregate", "trend"]
Where = Literal["turning", "random", "none"]
BalanceScope = Literal["prompt", "batch"]
Steps = Bool[Tensor, "prompt member node-1"]


def turning_points(rewards: NodeTable, consistent: bool = True, first_step: bool = True) -> Steps:
    """Mask of the turning points, before balancing.

    With d_i = R_{i+1} - R_i and D = R_T - R_0, step i >= 1 is a turning point if sign(d_{i-1}) sign(D) < 0 < sign(d_i) sign(D).
    A zero difference never qualifies. Under the consistent rule the last step never qualifies, and with 0/1 rewards no step does
    (three values are needed). Source: TP-GRPO (arXiv 2602.06422, definitions of turning points, remark 5.2).

    Args:
        rewards: reward table R [prompt, member, node].
        consistent: require d_i (R_T - R_{i+1}) > 0 as well, so that the rest of the trajectory has the sign of the step.
        first_step: let step 0 qualify, if d_0 (R_T - R_1) > 0 (`consistent`) or d_0 D > 0 (otherwise).

    Returns:
        A Boolean mask [prompt, member, step].
    """
    step_sign = gains(rewards).sign()
    trend_sign = (rewards[..., -1:] - rewards[..., :1]).sign()
    follow_sign = (rewards[..., -1:] - rewards[..., 1:]).sign()
    along = step_sign * trend_sign
    turns = torch.zeros_like(along, dtype=torch.bool)
    turns[..., 1:] = (along[..., :-1] < 0) & (along[..., 1:] > 0)
    turns[..., 0] = along[..., 0] > 0
    if consistent:
        # At step 0 this alone is enough: if the step and what follows agree, the trend has their sign too.
        turns = turns & (step_sign * follow_sign > 0)
    if not first_step:
        turns[..., 0] = False
    return turns


def deciding_nodes(table: Tensor) -> Mapping[str, Tensor]:
    """The entries [..., step] of a table [..., node] that decide whether step i is a turning point, by letter.

    v: node 0; w: i - 1 (0 for the first step); x: i; y: i + 1; z: T.
    """
    x = table[..., :-1]
    return {
        "v": table[..., :1].expand_as(x), "w": torch.cat([table[..., :1], x[..., :-1]], dim=-1), "x": x,
        "y": table[..., 1:], "z": table[..., -1:].expand_as(x),
    }  # fmt: skip


def turn_orders(first: bool, consistent: bool, at_start: bool, at_end: bool) -> tuple[str, ...]:
    """The orders of the rewards at `deciding_nodes` that make a step an upward turning point, as in `turning_points`.

    They are mutually exclusive alternatives for `order_moments`; without one the step never qualifies. `first`: it is step 0.
    `at_start`: w and v are one reward; `at_end`: y and z are one, written y. A downward turning point has all relations reversed.
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


def process_rewards(rewards: NodeTable, selected: Steps, add: bool = False) -> StepTable:
    """R_T - R_i at the `selected` steps, d_i = R_{i+1} - R_i elsewhere.

    Source: TP-GRPO (arXiv 2602.06422), where the aggregated reward replaces the increment; `add` is an ablation of this package.

    Args:
        rewards: reward table R [prompt, member, node].
        selected: mask of the aggregated steps [prompt, member, step].
        add: use d_i + (R_T - R_i) at the selected steps.

    Returns:
        Process rewards [prompt, member, step], in units of the reward.
    """
    increments = gains(rewards)
    long_term = reward_to_go(rewards) + increments if add else reward_to_go(rewards)
    return torch.where(selected, long_term, increments)


def balanced(rewards: NodeTable, turns: Steps, by: Balance = "aggregate", scope: BalanceScope = "batch") -> Steps:
    """The turning points that remain after both signs are reduced to the same number.

    Let n+ and n- be the numbers of positive and negative turning points within a `scope`. If both are above 0, the min(n+, n-)
    largest of each sign remain; otherwise all remain. Among entries of equal size (under "trend", all of a trajectory) the later
    step is removed first, then the later sample. The public code leaves the order of ties to its sorting routine. The order of
    the members can matter only if rewards take few values. Source: TP-GRPO (arXiv 2602.06422).

    Args:
        rewards: reward table R [prompt, member, node].
        turns: mask of turning points [prompt, member, step].
        by: sign and size of R_T - R_i ("aggregate", the paper's text) or of D = R_T - R_0 ("trend", the public code).
        scope: balance within each prompt ("prompt") or over all prompts of the table ("batch").

    Returns:
        A Boolean mask [prompt, member, step], a subset of `turns`.

    Raises:
        ConfigError: `by` or `scope` is unknown.
    """
    require(by in ("aggregate", "trend"), "by", by, "'aggregate' or 'trend'")
    require(scope in ("prompt", "batch"), "scope", scope, "'prompt' or 'batch'")
    trend = rewards[..., -1:] - rewards[..., :1]
    size = reward_to_go(rewards) if by == "aggregate" else trend.expand_as(turns)
    if scope == "batch":
        return _balanced_scope(turns, size)
    return torch.stack([_balanced_scope(*prompt) for prompt in zip(turns, size, strict=True)])


def _balanced_scope(turns: Bool[Tensor, "*entry"], size: Float[Tensor, "*entry"]) -> Bool[Tensor, "*entry"]:
    """Balance the entries of one scope, signed and ranked by `size`; entries of size 0 have no sign and remain."""
    positive, negative = turns & (size > 0), turns & (size < 0)
    count = min(int(positive.sum()), int(negative.sum()))
    if count == 0:
        return turns
    return _largest(positive, size, count) | _largest(negative, -size, count) | (turns & (size == 0))


def _largest(candidates: Bool[Tensor, "*entry"], size: Float[Tensor, "*entry"], count: int) -> Bool[Tensor, "*entry"]:
    """The `count` largest of the `candidates`; of equals the later step (the last axis), then the later sample."""
    ranked = torch.where(candidates, size, -torch.inf).movedim(-1, 0)
    kept = torch.zeros(ranked.numel(), dtype=torch.bool, device=ranked.device)
    kept[ranked.flatten().argsort(stable=True)[-count:]] = True
    return kept.reshape(ranked.shape).movedim(0, -1)


def large_aggregates(rewards: NodeTable, least: float) -> Steps:
    """Mask of |R_T - R_i| >= `least`: a magnitude threshold.

    Args:
        rewards: reward table R [prompt, member, node].
        least: threshold in units of the reward; 0 keeps every step.

    Returns:
        A Boolean mask [prompt, member, step].
    """
    return reward_to_go(rewards).abs() >= least


def clear_swings(rewards: NodeTable, confidence: float) -> Steps:
    """Mask of |d_i| >= `confidence` times the population std of d_i over the group's members at that step.

    d_i = R_{i+1} - R_i. A turn that is small against the spread of its step may be due to noise of the estimate.

    Args:
        rewards: reward table R [prompt, member, node].
        confidence: threshold in standard deviations; 0 keeps every step.

    Returns:
        A Boolean mask [prompt, member, step].
    """
    increments = gains(rewards)
    spread = increments.std(dim=1, keepdim=True, unbiased=False)
    return increments.abs() >= confidence * spread


def turn_probability(rewards: NodeTable, turns: Steps, noise: float, consistent: bool = True) -> StepTable:
    """The probability that a step of `turns` is a turning point of the same direction in the rewards without noise.

    The rewards are R_j = r_j + `noise` e_j with independent standard normal e_j; with a flat prior the r_j are independent and
    normal around R_j, with the same standard deviation. Equal rewards of a trajectory count as one score, because a completion
    that gives the same image has the same noise. The error is below 1e-9. If the noise is not small against the differences
    between true rewards, a flat prior is too optimistic.

    Args:
        rewards: reward table R [prompt, member, node].
        turns: mask of turning points [prompt, member, step], from `turning_points`.
        noise: standard deviation of the reward's noise, in units of the reward.
        consistent: the definition by which `turns` were found.

    Returns:
        Probabilities [prompt, member, step]; 0 outside `turns`.
    """
    nodes = {letter: values[turns] for letter, values in deciding_nodes(rewards).items()}
    direction = (nodes["y"] - nodes["x"]).sign() / noise
    zero = torch.arange(turns.shape[-1], device=turns.device).expand_as(turns)[turns] == 0
    found = torch.zeros(len(zero), dtype=torch.float64, device=turns.device)
    for first, at_start, at_end in product((True, False), repeat=3):
        case = (zero == first) & ((nodes["w"] == nodes["v"]) == at_start) & ((nodes["y"] == nodes["z"]) == at_end)
        orders = turn_orders(first, consistent, at_start, at_end)
        if orders and bool(case.any()):
            found[case] = order_moments({letter: (direction * node)[case] for letter, node in nodes.items()}, orders)[0]
    table = torch.zeros(turns.shape, dtype=torch.float64, device=turns.device)
    table[turns] = found
    return table


def likely_turns(rewards: NodeTable, turns: Steps, noise: float, confidence: float, consistent: bool = True) -> Steps:
    """The entries of `turns` that are real with probability Phi(`confidence`) or more, given the reward's `noise`.

    `turn_probability` computes the probability. If only the sign of d_i = R_{i+1} - R_i is in doubt, the criterion is |d_i| >=
    `confidence` sqrt(2) `noise`, where sqrt(2) `noise` is the standard deviation of d_i.

    Args:
        rewards: reward table R [prompt, member, node].
        turns: mask of turning points [prompt, member, step].
        noise: standard deviation of the reward's noise, in units of the reward.
        confidence: quantile of the standard normal; 0 is a probability of 0.5, 1 of 0.84, 1.64 of 0.95.
        consistent: the definition by which `turns` were found (see `turning_points`).

    Returns:
        A Boolean mask [prompt, member, step], a subset of `turns`.
    """
    least = 0.5 * (1 + math.erf(confidence / math.sqrt(2)))
    return turns & (turn_probability(rewards, turns, noise, consistent) >= least)


def random_steps(rewards: NodeTable, selected: Steps, seed: int = 0) -> Steps:
    """As many steps per trajectory as in `selected`, at positions independent of the sizes and signs of the rewards.

    A control for whether the *position* of a turning point matters, or only that some steps get R_T - R_i. The positions come
    from a pseudo-random permutation of the steps, drawn from `seed` and the rank order of the trajectory's rewards. They do not
    change if members are permuted or a constant is added. Trajectories of the same rank order share the permutation.

    Args:
        rewards: reward table R [prompt, member, node].
        selected: mask of steps [prompt, member, step]; only the number per trajectory is used.
        seed: seed of the permutation.

    Returns:
        A Boolean mask [prompt, member, step].
    """
    steps = selected.shape[-1]
    orders = rewards.argsort(dim=-1, stable=True).flatten(0, 1).tolist()
    known: dict[tuple[int, ...], list[int]] = {}
    for order in map(tuple, orders):
        if order not in known:
            digest = hashlib.sha256(repr((seed, order)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            known[order] = torch.randperm(steps, generator=generator).tolist()
    places = torch.tensor([known[tuple(order)] for order in orders], device=selected.device).view(selected.shape)
    counts = selected.sum(dim=-1, keepdim=True)
    return places < counts


@checked_options
@dataclass(frozen=True)
class TurningPoint:
    """A step gets its gain, at a turning point its whole long-term effect.

    A = Z(r), r_i = R_T - R_i at turning points and d_i = R_{i+1} - R_i elsewhere, clamped to +-`clamp`.

    Z(y) = (y - mean) / (std + 1e-4) per prompt. With 0/1 rewards the consistent rule finds no turning point. With `normalise` =
    "step", members with R_T - R_i and members with d_i are compared with each other at one step. `assign` raises `CreditError` if
    a node's reward is not finite. Source: TP-GRPO (arXiv 2602.06422), rewards by ODE completion; `where`, `min_size`,
    `confidence`, `reward_noise` and `combine` are ablations and controls of this package.

    Args:
        consistent: TP-GRPO's stricter definition of a turning point, whose long-term effect has the sign of the step's gain.
        balance: reduce both signs to the same number, by the sign of R_T - R_i ("aggregate", the paper's text) or of R_T - R_0
            ("trend", the public code); None keeps all.
        balance_scope: balance within each prompt ("prompt"), or over the table ("batch"), as in published mini-batches.
        first_step: let step 0 be a turning point.
        normalise: "step": Z over members, step by step, as published; "joint": over members and steps.
        where: aggregate at turning points, at as many random steps per trajectory (`random_steps`), or nowhere ("none").
        min_size: threshold of `large_aggregates`, in units of the reward.
        confidence: threshold of `clear_swings`, or of `likely_turns` if `reward_noise` > 0.
        reward_noise: standard deviation of the reward's noise, in units of the reward; 0: unknown.
        combine: "replace", or "add": d_i + (R_T - R_i) instead of R_T - R_i.
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
        require(self.balance in ("aggregate", "trend", None), "TurningPoint.balance", self.balance, allowed)
        scopes = ("prompt", "batch")
        require(self.balance_scope in scopes, "TurningPoint.balance_scope", self.balance_scope, "'prompt' or 'batch'")
        require(self.normalise in ("step", "joint"), "TurningPoint.normalise", self.normalise, "'step' or 'joint'")
        places = ("turning", "random", "none")
        require(self.where in places, "TurningPoint.where", self.where, "'turning', 'random' or 'none'")
        require(self.combine in ("replace", "add"), "TurningPoint.combine", self.combine, "'replace' or 'add'")
        for name in ("min_size", "confidence", "reward_noise"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"TurningPoint.{name}", value, "finite and 0 or more")
        require(0 <= self.seed <= MAX_SEED, "TurningPoint.seed", self.seed, f"in [0, {MAX_SEED}]")
        require_clamp("TurningPoint", self.clamp)

    def selected(self, rewards: NodeTable) -> Steps:
        """The steps that get their long-term reward: turning points after all filters and balancing, or the control's steps."""
        turns = turning_points(rewards, self.consistent, self.first_step)
        if self.where == "none":
            return torch.zeros_like(turns)
        if self.reward_noise > 0:
            turns = likely_turns(rewards, turns, self.reward_noise, self.confidence, self.consistent)
        else:
            turns = turns & clear_swings(rewards, self.confidence)
        turns = turns & large_aggregates(rewards, self.min_size)
        if self.balance is not None:
            turns = balanced(rewards, turns, self.balance, self.balance_scope)
        return random_steps(rewards, turns, self.seed) if self.where == "random" else turns

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; the schedule is not used."""
        require_nodes(rewards, list(range(rewards.shape[-1])), "TurningPoint", self.probe)
        over = ("member",) if self.normalise == "step" else ("member", "step")
        processed = process_rewards(rewards, self.selected(rewards), add=self.combine == "add")
        return zscore(processed, over=over, clamp=self.clamp)
