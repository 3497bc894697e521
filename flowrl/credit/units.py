"""Shared code of credit rules on trees: values and advantages of units, the distinct states of a branched rollout
(`flowrl.tree`).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.credit.table import STD_EPSILON, probed
from flowrl.errors import CreditError
from flowrl.probes import Branching, Probe
from flowrl.tree import Tree
from flowrl.types import NodeTable, Schedule

Std = Literal["population", "sample"]
Backup = Literal["softmax", "mean"]
Units = Float[Tensor, "prompt unit"]
SILENT_STD = 1e-6
"""The sample standard deviation below which the released code of BranchGRPO takes all values for equal."""


def branched_tree(rewards: NodeTable, schedule: Schedule | None, rule: str) -> Tree:
    """The tree of `schedule`, checked against the reward table.

    Args:
        rewards: reward table [prompt, member, node].
        schedule: the schedule of the rollout; None is an error.
        rule: name of the credit rule for the message.

    Returns:
        The branched tree of the rollout.

    Raises:
        CreditError: the schedule has no branched tree, or the tree and the table differ in members or steps.
    """
    tree = None if schedule is None else schedule.tree
    if tree is None or not tree.branched:
        found = "no schedule" if schedule is None else "a schedule without a tree" if tree is None else "a tree without branches"
        raise CreditError(f"{rule} needs a schedule with a branched tree (schedule.tree), got {found}: roll out with its `probe`")
    if (tree.members, tree.steps + 1) != tuple(rewards.shape[1:]):
        raise CreditError(
            f"{rule}: schedule.tree has {tree.members} members and {tree.steps} steps, the rewards are [prompt, member, node] = "
            f"{tuple(rewards.shape)}"
        )
    return tree


def unit_values(rewards: NodeTable, tree: Tree, rule: str, probe: Probe) -> Units:
    """The value of every unit (distinct state) of a tree, from the reward table.

    Args:
        rewards: reward table [prompt, member, node].
        tree: the tree of the rollout.
        rule: name of the credit rule for the message.
        probe: the rule's probe for the message.

    Returns:
        Values [prompt, unit], in units of the reward.

    Raises:
        CreditError: a reward is not finite.
    """
    if not bool(rewards.isfinite().all()):
        raise CreditError(f"{rule} needs finite rewards at every node: roll out with the probe {probe} (the rule's `probe`)")
    return tree.unit_table(rewards)


def siblings(tree: Tree) -> Int[Tensor, " unit"]:
    """A number for every unit, shared by the units drawn from the same parent; unique for a unit that is no decision."""
    return torch.where(tree.drawn, tree.parent, tree.units + torch.arange(tree.units))


def group_deviations(values: Units, group: Int[Tensor, " unit"]) -> Units:
    """y - mean over the units of equal `group`; exactly 0 if all of them are equal.

    Args:
        values: values y [prompt, unit].
        group: a number per unit [unit]; units with the same number are compared.

    Returns:
        Deviations [prompt, unit], in units of `values`.
    """
    _, place, count = group.unique(return_inverse=True, return_counts=True)
    first = torch.full_like(count, len(group)).scatter_reduce(0, place, torch.arange(len(group)), "amin")
    shifted = values - values[:, first[place]]
    return shifted - _sums(shifted, place, len(count))[:, place] / count[place]


def group_zscore(
    values: Units, group: Int[Tensor, " unit"], std: Std = "population", clamp: float | None = 5.0, leave_one_out: bool = False
) -> Units:
    """(y - mean) / (std + 1e-4) over the units of equal `group`, clamped to +-`clamp`; 0 for a group of one unit.

    Args:
        values: values y [prompt, unit].
        group: a number per unit [unit]; units with the same number are compared.
        std: "population", or "sample": divided by n - 1, + 1e-8, and 0 if the std is below 1e-6 (BranchGRPO's code).
        clamp: largest absolute score; None for no clamp.
        leave_one_out: use the mean of the other units, which multiplies the numerator by n / (n - 1).

    Returns:
        Scores [prompt, unit], dimensionless.
    """
    deviations = group_deviations(values, group)
    _, place, counts = group.unique(return_inverse=True, return_counts=True)
    count = counts[place]
    others = (count - 1).clamp(min=1)
    squares = _sums(deviations.square(), place, len(counts))[:, place]
    numerator = deviations * (count / others).to(deviations) if leave_one_out else deviations
    if std == "population":
        scores = numerator / ((squares / count).sqrt() + STD_EPSILON)
    else:
        spread = (squares / others).sqrt()
        scores = torch.where(spread >= SILENT_STD, numerator / (spread + 1e-8), torch.zeros_like(values))
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def _sums(values: Units, place: Int[Tensor, " unit"], groups: int) -> Float[Tensor, "prompt group"]:
    return values.new_zeros(len(values), groups).index_add(1, place, values)


def backed_up(leaves: Float[Tensor, "prompt member"], tree: Tree, backup: Backup, rule: str) -> Units:
    """y(u) = sum over the children c of w_c y(c), from the members' numbers at the leaves up to the roots.

    `backup` = "softmax": w is the softmax of the children's log-probabilities, each the mean over the latent's elements
    (`Tree.log_probs`); "mean": equal weights. Raises `CreditError` if the tree has no log-probabilities.
    """
    parent, inner = tree.parent, tree.parent >= 0
    weights = leaves.new_zeros(len(leaves), tree.units)
    if backup == "softmax":
        if tree.log_probs is None:
            raise CreditError(f"{rule} needs the log-probabilities of the edges: schedule.tree.log_probs is missing")
        weights = tree.log_probs.to(leaves)
    family = torch.where(inner, parent, tree.units)
    highest = weights.new_full((len(leaves), tree.units + 1), -torch.inf)
    highest = highest.scatter_reduce(1, family.expand_as(weights), weights, "amax")
    weights = (weights - highest[:, family]).exp()
    weights = weights / _sums(weights, family, tree.units + 1)[:, family]
    found = torch.zeros_like(weights)
    found[:, tree.paths[:, -1]] = leaves
    for node in range(tree.steps, 0, -1):
        at = tree.at(node)
        found.index_add_(1, parent[at], weights[:, at] * found[:, at])
    return found


@dataclass(frozen=True)
class Example:
    """A reward table as a rollout with some probe could fill it, and its schedule.

    Args:
        rewards: reward table [prompt, member, node].
        schedule: the schedule of the rollout, with its tree.
    """

    rewards: NodeTable
    schedule: Schedule


def example(rewards: NodeTable, schedule: Schedule, probe: Probe, seed: int = 0) -> Example:
    """The reward table that a rollout with `probe` would give, for testing a rule without a rollout.

    For a branching probe, a tree with random log-probabilities is drawn from `seed` and attached to the schedule. The rewards of
    finished images are kept; the other entries become the values of the tree's units.

    Args:
        rewards: a full reward table [prompt, member, node].
        schedule: the schedule of the rollout.
        probe: the probe whose nodes are kept.
        seed: seed of the tree.

    Returns:
        The table and the schedule.

    Raises:
        ConfigError: the number of members does not fit the branching probe.
    """
    if not isinstance(probe, Branching):
        return Example(probed(rewards, probe), schedule)
    generator = torch.Generator().manual_seed(seed)
    prompts, members, _ = rewards.shape
    tree = probe.tree(schedule.steps, schedule.decisions, members, False, generator)
    log_probs = torch.randn(prompts, tree.units, generator=generator) * tree.drawn
    tree = replace(tree, log_probs=log_probs)
    return Example(tree.node_table(tree.values(rewards[..., -1])), replace(schedule, tree=tree))
