"""Credit rules on trees: values and advantages of units, the distinct states of a branched rollout
(`flowrl.core.tree`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import CreditError
from flowrl.core.experience import CreditTable, Decisions, Experience, Needs, ValueTable, needs_of
from flowrl.core.options import checked_options
from flowrl.core.tree import Tree
from flowrl.credit.table import (
    STD_EPSILON,
    Clamp,
    centred,
    clamped,
    last_column,
    require_columns,
    zscore,
)
from flowrl.probes import Branch, Branching

Std = Literal["population", "sample"]
Backup = Literal["softmax", "mean"]
Units = Float[Tensor, "prompt unit"]


def branched_tree(decisions: Decisions, rule: str) -> Tree:
    """The tree of the decisions.

    Args:
        decisions: the decisions of the rollout.
        rule: name of the credit rule for the message.

    Returns:
        The branched tree of the rollout.

    Raises:
        CreditError: there is none.
    """
    if decisions.tree is None:
        raise CreditError(f"{rule} needs decisions with a branched tree: roll out with its `probe`")
    return decisions.tree


# Statistics over groups of units


def unit_values(values: ValueTable, decisions: Decisions, tree: Tree) -> Units:
    """The value of each drawn unit: the mean of V_{k+1} over the members in the mask that reach it
    by decision k.

    If the members are finished with several strides, their final rewards are averaged.

    Args:
        values: value table V [prompt, member, decision+1].
        decisions: the decisions of the rollout, with the mask.
        tree: their tree.

    Returns:
        Values [prompt, unit]; NaN for units that were not drawn, or have no such member.
    """
    table = values[..., 1:] if tree.strides is None else values[..., -1:].expand_as(decisions.mask)
    return tree.edge_means(table, decisions.mask).masked_fill(~tree.drawn, torch.nan)


@checked
def group_deviations(values: Units, group: Int[Tensor, " unit"]) -> Units:
    """y - mean over the units of equal `group`; exactly 0 if all of them are equal. Units with NaN
    are left out.

    Args:
        values: values y [prompt, unit].
        group: a number per unit [unit]; units with the same number are compared, such as siblings
            (`tree.parent`) or the units of a node (`tree.node`).

    Returns:
        Deviations [prompt, unit], in units of `values`; 0 for units with NaN.
    """
    known, place, last = ~values.isnan(), _places(values, group), values.shape[1] - 1
    # as in `table.centred`: the group's first value is subtracted before the mean
    order = torch.arange(last + 1).expand_as(place).masked_fill(~known, last)
    first = place.new_full(place.shape, last).scatter_reduce(1, place, order, "amin")
    shifted = (values - values.gather(1, first.gather(1, place))).masked_fill(~known, 0.0)
    mean = _group_sums(shifted, place) / _group_sums(known.to(values), place).clamp(min=1)
    return (shifted - mean).masked_fill(~known, 0.0)


@checked
def group_zscore(
    values: Units,
    group: Int[Tensor, " unit"],
    std: Std = "population",
    clamp: float | None = 5.0,
    leave_one_out: bool = False,
) -> Units:
    """(y - mean) / (std + 1e-4) over the units of equal `group`, clamped to +-`clamp`; 0 for a
    group of one unit.

    Args:
        values: values y [prompt, unit]; units with NaN are left out.
        group: a number per unit [unit]; units with the same number are compared.
        std: "population", or "sample": divided by n - 1, + 1e-8, and 0 if the std is below 1e-6
            (BranchGRPO's code).
        clamp: largest absolute score; None for no clamp.
        leave_one_out: use the mean of the other units, which multiplies the numerator by n / (n -
            1).

    Returns:
        Scores [prompt, unit], dimensionless; 0 for units with NaN.
    """
    place, deviations = _places(values, group), group_deviations(values, group)
    count = _group_sums((~values.isnan()).to(values), place)
    others = (count - 1).clamp(min=1)
    squares = _group_sums(deviations.square(), place)
    numerator = deviations * (count / others) if leave_one_out else deviations
    if std == "population":
        return clamped(numerator / ((squares / count.clamp(min=1)).sqrt() + STD_EPSILON), clamp)
    spread = (squares / others).sqrt()
    return clamped(torch.where(spread >= 1e-6, numerator / (spread + 1e-8), 0.0), clamp)


def _places(values: Units, group: Int[Tensor, " unit"]) -> Int[Tensor, "prompt unit"]:
    """The index of each unit's group."""
    return group.unique(return_inverse=True)[1].expand_as(values)


def _group_sums(values: Units, place: Int[Tensor, "prompt unit"]) -> Units:
    """For each unit, the sum over its group."""
    return torch.zeros_like(values).scatter_add(1, place, values).gather(1, place)


# Values from the leaves to the roots


@checked
def backed_up(leaves: Float[Tensor, "prompt member"], tree: Tree, log_probs: Units) -> Units:
    """y(u) = sum over the children c of w_c y(c), from the members' numbers at the leaves up to the
    roots.

    Args:
        leaves: the members' numbers; members with NaN, and branches without others, are left out.
        tree: the tree of the rollout.
        log_probs: w is their softmax over the children of a unit; zeros for equal weights.

    Returns:
        y [prompt, unit]; 0 for units without a member that counts.
    """
    reached = (~leaves.isnan()).to(leaves) @ tree.passes.to(leaves) > 0
    family = torch.where(tree.parent >= 0, tree.parent, tree.units).expand_as(reached)
    scores = log_probs.masked_fill(~reached, -torch.inf)
    highest = scores.new_full((len(scores), tree.units + 1), -torch.inf)
    highest = highest.scatter_reduce(1, family, scores, "amax").gather(1, family)
    weights = (scores - highest).exp().masked_fill(~reached, 0.0)
    total = weights.new_zeros(len(weights), tree.units + 1).scatter_add(1, family, weights)
    weights = weights / total.gather(1, family).masked_fill(~reached, 1.0)
    result = torch.zeros_like(weights)
    result[:, tree.paths[:, -1]] = leaves.nan_to_num()
    for node in range(tree.steps, 0, -1):
        units = tree.at(node)
        result.index_add_(1, tree.parent[units], weights[:, units] * result[:, units])
    return result


# Rules


def backup_needs(backup: Backup) -> Needs:
    """What a rule needs for its `backup`: the log-probabilities for "softmax"."""
    return Needs(fields=("log_probs",)) if backup == "softmax" else Needs()


@dataclass(frozen=True, kw_only=True)
class _TreeRule(ABC):
    """A rule that gives every unit an advantage: that of the decisions that lead to it."""

    clamp: Clamp = 5.0
    probe: Branching = Branch((2, 2))

    @checked
    def assign(
        self, values: ValueTable, decisions: Decisions, record: Experience | None = None
    ) -> CreditTable:
        """Advantages [prompt, member, decision]; 0 where a member's transition was not drawn."""
        tree, mask = branched_tree(decisions, type(self).__name__), decisions.mask
        # the columns k + 1 that the decisions lead to, and the last
        arrived = torch.cat([torch.zeros_like(mask[..., :1]), mask], -1)
        require_columns(values, decisions, self, arrived | last_column(mask))
        weights = values.new_zeros(len(values), tree.units)
        if needs_of(self).fields:
            if record is None or record.log_probs is None:
                raise CreditError(f"{self} needs log-probabilities: pass a record that has them")
            among = decisions.drawn & mask.any(-1, keepdim=True)
            weights = tree.edge_means(record.log_probs, among).to(values)
        return tree.decision_table(self._units(values, decisions, tree, weights))

    @abstractmethod
    def _units(
        self, values: ValueTable, decisions: Decisions, tree: Tree, log_probs: Units
    ) -> Units:
        """Advantages of the drawn units; `log_probs` of the transitions into them are 0 unless
        `backup` is "softmax".
        """


@checked_options
@dataclass(frozen=True)
class SiblingRelative(_TreeRule):
    """Compares a branch with the other branches from the same state.

    A(u) = (V(u) - mean) / (std + 1e-4) over the siblings of u, the draws from the same state; 0 for
    a draw without siblings.

    Siblings differ only by what happened at the step itself, so earlier luck is not credited. If
    members are finished by ODE steps of several strides (`Comb(strides=...)`), A(u) is the sum over
    the strides s of Z(V_s), with V_s the mean over the members of stride s behind u.

    `assign` raises `CreditError` if the decisions have no branched tree. Sources: Granular-GRPO
    (arXiv 2510.01982), whose siblings share their trunk, summed over strides; TempFlow-GRPO (arXiv
    2508.04324), comparison per seed. Leave-one-out is our extension.

    Args:
        normalise: divide by the standard deviation; of two siblings only the sign then remains.
            False: A is in units of the reward.
        leave_one_out: multiply by k / (k - 1) for k siblings, because the mean contains the draw's
            own value.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    normalise: bool = True
    leave_one_out: bool = False

    def _units(
        self, values: ValueTable, decisions: Decisions, tree: Tree, log_probs: Units
    ) -> Units:
        total = values.new_zeros(len(values), tree.units)
        strides = torch.ones(tree.members) if tree.strides is None else tree.strides
        for stride in strides.unique():
            mask = decisions.mask & (strides == stride)[:, None]
            states = unit_values(values, replace(decisions, mask=mask), tree)
            total += self._among_siblings(states, tree.parent)
        return total

    def _among_siblings(self, values: Units, family: Tensor) -> Units:
        if self.normalise:
            return group_zscore(values, family, clamp=self.clamp, leave_one_out=self.leave_one_out)
        difference = group_deviations(values, family)
        if self.leave_one_out:
            count = _group_sums((~values.isnan()).to(values), _places(values, family))
            difference = difference * count / (count - 1).clamp(min=1)
        return clamped(difference, self.clamp)


@checked_options
@dataclass(frozen=True)
class DepthRelative(_TreeRule):
    """Compares a branch with all branches at the same depth of the tree.

    A(u) = Z(V(u)) over the distinct states drawn at the node of u, Z(y) = (y - mean) / (std + eps).

    A state without siblings differs from the others only by earlier steps, and is credited for
    them.

    `assign` raises `CreditError` if the decisions have no branched tree, or if "softmax" gets no
    log-probabilities. Sources: BranchGRPO (arXiv 2509.06040) is scope "tree", std "sample" by its
    code (commit 19fbb9f), `backup` its `tree_prob_weighted`; Multi-GRPO (arXiv 2512.00743, temporal
    groups) and TempFlow-GRPO (arXiv 2508.04324) without seed grouping are scope "prompt".

    Args:
        scope: compare with all states of the prompt ("prompt"), or with those from the same initial
            noise ("tree").
        std: "population": eps = 1e-4; "sample": divided by n - 1, eps = 1e-8, and 0 for a single
            state or a std below 1e-6.
        backup: V: "mean": the value table; "softmax": from the leaves up, the children's mean
            weighted by the softmax of their log-probabilities per element. Children are drawn from
            these probabilities already, so the second weighting is biased.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    scope: Literal["prompt", "tree"] = "prompt"
    std: Std = "population"
    backup: Backup = "mean"

    @property
    def needs(self) -> Needs:
        """The log-probabilities, for "softmax"."""
        return backup_needs(self.backup)

    def _units(
        self, values: ValueTable, decisions: Decisions, tree: Tree, log_probs: Units
    ) -> Units:
        states = unit_values(values, decisions, tree)
        if self.backup == "softmax":
            members = decisions.mask.any(-1)
            final = centred(values[..., -1], ("member",), members).masked_fill(~members, torch.nan)
            states = backed_up(final, tree, log_probs).masked_fill(states.isnan(), torch.nan)
        group = tree.node if self.scope == "prompt" else tree.node * tree.units + tree.roots
        return group_zscore(states, group, self.std, self.clamp)


@checked_options
@dataclass(frozen=True)
class BackedUp(_TreeRule):
    """Compares the leaves of a tree, and averages their advantages back to the root.

    A(leaf) = Z(R) over the leaves of the prompt, clamped to +-`clamp`; A(u) = sum over the children
    c of w_c A(c).

    Z(y) = (y - mean) / (std + 1e-4). A single child has the advantage of its parent. Children are
    drawn from p already, so weighting by p again estimates another value than that of u; equal
    weights do not. Members outside the mask, and branches without others, are left out.

    `assign` raises `CreditError` if the decisions have no branched tree, or if "softmax" gets no
    log-probabilities. Source: TreeGRPO (arXiv 2512.08153), "softmax".

    Args:
        backup: "softmax": w is the softmax over the children of log p(c | u), a mean over latent
            elements; "mean": equal weights.
        clamp: largest absolute advantage of a leaf; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    backup: Backup = "softmax"

    @property
    def needs(self) -> Needs:
        """The log-probabilities, for "softmax"."""
        return backup_needs(self.backup)

    def _units(
        self, values: ValueTable, decisions: Decisions, tree: Tree, log_probs: Units
    ) -> Units:
        members = decisions.mask.any(-1, keepdim=True)
        scores = zscore(values[..., -1:], ("member",), clamp=self.clamp, mask=members)
        leaves = scores.masked_fill(~members, torch.nan)[..., 0]
        return backed_up(leaves, tree, log_probs)
