"""What every credit rule promises."""

import copy
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import check_advantages
from flowrl.errors import CreditError
from flowrl.testing.findings import Contract, ContractBroken, expect
from flowrl.types import NoProbe, Probe, Schedule

CONTRACT = Contract("credit rule")
promise = CONTRACT.promise

SIZES = ((3, 5, 11), (1, 2, 5), (4, 3, 2), (2, 6, 7))
"""Prompts, members and nodes of the tables tried: all distinct, so that swapped axes cannot hide."""


def schedule_for(nodes: int) -> Schedule:
    """An even grid whose last step is deterministic."""
    stds = torch.linspace(0.3, 0.1, nodes - 1)
    if nodes > 2:
        stds[-1] = 0.0
    return Schedule(torch.linspace(1, 0, nodes), stds=stds)


def table(rule: Any, prompts: int, members: int, nodes: int, seed: int = 0) -> Tensor:
    """A random reward table as the rule's probe would fill it."""
    rewards = torch.rand(prompts, members, nodes, generator=torch.Generator().manual_seed(seed))
    return as_probed(rule, rewards)


def as_probed(rule: Any, rewards: Tensor) -> Tensor:
    """NaN at the nodes that the rule's probe leaves unscored."""
    rewards = rewards.clone()
    if isinstance(rule.probe, NoProbe):
        rewards[..., :-1] = float("nan")
    return rewards


def assign(rule: Any, rewards: Tensor) -> Tensor:
    """The rule's advantages, from a copy of the rule, so that a memory does not carry over."""
    return copy.deepcopy(rule).assign(rewards.clone(), schedule_for(rewards.shape[-1]))


def same(got: Tensor, expected: Tensor, what: str, hint: str, tolerance: float = 2e-4) -> None:
    """Equal but for float rounding, or `ContractBroken` with the largest difference and its place."""
    gap = (got - expected).abs()
    if float(gap.max()) <= tolerance * (1 + float(expected.abs().max())):
        return
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    raise ContractBroken(
        f"{what}: at (prompt, member, step) = {place} it is {float(got[place]):.5g} instead of "
        f"{float(expected[place]):.5g}. {hint}"
    )


@promise("`probe` is one of NoProbe(), Tweedie(), Substeps(n), Completion()")
def declares_a_probe(rule: Any) -> None:
    expect(isinstance(rule.probe, Probe), f"`probe` is {rule.probe!r}")


@promise("advantages are [prompt, member, step] with step = node - 1, floating point and finite")
def returns_advantages_per_step(rule: Any) -> None:
    for sizes in SIZES:
        rewards = table(rule, *sizes)
        try:
            check_advantages(assign(rule, rewards), rewards, type(rule).__name__)
        except CreditError as error:
            raise ContractBroken(str(error)) from None


@promise("unscored nodes are never read: with NoProbe only the last node is filled, the others are NaN")
def reads_only_what_its_probe_fills(rule: Any) -> None:
    sizes = SIZES[0]
    full = torch.rand(sizes, generator=torch.Generator().manual_seed(0))
    got = assign(rule, as_probed(rule, full))
    bad = ~torch.isfinite(got)
    expect(not bool(bad.any()), f"{int(bad.sum())} advantages are not finite. Ask for the nodes with another probe.")


@promise("the same table gives the same advantages; randomness must come from the table")
def is_deterministic(rule: Any) -> None:
    rewards = table(rule, *SIZES[0])
    torch.manual_seed(1)
    first = assign(rule, rewards)
    torch.manual_seed(2)
    same(
        assign(rule, rewards), first, "a second call differs", "Draw from a generator seeded by the rule, or keep no state.", 0.0
    )


@promise("the reward table is not changed")
def leaves_its_input_alone(rule: Any) -> None:
    rewards = table(rule, *SIZES[0])
    before = rewards.clone()
    copy.deepcopy(rule).assign(rewards, schedule_for(rewards.shape[-1]))
    same_table = torch.equal(torch.nan_to_num(before), torch.nan_to_num(rewards))
    expect(same_table, "the table was modified in place. Work on a clone.")


