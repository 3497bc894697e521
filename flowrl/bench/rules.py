"""Credit rules of the laboratory: a random control, variants of turning points, pruned trees.

They are registered by entry points, as a third party's rules would be.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.errors import CreditError, require
from flowrl.core.experience import (
    Credit,
    CreditTable,
    Decisions,
    Experience,
    Mask,
    Needs,
    ValueTable,
    needs_of,
)
from flowrl.core.options import Count, Fraction, NonNegative, Seed, Whole, checked_options
from flowrl.core.protocols import CreditAssigner, Stateful
from flowrl.core.tree import Tree
from flowrl.credit import (
    CalibratedGain,
    DepthRelative,
    RuleAround,
    TurningPoint,
    balanced,
    branched_tree,
    gains,
    predictions,
    reward_to_go,
    turning_points,
)
from flowrl.credit.table import (
    gain_columns,
    last_column,
    masked_std,
    require_columns,
)
from flowrl.probes import Branching, NoProbe, Probe

Steps = Bool[Tensor, "prompt member decision"]


@checked_options
@dataclass
class RandomCredit:
    """Random credit, a control.

    A ~ N(0, 1) for every member and decision, drawn anew for every table; 0 for a group whose final
    rewards are all equal.

    A negative control: every measurement of credit rules should find it useless. The draws are
    assigned by the rank of the members' rewards, so the order of members has no effect. They depend
    on `seed` and on the number of earlier tables, which checkpoints contain.

    Args:
        seed: seed of the draws; None: the run's seed (0 without a run).
        probe: the probe of the rollout, whose rewards are not used.

    Raises:
        ConfigError: `seed` is out of range.
    """

    seed: Seed | None = None
    probe: Probe = NoProbe()
    tables: int = field(default=0, init=False, repr=False)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]; counts the table."""
        require_columns(values, decisions, self, last_column(decisions.mask))
        seed = 1_000_003 * ((self.seed or 0) % 10**12) + self.tables
        self.tables += 1
        draws = torch.randn(decisions.mask.shape, generator=torch.Generator().manual_seed(seed))
        members = decisions.mask.any(-1)
        final = values[..., -1].masked_fill(~members, torch.inf)
        ranks = final.argsort(dim=1, stable=True).argsort(dim=1)
        credit = draws.to(values).gather(1, ranks[..., None].expand_as(draws))
        silent = ((final == final.amin(1, keepdim=True)) | ~members).all(1)
        return credit.masked_fill(silent[:, None, None], 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of tables so far."""
        return {"tables": torch.tensor(self.tables)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.tables = int(state.get("tables", torch.tensor(0)))


@checked_options
@dataclass(frozen=True)
class EvenGain(CalibratedGain):
    """`calibrated-gain` with the weight of least squares in place of r2.

    A_k = Z(g_k + c_k u_{k+1}) with g_k = s_{k+1} v_{k+1} - s_k v_k, u_j = r - s_j v_j, and c_k =
    (1 - r2_{D-1}) / (D (1 - r2_{k+1})); at the last decision Z(g_k / D).

    Among all combinations of g_k and u_{k+1}, this one has the least mean squared error as an
    estimate of the true advantage A*_k if gains are calibrated and uncorrelated, so that cov(A*_k,
    g_k) = var(g_k) and cov(A*_k, u_{k+1}) = var(A*_k) - var(g_k), and if what the values leave
    unexplained, (1 - r2_{D-1}) var(r), is decided evenly over the D decisions. How much of it a
    decision holds cannot be measured from values and rewards. `gain_weight` has no effect.
    """

    def gains(self, values: ValueTable, known: Bool[Tensor, "prompt member column"]) -> CreditTable:
        """Credit before Z."""
        predicted, r2 = predictions(values, self.cross_fit, known)
        columns = known.any(1).any(0)
        share = 1 / max(int(columns.sum()) - 1, 1)
        unexplained = (1 - r2[..., :-1]).where(columns[:-1], 1.0).amin(-1, keepdim=True)
        ratio = share * unexplained / (1 - r2[..., 1:]).clamp(min=1e-9)
        credit = predicted.diff(dim=-1) + ratio.clamp(max=1) * (
            predicted[..., -1:] - predicted[..., 1:]
        )
        credit[..., -1] *= share
        return credit


# Turning points


def clear_swings(values: ValueTable, confidence: float, mask: Mask) -> Steps:
    """|d_k| >= `confidence` times the population std of d_k = V_{k+1} - V_k over the group's
    members in the mask at that decision.

    A turn that is small against the spread of its decision may be due to noise of the estimate.
    """
    increments = gains(values)
    return increments.abs() >= confidence * masked_std(increments, ("member",), mask)


def random_steps(values: ValueTable, selected: Steps, seed: int, mask: Mask) -> Steps:
    """As many decisions of the mask per trajectory as in `selected`, at positions independent of
    the sizes and signs of the values.

    The positions come from a pseudo-random permutation of the decisions, drawn from `seed` and the
    rank order of the trajectory's values. They do not change if members are permuted or a constant
    is added. Trajectories of the same rank order share the permutation, so the decisions are not
    marked equally often.
    """
    count = selected.shape[-1]
    orders = [tuple(order) for order in values.argsort(dim=-1, stable=True).flatten(0, 1).tolist()]
    places: dict[tuple[int, ...], Tensor] = {}
    for order in set(orders):
        digest = hashlib.sha256(repr((seed, order)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        places[order] = torch.randperm(count, generator=generator)
    table = torch.stack([places[order] for order in orders]).view(selected.shape)
    ranks = table.masked_fill(~mask, count).argsort(-1).argsort(-1)
    return ranks < selected.sum(dim=-1, keepdim=True)


def luck(values: ValueTable) -> CreditTable:
    """F_k = R - V_{k+1}: what follows a decision, by which a mark changes its credit. Its mean
    given the state after the decision is 0 for exact values.
    """
    return values[..., -1:] - values[..., 1:]


def early_turns(values: ValueTable) -> Steps:
    """Marks that do not look at what follows: d_{k-1} T < 0 < d_k T with T = V_{k+1} - V_0, never
    at decision 0. With exact values they leave the mean gradient of gains unchanged, since the luck
    after a decision has the mean 0 whatever is marked.
    """
    increments = gains(values)
    trend = values[..., 1:] - values[..., :1]
    turns = torch.zeros_like(increments, dtype=torch.bool)
    before, now = increments[..., :-1] * trend[..., 1:], increments[..., 1:] * trend[..., 1:]
    turns[..., 1:] = (before < 0) & (now > 0)
    return turns


def _generator(seed: int, values: Float[Tensor, "*member column"]) -> torch.Generator:
    """Draws that depend on the order of the values within trajectories, but neither on the order of
    members nor on the unit of the rewards.
    """
    orders = values.argsort(dim=-1, stable=True).flatten(0, -2).tolist()
    text = repr((seed, sorted(map(tuple, orders))))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shifted(values: ValueTable, marks: Steps, seed: int, mask: Mask) -> Steps:
    """Every member has the marks of another one of its prompt.

    mark'[p, i, k] = mark[p, (i + s_p) mod G, k], in which s_p is drawn from 1, ..., G - 1 for each
    prompt and the valid members are counted in the order of their final rewards. Marks per prompt
    and decision and the pattern within a trajectory remain; the mark of a member knows nothing of
    what follows its own decision.
    """
    moved = torch.zeros_like(marks)
    for prompt, table in enumerate(values):
        members = mask[prompt].any(-1).nonzero().flatten()
        if len(members) < 2:
            continue
        members = members[table[members, -1].argsort(stable=True)]
        generator = _generator(seed, table[members])
        offset = int(torch.randint(1, len(members), (1,), generator=generator))
        moved[prompt, members] = marks[prompt, members.roll(-offset)]
    return moved & mask


def exchanged(values: ValueTable, marks: Steps, seed: int, mask: Mask) -> Steps:
    """Marks in random order among the entries of the `mask` at the same decision whose |F_k| is in
    the same third of the table: as many marks, and almost the same dose, the root mean square of
    F_k at marks.
    """
    size, result = luck(values).abs(), torch.zeros_like(marks)
    generator = _generator(seed, values)
    for decision in range(marks.shape[-1]):
        entries = mask[..., decision].nonzero()
        sizes = size[..., decision][mask[..., decision]]
        order = entries[sizes.argsort(stable=True)]
        for third in order.tensor_split(3):
            places = (*third.T, torch.full((len(third),), decision))
            result[places] = marks[places][torch.randperm(len(third), generator=generator)]
    return result


@checked_options
@dataclass(frozen=True)
class TurningPointVariant(RuleAround):
    """Turning points by stricter criteria, or a control that gives other decisions the long-term
    reward.

    With 0 for all thresholds and where = "turning" it is `rule`. A mark changes the credit of a
    decision by its luck F_k = R - V_{k+1}, and changes nothing at the last one. TP-GRPO's marks
    look at F_k, so the mean credit of a marked decision is biased in the direction of its gain.

    Args:
        where: which decisions have the long-term reward.

            - "turning": the turning points.
            - "shift": the turning points of another member of the prompt (`shifted`).
            - "dose": as many decisions with F_k of the same size (`exchanged`).
            - "sign": the same among decisions whose gain and luck have the same sign, as those of
              consistent turning points, whether they turn or not.
            - "early": `early_turns`, which do not look at what follows.
            - "bonus": none; the gain becomes d_k + kappa_k sign d_k, with kappa_k the mean over the
              table of |F_k| at turning points, 0 elsewhere: the mean effect of turning points
              without their noise.
            - "random": as many random decisions per trajectory. Some are the last one, and F_k is
              smaller than at turning points, so the credit changes less.
            - "none": no decision.
        min_size: smallest |R - V_k| of a turning point, in units of the reward.
        confidence: threshold of `clear_swings`.
        permutation: seed of the random decisions.
        rule: the turning points, their balance and normalisation.

    Raises:
        ConfigError: a field is out of range.
    """

    where: Literal["turning", "shift", "dose", "sign", "early", "bonus", "random", "none"] = (
        "turning"
    )
    min_size: NonNegative = 0.0
    confidence: NonNegative = 0.0
    permutation: Seed = 0
    rule: TurningPoint = TurningPoint()

    @property
    def needs(self) -> Needs:
        """The columns of gains if `where` is "none", those of `rule` if it is "turning", else
        all.
        """
        needs = needs_of(self.rule)
        if self.where == "turning":
            return needs
        return replace(needs, columns=gain_columns if self.where == "none" else None)

    def selected(self, values: ValueTable, mask: Mask | None = None) -> Steps:
        """Mask of the decisions that get their long-term reward.

        `mask`: the entries that count; None for all.
        """
        mask = torch.ones_like(gains(values), dtype=torch.bool) if mask is None else mask
        if self.where in ("none", "bonus"):
            return torch.zeros_like(mask)
        turns = self._turns(values, mask)
        if self.where == "shift":
            return shifted(values, turns, self.permutation, mask)
        if self.where in ("dose", "sign"):
            agree = gains(values) * luck(values) > 0
            fits = mask & agree if self.where == "sign" else mask
            return exchanged(values, turns & fits, self.permutation, fits)
        if self.where == "random":
            return random_steps(values, turns, self.permutation, mask)
        return turns

    def _turns(self, values: ValueTable, mask: Mask) -> Steps:
        """The turning points after the thresholds and balancing."""
        rule = self.rule
        early = self.where == "early"
        turns = mask & (
            early_turns(values)
            if early
            else turning_points(values, rule.consistent, rule.first_step)
        )
        turns = turns & clear_swings(values, self.confidence, mask)
        turns = turns & (reward_to_go(values).abs() >= self.min_size)
        if rule.balance is None:
            return turns
        return balanced(values, turns, rule.balance, rule.balance_scope)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self)
        if self.where == "bonus":
            values = self._with_bonus(values, decisions.mask)
        return self.rule.scores(values, decisions, self.selected(values, decisions.mask))

    def _with_bonus(self, values: ValueTable, mask: Mask) -> ValueTable:
        """Values whose gains are d_k + kappa_k sign d_k."""
        increments = gains(values)
        marked = self._turns(values, mask) * luck(values).abs()
        kappa = marked.flatten(0, 1).sum(0) / mask.flatten(0, 1).sum(0).clamp(min=1)
        changed = increments + kappa * increments.sign()
        return torch.cat([values[..., :1], values[..., :1] + changed.cumsum(-1)], -1)


# Pruned trees


@checked_options
@dataclass
class Pruned(RuleAround):
    """The credit of `rule`, with only some decisions in the loss: the others have weight 0.

    The weights apply after normalisation; normalising over the remaining decisions would be biased.
    Depth pruning leaves out the decisions at `steps` of the schedule. Width pruning leaves out
    branches after the last step at which the tree branches, ranked among the members in the mask.
    Of equal branches the earlier member's remains. An iteration is a call of `assign`; checkpoints
    contain the count.

    `assign` raises `CreditError` without a branched tree. Source: BranchGRPO (arXiv 2509.06040),
    code at 19fbb9f. Its depths are nodes, `steps` one less. Published: depths 15 to 18 of 20, moved
    every 30 iterations until depth 9, or width modes 1 ("best") and 2 ("extremes"), ratio 0.5.

    Args:
        rule: the rule for a branching probe.
        steps: the steps whose decisions are left out.
        every: move `steps` one step earlier every so many iterations; None: never.
        stop: the smallest first step that this reaches.
        width: "best" keeps the fraction `ratio` of the branches of every state that branched there,
            at least one; "extremes" keeps this fraction of the prompt's branches, half best and
            half worst by the advantage of the decision at which they parted; None: all.
        ratio: fraction of branches that remain, in (0, 1].
        until: the last iteration with pruning, counted from 0; None: no end.
        released: rank single decisions as BranchGRPO's code does. Under a depth rule all decisions
            of a branch have the same advantage, so "best", taken within each branch, keeps its
            earliest decisions whatever its value, and "extremes", taken over all prompts, may cut a
            branch in two.

    Raises:
        ConfigError: a field is out of range, or `rule` is not allowed.
    """

    rule: CreditAssigner = field(default_factory=DepthRelative)
    steps: tuple[Whole, ...] = ()
    every: Count | None = None
    stop: Whole = 0
    width: Literal["best", "extremes"] | None = None
    ratio: Fraction = 0.5
    until: Annotated[int, Ge(0)] | None = None
    released: bool = False
    iteration: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        branching = isinstance(self.rule.probe, Branching)
        require(branching, "Pruned.rule.probe", self.rule.probe, "a branching probe")
        first = min(self.steps, default=self.stop)
        require(self.stop <= first, "Pruned.stop", self.stop, "at most the first of `steps`")

    def assign(
        self, values: ValueTable, decisions: Decisions, record: Experience | None = None
    ) -> Credit:
        """The credit of `rule`, with weight 0 for pruned decisions; counts the iteration."""
        credit = self.inner_credit(values, decisions, record)
        assert credit.weights is not None
        return Credit(credit.advantages, credit.weights * self._kept(credit.advantages, decisions))

    def _kept(
        self, advantages: CreditTable, decisions: Decisions
    ) -> Bool[Tensor, "prompt member decision"]:
        """Which decisions of an iteration are trained on; counts the iteration."""
        tree = branched_tree(decisions, "Pruned")
        now, self.iteration = self.iteration, self.iteration + 1
        kept = decisions.mask.clone()
        if self.until is not None and now > self.until:
            return kept
        kept &= ~torch.isin(decisions.step, torch.tensor(self._left_out(now, tree.steps)))
        split = _last_split(tree)
        if self.width is None or split is None:
            return kept
        last = tree.drawn_steps.index(split)
        later, after = advantages[..., last + 1 :], kept[..., last + 1 :]
        if self.released:
            kept[..., last + 1 :] = self._decisions(later, after)
        else:
            worth = advantages[..., last].masked_fill(~decisions.mask.any(-1), -torch.inf)
            after &= self._branches(worth, tree.paths[:, split])[..., None]
        return kept

    def _left_out(self, iteration: int, steps: int) -> list[int]:
        """The steps that depth pruning leaves out."""
        moved = 0 if self.every is None else iteration // self.every
        moved = min(moved, min(self.steps, default=0) - self.stop)
        left_out = [step - moved for step in self.steps]
        if any(step >= steps for step in left_out):
            raise CreditError(f"Pruned.steps = {self.steps} on a schedule of {steps} steps")
        return left_out

    def _branches(self, worth: Tensor, parents: Tensor) -> Tensor:
        """Mask of the members whose branches remain [prompt, member]; those with -inf do not count.

        `parents`: the state from which each member's branch started [member]."""
        if self.width == "extremes":
            return torch.stack([_extremes(row, self.ratio) for row in worth])
        kept = torch.zeros_like(worth, dtype=torch.bool)
        for unit in parents.unique():
            members = (parents == unit).nonzero().flatten()
            ranks = worth[:, members].argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            count = (worth[:, members] > -torch.inf).sum(1, keepdim=True)
            kept[:, members] = ranks < (self.ratio * count.double()).long().clamp(min=1)
        return kept

    def _decisions(self, worth: Tensor, candidates: Tensor) -> Tensor:
        """Mask of the single decisions that remain under the released ranking [prompt, member,
        decision].
        """
        kept = torch.zeros_like(candidates)
        if self.width == "extremes":
            kept[candidates] = _extremes(worth[candidates], self.ratio)
            return kept
        for place in torch.cartesian_prod(*map(torch.arange, worth.shape[:2])).tolist():
            choice = candidates[*place].nonzero().flatten()
            order = worth[*place][choice].argsort(descending=True, stable=True)
            kept[*place, choice[order[: max(1, int(self.ratio * len(choice)))]]] = True
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """The number of iterations so far, and the memory of `rule`."""
        inner = self.rule.state_dict() if isinstance(self.rule, Stateful) else {}
        memory = {f"rule.{name}": value for name, value in inner.items()}
        return {"iteration": torch.tensor(self.iteration), **memory}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.iteration = int(state.get("iteration", torch.tensor(0)))
        memory = {name[5:]: value for name, value in state.items() if name.startswith("rule.")}
        if isinstance(self.rule, Stateful):
            self.rule.load_state_dict(memory)


def _last_split(tree: Tree) -> int | None:
    """The last step at which several states are drawn from one."""
    drawn = tree.parent[tree.drawn]
    split = (torch.bincount(drawn, minlength=tree.units) > 1).nonzero().flatten()
    return int(tree.node[split].max()) if len(split) else None


def _extremes(worth: Tensor, ratio: float) -> Tensor:
    """The int(ratio n) largest and smallest of the n entries above -inf, half each."""
    number = int((worth > -torch.inf).sum())
    kept = int(ratio * number)
    order = worth.argsort(descending=True, stable=True)[:number]
    chosen = torch.cat([order[: (kept + 1) // 2], order[number - kept // 2 :]])
    return torch.zeros_like(worth, dtype=torch.bool).scatter_(0, chosen, True)
