"""Probes that score unfinished states by branches of the trajectories."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from flowrl.core.errors import require
from flowrl.core.options import Count, Whole, allowed, checked_options
from flowrl.core.probe import Cost, Probe, Shape
from flowrl.core.tree import Mean, Tree, Visits, Weight, tree_of


class Branching(Probe, ABC):
    """A probe that scores unfinished states by branches of the trajectories.

    Such a rollout has as many leaves as the group has members. R_j of a member is the value of its
    state at node j: the mean reward of the leaves behind this state
    (`flowrl.core.tree.Tree.values`). The subclass defines how the tree branches.
    """

    @abstractmethod
    def tree(
        self,
        steps: int,
        decisions: Sequence[int],
        members: int,
        shared_noise: bool,
        generator: torch.Generator,
    ) -> Tree:
        """The tree of an iteration, the same for every group, with one leaf per member.

        `decisions` are the sampler's stochastic steps among `steps`. A tree that changes between
        iterations is drawn from `generator`. Raises `ConfigError` if the number of members does not
        fit.
        """

    def cost(self, shape: Shape) -> Cost:
        """No further calls: the tree contains all scored states."""
        return Cost()


@checked_options
@dataclass(frozen=True)
class Branch(Branching):
    """At some stochastic steps the trajectory continues as several trajectories; at all other
    steps, as one.

    A group has members / (product of the children) trees, each with its own initial noise. With
    shared noise it has one tree, which branches further at its first stochastic step. All
    stochastic steps are decisions, also those without branches. A group takes as many network
    evaluations as it has distinct states before the last node. `tree` raises `ConfigError` if a
    step is not stochastic or the group size is not a multiple of the leaves.

    Source: BranchGRPO (arXiv 2509.06040), binary splits at steps 0, 3, 6, 9 of 20; TreeGRPO (arXiv
    2512.08153), three children at each of three consecutive stochastic steps.

    Args:
        children: number of children by step, or a tuple for the first stochastic steps in order,
            wherever they are.
        weight: weight of a decision in the loss (see `flowrl.core.tree.Tree`).
        mean: mean over leaves or children (see `flowrl.core.tree.Tree`).

    Raises:
        ConfigError: a field is out of range.
    """

    children: Mapping[int, int] | tuple[Count, ...] = (2,)
    weight: Weight = "leaf"
    mean: Mean = "leaf"

    def __post_init__(self) -> None:
        by_step = self.children if isinstance(self.children, Mapping) else {}
        fits = all(allowed(step, Whole) and allowed(by_step[step], Count) for step in by_step)
        require(fits, "Branch.children", self.children, "{step: number}, 1 or more for each step")

    def tree(
        self,
        steps: int,
        decisions: Sequence[int],
        members: int,
        shared_noise: bool,
        generator: torch.Generator,
    ) -> Tree:
        """The same tree every iteration."""
        stochastic = f"the stochastic steps {list(decisions)}"
        if isinstance(self.children, Mapping):
            children = dict(self.children)
            fits = children.keys() <= set(decisions)
        else:
            children = dict(zip(decisions, self.children, strict=False))
            fits = len(children) == len(self.children)
        require(fits, "Branch.children", self.children, stochastic)
        leaves = math.prod(children.values())
        trees = _count_of(members, leaves, self)
        if shared_noise and decisions:
            children[decisions[0]] = children.get(decisions[0], 1) * trees
        behind = [
            math.prod(count for step, count in children.items() if step >= node)
            for node in range(steps + 1)
        ]
        visits = [
            [(node, member // behind[node]) for node in range(steps + 1)]
            for member in range(members)
        ]
        return tree_of(visits, lambda node, _: node - 1 in decisions, self.mean, self.weight)


def _count_of(members: int, leaves: int, probe: Branching) -> int:
    """The number of trees of `leaves` members in a group."""
    allowed = f"a multiple of {leaves}, the leaves of a tree of {probe}"
    require(members % leaves == 0, "group_size", members, allowed)
    return members // leaves


@checked_options
@dataclass(frozen=True)
class Comb(Branching):
    """A trunk of ODE steps; at some steps `branches` draws from the sampler, each finished by the
    ODE.

    A group has members / (branches x steps x strides) trunks, each with its own initial noise (with
    shared noise: one, with more branches); with a tuple of branches, members / (their sum x
    strides). The only decisions are the draws at the branches. Network evaluations of a trunk with
    steps M: (last of M) + 1 + branches sum_{k in M} [1 + sum_s (ceil((T - k - 1) / s) - 1)]. `tree`
    raises `ConfigError` if the group size is not a multiple of the leaves or no stochastic step is
    in range.

    Source: TempFlow-GRPO (arXiv 2508.04324), one stride; the paper does not specify which steps an
    iteration uses. Granular-GRPO (arXiv 2510.01982), strides 1, 2, 3.

    Args:
        branches: draws per step, or a tuple of the draws at the first stochastic steps in range; no
            further step is a decision then.
        count: number of steps, drawn anew every iteration and the same for all groups; None: all in
            range.
        low: first step in range.
        high: end of the range; None: the number of steps.
        strides: every branch is finished once per stride s, by ODE steps of s nodes (the last may
            be shorter); the network's output at the branch's first state is shared.
        weight: weight of a decision in the loss (see `flowrl.core.tree.Tree`).
        mean: mean over leaves or children (see `flowrl.core.tree.Tree`).

    Raises:
        ConfigError: a field is out of range.
    """

    branches: Count | tuple[Count, ...] = 4
    count: Count | None = None
    low: Whole = 0
    high: int | None = None
    strides: tuple[Count, ...] = (1,)
    weight: Weight = "leaf"
    mean: Mean = "leaf"

    def __post_init__(self) -> None:
        fits = self.high is None or self.high > self.low
        require(fits, "Comb.high", self.high, f"above low = {self.low}, or None")
        fits = self.branches != () and (self.count is None or isinstance(self.branches, int))
        require(fits, "Comb.branches", self.branches, "one or more numbers, and one with `count`")
        fits = 0 < len(self.strides) == len(set(self.strides))
        require(fits, "Comb.strides", self.strides, "one or more different numbers of nodes")

    def tree(
        self,
        steps: int,
        decisions: Sequence[int],
        members: int,
        shared_noise: bool,
        generator: torch.Generator,
    ) -> Tree:
        """The tree of an iteration; `generator` draws the steps if `count` is given."""
        high = steps if self.high is None else self.high
        within = [step for step in decisions if self.low <= step < high]
        if isinstance(self.branches, tuple):
            count = len(self.branches)
        else:
            count = len(within) if self.count is None else self.count
        place = f"{max(count, 1)} or more stochastic steps within [{self.low}, {high})"
        require(len(within) >= max(count, 1), "Comb: stochastic steps", list(decisions), place)
        if self.count is not None:
            order = torch.randperm(len(within), generator=generator, device=generator.device)
            within = sorted(within[i] for i in order[:count].tolist())
        each = self.branches if isinstance(self.branches, tuple) else (self.branches,) * count
        trunks = _count_of(members, sum(each) * len(self.strides), self)
        draws, trunks = (trunks, 1) if shared_noise else (1, trunks)
        teeth = [(s, k) for s, n in zip(within, each, strict=False) for k in range(n * draws)]

        def visits(trunk: int, step: int, branch: int, stride: int) -> Visits:
            """ODE steps on the trunk, the draw after `step`, and ODE steps of `stride` nodes."""
            nodes = [step + 1, *range(step + 1 + stride, steps, stride)]
            nodes += [steps] if step + 1 < steps else []
            keys = [(trunk, step, branch, *nodes[1:i]) for i in range(1, len(nodes) + 1)]
            trunk_states = [(node, ("trunk", trunk)) for node in range(step + 1)]
            return [*trunk_states, *zip(nodes, keys, strict=True)]

        choices = product(range(trunks), teeth, self.strides)
        tree = tree_of(
            [visits(trunk, *tooth, stride) for trunk, tooth, stride in choices],
            # the first state of a branch was drawn
            lambda node, key: isinstance(key, tuple) and key[0] != "trunk" and len(key) == 3,
            self.mean,
            self.weight,
        )
        strides = torch.tensor(self.strides).repeat(tree.members // len(self.strides))
        return replace(tree, strides=strides) if len(self.strides) > 1 else tree
