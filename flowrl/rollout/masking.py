"""Masks of the samples that count: valid samples and, on request, those whose advantages are not all 0."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.errors import RewardError
from flowrl.rollout import RewardTables
from flowrl.types import Schedule


def valid_credit(
    tables: RewardTables, schedule: Schedule, assign: Callable[[RewardTables, Schedule], Tensor]
) -> tuple[Tensor, Tensor]:
    """Advantages [prompt, member, step] by `assign`, and a mask [prompt, member] of the samples that count.

    The rule receives every group without its invalid samples, so the others get the same credit as in a group without them.
    Groups with as many valid samples (in branched trees: with the same remaining leaves) share a table; statistics over a batch
    and a rule's memory are then taken table by table. Samples that do not count have advantage 0: invalid samples, and groups
    with a single valid sample. Raises `RewardError` if none remains.
    """
    tree = schedule.tree
    if tree is not None and tables.log_probs is not None:
        schedule = replace(schedule, tree=replace(tree, log_probs=tables.log_probs))
    if bool(tables.valid.all()):
        return assign(tables, schedule), tables.valid
    counts = tables.valid.sum(1)
    used = tables.valid & (counts >= 2)[:, None]
    if not bool(used.any()):
        raise RewardError(
            f"the reward marked {int((~tables.valid).sum())} of {tables.valid.numel()} samples invalid; no prompt has two left "
            "to be compared"
        )
    prompts, members, nodes = tables.total.shape
    advantages = torch.zeros(prompts, members, nodes - 1)
    for alike in _alike(tables.valid, tree is not None and tree.branched):
        kept = tables.valid & alike[:, None]
        count = int(kept.sum()) // int(alike.sum())

        def part(table: Tensor, kept: Tensor = kept, count: int = count) -> Tensor:
            return table[kept].view(-1, count, nodes)

        smaller = RewardTables(
            part(tables.total),
            {name: part(table) for name, table in tables.parts.items()},
            torch.ones(int(alike.sum()), count, dtype=torch.bool),
            prompts=[prompt for prompt, chosen in zip(tables.prompts, alike.tolist(), strict=False) if chosen],
        )
        advantages[kept] = assign(smaller, _left(schedule, alike, kept)).to(advantages).flatten(0, 1)
    return advantages, used


def _alike(valid: Tensor, branched: bool) -> Iterator[Tensor]:
    """Indices of groups that can share a table, among those with two valid samples or more."""
    counts = valid.sum(1)
    for count in sorted(set(counts[counts >= 2].tolist())):
        groups = counts == count
        for which in valid[groups].unique(dim=0) if branched else valid[:0]:
            yield groups & (valid == which).all(1)
        if not branched:
            yield groups


def _left(schedule: Schedule, groups: Tensor, kept: Tensor) -> Schedule:
    """The schedule of some groups with the remaining leaves of their tree; without a tree if they have none in common."""
    tree = schedule.tree
    if tree is None or not tree.branched:
        return replace(schedule, tree=None)
    log_probs = None if tree.log_probs is None else tree.log_probs[groups]
    return replace(schedule, tree=replace(tree, log_probs=log_probs).keep(kept[groups][0]))


def with_advantage(used: Tensor, advantages: Tensor, steps: Tensor) -> Tensor:
    """The samples `used` [prompt, member] whose `advantages` [prompt, member, step] are not 0 at each of the trained `steps`.

    Flow-GRPO's public code (arXiv 2505.05470) leaves the others out of the loss and its mean, so that they give no KL either.
    """
    return used & (advantages[..., steps.to(advantages.device)] != 0).any(-1)
