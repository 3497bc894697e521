"""The promises of a credit rule."""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import Example, check_advantages, check_trained, example
from flowrl.errors import CreditError
from flowrl.probes import Branching, Probe
from flowrl.testing import findings
from flowrl.testing.findings import INAPPLICABLE, Contract, ContractBroken, expect, name_of, twice, unchanged
from flowrl.testing.tables import left, of_members, of_prompts, schedule_for, tree_sizes
from flowrl.types import Prompt, Schedule

CONTRACT = Contract("credit rule")
promise = CONTRACT.promise

SIZES = ((3, 5, 10), (1, 2, 4), (4, 3, 1), (2, 6, 6))
"""Prompts, members and steps of the tables: all different within a table, so that swapped axes are detected."""
EQUAL_REWARDS = (0.0, 0.3, -3.3, 1000.1, 12345.678, 1e6 / 3)


@dataclass(frozen=True)
class Case:
    """A credit rule, and the number of steps that it requires (None: any)."""

    rule: Any
    steps: int | None = None

    def __repr__(self) -> str:
        return name_of(self.rule)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Prompts, members and steps of the tables to try."""
        if isinstance(self.rule.probe, Branching):
            return tree_sizes(self.rule.probe, self.steps)
        return SIZES if self.steps is None else tuple((p, m, self.steps) for p, m, _ in SIZES)

    def tables(self, seeds: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Example]:
        """Random tables [prompt, member, node] without ties, filled as by the rule's probe; trees also with a member left out."""
        for size, (prompts, members, steps) in enumerate(self.sizes):
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(100 * size + seed)
                shown = self.filled(torch.rand(prompts, members, steps + 1, generator=generator, dtype=dtype), seed)
                yield shown
                if shown.schedule.tree is not None:
                    yield left(shown, torch.arange(members) != 1)

    def filled(self, rewards: Tensor, seed: int = 0) -> Example:
        """A table as the rule's probe fills it (NaN at unscored nodes; the values of a tree), with its schedule."""
        return example(rewards, schedule_for(rewards.shape[-1] - 1), self.rule.probe, seed)

    def assign(self, shown: Example) -> Tensor:
        """The rule's advantages, from a copy of the rule, so that a memory does not carry over."""
        return copy.deepcopy(self.rule).assign(shown.rewards.clone(), shown.schedule)


def same(got: Tensor, expected: Tensor, what: str, hint: str, tolerance: float = 2e-4) -> None:
    """Check that advantages are equal up to rounding."""
    findings.same(got, expected, f"{what}, the advantage", hint, tolerance, lambda index: _at(index, got))


def _at(index: tuple[int, ...], advantages: Tensor) -> str:
    return f" at (prompt, member, step) = {index} of a table {tuple(advantages.shape)}"


def finite(got: Tensor, what: str, hint: str) -> None:
    """Check that advantages are finite."""
    findings.finite(got, f"the advantages of {what}", hint, lambda index: _at(index, got))


def needs_steps(case: Case, advantages: Any, rewards: Tensor, method: str = "assign") -> None:
    """Check the shape [prompt, member, step]; raises `ContractBroken` with the message of `check_advantages`."""
    try:
        check_advantages(advantages, rewards, type(case.rule).__name__)
    except CreditError as error:
        raise ContractBroken(str(error).replace(".assign returned", f".{method} returned")) from None


@promise("it has `assign`, and `probe` is a flowrl.probes.Probe, such as NoProbe(), Substeps(n) or Branch(2)", basic=True)
def declares_a_probe(case: Case) -> None:
    expect(hasattr(case.rule, "probe"), "there is no attribute `probe`. Write probe: Probe = Completion() in the class.")
    probe = case.rule.probe
    hint = " Write an object, with brackets." if isinstance(probe, type) else ""
    expect(isinstance(probe, Probe) and type(probe) is not Probe, f"`probe` is {probe!r}.{hint}")
    expect(callable(getattr(case.rule, "assign", None)), "there is no method `assign(rewards, schedule)`")


@promise("advantages are a floating-point tensor [prompt, member, step], step = node - 1, and finite", basic=True)
def returns_advantages_per_step(case: Case) -> None:
    for prompts, members, steps in case.sizes:
        rewards = torch.rand(prompts, members, steps + 1, generator=torch.Generator().manual_seed(steps))
        shown = case.filled(rewards) if isinstance(case.rule.probe, Branching) else Example(rewards, schedule_for(steps))
        needs_steps(case, case.assign(shown), shown.rewards)


