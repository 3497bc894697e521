"""Reward tables for the contract tests of credit rules: sizes and schedules, parts and permutations."""

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.credit import Example
from flowrl.errors import ConfigError
from flowrl.probes import Branching
from flowrl.testing.findings import expect
from flowrl.types import Schedule


def schedule_for(steps: int) -> Schedule:
    """An even grid whose last step is deterministic, unless it is the only one."""
    stds = torch.linspace(0.3, 0.1, steps)
    if steps > 1:
        stds[-1] = 0.0
    return Schedule(torch.linspace(1, 0, steps + 1), stds=stds)


MOST_MEMBERS, MOST_STEPS = 96, 24


def tree_sizes(probe: Branching, steps: int | None = None) -> tuple[tuple[int, int, int], ...]:
    """Prompts, members and steps of tables whose members fit the probe's trees, all different within a table."""
    found = []
    for count in range(1, MOST_STEPS + 1) if steps is None else (steps,):
        decisions = schedule_for(count).decisions
        for members in range(1, MOST_MEMBERS + 1):
            try:
                probe.tree(count, decisions, members, False, torch.Generator().manual_seed(0))
            except ConfigError:
                continue
            found.append((members * -(-3 // members), count))
            break
    limits = f"groups of up to {MOST_MEMBERS} members on schedules of {'up to ' * (steps is None)}{steps or MOST_STEPS} steps"
    expect(len(found) > 0, f"the trees of `probe` = {probe} fit no {limits} whose last step is deterministic; pass steps=...")
    sizes = []
    for (least, count), prompts, times in zip((found[0], found[len(found) // 2], found[-1]), (3, 1, 4), (1, 2, 1), strict=True):
        members = least * times if least * times != count else least * (times + 1)
        sizes.append((next(p for p in (prompts, 5, 7, 2) if p not in (members, count)), members, count))
    return tuple(dict.fromkeys(sizes))


def left(shown: Example, members: Tensor) -> Example:
    """The table of some of the members; `members` is a mask [member]."""
    tree = shown.schedule.tree
    if tree is None:
        return Example(shown.rewards[:, members], shown.schedule)
    tree = tree.keep(members)
    return Example(tree.node_table(tree.values(shown.rewards[:, members, -1])), replace(shown.schedule, tree=tree))


def of_members(shown: Example, order: Tensor) -> Example:
    """The table with its members in the orders [prompt, member]; one for all prompts if they share a tree."""
    rewards = shown.rewards.gather(1, order[..., None].expand_as(shown.rewards))
    tree = shown.schedule.tree
    if tree is None:
        return Example(rewards, shown.schedule)
    strides = None if tree.strides is None else tree.strides[order[0]]
    return Example(rewards, replace(shown.schedule, tree=replace(tree, paths=tree.paths[order[0]], strides=strides)))


def of_prompts(shown: Example, which: Tensor, rewards: Tensor | None = None) -> Example:
    """The table of the prompts `which`, optionally with other rewards in their order."""
    tree = shown.schedule.tree
    schedule = shown.schedule
    if tree is not None and tree.log_probs is not None:
        schedule = replace(schedule, tree=replace(tree, log_probs=tree.log_probs[which]))
    return Example(shown.rewards[which] if rewards is None else rewards, schedule)
