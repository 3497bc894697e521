"""The promises of a credit rule."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, CreditError, require
from flowrl.core.experience import Decisions, Experience
from flowrl.core.protocols import CreditRule
from flowrl.credit import check_signature, credit_of, example, on_tree, read_columns
from flowrl.parts.registry import check_part
from flowrl.probes import Branching, Probe
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    expect,
    maker,
    same,
    tensors,
    twice,
    unchanged,
)

SIZES = ((3, 5, 10), (1, 2, 4), (4, 3, 1), (2, 6, 6))
"""Prompts, members and decisions of the tables: all different within a table, so that swapped axes
are detected.
"""
MOST_MEMBERS = 97
LARGE = 100.0
"""An advantage above this is likely to end a training."""
EQUAL_REWARDS = (0.0, 0.3, -3.3, 1000.1, 12345.678, 1e6 / 3)


@dataclass(frozen=True)
class Case:
    """A credit rule, and the number of decisions that it requires (None: any)."""

    rule: Any
    decisions: int | None = None

    @cached_property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Prompts, members and decisions of the tables to try."""
        if isinstance(self.rule.probe, Branching):
            return tree_sizes(self.rule.probe, self.decisions)
        return [(p, m, self.decisions or d) for p, m, d in SIZES]

    def tables(self, seeds: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Random value tables without ties, `seeds` of every size."""
        for prompts, members, decisions in self.sizes:
            generator = torch.Generator().manual_seed(decisions)
            for _ in range(seeds):
                shape = (prompts, members, decisions + 1)
                yield torch.rand(shape, generator=generator, dtype=dtype)

    def records(self, seeds: int = 1, dtype: torch.dtype = torch.float32) -> list[Experience]:
        """The records of `tables`."""
        return [self.filled(values) for values in self.tables(seeds, dtype)]

    def filled(self, values: Tensor) -> Experience:
        """A record with the values that the rule's probe fills (NaN in the other columns; the
        values of a tree).
        """
        stds = torch.linspace(0.3, 0.1, values.shape[-1] - 1).tolist()
        return example(values, self.rule.probe, Decisions.like(values, stds))

    def credit(self, record: Experience) -> Tensor:
        """The credit by a copy of the rule, so that a memory does not carry over."""
        return credited(copy.deepcopy(self.rule), record)


def credited(rule: Any, record: Experience) -> Tensor:
    """Advantages and weights [prompt, member, decision, 2] of a rule, which updates its memory."""
    return torch.stack([*vars(credit_of(rule, record)).values()], -1)


def compare(got: Tensor, expected: Tensor, what: str, hint: str, tolerance: float = 2e-4) -> None:
    """Check that credit is equal up to rounding."""
    axes = "[prompt, member, decision; advantage 0, weight 1]"
    same(got, expected, f"{what}, the credit {axes}", hint, tolerance)


def tree_sizes(probe: Branching, decisions: int | None) -> list[tuple[int, int, int]]:
    """Prompts, members and decisions of tables whose members fit the probe's trees."""

    def fits(members: int, count: int) -> bool:
        try:
            probe.tree(count, range(count), members, False, torch.Generator().manual_seed(0))
        except ConfigError:
            return False
        return members != count

    sizes = []
    for count in (decisions,) if decisions else (10, 4, 2):
        members = next((m for m in range(3, MOST_MEMBERS) if fits(m, count)), None)
        if members:
            sizes.append((5 if members == 3 else 3, members, count))
    expect(sizes, f"trees of {probe} fit no group of up to {MOST_MEMBERS}; pass decisions=...")
    return sizes