@promise("nodes that the probe does not fill are never read: with NoProbe all but the last node are NaN", basic=True)
def reads_only_what_its_probe_fills(case: Case) -> None:
    for shown in case.tables():
        finite(case.assign(shown), f"a table as {case.rule.probe} fills it", "Declare the probe whose nodes you read.")


@promise("the same table gives the same advantages", basic=True)
def is_deterministic(case: Case) -> None:
    for shown in case.tables():
        first, second = twice(lambda shown=shown: case.assign(shown))
        hint = "Draw nothing from torch's global generator: seed one of your own from the table or the rule."
        same(second, first, "in a second call", hint, 0.0)


def _written_once(table: Tensor) -> Tensor:
    """The entries of `table` with separate memory each; an expanded tensor repeats entries and cannot be written to."""
    for axis, stride in enumerate(table.stride()):
        if stride == 0 and table.shape[axis] > 1:
            table = table.narrow(axis, 0, 1)
    return table


@promise("neither the reward table nor the schedule is changed, and the result shares no memory with them")
def leaves_its_input_alone(case: Case) -> None:
    for shown in case.tables():
        with unchanged({"the table [prompt, member, node]": shown.rewards, **_parts(shown.schedule)}):
            _written_once(copy.deepcopy(case.rule).assign(shown.rewards, shown.schedule)).add_(1.0)


def _parts(schedule: Schedule) -> dict[str, Any]:
    """The tensors of a schedule by name."""
    names = ("parent", "node", "drawn", "paths", "log_probs", "strides")
    tree = {} if schedule.tree is None else {f"schedule.tree.{name}": getattr(schedule.tree, name) for name in names}
    return {name: value for name, value in {"schedule.stds": schedule.stds, **tree}.items() if value is not None}


@promise("a constant added to every reward changes nothing")
def ignores_a_constant(case: Case) -> None:
    for shown in case.tables(seeds=2, dtype=torch.float64):
        expected = case.assign(shown)
        tolerance = 1e-6 if expected.dtype == torch.float64 else 2e-3
        for constant in (0.5, -7.3, 100.0):
            hint = "Use differences, or subtract the group's mean, before anything else."
            moved = Example(shown.rewards + constant, shown.schedule)
            same(case.assign(moved), expected, f"with {constant} added to every reward", hint, tolerance)


@promise("permuting the members of the groups (and the paths of a tree) permutes the advantages")
def treats_members_alike(case: Case) -> None:
    for seed, shown in enumerate(case.tables(seeds=3)):
        order = _orders(shown, seed)
        expected = case.assign(shown)
        expected = expected.gather(1, order[..., None].expand_as(expected))
        what = f"with the members of the prompts in the orders {order.tolist()}"
        hint = "Does the place of a member in its group matter, or is an axis mixed up?"
        same(case.assign(of_members(shown, order)), expected, what, hint)


