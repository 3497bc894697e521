"""The promises of a credit rule."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, CreditError, require
from flowrl.core.experience import Decisions, Experience
from flowrl.core.protocols import Stateful
from flowrl.core.tree import Tree
from flowrl.credit import credit_of, example, on_tree, read_columns
from flowrl.probes import Branching
from flowrl.run.parts.registry import check_part
from flowrl.testing.contract import (
    Contract,
    ContractBroken,
    basic,
    expect,
    promise,
    same,
    twice,
    unchanged,
)

SIZES = ((3, 5, 10), (1, 2, 4), (4, 3, 1), (2, 6, 6))
"""Prompts, members and decisions of the tables: all different within a table, so that swapped axes
are detected.
"""
MOST_MEMBERS = 97
EQUAL_REWARDS = (0.0, -3.3, 12345.678, 1e6 / 3)


@dataclass(frozen=True)
class CreditContract(Contract):
    """The contract of a credit rule (`CreditAssigner`).

    Args:
        part: the credit rule: an object (copied for every promise), a class, or a function that
            makes it.
        decisions: number of decisions, if the rule requires one; None for several.
        without: names of promises that the part breaks on purpose.
    """

    decisions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.decisions is None or self.decisions >= 1
        require(fits, "decisions", self.decisions, "1 or more, or None")

    @cached_property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Prompts, members and decisions of the tables to try."""
        if isinstance(self.part.probe, Branching):
            return tree_sizes(self.part.probe, self.decisions)
        return [(p, m, self.decisions or d) for p, m, d in SIZES]

    def tables(self, visits: int = 1) -> Iterator[Tensor]:
        """Random value tables without ties, `visits` of every size in a row."""
        for prompts, members, decisions in self.sizes:
            generator = torch.Generator().manual_seed(decisions)
            for _ in range(visits):
                shape = (prompts, members, decisions + 1)
                yield torch.rand(shape, generator=generator, dtype=torch.float64)

    def records(self, visits: int = 1) -> list[Experience]:
        """The records of `tables`."""
        return [self.filled(values) for values in self.tables(visits)]

    def filled(self, values: Tensor) -> Experience:
        """A record with the values that the rule's probe fills (NaN in the other columns; the
        values of a tree).
        """
        stds = torch.linspace(0.3, 0.1, values.shape[-1] - 1).tolist()
        return example(values, self.part.probe, Decisions.like(values, stds))

    def credit(self, record: Experience) -> Tensor:
        """The credit by a copy of the rule, so that a memory does not carry over."""
        return credited(copy.deepcopy(self.part), record)

    @basic
    def declares_a_probe(self) -> None:
        """It has `assign(values, decisions)`, with a further argument `record` if its `needs` name
        fields of the record, and `probe` is a flowrl.probes.Probe, such as NoProbe().
        """
        check_part("credit", self.part)

    @basic
    def leaves_its_input_alone(self) -> None:
        """Neither the values nor the decisions are changed.

        Operations that end in _ and += change their tensor.
        """
        for record in self.records():
            # what it returns is the subject of another promise
            with unchanged(record=record), suppress(Exception):
                self.credit(record)

    @basic
    def returns_advantages_per_decision(self) -> None:
        """Advantages are a floating-point tensor [prompt, member, decision], finite within the
        mask, also for a reward with components; weights are in [0, 1].

        Fields of the record that `needs` does not name are None.
        """
        for values in self.tables():
            record = self.filled(values.float())
            full = record.values if record.decisions.tree else values.float()
            for parts in ({}, {"first": full.clone(), "second": 3.0 * full}):
                self.credit(replace(record, values=full, parts=parts))

    @basic
    def reads_only_what_its_probe_fills(self) -> None:
        """Columns that the probe does not fill, of NoProbe all but the last, are never read."""
        for record in self.records():
            self.credit(record)

    @basic
    def is_deterministic(self) -> None:
        """The same table gives the same advantages.

        Draw from a generator of your own, seeded from the table or the rule.
        """
        for record in self.records():
            first, second = twice(lambda record=record: self.credit(record))
            compare(second, first, "in a second call", 0.0)

    @promise
    def reads_nothing_outside_the_mask(self) -> None:
        """Entries outside the mask, and values that no trained decision reads, have no effect: the
        credit is that of tables without the masked members.

        Take every mean, std and count over decisions.mask, and name the columns in `needs`.
        """
        for record in self.records():
            prompts, members, steps = (torch.arange(n) for n in record.decisions.mask.shape)
            trained = (steps != len(steps) // 2) | (len(steps) == 1)
            # a group of two keeps both members: a group of one is the subject of survives_extremes
            out = (members == 0) & (len(members) > 2)
            masked = left_out(record, out, trained)
            unread = ~read_columns(self.part, masked.decisions.trained) | out[:, None]
            masked = replace(masked, values=masked.values.masked_fill(unread, torch.nan))
            expected = self.credit(chosen(masked, prompts, members[~out]))
            for fill in (masked.values, 1e3 * masked.values.nan_to_num(0.5).flip(0, 1, 2)):
                other = replace(masked, values=torch.where(unread, fill, masked.values))
                if record.log_probs is not None and not record.decisions.tree:
                    logs = record.log_probs.where(masked.decisions.mask, -1e3)
                    other = replace(other, log_probs=logs)
                compare(self.credit(other)[:, ~out], expected, "with member 0 masked", 1e-6)

    @promise
    def ignores_a_constant(self) -> None:
        """A constant added to every reward changes nothing.

        Use differences, or subtract the group's mean, before anything else.
        """
        for record in self.records():
            expected = self.credit(record)
            tolerance = 1e-6 if expected.dtype == torch.float64 else 2e-3
            for constant in (0.5, -7.3, 100.0):
                moved = self.credit(replace(record, values=record.values + constant))
                compare(moved, expected, f"with {constant} added to rewards", tolerance)

    @promise
    def treats_members_alike(self) -> None:
        """Permuting the members of the groups (and the paths of a tree) permutes the advantages.

        Does the place in the table matter, also in a memory, or is an axis mixed up?
        """
        self.follows_order("members")

    @promise
    def treats_prompts_alike(self) -> None:
        """Permuting the prompts permutes the advantages, and a memory does not notice.

        Does the place in the table matter, also in a memory, or is an axis mixed up?
        """
        self.follows_order("prompts")

    def follows_order(self, axis: str) -> None:
        """Check the credit of records with permuted members or prompts, and of the next ones."""
        records = self.records(visits=2)
        for first, second in zip(records[::2], records[1::2], strict=True):
            prompts, members = (torch.arange(n) for n in first.valid.shape)
            orders = {"prompts": prompts, "members": members}
            orders[axis] = order = orders[axis].roll(1)
            rule, moved = copy.deepcopy(self.part), copy.deepcopy(self.part)
            what = f"with the {axis} in the order {order.tolist()}"
            expected = credited(rule, first)[orders["prompts"]][:, orders["members"]]
            compare(credited(moved, chosen(first, **orders)), expected, what)
            compare(credited(moved, second), credited(rule, second), f"after a table {what}")

    @promise
    def gives_a_silent_group_zero(self) -> None:
        """A group whose rewards are all equal gets exactly 0, among other groups and alone.

        Subtract the group's mean before dividing, and one of its rewards before that mean is taken,
        so that equal rewards leave exact zeros.
        """
        for record in self.records():
            prompts, members = (torch.arange(n) for n in record.valid.shape)
            for value in EQUAL_REWARDS:
                values = record.values.clone()
                values[-1] = torch.where(values[-1].isnan(), torch.nan, value)
                among = replace(record, values=values)
                for table in (among, chosen(among, prompts[-1:], members)):
                    silent = self.credit(table)[-1, ..., 0]
                    what = f"with rewards of {value:g} in a group, one of {len(table.values)}, the"
                    same(silent, torch.zeros_like(silent), f"{what} advantage")

    @promise
    def survives_extremes(self) -> None:
        """Advantages stay finite for rewards of 0 and 1, of 1e-6 and of 1e6, for outliers and for a
        group of one.

        Add a small constant to every std that you divide by.
        """
        for base in self.tables():
            extremes = {
                "of 0 and 1": (base > 0.5).double(),
                "of sizes from 1e-6 to 1e6": 10 ** (12 * base - 6),
                "that differ by 1e-6 around 1": 1 + base * 1e-6,
                "of 0 but for one of 1e6": torch.where(base == base.max(), 1e6, 0.0),
            }
            for name, values in extremes.items():
                record = self.filled(values.float())
                others = torch.arange(base.shape[1]) > 0
                single = left_out(record, others, record.decisions.trained)
                for table in (record, single):
                    try:
                        self.credit(table)
                    except CreditError as error:
                        raise ContractBroken(f"Rewards {name}: {error}") from error

    @promise
    def keeps_its_memory(self) -> None:
        """A memory is kept by state_dict and load_state_dict: a restored rule continues with the
        same numbers.

        Write both methods; is part of the memory missing, or shared and not cloned?
        """
        rule, fresh = self.part, copy.deepcopy(self.part)
        record, *others = self.records(visits=4)[:4]
        for other in others:
            credited(rule, other)
        if isinstance(rule, Stateful):
            fresh.load_state_dict(rule.state_dict())
        expected = credited(rule, record)
        compare(credited(fresh, record), expected, "after load_state_dict(state_dict())", 0.0)

    @promise
    def pays_the_better_member(self) -> str | None:
        """Of members whose rewards rise by different amounts, the one with the highest rise gets
        more credit than the one with none.
        """
        advice, falls = None, []
        for _, members, decisions in self.sizes:
            rise = torch.linspace(0.0, 1.0, members)[:, None] * torch.linspace(
                0.0, 1.0, decisions + 1
            )
            total = self.credit(self.filled(rise[None]))[0, ..., 0].sum(dim=-1)
            falls.append(bool(total[-1] < total[0] and (total.diff() <= 0).all()))
            if total[-1] <= total[0]:
                advice = (
                    f"a value rising from 0 to 1 gets a total credit of {total[-1]:.3g}, and one"
                    f" staying at 0 gets {total[0]:.3g} ({decisions} decisions). Is a sign wrong?"
                    " Higher rewards are better."
                )
        expect(not all(falls), str(advice))
        return advice


def credited(rule: Any, record: Experience) -> Tensor:
    """Advantages and weights [prompt, member, decision, 2] of a rule, which updates its memory."""
    return torch.stack([*vars(credit_of(rule, record)).values()], -1)


def compare(got: Tensor, expected: Tensor, what: str, tolerance: float = 2e-4) -> None:
    """Check that credit is equal up to rounding."""
    axes = "[prompt, member, decision; advantage 0, weight 1]"
    same(got, expected, f"{what}, the credit {axes}", tolerance)


def tree_sizes(probe: Branching, decisions: int | None) -> list[tuple[int, int, int]]:
    """Prompts, members and decisions of tables whose members fit the probe's trees."""

    def fits(members: int, count: int) -> bool:
        try:
            probe.tree(count, range(count), members, False, torch.Generator())
        except ConfigError:
            return False
        return members != count

    sizes = []
    for count in (decisions,) if decisions else (10, 4, 2):
        members = [number for number in range(3, MOST_MEMBERS) if fits(number, count)]
        sizes += [(2, number, count) for number in members[:1]]
    expect(sizes, f"trees of {probe} fit no group of up to {MOST_MEMBERS}; pass decisions=...")
    return sizes


def chosen(record: Any, prompts: Tensor, members: Tensor) -> Experience:
    """The record of the prompts and of the members of every group with these indices, in their
    order.
    """
    path, decisions, tree = record.trajectories, record.decisions, record.trajectories.tree
    # units that only other members pass are left out, and the others get new numbers
    kept = tree.passes[members].any(0)
    number, parent = kept.cumsum(0) - 1, tree.parent[kept]
    branches = {}
    if isinstance(tree, Tree) and tree.strides is not None:
        branches["strides"] = tree.strides[members]
    tree = replace(
        tree,
        parent=torch.where(parent < 0, parent, number[parent]),
        node=tree.node[kept],
        drawn=tree.drawn[kept],
        paths=number[tree.paths[members]],
        **branches,
    )
    inner = kept[: path.outputs.shape[1]]  # the leaves have no velocity
    states, outputs = path.states[prompts][:, kept], path.outputs[prompts][:, inner]
    drawn, mask = decisions.drawn[members], decisions.mask[prompts][:, members]
    tables = ("values", "valid", "log_probs")
    return replace(
        record,
        **{name: getattr(record, name)[prompts][:, members] for name in tables},
        prompts=[record.prompts[row] for row in prompts],
        condition=record.condition.take(prompts),
        decisions=replace(decisions, drawn=drawn, mask=mask, tree=decisions.tree and tree),
        trajectories=replace(path, states=states, outputs=outputs, tree=tree),
    )


def left_out(record: Experience, members: Tensor, trained: Tensor) -> Experience:
    """A record in which the `members` [member] are invalid, and only the `trained` decisions
    [decision] are.
    """
    decisions, valid = replace(record.decisions, trained=trained), record.valid & ~members
    if decisions.tree is not None:
        final = record.values[..., -1].masked_fill(members, torch.nan)
        return replace(on_tree(final, decisions, decisions.tree), valid=valid)
    mask = decisions.mask & valid[..., None] & trained
    return replace(record, decisions=replace(decisions, mask=mask), valid=valid)
