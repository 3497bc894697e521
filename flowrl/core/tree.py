"""The branches of a tree, and the paths of groups without one: independent trajectories, or a
common start.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.types import Paths

Mean = Literal["leaf", "child"]
Weight = Literal["leaf", "edge", "step"]


@checked
@dataclass(frozen=True)
class Tree(Paths):
    """The branches of a group with a branching probe: one member per leaf.

    The value of a unit is a mean over the members behind it. In the update, a parent is evaluated
    once for all its children.

    Args:
        parent, node, drawn, paths: as in `flowrl.core.types.Paths`.
        mean: mean over the members behind a unit ("leaf"), or recursively over its children
            ("child").
        weight: a decision counts once per member behind it ("leaf": the loss is the mean over
            trajectories) or once ("edge"); "step": as "edge", times the mean number of transitions
            per step over that of its step, so that all steps weigh the same.
    """

    branched: ClassVar[bool] = True

    mean: Mean = "leaf"
    weight: Weight = "leaf"
    strides: Int[Tensor, " member"] | None = None
    """Nodes per ODE step by which each member is finished, if there are several strides
    (`flowrl.probes.Comb`).
    """

    @cached_property
    def leaves(self) -> Int[Tensor, " unit"]:
        """Number of members that pass each unit."""
        return self.passes.sum(0)

    @cached_property
    def roots(self) -> Int[Tensor, " unit"]:
        """The root (initial noise) of each unit: units of one root are one tree."""
        return self.paths[self.passes.to(torch.uint8).argmax(0), 0]

    @cached_property
    def decision_of(self) -> Int[Tensor, " unit"]:
        """The index of the decision that led to each drawn unit; -1 for the others."""
        index = torch.searchsorted(torch.tensor(self.drawn_steps, dtype=torch.long), self.node - 1)
        return index.masked_fill(~self.drawn, -1)

    @checked
    def values(self, rewards: Float[Tensor, "prompt member"]) -> Float[Tensor, "prompt unit"]:
        """V of every unit from the rewards of the finished trajectories; invalid ones (NaN) are
        left out.

        `mean` = "leaf": the mean over the members that pass the unit. "child": recursively the mean
        over the unit's children. Both are unbiased estimates of the value if the shape of the tree
        does not depend on the samples; they are equal if all children of a node have equally many
        members. NaN for a unit without a valid member.
        """
        # float64: the rounding does not depend on the number of prompts
        valid, exact = rewards.isfinite(), rewards.double()
        reached = self.passes.to(exact)
        # differences from a valid reward, so that the mean of equal rewards is exactly this reward
        first = exact.nan_to_num().gather(1, valid.to(torch.uint8).argmax(1, keepdim=True))
        means = ((exact - first).nan_to_num() @ reached) / (valid.to(exact) @ reached)
        if self.mean == "child":
            for unit in reversed(range(self.units)):  # children are numbered after their parents
                children = means[:, self.parent == unit]
                if children.shape[1]:
                    means[:, unit] = children.nanmean(1)
        values = (first + means).to(rewards)
        single = self.leaves == 1  # the value is the member's reward, without rounding
        values[:, single] = rewards[:, self.passes[:, single].to(torch.uint8).argmax(0)]
        return values

    @checked
    def value_table(
        self, values: Float[Tensor, "prompt unit"]
    ) -> Float[Tensor, "prompt member column"]:
        """Values of units as a value table: the values of the states that a member's decisions
        start from, and of its leaf.
        """
        return values[:, self.paths[:, [*self.drawn_steps, self.steps]]]

    @checked
    def decision_table(
        self, units: Float[Tensor, "prompt unit"]
    ) -> Float[Tensor, "prompt member decision"]:
        """Numbers of drawn units as a table of the decisions that led to them; 0 where a member's
        transition was not drawn.
        """
        table = units[:, self.paths[:, [step + 1 for step in self.drawn_steps]]]
        return torch.where(self.decisions[:, self.drawn_steps], table, torch.zeros_like(table))

    @checked
    def edge_means(
        self,
        table: Float[Tensor, "prompt member decision"],
        mask: Bool[Tensor, "prompt member decision"] | None = None,
    ) -> Float[Tensor, "prompt unit"]:
        """For each drawn unit, the mean of `table` at the decision that led to it, over the members
        that pass it.

        The inverse of `decision_table`. Equal numbers have this mean without rounding. NaN for
        units without such a member within `mask`, 0 for units that were not drawn.
        """
        column = self.decision_of.clamp(min=0)
        counted = self.passes.expand(len(table), -1, -1)
        if mask is not None:
            counted = counted & mask[:, :, column]
        numbers = table[:, :, column].masked_fill(~counted, 0.0)
        first = numbers.gather(1, counted.to(torch.uint8).argmax(1, keepdim=True))
        means = (numbers - first).masked_fill(~counted, 0.0).sum(1) / counted.sum(1)
        return torch.where(self.drawn, first[:, 0] + means, torch.zeros_like(means))


Visits = Sequence[tuple[int, Hashable]]
"""The states of one member: nodes in order, each with a key that members in the same state share.
"""


def tree_of(
    visits: Sequence[Visits],
    drawn: Callable[[int, Hashable], bool],
    mean: Mean = "leaf",
    weight: Weight = "leaf",
    branched: bool = True,
) -> Any:
    """The `Tree` of the members with the states `visits`, one unit per distinct state; their
    `Paths` unless `branched`.

    Every member starts at node 0 and ends at the same last node; nodes ascend. `drawn` selects the
    states (node, key) that were drawn from the sampler; `mean` and `weight` are those of `Tree`.
    """
    states = {state: None for path in visits for state in path}
    order = sorted(states, key=lambda state: state[0])  # stable: members stay in order
    unit = {state: number for number, state in enumerate(order)}
    last, _ = order[-1]
    parent, paths = torch.full((len(unit),), -1), torch.zeros(len(visits), last + 1).long()
    for member, path in enumerate(visits):
        units = [unit[state] for state in path]
        parent[units[1:]] = torch.tensor(units[:-1])
        for (node, _), number in zip(path, units, strict=True):
            paths[member, node:] = number
    node = torch.tensor([node for node, _ in order])
    flags = torch.tensor([node > 0 and drawn(node, key) for node, key in order])
    if not branched:
        return Paths(parent, node, flags, paths)
    return Tree(parent, node, flags, paths, mean, weight)


@cache
def plain_tree(
    members: int, steps: int, decisions: tuple[int, ...], shared_noise: bool = False
) -> Paths:
    """Independent trajectories; with `shared_noise` from the same initial noise, so that they
    differ only after the first decision.
    """
    shared_until = min(decisions, default=steps) if shared_noise else -1

    visits = [
        [(node, 0 if node <= shared_until else member) for node in range(steps + 1)]
        for member in range(members)
    ]
    return tree_of(visits, lambda node, _: node - 1 in decisions, branched=False)