@promise("a constant added to every reward changes nothing")
def ignores_a_constant(rule: Any) -> None:
    for seed in range(3):
        rewards = table(rule, *SIZES[0], seed)
        got = assign(rule, rewards + 0.5)
        same(got, assign(rule, rewards), "with 0.5 added to every reward", "Use differences, or subtract the group's mean.", 2e-3)


@promise("permuting the members of the groups permutes the advantages")
def treats_members_alike(rule: Any) -> None:
    for seed in range(3):
        rewards = table(rule, *SIZES[0], seed)
        order = torch.randperm(rewards.shape[1], generator=torch.Generator().manual_seed(seed))
        got = assign(rule, rewards[:, order])
        same(got, assign(rule, rewards)[:, order], f"with the members in the order {order.tolist()}", "Is an axis mixed up?")


@promise("permuting the prompts permutes the advantages")
def treats_prompts_alike(rule: Any) -> None:
    rewards = table(rule, *SIZES[0])
    order = torch.tensor([2, 0, 1])
    got = assign(rule, rewards[order])
    same(got, assign(rule, rewards)[order], f"with the prompts in the order {order.tolist()}", "Is an axis mixed up?")


@promise("a group whose rewards are all equal gets exactly 0")
def gives_a_silent_group_zero(rule: Any) -> None:
    for value in (0.0, 0.3, 1000.1):
        rewards = table(rule, *SIZES[0])
        rewards[1] = as_probed(rule, torch.full_like(rewards[1:2], value))[0]
        got = assign(rule, rewards)[1]
        largest = float(got.abs().max())
        hint = "Subtract the group's own mean before dividing, and guard the std."
        expect(largest == 0.0, f"rewards of {value} everywhere gave an advantage of {largest:.3g}. {hint}")


@promise("advantages stay finite for 0/1 rewards and for rewards of 1e-6 and of 1e6")
def survives_extremes(rule: Any) -> None:
    binary = (torch.rand(SIZES[0], generator=torch.Generator().manual_seed(3)) > 0.5).float()
    base = torch.rand(SIZES[0], generator=torch.Generator().manual_seed(4))
    for name, rewards in (("0/1", binary), ("1e-6", base * 1e-6), ("1e6", base * 1e6)):
        got = assign(rule, as_probed(rule, rewards))
        expect(bool(torch.isfinite(got).all()), f"rewards of size {name} gave advantages that are not finite")


@promise("without a schedule a rule works the same, or says with a CreditError that it needs one")
def accepts_no_schedule(rule: Any) -> None:
    rewards = table(rule, *SIZES[0])
    try:
        got = copy.deepcopy(rule).assign(rewards, None)
    except CreditError:
        return
    same(got, assign(rule, rewards), "without a schedule", "Raise a CreditError where the schedule matters.")


@promise("a memory is kept by state_dict and load_state_dict: a restored rule goes on with the same numbers")
def keeps_its_memory(rule: Any) -> None:
    if not (hasattr(rule, "state_dict") or hasattr(rule, "load_state_dict")):
        first, again = copy.deepcopy(rule), rule
        rewards, other = table(rule, *SIZES[0]), table(rule, *SIZES[0], 1)
        again.assign(other, schedule_for(SIZES[0][-1]))
        got = again.assign(rewards.clone(), schedule_for(SIZES[0][-1]))
        hint = "A rule with memory needs state_dict() and load_state_dict(), or a resumed run differs."
        same(got, first.assign(rewards, schedule_for(SIZES[0][-1])), "after another table", hint, 0.0)
        return
    schedule = schedule_for(SIZES[0][-1])
    fresh = copy.deepcopy(rule)
    for seed in range(3):
        rule.assign(table(rule, *SIZES[0], seed), schedule)
    fresh.load_state_dict(rule.state_dict())
    last = table(rule, *SIZES[0], 9)
    expected = rule.assign(last, schedule)
    same(fresh.assign(last, schedule), expected, "after load_state_dict(state_dict())", "Is part of the memory missing?", 0.0)