def _orders(shown: Example, seed: int) -> Tensor:
    """Random orders of the members [prompt, member]; one for all prompts if they share a tree."""
    prompts, members, _ = shown.rewards.shape
    order = torch.rand(prompts, members, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    return order if shown.schedule.tree is None else order[:1].expand(prompts, -1)


@promise("permuting the prompts permutes the advantages")
def treats_prompts_alike(case: Case) -> None:
    for seed, shown in enumerate(case.tables(seeds=3)):
        order = torch.randperm(len(shown.rewards), generator=torch.Generator().manual_seed(seed))
        what = f"with the prompts in the order {order.tolist()}"
        same(case.assign(of_prompts(shown, order)), case.assign(shown)[order], what, "Does the place of a prompt matter?")


@promise("a group whose rewards are all equal gets exactly 0, among other groups and alone")
def gives_a_silent_group_zero(case: Case) -> str | None:
    for shown in case.tables():
        rewards, everyone = shown.rewards, torch.arange(len(shown.rewards))
        for value in EQUAL_REWARDS:
            silent = torch.where(rewards[-1:].isnan(), rewards[-1:], value)
            among = of_prompts(shown, everyone, torch.cat([rewards[:-1], silent]))
            for name, table in (("among others", among), ("alone", of_prompts(shown, everyone[-1:], silent))):
                got = case.assign(table)
                wanted = got.clone()
                wanted[-1] = 0.0
                hint = "Subtract the group's own mean before dividing; subtract one of its rewards before that mean is taken, so "
                hint += "that equal rewards leave exact zeros."
                same(got, wanted, f"with rewards of {value:g} in the whole group ({name})", hint, 0.0)
    for seed, (prompts, members, steps) in enumerate(case.sizes):
        rewards = torch.rand(prompts, members, steps + 1, generator=torch.Generator().manual_seed(seed))
        rewards[..., -1] = 0.5
        largest = float(case.assign(case.filled(rewards)).abs().max())
        if largest > 100:
            return f"equal final rewards after unequal estimates give an advantage of {largest:.3g}; clamp it, as zscore does"
    return None


@promise("advantages stay finite for rewards of 0 and 1, of 1e-6 and of 1e6, for outliers and for a group of one")
def survives_extremes(case: Case) -> None:
    lonely_group = () if isinstance(case.rule.probe, Branching) else ((2, 1, case.sizes[0][2]),)
    for seed, (prompts, members, steps) in enumerate((*case.sizes, *lonely_group)):
        generator = torch.Generator().manual_seed(seed)
        base = torch.rand(prompts, members, steps + 1, generator=generator)
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
        for name, rewards in tables.items():
            shown, what = case.filled(rewards), f"rewards {name} in a table {tuple(rewards.shape)}"
            finite(case.assign(shown), what, "Add a small constant to every std that you divide by.")
            alone = left(shown, torch.arange(members) == 0)
            finite(case.assign(alone), f"{what} with one member left", "A single member has no other member for a comparison.")


@promise("float64 tables give the same advantages, up to rounding")
def accepts_double_precision(case: Case) -> None:
    for shown in case.tables(seeds=2):
        got = case.assign(Example(shown.rewards.double(), shown.schedule))
        expect(got.is_floating_point(), f"float64 rewards gave {got.dtype}")
        same(got, case.assign(shown).to(got.dtype), "with float64 rewards", "Create tensors with the rewards' own dtype.", 1e-3)


@promise("without a schedule a rule works the same, or raises a CreditError that names the schedule")
def accepts_no_schedule(case: Case) -> None:
    for shown in case.tables():
        try:
            got = copy.deepcopy(case.rule).assign(shown.rewards.clone(), None)
        except CreditError as error:
            message = f"it raised CreditError({str(error)!r}), which does not mention the schedule"
            expect("schedule" in str(error).lower(), message)
            continue
        same(got, case.assign(shown), "without a schedule", "Raise a CreditError if the schedule matters.")


@promise("a memory is kept by state_dict and load_state_dict: a restored rule continues with the same numbers")
def keeps_its_memory(case: Case) -> None:
    rule, fresh = case.rule, copy.deepcopy(case.rule)
    table, *others = (t for seed, t in enumerate(case.tables(seeds=4)) if seed < 4)
    for other in others:
        rule.assign(other.rewards.clone(), other.schedule)
    if not (hasattr(rule, "state_dict") or hasattr(rule, "load_state_dict")):
        hint = "A rule with memory needs state_dict() and load_state_dict(state), or a resumed run differs."
        same(_applied(rule, table), _applied(fresh, table), "after other tables", hint, 0.0)
        return
    state = rule.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    expect(not odd, f"state_dict() has {', '.join(map(repr, odd))}, not a tensor: checkpoints contain tensors only")
    fresh.load_state_dict(state)
    expected = _applied(rule, table)
    what = "after load_state_dict(state_dict())"
    same(_applied(fresh, table), expected, what, "Is part of the memory missing, or shared and not cloned?", 0.0)


def _applied(rule: Any, table: Example) -> Tensor:
    """The advantages of `rule` itself, which updates its memory."""
    return rule.assign(table.rewards.clone(), table.schedule)


@promise("a rule with `assign_prompts` follows the prompts' texts: with prompts in another order, and after a restored memory")
def follows_prompts(case: Case) -> str | None:
    if not hasattr(case.rule, "assign_prompts"):
        return INAPPLICABLE
    first, second = (t for seed, t in enumerate(case.tables(seeds=2)) if seed < 2)
    texts, order = [Prompt(f"prompt {i}") for i in range(len(first.rewards))], torch.arange(len(first.rewards)).flip(0)

    def visit(rule: Any, shown: Example, prompts: list[Prompt]) -> Tensor:
        with unchanged({"the table [prompt, member, node]": shown.rewards, **_parts(shown.schedule)}):
            found = rule.assign_prompts(shown.rewards, prompts, shown.schedule)
        needs_steps(case, found, shown.rewards, "assign_prompts")
        return found

    rule, restored, moved = (copy.deepcopy(case.rule) for _ in range(3))
    same(visit(rule, first, texts), case.assign(first), "at the first visit", "`assign` is for prompts that are all new.", 1e-6)
    if hasattr(rule, "state_dict"):
        restored.load_state_dict(rule.state_dict())
        again = visit(restored, second, texts)
    else:
        again = visit(copy.deepcopy(rule), second, texts)
    visit(moved, of_prompts(first, order), [texts[i] for i in order])
    expected = visit(rule, second, texts)
    same(again, expected, "after load_state_dict(state_dict())", "Is part of the memory missing, or shared and not cloned?", 0.0)
    hint = "Key the memory by the prompt's text, not by its place in the table."
    same(visit(moved, second, texts), expected, "after a table with the prompts in another order", hint)
    swapped = visit(copy.deepcopy(rule), of_prompts(first, order), [texts[i] for i in order])
    same(swapped[order], visit(rule, first, texts), "with the prompts in another order", hint)


@promise("a rule with `trained` selects the decisions that enter the loss, bool [prompt, member, step], for permuted members too")
def selects_decisions(case: Case) -> str | None:
    if not hasattr(case.rule, "trained"):
        return INAPPLICABLE
    rule = copy.deepcopy(case.rule)
    for seed, shown in enumerate(case.tables(seeds=2)):
        order, advantages, before = _orders(shown, seed), case.assign(shown), copy.deepcopy(rule)
        with unchanged({"the advantages [prompt, member, step]": advantages, **_parts(shown.schedule)}):
            trained = rule.trained(advantages, shown.schedule)
        try:
            check_trained(trained, advantages, type(rule).__name__)
        except CreditError as error:
            raise ContractBroken(str(error)) from None
        order = order[..., None].expand_as(trained)
        permuted = before.trained(advantages.gather(1, order), of_members(shown, order[..., 0]).schedule)
        expect(torch.equal(permuted, trained.gather(1, order)), "with its members permuted, other decisions are trained on")
        fresh = copy.deepcopy(case.rule)
        if hasattr(rule, "state_dict"):
            fresh.load_state_dict(rule.state_dict())
        again = torch.equal(fresh.trained(advantages, shown.schedule), copy.deepcopy(rule).trained(advantages, shown.schedule))
        expect(again, "after load_state_dict(state_dict()), other decisions are trained on: is the memory in the state?")


@promise("a rule that reads components gives advantages [prompt, member, step] from one table per component")
def credits_components(case: Case) -> str | None:
    if not hasattr(case.rule, "assign_parts"):
        return INAPPLICABLE
    for shown in case.tables():
        tree, other = shown.schedule.tree, 10.0 * shown.rewards.flip(1) ** 2
        parts = {"first": shown.rewards, "second": other if tree is None else tree.node_table(tree.values(other[..., -1]))}
        with unchanged({f"the table of component {name!r}": table for name, table in parts.items()}):
            got = copy.deepcopy(case.rule).assign_parts(parts, shown.schedule)
        needs_steps(case, got, shown.rewards, "assign_parts")


@promise("(advice) a table of one node, which has no step, is refused with a CreditError")
def refuses_a_table_without_steps(case: Case) -> str | None:
    rewards = torch.rand(2, 3, 1, generator=torch.Generator().manual_seed(0))
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch's, about the std of no steps
            got = copy.deepcopy(case.rule).assign(rewards, None)
    except CreditError:
        return None
    except Exception as error:
        return f"a table of one node raised {type(error).__name__}, not a CreditError; the trainer makes no such table"
    return f"a table of one node gave advantages {tuple(got.shape)}, not a CreditError; the trainer makes no such table"


@promise("(advice) the member whose reward rises most gets more credit than the one whose reward does not rise")
def pays_the_better_member(case: Case) -> str | None:
    for _, members, steps in case.sizes:
        rise = torch.linspace(0.0, 1.0, members)[:, None] * torch.linspace(0.0, 1.0, steps + 1)
        total = case.assign(case.filled(rise[None]))[0].sum(dim=-1)
        if not float(total[-1]) > float(total[0]):
            found = f"rising from 0 to 1 gets {float(total[-1]):.3g} in all {steps} steps, staying at 0 {float(total[0]):.3g}"
            return f"{found}. Is a sign wrong? Higher rewards are better."
    return None