def chosen(record: Experience, prompts: Tensor, members: Tensor) -> Experience:
    """The record of the prompts and of the members of every group with these indices, in their
    order.
    """
    path, decisions, log_probs = record.trajectories, record.decisions, record.log_probs
    assert path is not None and record.condition is not None and log_probs is not None

    def rows(table: Tensor) -> Tensor:
        return table[prompts][:, members]

    # units that only other members pass are left out, and the others get new numbers
    kept = path.tree.passes[members].any(0)
    number, parent = kept.cumsum(0) - 1, path.tree.parent[kept]
    strides = None if path.tree.strides is None else path.tree.strides[members]
    tree = replace(
        path.tree,
        parent=torch.where(parent < 0, parent, number[parent]),
        node=path.tree.node[kept],
        drawn=path.tree.drawn[kept],
        paths=number[path.tree.paths[members]],
        strides=strides,
    )
    inner = kept[: path.outputs.shape[1]]  # the leaves have no velocity
    states, outputs = path.states[prompts][:, kept], path.outputs[prompts][:, inner]
    drawn, mask = decisions.drawn[members], rows(decisions.mask)
    branched = decisions.tree and tree
    return replace(
        record,
        prompts=[record.prompts[row] for row in prompts.tolist()],
        values=rows(record.values),
        valid=rows(record.valid),
        log_probs=rows(log_probs),
        condition=record.condition.take(prompts),
        decisions=replace(decisions, drawn=drawn, mask=mask, tree=branched),
        trajectories=replace(path, states=states, outputs=outputs, tree=tree),
    )


def left_out(
    record: Experience, members: Tensor, rule: CreditRule, trained: Tensor | None = None
) -> Experience:
    """A whole record without the `members` [member], and with the `trained` decisions [decision]
    only (None: all). What the rule then does not read is NaN.
    """
    trained = record.decisions.trained if trained is None else trained
    decisions, valid = replace(record.decisions, trained=trained), record.valid & ~members
    if decisions.tree is not None:
        final = record.values[..., -1].masked_fill(members, torch.nan)
        part = on_tree(final, decisions, decisions.tree)
        return replace(record, values=part.values, decisions=part.decisions, valid=valid)
    decisions = replace(decisions, mask=decisions.mask & valid[..., None] & trained)
    values = record.values.masked_fill(~read_columns(rule, trained) | members[:, None], torch.nan)
    return replace(record, values=values, decisions=decisions, valid=valid)


def declares_a_probe(case: Case) -> None:
    """It has `assign(values, decisions)` or `credit(experience)`, and `probe` is a
    flowrl.probes.Probe, such as NoProbe().
    """
    check_part("credit", case.rule)
    check_signature(case.rule)
    probe = case.rule.probe
    fits = isinstance(probe, Probe) and type(probe) is not Probe
    expect(fits, f"`probe` is {probe!r}. Write an object: probe: Probe = Completion()")


def leaves_its_input_alone(case: Case) -> None:
    """Neither the values nor the decisions are changed, and the result shares no memory with
    them.
    """
    for record in case.records():
        rule, inputs = copy.deepcopy(case.rule), tensors(record)
        with unchanged(**inputs):
            if hasattr(rule, "credit"):
                credit = rule.credit(record)
            else:
                credit = rule.assign(record.values, record.decisions)
        places = {table.untyped_storage().data_ptr() for table in inputs.values()}
        for table in tensors(credit).values():
            # Boolean tables break the next promise
            copied = table.untyped_storage().data_ptr() not in places or table.dtype == torch.bool
            expect(copied, "the result shares memory with the input: return a clone")


def returns_advantages_per_decision(case: Case) -> None:
    """Advantages are a floating-point tensor [prompt, member, decision], finite within the mask;
    weights are in [0, 1].
    """
    for values in case.tables():
        record = case.filled(values)
        case.credit(record if record.decisions.tree else replace(record, values=values))


def reads_only_what_its_probe_fills(case: Case) -> None:
    """Columns that the probe does not fill, of NoProbe all but the last, are never read."""
    for record in case.records():
        case.credit(record)


def is_deterministic(case: Case) -> None:
    """The same table gives the same advantages."""
    hint = "Draw from a generator of your own, seeded from the table or the rule."
    for record in case.records():
        first, second = twice(lambda record=record: case.credit(record))
        compare(second, first, "in a second call", hint, 0.0)


