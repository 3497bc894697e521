"""The states that the trajectories of a group share: independent ones, a common start, or the
branches of a tree.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.core.errors import require

Mean = Literal["leaf", "child"]
Weight = Literal["leaf", "edge"]


@dataclass(frozen=True)
class Tree:
    """The states of one group and their parents; every group of an iteration has the same tree.

    A *unit* is a distinct state; units are numbered by node. The value of a unit in a branched tree
    is a mean over the members behind it. In the update, a parent is evaluated once for all its
    children.

    Args:
        parent: the unit from which each unit was reached [unit]; -1 for initial noise.
        node: node of each unit on the time grid [unit].
        drawn: whether each unit was drawn from the sampler's distribution [unit], so that the edge
            into it is a decision; other edges are ODE steps.
        paths: the units of each member's trajectory [member, node], one member per leaf; at nodes
            that an ODE step skips, the unit before.
        branched: whether this is the tree of a branching probe and not a plain group, whose members
            at most share their initial noise.
        mean: mean over the members behind a unit ("leaf"), or recursively over its children
            ("child").
        weight: a decision counts once per member behind it ("leaf": the loss is the mean over
            trajectories) or once ("edge").
    """

    parent: Int[Tensor, " unit"]
    node: Int[Tensor, " unit"]
    drawn: Bool[Tensor, " unit"]
    paths: Int[Tensor, "member node"]
    branched: bool = False
    mean: Mean = "leaf"
    weight: Weight = "leaf"
    strides: Int[Tensor, " member"] | None = None
    """Nodes per ODE step by which each member is finished, if there are several strides
    (`flowrl.probes.Comb`).
    """

    @property
    def steps(self) -> int:
        """T, the number of transitions."""
        return self.paths.shape[1] - 1

    @property
    def members(self) -> int:
        """Number of trajectories of the group."""
        return len(self.paths)

    @property
    def units(self) -> int:
        """Number of distinct states."""
        return len(self.node)

    @cached_property
    def counts(self) -> list[int]:
        """n_i, the number of units at each node. A rollout evaluates the network sum_{i < T} n_i
        times for a group.
        """
        nodes = self.node.tolist()
        return [nodes.count(node) for node in range(self.steps + 1)]

    def at(self, node: int) -> slice:
        """The units at a node."""
        starts = [0, *accumulate(self.counts)]
        return slice(starts[node], starts[node + 1])

    @cached_property
    def edges(self) -> list[list["Edges"]]:
        """The edges that start at each node, in the order of the units that they lead to."""
        found: list[dict[tuple[int, bool], list[int]]] = [{} for _ in range(self.steps)]
        nodes, drawn, parents = self.node.tolist(), self.drawn.tolist(), self.parent.tolist()
        for unit, parent in enumerate(parents):
            if parent >= 0:
                found[nodes[parent]].setdefault((nodes[unit], drawn[unit]), []).append(unit)
        return [
            [
                edges_of(n, d, units, [parents[unit] - self.at(node).start for unit in units])
                for (n, d), units in kinds.items()
            ]
            for node, kinds in enumerate(found)
        ]

    @cached_property
    def first_members(self) -> list[int]:
        """The first member of every root."""
        starts = self.paths[:, 0].tolist()
        return [starts.index(root) for root in range(self.counts[0])]

    @cached_property
    def passes(self) -> Bool[Tensor, "member unit"]:
        """Mask of the units that a member's trajectory passes."""
        found = torch.zeros(self.members, self.units, dtype=torch.bool)
        return found.scatter_(1, self.paths, torch.tensor(True).expand_as(self.paths))

    @cached_property
    def leaves(self) -> Int[Tensor, " unit"]:
        """Number of members that pass each unit."""
        return self.passes.sum(0)

    @cached_property
    def roots(self) -> Int[Tensor, " unit"]:
        """The root (initial noise) of each unit: units of one root are one tree."""
        found = torch.arange(self.units)
        for unit, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                found[unit] = found[parent]
        return found

    @cached_property
    def decisions(self) -> Bool[Tensor, "member step"]:
        """Mask of the steps of a member's trajectory that are decisions."""
        following = self.paths[:, 1:]
        arrives = self.node[following] == torch.arange(1, self.steps + 1)
        return self.drawn[following] & arrives

    @cached_property
    def drawn_steps(self) -> list[int]:
        """The steps at which any member's trajectory was drawn, in order: the axis of decisions."""
        return sorted({node - 1 for node in self.node[self.drawn].tolist()})

    def values(self, rewards: Float[Tensor, "prompt member"]) -> Float[Tensor, "prompt unit"]:
        """V of every unit from the rewards of the finished trajectories; invalid ones (NaN) are
        left out.

        `mean` = "leaf": the mean over the members that pass the unit. "child": recursively the mean
        over the unit's children. Both are unbiased estimates of the value if the shape of the tree
        does not depend on the samples; they are equal if all children of a node have equally many
        members. NaN for a unit without a valid member.
        """
        # float64: rounding does not depend on the number of prompts
        valid, exact = rewards.isfinite(), rewards.double()
        reached = self.passes.to(exact)
        # equal rewards: no rounding
        first = exact.nan_to_num().gather(1, valid.to(torch.uint8).argmax(1, keepdim=True))
        found = ((exact - first).nan_to_num() @ reached) / (valid.to(exact) @ reached)
        found = (first + (found if self.mean == "leaf" else self._child_means(found))).to(rewards)
        alone = self.leaves == 1  # its value is that reward, without rounding
        found[:, alone] = rewards[:, self.passes[:, alone].to(torch.uint8).argmax(0)]
        return found

    def _child_means(self, values: Tensor) -> Tensor:
        for node in reversed(range(self.steps)):
            for unit in range(*self.at(node).indices(self.units)):
                children = values[:, self.parent == unit]
                if children.shape[1]:
                    values[:, unit] = children.nanmean(1)
        return values

    def value_table(
        self, values: Float[Tensor, "prompt unit"]
    ) -> Float[Tensor, "prompt member decision+1"]:
        """Values of units as a value table: the values of the states that a member's decisions
        start from, and of its leaf.
        """
        return values[:, self.paths[:, [*self.drawn_steps, self.steps]]]

    def decision_table(
        self, units: Float[Tensor, "prompt unit"]
    ) -> Float[Tensor, "prompt member decision"]:
        """Numbers of drawn units as a table of the decisions that led to them; 0 where a member's
        transition was not drawn.
        """
        table = units[:, self.paths[:, [step + 1 for step in self.drawn_steps]]]
        return torch.where(self.decisions[:, self.drawn_steps], table, torch.zeros_like(table))

    @cached_property
    def decision_of(self) -> Int[Tensor, " unit"]:
        """The index of the decision that led to each drawn unit; -1 for the others."""
        found = [
            self.drawn_steps.index(node - 1) if drawn else -1 for node, drawn in self._arrivals
        ]
        return torch.tensor(found)

    @property
    def _arrivals(self) -> list[tuple[int, bool]]:
        return list(zip(self.node.tolist(), self.drawn.tolist(), strict=True))

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
        place = self.decision_of.clamp(min=0)
        among = self.passes.expand(len(table), -1, -1)
        if mask is not None:
            among = among & mask[:, :, place]
        numbers = table[:, :, place].masked_fill(~among, 0.0)
        first = numbers.gather(1, among.to(torch.uint8).argmax(1, keepdim=True))
        means = (numbers - first).masked_fill(~among, 0.0).sum(1) / among.sum(1)
        return torch.where(self.drawn, first[:, 0] + means, torch.zeros_like(means))


