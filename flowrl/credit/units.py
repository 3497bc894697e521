"""Shared code of credit rules on trees: values and advantages of units, the distinct states of a
branched rollout (`flowrl.core.tree`); and examples of the record that a rule receives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.core.errors import CreditError, require
from flowrl.core.experience import CreditTable, Decisions, Experience, ValueTable
from flowrl.core.prompt import Prompt
from flowrl.core.tree import Tree, plain_tree
from flowrl.core.types import Condition, Schedule, Trajectories
from flowrl.credit.table import STD_EPSILON, probed
from flowrl.probes import Branching, Probe

Std = Literal["population", "sample"]
Backup = Literal["softmax", "mean"]
Units = Float[Tensor, "prompt unit"]
SILENT_STD = 1e-6
"""The sample standard deviation below which the released code of BranchGRPO takes all values for
equal.
"""


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
        raise CreditError(
            f"{rule} needs decisions with a branched tree, got none: roll out with the rule's"
            " `probe`"
        )
    return decisions.tree


def next_columns(
    mask: Bool[Tensor, "prompt member decision"],
) -> Bool[Tensor, "prompt member decision+1"]:
    """The columns k + 1 that the decisions of `mask` lead to."""
    return torch.cat([torch.zeros_like(mask[..., :1]), mask], -1)


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
    known, count, place = _counted(values, group)
    order = torch.arange(values.shape[1]).expand_as(place).masked_fill(~known, values.shape[1] - 1)
    first = torch.full_like(count, values.shape[1] - 1, dtype=torch.long).scatter_reduce(
        1, place, order, "amin"
    )
    shifted = (values - values.gather(1, first.gather(1, place))).masked_fill(~known, 0.0)
    means = _sums(shifted, place) / count.clamp(min=1)
    return (shifted - means.gather(1, place)).masked_fill(~known, 0.0)


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
    _, counts, place = _counted(values, group)
    deviations, count = group_deviations(values, group), counts.gather(1, place)
    others = (count - 1).clamp(min=1)
    squares = _sums(deviations.square(), place).gather(1, place)
    numerator = deviations * (count / others) if leave_one_out else deviations
    if std == "population":
        scores = numerator / ((squares / count.clamp(min=1)).sqrt() + STD_EPSILON)
    else:
        spread = (squares / others).sqrt()
        scores = torch.where(
            spread >= SILENT_STD, numerator / (spread + 1e-8), torch.zeros_like(values)
        )
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def _counted(values: Units, group: Int[Tensor, " unit"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of the known units, their number per group [prompt, unit] (padded), and the group's
    index of each unit.
    """
    known = ~values.isnan()
    place = group.unique(return_inverse=True)[1].expand_as(values)
    return known, _sums(known.to(values), place), place


def _sums(values: Units, place: Int[Tensor, "prompt unit"]) -> Float[Tensor, "prompt unit"]:
    """Sums over the groups `place`, padded with 0 to the number of units."""
    return torch.zeros_like(values).scatter_add(1, place, values)


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
    highest = scores.new_full((len(scores), tree.units + 1), -torch.inf).scatter_reduce(
        1, family, scores, "amax"
    )
    weights = (scores - highest.gather(1, family)).exp().masked_fill(~reached, 0.0)
    total = torch.zeros_like(highest).scatter_add(1, family, weights).gather(1, family)
    weights = weights / total.masked_fill(~reached, 1.0)
    found = torch.zeros_like(weights)
    found[:, tree.paths[:, -1]] = leaves.nan_to_num()
    for node in range(tree.steps, 0, -1):
        at = tree.at(node)
        found.index_add_(1, tree.parent[at], weights[:, at] * found[:, at])
    return found


def unit_log_probs(
    log_probs: CreditTable | None, decisions: Decisions, tree: Tree, rule: str
) -> Units:
    """The log-probability of the transition into each unit, the mean over latent elements.

    It is 0 for units that were not drawn, and NaN for those that no member with an entry in the
    mask passes.

    Args:
        log_probs: log-probabilities of the record [prompt, member, decision].
        decisions: the decisions of the rollout.
        tree: their tree.
        rule: name of the credit rule for the message.

    Raises:
        CreditError: `log_probs` is None.
    """
    if log_probs is None:
        raise CreditError(f"{rule} needs log-probabilities: call credit(experience) with log_probs")
    return tree.edge_means(log_probs, decisions.drawn & decisions.mask.any(-1, keepdim=True))


