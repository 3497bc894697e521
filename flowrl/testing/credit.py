"""The promises of a credit rule."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.credit import check_signature, credit_of, example, read_columns
from flowrl.probes import Branching, Probe
from flowrl.testing import findings
from flowrl.testing.findings import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    expect,
    name_of,
    twice,
    unchanged,
)
from flowrl.testing.tables import left_out, of_members, of_prompts, tree_sizes

CONTRACT = Contract("credit rule")
promise = CONTRACT.promise

SIZES = ((3, 5, 10), (1, 2, 4), (4, 3, 1), (2, 6, 6))
"""Prompts, members and decisions of the tables: all different within a table, so that swapped axes
are detected.
"""
EQUAL_REWARDS = (0.0, 0.3, -3.3, 1000.1, 12345.678, 1e6 / 3)


@dataclass(frozen=True)
class Case:
    """A credit rule, the number of decisions that it requires (None: any), and whether all records
    have all members.
    """

    rule: Any
    decisions: int | None = None
    whole: bool = False

    def __repr__(self) -> str:
        return name_of(self.rule)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Prompts, members and decisions of the tables to try."""
        if isinstance(self.rule.probe, Branching):
            return tree_sizes(self.rule.probe, self.decisions)
        return (
            SIZES if self.decisions is None else tuple((p, m, self.decisions) for p, m, _ in SIZES)
        )

    def records(self, seeds: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Experience]:
        """Random records without ties, filled as by the rule's probe: whole ones, and with members
        and a decision left out.
        """
        for size, (prompts, members, decisions) in enumerate(self.sizes):
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(100 * size + seed)
                record = self.filled(
                    torch.rand(prompts, members, decisions + 1, generator=generator, dtype=dtype),
                    seed,
                )
                yield record
                if not self.whole:
                    yield self.without(record, seed)

    def filled(self, values: Tensor, seed: int = 0) -> Experience:
        """A record with the values that the rule's probe fills (NaN in the other columns; the
        values of a tree).
        """
        return example(values, self.rule.probe, decisions_for(values), seed).experience(seed)

    def without(self, record: Experience, seed: int = 0) -> Experience:
        """The record with one member of every group of three or more, and one decision, left out;
        the same member of trees.
        """
        prompts, members, decisions = record.decisions.mask.shape
        out = torch.arange(prompts)[:, None] * (record.decisions.tree is None) + seed + 1
        trained = (torch.arange(decisions) != decisions // 2) | (decisions == 1)
        return left_out(
            record, (torch.arange(members) == out % members) & (members > 2), trained, self.rule
        )

    def credit(self, record: Experience) -> Tensor:
        """Advantages and weights [prompt, member, decision, 2] of a copy of the rule, so that a
        memory does not carry over.
        """
        return credited(copy.deepcopy(self.rule), record)


def decisions_for(values: Tensor) -> Decisions:
    """Decisions on an even grid whose stds fall."""
    return Decisions.like(values, stds=torch.linspace(0.3, 0.1, values.shape[-1] - 1).tolist())


def credited(rule: Any, record: Experience) -> Tensor:
    """Advantages and weights [prompt, member, decision, 2] of the rule itself, which updates its
    memory.
    """
    found = credit_of(rule, record)
    assert found.weights is not None
    return torch.stack([found.advantages, found.weights], -1)


def same(got: Tensor, expected: Tensor, what: str, hint: str, tolerance: float = 2e-4) -> None:
    """Check that advantages and weights are equal up to rounding."""
    findings.same(
        got, expected, f"{what}, the credit", hint, tolerance, lambda index: _at(index, got)
    )


def _at(index: tuple[int, ...], credit: Tensor) -> str:
    kind = ("advantage", "weight")[index[3]]
    return (
        f" ({kind}) at (prompt, member, decision) = {index[:3]} of a table"
        f" {tuple(credit.shape[:3])}"
    )


def checked(case: Case, record: Experience, hint: str = "") -> Tensor:
    """The credit; raises `ContractBroken` with the message of `credit_of`, and the hint."""
    try:
        return case.credit(record)
    except CreditError as error:
        raise ContractBroken(f"{error}. {hint}".strip()) from None


@promise(
    "it has `assign(values, decisions)` or `credit(experience)`, and `probe` is a"
    " flowrl.probes.Probe, such as NoProbe()",
    basic=True,
)
def declares_a_probe(case: Case) -> None:
    expect(
        hasattr(case.rule, "probe"),
        "there is no attribute `probe`. Write probe: Probe = Completion() in the class.",
    )
    probe = case.rule.probe
    hint = " Write an object, with brackets." if isinstance(probe, type) else ""
    expect(isinstance(probe, Probe) and type(probe) is not Probe, f"`probe` is {probe!r}.{hint}")
    methods = [name for name in ("assign", "credit") if callable(getattr(case.rule, name, None))]
    expect(
        len(methods) > 0, "there is no method `assign(values, decisions)` or `credit(experience)`"
    )
    try:
        check_signature(case.rule)
    except ConfigError as error:
        raise ContractBroken(str(error)) from None


def _written_once(table: Tensor) -> Tensor:
    """The entries of `table` with separate memory each; an expanded tensor repeats entries and
    cannot be written to.
    """
    for axis, stride in enumerate(table.stride()):
        if stride == 0 and table.shape[axis] > 1:
            table = table.narrow(axis, 0, 1)
    return table


@promise(
    "neither the values nor the decisions are changed, and the result shares no memory with them",
    basic=True,
)
def leaves_its_input_alone(case: Case) -> None:
    for record in case.records():
        rule = copy.deepcopy(case.rule)
        with unchanged(
            {"the values [prompt, member, decision+1]": record.values, **_parts(record)}
        ):
            found = (
                rule.credit(record)
                if hasattr(rule, "credit")
                else rule.assign(record.values, record.decisions)
            )
            tables = (found.advantages, found.weights) if isinstance(found, Credit) else (found,)
            for table in tables:
                if isinstance(table, Tensor) and table.is_floating_point():
                    _written_once(table).add_(1.0)


def _parts(record: Experience) -> dict[str, Any]:
    """The other tensors of a record by name."""
    own, tree = record.decisions, record.decisions.tree
    names = ("step", "time", "delta", "std", "trained", "drawn", "mask")
    found = {f"decisions.{name}": getattr(own, name) for name in names}
    for name in ("parent", "node", "drawn", "paths", "strides") if tree is not None else ():
        found[f"decisions.tree.{name}"] = getattr(tree, name)
    return {**found, "log_probs": record.log_probs, "valid": record.valid}


@promise(
    "advantages are a floating-point tensor [prompt, member, decision], finite within the mask;"
    " weights are in [0, 1]",
    basic=True,
)
def returns_advantages_per_decision(case: Case) -> None:
    for prompts, members, decisions in case.sizes:
        values = torch.rand(
            prompts, members, decisions + 1, generator=torch.Generator().manual_seed(decisions)
        )
        record = case.filled(values)
        whole = record if record.decisions.tree is not None else replace(record, values=values)
        checked(case, whole)


@promise(
    "columns that the probe does not fill are never read: with NoProbe all but the last are NaN",
    basic=True,
)
def reads_only_what_its_probe_fills(case: Case) -> None:
    for size, (prompts, members, decisions) in enumerate(case.sizes):
        values = torch.rand(
            prompts, members, decisions + 1, generator=torch.Generator().manual_seed(size)
        )
        checked(case, case.filled(values), "Declare the probe whose columns you read.")


@promise("the same table gives the same advantages", basic=True)
def is_deterministic(case: Case) -> None:
    for prompts, members, decisions in case.sizes:
        record = case.filled(
            torch.rand(prompts, members, decisions + 1, generator=torch.Generator().manual_seed(2))
        )
        first, second = twice(lambda record=record: case.credit(record))
        hint = (
            "Draw nothing from torch's global generator: seed one of your own from the table or the"
            " rule."
        )
        same(second, first, "in a second call", hint, 0.0)


@promise(
    "values that no trained decision reads, and those of members outside the mask, have no effect",
    basic=True,
)
def reads_nothing_outside_the_mask(case: Case) -> None:
    for size, (prompts, members, decisions) in enumerate(case.sizes):
        values = torch.rand(
            prompts, members, decisions + 1, generator=torch.Generator().manual_seed(size)
        )
        record = case.without(case.filled(values))
        mask, trained = record.decisions.mask, record.decisions.trained
        unread = ~mask.any(-1, keepdim=True) | ~read_columns(case.rule, trained)
        hint = (
            "Take every mean, std and count over decisions.mask, and list the columns in `reads`."
        )
        expected = checked(case, record, hint)
        for name, fill in (
            ("NaN", torch.full_like(values, torch.nan)),
            ("large numbers", 1e3 * values.flip(0, 1, 2)),
        ):
            fill = fill[..., : unread.shape[-1]]
            other = replace(record, values=torch.where(unread, fill, record.values))
            same(checked(case, other, hint), expected, f"with {name} there", hint, 0.0)


@promise(
    "a member outside the mask gives the others the same credit as a table without this member"
)
def leaves_out_masked_members(case: Case) -> None:
    hint = "Take every mean, std and count over decisions.mask."
    for size, (prompts, members, decisions) in enumerate(case.sizes):
        values = torch.rand(
            prompts, members, decisions + 1, generator=torch.Generator().manual_seed(size)
        ).double()
        record = case.filled(values)
        # a group of one is a promise of its own
        for member in {0, members // 2} if members > 2 else ():
            every = torch.ones(len(record.decisions), dtype=torch.bool)
            out = (torch.arange(members) == member).expand(prompts, -1)
            masked = left_out(record, out, every, case.rule)
            others = (torch.arange(members) != member).nonzero().flatten()
            expected = case.credit(of_members(masked, others))
            same(
                case.credit(masked)[:, others],
                expected,
                f"with member {member} outside the mask",
                hint,
                1e-6,
            )


@promise("a constant added to every reward changes nothing")
def ignores_a_constant(case: Case) -> None:
    for record in case.records(seeds=2, dtype=torch.float64):
        expected = case.credit(record)
        tolerance = 1e-6 if expected.dtype == torch.float64 else 2e-3
        for constant in (0.5, -7.3, 100.0):
            hint = "Use differences, or subtract the group's mean, before anything else."
            moved = replace(record, values=record.values + constant)
            same(
                case.credit(moved),
                expected,
                f"with {constant} added to every reward",
                hint,
                tolerance,
            )


@promise("permuting the members of the groups (and the paths of a tree) permutes the advantages")
def treats_members_alike(case: Case) -> None:
    for seed, record in enumerate(case.records(seeds=3)):
        order = torch.randperm(
            record.values.shape[1], generator=torch.Generator().manual_seed(seed)
        )
        what = f"with the members in the order {order.tolist()}"
        hint = "Does the place of a member in its group matter, or is an axis mixed up?"
        same(case.credit(of_members(record, order)), case.credit(record)[:, order], what, hint)


@promise("permuting the prompts permutes the advantages")
def treats_prompts_alike(case: Case) -> None:
    for seed, record in enumerate(case.records(seeds=3)):
        order = torch.randperm(len(record.values), generator=torch.Generator().manual_seed(seed))
        what = f"with the prompts in the order {order.tolist()}"
        same(
            case.credit(of_prompts(record, order)),
            case.credit(record)[order],
            what,
            "Does the place of a prompt matter?",
        )


@promise("a group whose rewards are all equal gets exactly 0, among other groups and alone")
def gives_a_silent_group_zero(case: Case) -> str | None:
    for record in case.records():
        values, everyone = record.values, torch.arange(len(record.values))
        for value in EQUAL_REWARDS:
            silent = torch.where(values[-1:].isnan(), values[-1:], value)
            among = of_prompts(record, everyone, torch.cat([values[:-1], silent]))
            for name, table in (
                ("among others", among),
                ("alone", of_prompts(record, everyone[-1:], silent)),
            ):
                got = case.credit(table)
                wanted = got.clone()
                wanted[-1, ..., 0] = 0.0
                hint = (
                    "Subtract the group's own mean before dividing; subtract one of its rewards"
                    " before that mean is taken, so "
                )
                hint += "that equal rewards leave exact zeros."
                same(
                    got, wanted, f"with rewards of {value:g} in the whole group ({name})", hint, 0.0
                )
    for seed, (prompts, members, decisions) in enumerate(case.sizes):
        values = torch.rand(
            prompts, members, decisions + 1, generator=torch.Generator().manual_seed(seed)
        )
        values[..., -1] = 0.5
        largest = float(case.credit(case.filled(values)).abs().max())
        if largest > 100:
            return (
                f"equal final rewards after unequal estimates give an advantage of {largest:.3g};"
                " clamp it, as zscore does"
            )
    return None


@promise(
    "advantages stay finite for rewards of 0 and 1, of 1e-6 and of 1e6, for outliers and for a"
    " group of one"
)
def survives_extremes(case: Case) -> None:
    lonely_group = () if isinstance(case.rule.probe, Branching) else ((2, 1, case.sizes[0][2]),)
    for seed, (prompts, members, decisions) in enumerate((*case.sizes, *lonely_group)):
        generator = torch.Generator().manual_seed(seed)
        base = torch.rand(prompts, members, decisions + 1, generator=generator)
        lonely = torch.zeros_like(base)
        lonely[-1, -1, -1] = 1e6
        tables = {
            "of 0 and 1": (base > 0.5).float(),
            "of size 1e-6": base * 1e-6,
            "of size 1e6": (base - 0.5) * 1e6,
            "of sizes from 1e-6 to 1e6": 10 ** (12 * base - 6),
            "that differ by 1e-6 around 1": 1 + base * 1e-6,
            "of 0 but for one of 1e6": lonely,
        }
        for name, values in tables.items():
            record, what = case.filled(values), f"Rewards {name} in a table {tuple(values.shape)}"
            checked(case, record, f"{what}. Add a small constant to every std that you divide by.")
            everything = torch.ones(len(record.decisions), dtype=torch.bool)
            alone = left_out(
                record, (torch.arange(members) > 0).expand(prompts, -1), everything, case.rule
            )
            checked(
                case,
                alone,
                f"{what} with one member left, which has no other member for a comparison.",
            )


@promise("float64 tables give the same advantages, up to rounding")
def accepts_double_precision(case: Case) -> None:
    for record in case.records(seeds=2):
        got = case.credit(replace(record, values=record.values.double()))
        same(
            got,
            case.credit(record).to(got.dtype),
            "with float64 rewards",
            "Create tensors with the values' own dtype.",
            1e-3,
        )


@promise(
    "a memory is kept by state_dict and load_state_dict: a restored rule continues with the same"
    " numbers"
)
def keeps_its_memory(case: Case) -> None:
    rule, fresh = case.rule, copy.deepcopy(case.rule)
    record, *others = (t for number, t in enumerate(case.records(seeds=4)) if number < 4)
    for other in others:
        credited(rule, other)
    if not (hasattr(rule, "state_dict") or hasattr(rule, "load_state_dict")):
        hint = (
            "A rule with memory needs state_dict() and load_state_dict(state), or a resumed run"
            " differs."
        )
        same(credited(rule, record), credited(fresh, record), "after other tables", hint, 0.0)
        return
    state = rule.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    expect(
        not odd,
        f"state_dict() has {', '.join(map(repr, odd))}, not a tensor: checkpoints contain tensors"
        " only",
    )
    fresh.load_state_dict(state)
    expected = credited(rule, record)
    what = "after load_state_dict(state_dict())"
    same(
        credited(fresh, record),
        expected,
        what,
        "Is part of the memory missing, or shared and not cloned?",
        0.0,
    )


@promise(
    "a rule with `credit` follows the prompts' texts: a memory has no relation to the place of a"
    " prompt"
)
def follows_prompts(case: Case) -> str | None:
    if not hasattr(case.rule, "credit"):
        return INAPPLICABLE
    first, _, second = (t for number, t in enumerate(case.records(seeds=2)) if number < 3)
    order = torch.arange(len(first.values)).flip(0)
    rule, moved = (copy.deepcopy(case.rule) for _ in range(2))
    hint = "Key the memory by the prompt's text, not by its place in the table."
    before = credited(rule, first)
    same(
        credited(moved, of_prompts(first, order)),
        before[order],
        "with the prompts in another order",
        hint,
    )
    same(
        credited(moved, second),
        credited(rule, second),
        "after a table with the prompts in another order",
        hint,
    )
    return None


@promise(
    "a rule with `credit` and `assign` gives the same advantages by both, or `assign` raises a"
    " CreditError"
)
def agrees_with_its_assign(case: Case) -> str | None:
    if not (hasattr(case.rule, "credit") and hasattr(case.rule, "assign")):
        return INAPPLICABLE
    for record in case.records():
        try:
            got = copy.deepcopy(case.rule).assign(record.values.clone(), record.decisions)
        except CreditError:
            continue
        expected = case.credit(record)
        both = torch.stack([got.masked_fill(~record.decisions.mask, 0.0), expected[..., 1]], -1)
        same(
            both,
            expected,
            "by `assign`",
            "`assign` is for a first record without components.",
            1e-6,
        )
    return None


@promise(
    "a rule with `credit` gives advantages [prompt, member, decision] for a reward with components"
)
def credits_components(case: Case) -> str | None:
    if not hasattr(case.rule, "credit"):
        return INAPPLICABLE
    for record in case.records():
        checked(
            case,
            replace(record, parts={"first": record.values.clone(), "second": 3.0 * record.values}),
        )
    return None


@promise(
    "of members whose rewards rise by different amounts, the one with the highest rise gets more"
    " credit than the one with none"
)
def pays_the_better_member(case: Case) -> str | None:
    failures, tables, upside_down = [], 0, 0
    for _, members, decisions in case.sizes:
        rise = torch.linspace(0.0, 1.0, members)[:, None] * torch.linspace(0.0, 1.0, decisions + 1)
        total = case.credit(case.filled(rise[None]))[0, ..., 0].sum(dim=-1)
        tables, upside_down = (
            tables + 1,
            upside_down + bool((total.diff() <= 0).all() and total[-1] < total[0]),
        )
        if not float(total[-1]) > float(total[0]):
            found = f"rising from 0 to 1 gets {float(total[-1]):.3g} in all {decisions} decisions"
            found = f"{found}, staying at 0 {float(total[0]):.3g}"
            failures.append(f"{found}. Is a sign wrong? Higher rewards are better.")
    expect(upside_down < tables, failures[0] if failures else "")
    return failures[0] if failures else None