@dataclass(frozen=True)
class Edges:
    """Edges from one node to another.

    Args:
        node: the node to which they lead.
        drawn: whether they are decisions.
        units: the units to which they lead [edge].
        parents: the distinct units from which they start [parent], numbered within their node.
        place: index into `parents` of each edge's start [edge].
        in_order: every edge starts from its own parent, in order.
    """

    node: int
    drawn: bool
    units: Int[Tensor, " edge"]
    parents: Int[Tensor, " parent"]
    place: Int[Tensor, " edge"]
    in_order: bool


def edges_of(node: int, drawn: bool, units: list[int], parents: list[int]) -> Edges:
    """Edges to `units` of `node`, each from the unit in `parents`; `drawn` if they are
    decisions.
    """
    distinct = sorted(set(parents))
    place = [distinct.index(parent) for parent in parents]
    in_order = place == list(range(len(distinct)))
    return Edges(
        node, drawn, torch.tensor(units), torch.tensor(distinct), torch.tensor(place), in_order
    )


Visits = Sequence[tuple[int, Hashable]]
"""The states of one member: nodes in order, each with a key that members in the same state share.
"""


def tree_of(
    visits: Sequence[Visits],
    drawn: Callable[[int, Hashable], bool],
    mean: Mean = "leaf",
    weight: Weight = "leaf",
    branched: bool = True,
) -> Tree:
    """The tree of the members with the states `visits`, one unit per distinct state.

    Every member starts at node 0 and ends at the same last node. `drawn` selects the states (node,
    key) that were drawn from the sampler; `mean`, `weight` and `branched` are those of `Tree`.
    """
    last = visits[0][-1][0]
    fits = all(
        path[0][0] == 0 and path[-1][0] == last and list(dict(path)) == sorted(dict(path))
        for path in visits
    )
    require(
        fits,
        "tree: nodes",
        [[node for node, _ in path] for path in visits],
        f"from 0 to {last}, ascending, for every member",
    )
    states: dict[tuple[int, Hashable], int] = {}
    for node in range(last + 1):
        for state in (state for path in visits for state in path if state[0] == node):
            states.setdefault(state, len(states))
    parent = torch.full((len(states),), -1)
    paths = torch.zeros(len(visits), last + 1, dtype=torch.long)
    for member, path in enumerate(visits):
        numbers = [states[state] for state in path]
        parent[numbers[1:]] = torch.tensor(numbers[:-1], dtype=torch.long)
        for state, number in zip(path, numbers, strict=True):
            paths[member, state[0] :] = number
    node = torch.tensor([state[0] for state in states])
    flags = torch.tensor([node > 0 and drawn(node, key) for node, key in states])
    return Tree(parent, node, flags, paths, branched, mean, weight)


@cache
def plain_tree(
    members: int, steps: int, decisions: tuple[int, ...], shared_noise: bool = False
) -> Tree:
    """Independent trajectories; with `shared_noise` from the same initial noise, so that they
    differ only after the first decision.
    """
    shared_until = min(decisions, default=steps) if shared_noise else -1

    def path(member: int) -> Visits:
        return [(node, 0 if node <= shared_until else member) for node in range(steps + 1)]

    return tree_of(
        [path(m) for m in range(members)], lambda node, _: node - 1 in decisions, branched=False
    )