@dataclass(frozen=True)
class Example:
    """A value table as a rollout with some probe could fill it, and its decisions.

    Args:
        values: value table [prompt, member, decision+1].
        decisions: the decisions, with the tree of a branching probe.
    """

    values: ValueTable
    decisions: Decisions

    def experience(
        self, seed: int = 0, parts: Mapping[str, ValueTable] | None = None
    ) -> Experience:
        """A record with this table, for rules with a method `credit`.

        Log-probabilities, states, velocities and embeddings are random numbers drawn from `seed`;
        states are 2x2, and the prompts are "prompt 0", "prompt 1", ...

        Args:
            seed: seed of the draws.
            parts: value tables of components.
        """
        generator = torch.Generator().manual_seed(seed)
        decisions, (prompts, members, _) = self.decisions, self.values.shape
        steps = [step for step in decisions.step.tolist() if step >= 0]
        tree = decisions.tree or plain_tree(members, max(steps, default=0) + 1, tuple(steps))
        inner = tree.at(tree.steps).start
        states, outputs = (
            torch.randn(prompts, n, 1, 2, 2, generator=generator) for n in (tree.units, inner)
        )
        log_probs = torch.randn(prompts, tree.units, generator=generator)[
            :, tree.paths[:, (decisions.step + 1).tolist()]
        ]
        times, stds = {0: 1.0, tree.steps: 0.0}, torch.zeros(tree.steps)
        for k, step in enumerate(steps):
            start, length = float(decisions.time[k]), float(decisions.delta[k])
            times |= {step: start, step + 1: start - length}
            stds[step] = decisions.std[k]
        grid = np.interp(
            range(tree.steps + 1), sorted(times), [times[node] for node in sorted(times)]
        )
        return Experience(
            prompts=[Prompt(f"prompt {row}") for row in range(prompts)],
            values=self.values,
            decisions=decisions,
            valid=decisions.mask.any(-1),
            parts=parts or {},
            trajectories=Trajectories(
                states, outputs, Schedule(torch.tensor(grid).float()), tree, stds
            ),
            log_probs=log_probs.masked_fill(~decisions.drawn | (decisions.step < 0), torch.nan),
            condition=Condition({"embedding": torch.randn(prompts, 4, generator=generator)}),
        )


def example(
    values: ValueTable, probe: Probe, decisions: Decisions | None = None, seed: int = 0
) -> Example:
    """The value table that a rollout with `probe` would give, for testing a rule without a rollout.

    For a branching probe, a tree is drawn from `seed`. The rewards of finished images are kept; the
    other entries become the values of the tree's units. A probe that draws some of the decisions
    only leaves out the others' columns.

    Args:
        values: a full value table [prompt, member, decision+1].
        probe: the probe whose columns are kept.
        decisions: the decisions of the rollout; None for `Decisions.like(values)`.
        seed: seed of the tree.

    Returns:
        The table and its decisions.

    Raises:
        ConfigError: the decisions do not fit the table, or the number of members does not fit the
            branching probe.
    """
    decisions = Decisions.like(values) if decisions is None else decisions
    shape, wanted = tuple(values.shape), (*decisions.mask.shape[:2], len(decisions) + 1)
    require(
        shape == wanted,
        "values",
        shape,
        f"[prompt, member, decision+1] = {wanted} for these decisions",
    )
    if not isinstance(probe, Branching):
        return Example(probed(values, probe), decisions)
    steps = decisions.step.tolist()
    generator = torch.Generator().manual_seed(seed)
    tree = probe.tree(steps[-1] + 1, steps, shape[1], False, generator)
    return on_tree(values[..., -1], decisions, tree)


def on_tree(final: Float[Tensor, "prompt member"], decisions: Decisions, tree: Tree) -> Example:
    """The value table of a tree from the final rewards of its leaves, of which invalid ones are
    NaN.

    Args:
        final: final rewards.
        decisions: decisions that include those of the tree.
        tree: the tree.
    """
    kept = torch.isin(decisions.step, torch.tensor(tree.drawn_steps))
    axis = {
        name: getattr(decisions, name)[kept] for name in ("step", "time", "delta", "std", "trained")
    }
    drawn = tree.decisions[:, tree.drawn_steps]
    mask = final.isfinite()[..., None] & drawn & axis["trained"]
    return Example(
        tree.value_table(tree.values(final)),
        replace(decisions, **axis, drawn=drawn, mask=mask, tree=tree),
    )
