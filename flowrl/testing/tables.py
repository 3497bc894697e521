"""Records for the contract tests of credit rules: sizes, parts, permutations, and members left
out.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Experience
from flowrl.core.protocols import CreditRule
from flowrl.credit import on_tree, read_columns
from flowrl.probes import Branching
from flowrl.testing.findings import expect

MOST_MEMBERS, MOST_DECISIONS = 96, 24


def tree_sizes(probe: Branching, decisions: int | None = None) -> tuple[tuple[int, int, int], ...]:
    """Prompts, members and decisions of tables whose members fit the probe's trees, all different
    within a table.
    """
    found = []
    for count in range(1, MOST_DECISIONS + 1) if decisions is None else (decisions,):
        for members in range(1, MOST_MEMBERS + 1):
            try:
                probe.tree(count, range(count), members, False, torch.Generator().manual_seed(0))
            except ConfigError:
                continue
            found.append((members * -(-3 // members), count))
            break
    most = f"{'up to ' * (decisions is None)}{decisions or MOST_DECISIONS} decisions"
    limits = f"groups of up to {MOST_MEMBERS} members with {most}"
    expect(len(found) > 0, f"the trees of `probe` = {probe} fit no {limits}; pass decisions=...")
    sizes, chosen = [], (found[0], found[len(found) // 2], found[-1])
    for (least, count), prompts, times in zip(chosen, (3, 1, 4), (1, 2, 1), strict=True):
        members = least * times if least * times != count else least * (times + 1)
        free = next(p for p in (prompts, 5, 7, 2) if p not in (members, count))
        sizes.append((free, members, count))
    return tuple(dict.fromkeys(sizes))


def of_prompts(record: Experience, which: Tensor, values: Tensor | None = None) -> Experience:
    """The record of the prompts `which`, optionally with other values in their order."""
    path, condition, log_probs = record.trajectories, record.condition, record.log_probs
    assert path is not None and condition is not None and log_probs is not None
    return replace(
        record,
        prompts=[record.prompts[row] for row in which.tolist()],
        values=record.values[which] if values is None else values,
        decisions=replace(record.decisions, mask=record.decisions.mask[which]),
        valid=record.valid[which],
        parts={name: table[which] for name, table in record.parts.items()},
        trajectories=replace(path, states=path.states[which], outputs=path.outputs[which]),
        log_probs=log_probs[which],
        condition=condition.take(which),
    )


def of_members(record: Experience, members: Tensor) -> Experience:
    """The record of the members with the indices `members` of every group, in their order."""
    path, decisions, log_probs = record.trajectories, record.decisions, record.log_probs
    assert path is not None and log_probs is not None
    tree = path.tree
    kept = tree.passes[members].any(0)
    number, parent = kept.cumsum(0) - 1, tree.parent[kept]
    strides = None if tree.strides is None else tree.strides[members]
    smaller = replace(
        tree,
        parent=torch.where(parent < 0, parent, number[parent]),
        node=tree.node[kept],
        drawn=tree.drawn[kept],
        paths=number[tree.paths[members]],
        strides=strides,
    )
    inner = kept[: path.outputs.shape[1]]
    states, outputs = path.states[:, kept], path.outputs[:, inner]
    return replace(
        record,
        values=record.values[:, members],
        decisions=replace(
            decisions,
            drawn=decisions.drawn[members],
            mask=decisions.mask[:, members],
            tree=None if decisions.tree is None else smaller,
        ),
        valid=record.valid[:, members],
        parts={name: table[:, members] for name, table in record.parts.items()},
        trajectories=replace(path, states=states, outputs=outputs, tree=smaller),
        log_probs=log_probs[:, members],
    )


def left_out(record: Experience, members: Tensor, trained: Tensor, rule: CreditRule) -> Experience:
    """The record without some members and decisions, whose values are NaN.

    Args:
        record: a whole record.
        members: the members that are left out [prompt, member].
        trained: the decisions that remain [decision].
        rule: the rule; columns that it does not read become NaN.
    """
    decisions = replace(record.decisions, trained=record.decisions.trained & trained)
    valid = record.valid & ~members
    if decisions.tree is not None:
        shown = on_tree(
            record.values[..., -1].masked_fill(members, torch.nan), decisions, decisions.tree
        )
        return replace(record, values=shown.values, decisions=shown.decisions, valid=valid)
    mask = decisions.mask & valid[..., None] & decisions.trained
    unread = ~read_columns(rule, decisions.trained) | members[..., None]
    values = record.values.masked_fill(unread, torch.nan)
    return replace(record, values=values, decisions=replace(decisions, mask=mask), valid=valid)
