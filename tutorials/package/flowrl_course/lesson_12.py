"""Checks of the lesson on branching."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.tree import Tree, tree_of
from flowrl.credit import group_zscore
from flowrl.probes import Branch
from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    quiz,
    tensor,
    whole,
)

Answer = Callable[..., Any]


def _uneven() -> Tree:
    """Two trees of one prompt from which two leaves are missing, so that siblings have unequally
    many leaves behind them.
    """
    full = Branch({0: 2, 1: 3}).tree(3, (0, 1, 2), 12, False, torch.Generator())
    visits = [
        list(enumerate(path))
        for member, path in enumerate(full.paths.tolist())
        if member not in (4, 7)
    ]
    return tree_of(visits, lambda node, unit: True)


def _rewards(tree: Tree) -> Tensor:
    """2 prompts, [prompt, leaf]."""
    return torch.randn(2, tree.members, generator=torch.Generator().manual_seed(10))


@check("Exercise 1")
def check_parent(answer: Answer) -> None:
    """`answer(values, leaves)` is the value of the parent, [prompt]."""
    generator = torch.Generator().manual_seed(3)
    values, leaves = torch.randn(4, 3, generator=generator), torch.tensor([1.0, 4.0, 2.0])
    right = (values * leaves).sum(1) / 7
    mistakes = {
        "this is the plain mean of the children: a child with more leaves counts more": (
            values.mean(1)
        ),
        "this is the sum of all rewards: divide it by the number of leaves": right * 7,
        "the sum of all rewards is divided by the number of children: divide by all leaves": (
            right * 7 / 3
        ),
        "children with fewer leaves count more: the weight is the number of leaves": (
            (values / leaves).sum(1) / (1 / leaves).sum()
        ),
        "the weights are squared: a child's sum of rewards is leaves times V": (
            (values * leaves**2).sum(1) / (leaves**2).sum()
        ),
        "only the child with most leaves counts": values[:, 1],
    }
    got = answered(answer(values.clone(), leaves.clone()), "parent_value")
    expect(
        not isinstance(got, Tensor) or got.shape != (4, 1),
        "an axis is too much: return [prompt], without keepdim",
    )
    expect(
        not isinstance(got, Tensor) or got.shape != (3,),
        "the sum runs over prompts: the children are the last axis",
    )
    close(
        tensor(got, (4,), "the result"),
        right,
        "this is not the mean reward of the leaves behind all children",
        mistakes,
    )


@check("Exercise 2")
def check_siblings(answer: Answer) -> None:
    """`answer(values, parent)` is Z over siblings, [prompt, unit]; 0 for a state without siblings
    and for a root.
    """
    tree = _uneven()
    values, parent = tree.values(_rewards(tree)), tree.parent
    got = tensor(answer(values.clone(), parent.clone()), tuple(values.shape), "the result")
    expect(
        not bool(got.isnan().any()),
        "some entries are NaN: the sample standard deviation of a single state is 0/0; use"
        " unbiased=False",
    )
    alone = torch.where(parent >= 0, parent, tree.units + torch.arange(tree.units))
    wanted = group_zscore(values, alone, clamp=None)
    parents = parent.clamp(min=0)
    std = torch.stack([values[:, alone == family].std(1, unbiased=False) for family in alone], 1)
    count = (alone == alone[:, None]).sum(0)
    from_parent = torch.where(parent >= 0, values - values[:, parents], torch.zeros_like(values))
    mistakes = {
        "roots are compared with each other: they were not drawn from the same state, so "
        "their credit is 0": group_zscore(values, parent, clamp=None),
        "the standard deviation is the sample's: flowrl uses the population's (unbiased=False)": (
            wanted * (std + 1e-4) / (std * (count / (count - 1).clamp(min=1)).sqrt() + 1e-4)
        ),
        "all states are compared with each other: compare those with the same parent": group_zscore(
            values, torch.zeros_like(parent), clamp=None
        ),
        "all states of a node are compared (a depth rule): compare those with the same parent": (
            group_zscore(values, tree.node, clamp=None)
        ),
        "the division by the standard deviation is missing": wanted * (std + 1e-4),
        "V(parent) is subtracted, in which siblings weigh by their leaves: subtract the mean "
        "over the siblings": (from_parent / (std + 1e-4)),
        "the mean is that of the other siblings: here it includes the state itself": group_zscore(
            values, alone, clamp=None, leave_one_out=True
        ),
    }
    close(
        got,
        wanted,
        "this is not the z-score over the states with the same parent (1e-4 is added to the std)",
        mistakes,
    )


def _slopes(worth: Tensor, estimate: Tensor, mean: Tensor) -> dict[str, float]:
    """The slope of `estimate - mean` on `worth`, and what mistakes give instead."""
    difference = estimate - mean
    product, square = (difference * worth).mean(), worth.square().mean()
    wrong = {
        "": product / square,
        "the mean is not subtracted, so the parent's value is still there": (
            (estimate * worth).mean() / square
        ),
        "the mean is that of all families: siblings have their own, over dimension 1": (
            ((estimate - estimate.mean()) * worth).mean() / square
        ),
        "this is the slope of the mean, the share that is lost: subtract the mean first": (
            (mean * worth).mean() / square
        ),
        "this is the correlation: the slope divides by the mean square of the true advantage": (
            product / (square * difference.square().mean()).sqrt()
        ),
        "this is the slope of the advantage on the difference: regress the other way around": (
            product / difference.square().mean()
        ),
        "the divisor is that of the estimates: regress on `worth`": (
            product / estimate.square().mean()
        ),
        "this is the mean of the products: divide by the mean square of `worth`": product,
        "the slope is that of the mean minus the estimate: the sign is wrong": -product / square,
    }
    return {message: float(value) for message, value in wrong.items()}


@check("Exercise 3")
def check_shrinkage(answer: Answer) -> None:
    """`answer(worth, estimate, leave_one_out)` is the slope of the sibling difference on the true
    advantage.
    """
    for count in (3, 6, 2):
        generator = torch.Generator().manual_seed(count)
        worth = 2 * torch.randn(40, count, generator=generator)
        parent = 1 + torch.randn(40, 1, generator=generator)
        estimate = parent + worth + 0.5 * torch.randn(40, count, generator=generator)
        every, mean = estimate.sum(1, keepdim=True), estimate.mean(1, keepdim=True)
        others = (every - estimate) / (count - 1)
        neighbour = _slopes(worth, estimate, estimate.roll(1, 1))[""]
        for leave_one_out, subtracted in ((False, mean), (True, others)):
            options = {"leave_one_out": True} if leave_one_out else {}
            got = number(answer(worth.clone(), estimate.clone(), **options), "shrinkage")
            slopes = _slopes(worth, estimate, subtracted)
            wanted = slopes.pop("")
            if leave_one_out:
                message = (
                    "right with the mean over all siblings, but `leave_one_out` changes nothing:"
                    " subtract the mean of the other siblings"
                )
                slopes[message] = _slopes(worth, estimate, mean)[""]
                slopes["the sum of the others is divided by the number of all siblings"] = _slopes(
                    worth, estimate, (every - estimate) / count
                )[""]
            if count > 2:
                slopes["one sibling is subtracted: take the mean of all that count"] = neighbour
            otherwise = f"with {count} siblings the slope is {wanted:.3f}; you get {got:.3f}"
            close(got, wanted, otherwise, slopes, 1e-3)


@check("Exercise 4")
def check_largest_part(answer: str) -> None:
    """`answer` is the largest part of the last decision's credit under a depth rule."""
    letter = choice(answer, "abc")
    expect(letter != "c", "no draw follows decision 4: the ODE finishes the image")
    expect(
        letter == "b",
        "the decision itself is one draw: count the draws in which the parents differ",
    )