def reads_nothing_outside_the_mask(case: Case) -> None:
    """Entries outside the mask, and values that no trained decision reads, have no effect: the
    credit is that of a table without the masked members.
    """
    hint = "Take every mean, std and count over decisions.mask, and list the columns in `reads`."
    for record in case.records(dtype=torch.float64):
        prompts, members, decisions = (torch.arange(n) for n in record.decisions.mask.shape)
        trained = (decisions != len(decisions) // 2) | (len(decisions) == 1)
        # groups of two keep both members: a group of one is the subject of survives_extremes
        for member in {0, len(members) // 2} if len(members) > 2 else {-1}:
            out = members == member
            masked = left_out(record, out, case.rule, trained)
            expected = case.credit(chosen(masked, prompts, members[~out]))
            unread = ~read_columns(case.rule, masked.decisions.trained) | out[:, None]
            for fill in (masked.values, 1e3 * masked.values.nan_to_num(0.5).flip(0, 1, 2)):
                other = replace(masked, values=torch.where(unread, fill, masked.values))
                got, what = case.credit(other)[:, ~out], f"with member {member} masked"
                compare(got, expected, what, hint, 1e-6)


def ignores_a_constant(case: Case) -> None:
    """A constant added to every reward changes nothing."""
    hint = "Use differences, or subtract the group's mean, before anything else."
    for record in case.records(seeds=2, dtype=torch.float64):
        expected = case.credit(record)
        tolerance = 1e-6 if expected.dtype == torch.float64 else 2e-3
        for constant in (0.5, -7.3, 100.0):
            moved = case.credit(replace(record, values=record.values + constant))
            compare(moved, expected, f"with {constant} added to rewards", hint, tolerance)


def treats_members_alike(case: Case) -> None:
    """Permuting the members of the groups (and the paths of a tree) permutes the advantages."""
    follows_order(case, "members")


def treats_prompts_alike(case: Case) -> None:
    """Permuting the prompts permutes the advantages, and a memory does not notice."""
    follows_order(case, "prompts")


def follows_order(case: Case, axis: str) -> None:
    """Check the credit of records with permuted members or prompts, and of the records after."""
    hint = "Does the place in the table matter, also in a memory, or is an axis mixed up?"
    records = case.records(seeds=2)
    for first, second in zip(records[::2], records[1::2], strict=True):
        orders = {
            "prompts": torch.arange(len(first.valid)),
            "members": torch.arange(first.valid.shape[1]),
        }
        orders[axis] = order = orders[axis].flip(0).roll(1)
        rule, moved, what = (
            copy.deepcopy(case.rule),
            copy.deepcopy(case.rule),
            f"with the {axis} in the order {order.tolist()}",
        )
        expected = credited(rule, first)[orders["prompts"]][:, orders["members"]]
        compare(credited(moved, chosen(first, **orders)), expected, what, hint)
        compare(credited(moved, second), credited(rule, second), f"after a table {what}", hint)


def gives_a_silent_group_zero(case: Case) -> str | None:
    """A group whose rewards are all equal gets exactly 0, among other groups and alone."""
    hint = (
        "Subtract the group's mean before dividing, and one of its rewards before that mean is"
        " taken, so that equal rewards leave exact zeros."
    )
    for record in case.records():
        prompts, members = (torch.arange(n) for n in record.valid.shape)
        for value in EQUAL_REWARDS:
            values = record.values.clone()
            values[-1] = torch.where(values[-1].isnan(), torch.nan, value)
            among = replace(record, values=values)
            for table in (among, chosen(among, prompts[-1:], members)):
                silent = case.credit(table)[-1, ..., 0]
                where = f"with rewards of {value:g} in a group, one of {len(table.values)},"
                same(silent, torch.zeros_like(silent), f"{where} the advantage", hint)
    for values in case.tables():
        values[..., -1] = 0.5
        largest = float(case.credit(case.filled(values)).abs().max())
        if largest > LARGE:
            advice = "equal final rewards after unequal estimates give an advantage of"
            return f"{advice} {largest:.3g}; clamp it, as zscore does"
    return None


def survives_extremes(case: Case) -> None:
    """Advantages stay finite for rewards of 0 and 1, of 1e-6 and of 1e6, for outliers and for a
    group of one.
    """
    hint = "Add a small constant to every std that you divide by."
    for base in case.tables():
        extremes = {
            "of 0 and 1": (base > 0.5).float(),
            "of sizes from 1e-6 to 1e6": 10 ** (12 * base - 6),
            "that differ by 1e-6 around 1": 1 + base * 1e-6,
            "of 0 but for one of 1e6": torch.where(base == base.max(), 1e6, 0.0),
        }
        all_but_one = torch.arange(base.shape[1]) > 0
        for name, values in extremes.items():
            record = case.filled(values)
            for table in (record, left_out(record, all_but_one, case.rule)):
                try:
                    case.credit(table)
                except CreditError as error:
                    raise ContractBroken(f"Rewards {name}: {error}. {hint}") from error


def keeps_its_memory(case: Case) -> None:
    """A memory is kept by state_dict and load_state_dict: a restored rule continues with the same
    numbers.
    """
    rule, fresh = case.rule, copy.deepcopy(case.rule)
    record, *others = case.records(seeds=4)[:4]
    for other in others:
        credited(rule, other)
    what, hint = "after other tables", "Write state_dict() and load_state_dict(state)."
    if hasattr(rule, "state_dict") or hasattr(rule, "load_state_dict"):
        state = rule.state_dict()
        odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
        expect(not odd, f"state_dict() has {odd}, not tensors: checkpoints contain tensors only")
        fresh.load_state_dict(state)
        what = "after load_state_dict(state_dict())"
        hint = "Is part of the memory missing, or shared and not cloned?"
    expected = credited(rule, record)
    compare(credited(fresh, record), expected, what, hint, 0.0)


def agrees_with_its_assign(case: Case) -> str | None:
    """A rule with `credit` and `assign` gives the same advantages by both, or `assign` raises a
    CreditError.
    """
    if not (hasattr(case.rule, "credit") and hasattr(case.rule, "assign")):
        return INAPPLICABLE
    hint = "`assign` is for a first record without components."
    for record in case.records():
        mask = record.decisions.mask
        try:
            got = copy.deepcopy(case.rule).assign(record.values, record.decisions)
        except CreditError:
            continue
        expected = case.credit(record)[..., 0]
        same(got.masked_fill(~mask, 0.0), expected, "by `assign` the advantage", hint, 1e-6)
    return None


def credits_components(case: Case) -> str | None:
    """A rule with `credit` gives advantages [prompt, member, decision] for a reward with
    components.
    """
    if not hasattr(case.rule, "credit"):
        return INAPPLICABLE
    for record in case.records():
        parts = {"first": record.values.clone(), "second": 3.0 * record.values}
        case.credit(replace(record, parts=parts))
    return None


def pays_the_better_member(case: Case) -> str | None:
    """Of members whose rewards rise by different amounts, the one with the highest rise gets more
    credit than the one with none.
    """
    advice, falls = None, []
    for _, members, decisions in case.sizes:
        rise = torch.linspace(0.0, 1.0, members)[:, None] * torch.linspace(0.0, 1.0, decisions + 1)
        total = case.credit(case.filled(rise[None]))[0, ..., 0].sum(dim=-1)
        falls.append(bool(total[-1] < total[0]) and bool((total.diff() <= 0).all()))
        if total[-1] <= total[0]:
            advice = (
                f"rising from 0 to 1 gets {total[-1]:.3g} in all {decisions} decisions, staying at"
                f" 0 {total[0]:.3g}. Is a sign wrong? Higher rewards are better."
            )
    expect(not all(falls), str(advice))
    return advice


BASIC = (
    declares_a_probe,
    leaves_its_input_alone,
    returns_advantages_per_decision,
    reads_only_what_its_probe_fills,
    is_deterministic,
)
OTHERS = (
    reads_nothing_outside_the_mask,
    ignores_a_constant,
    treats_members_alike,
    treats_prompts_alike,
    gives_a_silent_group_zero,
    survives_extremes,
    keeps_its_memory,
    agrees_with_its_assign,
    credits_components,
    pays_the_better_member,
)


def contract(rule: Any, decisions: int | None = None, without: Sequence[str] = ()) -> Contract:
    """The contract of a credit rule (`CreditAssigner` or `ExperienceCredit`).

    Args:
        rule: the credit rule: an object (copied for every promise), a class, or a function that
            makes it.
        decisions: number of decisions, if the rule requires one; None for several.
        without: names of promises that the part breaks on purpose.
    """
    require(decisions is None or decisions >= 1, "decisions", decisions, "1 or more, or None")
    return Contract(
        "credit rule", BASIC, OTHERS, maker(rule), lambda rule: Case(rule, decisions), without
    )