@check("Exercise 5")
def check_shares(answer: Answer) -> None:
    """`answer(counts)` is each decision's share of the loss if every distinct edge counts once,
    [decision].
    """
    counts = [2, 2, 6, 6, 12, 24, 24]
    got = tensor(answer(list(counts)), (len(counts) - 1,), "the result").double()
    edges = torch.tensor(counts[1:], dtype=torch.float64)
    starts = torch.tensor(counts[:-1], dtype=torch.float64)
    mistakes = {
        "these are numbers of edges: divide by their sum": edges,
        "the denominator contains n_0: no edge leads to a root": edges / sum(counts),
        "decision i is counted by the states it starts from: count its edges": (
            starts / starts.sum()
        ),
        "every decision has 1/D: these are the shares with leaf weights": torch.full_like(
            edges, 1 / len(edges)
        ),
        "these are the weights 1 / n_{i+1} that would make all decisions equal: the share is "
        "proportional to n_{i+1}": ((1 / edges) / (1 / edges).sum()),
    }
    close(
        got,
        edges / edges.sum(),
        "these are not the shares: how many distinct edges does a decision have?",
        mistakes,
    )


_SHAPES: tuple[tuple[int, dict[int, int], int], ...] = (
    (3, {2: 2, 4: 2, 6: 2}, 10),
    (1, {0: 2, 3: 2, 6: 2, 9: 2}, 20),
    (1, {0: 3, 1: 3, 2: 3}, 10),
    (24, {}, 10),
)


def _counts(roots: int, children: dict[int, int], steps: int) -> list[int]:
    counts = [roots]
    for step in range(steps):
        counts.append(counts[-1] * children.get(step, 1))
    return counts


@check("Exercise 6")
def check_evaluations(answer: Answer) -> None:
    """`answer(roots, children, steps)` is the number of network evaluations of a rollout of one
    group.
    """
    for roots, children, steps in _SHAPES:
        got = number(answer(roots, dict(children), steps), "evaluations")
        n = _counts(roots, children, steps)
        mistakes = {
            f"{sum(n):,} is the number of states: the finished images need no evaluation": sum(n),
            f"{sum(n) - roots:,} is the number of edges: siblings share the evaluation of "
            f"the state that they start from": (sum(n) - roots),
            f"{steps * n[-1]:,} is what as many independent trajectories cost: shared states "
            f"are evaluated once": (steps * n[-1]),
            f"{sum(n[:-1]) // roots:,} is the number for one root: there are {roots}": (
                sum(n[:-1]) // roots
            ),
        }
        for message, value in mistakes.items():
            expect(not (abs(got - value) < 0.5 and value != sum(n[:-1])), message)
        expect(
            abs(got - sum(n[:-1])) < 0.5,
            f"{roots} roots, children {children}, {steps} steps take {sum(n[:-1]):,} evaluations;"
            f" you get {got:,.0f}",
        )


@check("Exercise 7")
def check_shape(roots: int, children: dict[int, int]) -> None:
    """`roots` and `children` {step: count} are a shape within the limits of the exercise."""
    roots = whole(roots, "roots")
    expect(isinstance(answered(children, "children"), dict), "children is a dict {step: count}")
    children = {step: whole(count, "a number of children") for step, count in children.items()}
    splits = [step for step, count in children.items() if count > 1]
    expect(
        set(splits) <= set(range(5)),
        "a split at an ODE step gives equal children: split at decisions 0 to 4",
    )
    counts = _counts(roots, children, 10)
    expect(counts[-1] >= 12, f"the shape has {counts[-1]} leaves of 12: split more, or add roots")
    expect(roots >= 2, "one root has one initial noise: use two roots or more")
    expect(len(splits) >= 3, f"siblings compare {len(splits)} decisions of 3: split at more steps")
    expect(
        sum(counts[:-1]) <= 100,
        f"the shape needs {sum(counts[:-1])} evaluations of 100: early splits and large families"
        " cost most",
    )


@check("Exercise 8")
def check_scale(answer: float) -> None:
    """`answer` is the scale of the gradient of the sibling difference."""
    mistakes = {
        "only the decisions with credit are counted: two siblings also shrink the advantage": 0.4,
        "only the shrinkage is counted: most decisions get no credit at all": 0.5,
        "the two factors are added: they multiply": 0.9,
    }
    close(
        number(answer, "the scale"),
        0.2,
        "this is not the scale: which two effects make the gradient smaller?",
        mistakes,
        1e-3,
    )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "Z is not in units of the reward; divide by the standard deviation of the pair",
            "c": "half the difference is the standard deviation, not the result",
        },
    ),
    (
        "c",
        {
            "a": "nothing is averaged: the difference has no such term, even with two leaves",
            "b": "they also share all draws up to the split",
        },
    ),
    (
        "a",
        {
            "b": "what is fixed before a draw is a baseline, whatever its size",
            "c": "a baseline does not change the expected gradient, and so not its length",
        },
    ),
    (
        "b",
        {
            "a": "the leaves are not evaluated; count the states at the nodes before them",
            "c": "count the states of steps 1 to 8 in both trees",
        },
    ),
    (
        "a",
        {
            "b": "compare the numbers of states at the first and at the last node",
            "c": "many leaves share an early edge; it counts once instead of once per leaf",
        },
    ),
)
