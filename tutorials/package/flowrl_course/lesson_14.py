"""Checks of the lesson One action or many?."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    numbers,
    quiz,
    same_gradient,
    tensor,
    whole,
)

Answer = Callable[..., Any]


@check("Exercise 1")
def check_chunks(answer: Answer) -> None:
    """`answer(log_ratios, chunks)` is the geometric mean of each chunk's ratios, [trajectory,
    step].
    """
    logs = 0.5 * torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    logs.requires_grad_()
    chunks, chunk_of = (1, 4, 2), torch.tensor([0, 1, 1, 1, 1, 2, 2])

    def pooled(values: Tensor, labels: Tensor) -> Tensor:
        same = (labels == labels[:, None]).to(values)
        return values @ (same / same.sum(0))

    sizes = torch.tensor(chunks)[chunk_of]
    mean = pooled(logs, chunk_of)
    ratios = answer(logs.clone(), chunks)
    got = tensor(ratios, (4, 7), "the result")
    ends = torch.bucketize(torch.arange(7), torch.tensor(chunks).sort().values, right=True)
    mistakes = {
        "these are logarithms: ratios are wanted": mean,
        "this is the arithmetic mean of the ratios: the geometric mean is wanted": pooled(
            logs.exp(), chunk_of
        ),
        "this is the product of a chunk's ratios: it still grows with the number of steps": (
            mean * sizes
        ).exp(),
        "every step has its own ratio": logs.exp(),
        "all steps have one ratio, that of the whole trajectory": (
            logs.mean(1, keepdim=True).expand_as(logs).exp()
        ),
        "the mean is also over trajectories: each has its own ratio": (
            mean.mean(0).expand_as(logs).exp()
        ),
        "`chunks` are numbers of steps, not the steps at which a chunk begins": (
            pooled(logs, ends).exp()
        ),
    }
    close(
        got,
        mean.exp(),
        "these are not the geometric means of the chunks: compute one chunk by hand",
        mistakes,
    )
    same_gradient(ratios, mean.exp(), logs)


@check("Exercise 2")
def check_before_and_after(answer: str) -> None:
    """`answer` compares three losses before and after an update."""
    letter = choice(answer, "abc")
    expect(
        letter != "c",
        "the ratio is a mean over nine steps, but it is in nine losses: add up what each step gets",
    )
    expect(letter == "a", "a mean of nine numbers has a smaller spread: which ratio leaves 1 ± c?")


def _check_independent(times: Tensor, noise: Tensor) -> None:
    """Whether no two of the draws of a group, [group, draw], are correlated, nor those of
    neighbouring groups and of both halves of the groups.
    """
    draws = torch.cat([times, noise], 1)
    half = len(draws) // 2
    for one, other, what in (
        (draws, draws, "the draws of a group depend on each other"),
        (draws[::2], draws[1::2], "the draws of different groups depend on each other"),
        (draws[:half], draws[half:], "the draws of different groups depend on each other"),
    ):
        size = one.shape[1]
        table = torch.corrcoef(torch.cat([one, other], 1).T)[:size, size:]
        if one is other:
            table = table - torch.eye(size)
        limit = 5 / len(one) ** 0.5  # five standard errors
        expect(
            float(table.abs().max()) < limit,
            f"{what}: every time and both elements of every noise need a number of their own",
        )


@check("Exercise 3")
def check_pairs(answer: Answer) -> None:
    """`answer(groups, members, count, generator)` has stratified times and noise, shared by the
    members of a group.
    """
    groups, members, count = 200, 3, 4
    got = answered(answer(groups, members, count, torch.Generator().manual_seed(2)), "draw_pairs")
    expect(isinstance(got, tuple | list) and len(got) == 2, "return two tensors: times, noise")
    times = tensor(got[0], (groups, members, count), "times")
    noise = tensor(got[1], (groups, members, count, 2), "noise")
    for name, part in (("times", times), ("noise", noise)):
        equal = bool((part == part[:, :1]).all())
        expect(equal, f"the members of a group have different {name}: they share them")
        expect(
            len(part[:, 0].flatten(1).unique(dim=0)) == groups,
            f"groups have the same {name}: each group has its own",
        )
    inside = (count * times).floor().clamp(max=count - 1) == torch.arange(count)
    expect(bool(inside.all()), "time q of a group is not in [q/K, (q+1)/K]: stratify the times")
    within = count * times[:, 0] - torch.arange(count)
    expect(
        float(within.std()) > 0.2 and bool((within[:, 0] != within[:, 1]).all()),
        "each interval needs a uniform number of its own",
    )
    uniform = abs(float(within.mean()) - 0.5) < 0.05 and abs(float(within.std()) - 12**-0.5) < 0.02
    expect(uniform, "the times are not uniform within their intervals: use torch.rand")
    expect(
        not bool((noise[:, :, 0] == noise[:, :, 1]).any()),
        "the pairs of a group have the same noise: it is independent for each pair",
    )
    normal = abs(float(noise.mean())) < 0.1 and abs(float(noise.std()) - 1) < 0.1
    far = float((noise[:, 0].abs() > 2).float().mean())
    expect(normal and 0.02 < far < 0.08, "the noise is not standard normal: use torch.randn")
    _check_independent(within, noise[:, 0].flatten(1))
    again, other = (
        answer(groups, members, count, torch.Generator().manual_seed(seed)) for seed in (2, 3)
    )
    expect(
        torch.equal(again[0], times) and torch.equal(again[1], noise),
        "the same generator gives different pairs: draw with `generator`",
    )
    expect(
        not torch.equal(other[0], times) and not torch.equal(other[1], noise),
        "another generator gives the same pairs: draw with `generator`",
    )


@check("Exercise 4")
def check_variances(answer: Answer) -> None:
    """`answer(advantages, gradients)` are the variances with own and with shared pairs."""
    generator = torch.Generator().manual_seed(3)
    advantages = torch.tensor([1.5, -0.4, -0.8, 0.2, -0.5])
    gradients = torch.randn(40, 5, 6, generator=generator)
    gradients = gradients + 2 * torch.randn(40, 1, 6, generator=generator)
    got = answered(answer(advantages.clone(), gradients.clone()), "pair_variances")
    pair = torch.tensor(numbers(got, 2, "return two numbers: own, shared"))
    terms = advantages[:, None] * gradients / 5
    own = terms.var(0, unbiased=False).sum()
    shared = terms.sum(1).var(0, unbiased=False).sum()
    plain = (advantages[:, None] * gradients.var(0, unbiased=False)).sum() / 5
    mistakes = {
        "the two numbers are swapped: own pairs first": torch.stack([shared, own]),
        "the factor 1/G is missing, which counts squared": 25 * torch.stack([own, shared]),
        "a variance is divided by G squared, since the estimate is divided by G": (
            5 * torch.stack([own, shared])
        ),
        "the advantages count squared in a variance": torch.stack([plain, shared]),
        "with shared pairs the terms are not independent: sum over the members first": (
            torch.stack([own, own])
        ),
        "with own pairs the terms are independent: add up their variances": (
            torch.stack([shared, shared])
        ),
        "these are standard deviations": torch.stack([own, shared]).sqrt(),
        "the mean square is asked for, var(unbiased=False)": torch.stack([own, shared]) * 40 / 39,
        "sum over the weights: this is the mean": torch.stack([own, shared]) / 6,
    }
    close(pair, torch.stack([own, shared]), "these are not the two variances", mistakes)


@check("Exercise 5")
def check_common_part(answer: str) -> None:
    """`answer` says which variance the common part is in."""
    letter = choice(answer, "abc")
    expect(
        letter == "c",
        "with shared pairs the factor of the common part is the sum of the advantages: compute it",
    )


@check("Exercise 6")
def check_pull(answer: Answer) -> None:
    """`answer(images, rewards)` is the mean of A (v* - v_old) over the members of each pair."""
    generator = torch.Generator().manual_seed(4)
    images, rewards = torch.randn(5, 2, 3, generator=generator), torch.rand(5, 2)
    rewards = torch.rand(5, 2, generator=generator)
    d, change = images[:, 0] - images[:, 1], (rewards[:, 0] - rewards[:, 1])[:, None]
    square = d.square().mean(-1, keepdim=True)
    right = -change * d / square
    mistakes = {
        "the sign is wrong: a velocity points from the image to the noise": -right,
        "the division by mean(delta^2) is missing": -change * d / 4,
        "the division by mean(delta^2) is missing, and so are two factors 1/2": -change * d,
        "this is the sum over both members: return their mean": 2 * right,
        "mean(delta^2) is a quarter of mean(d^2): delta is half of d": right / 4,
        "A is half of the difference of rewards, and delta half of d; mean(delta^2) is a quarter"
        " of mean(d^2)": right / 2,
        "divide by the mean of the squares, not by their sum": right / 3,
        "divide by the mean square, not by its root": -change * d / square.sqrt(),
        "the mean square is that of each pair, not of all": -change * d / square.mean(),
        "rewards are not compared: the weight is the advantage R - mean of the pair": (
            -rewards.diff(dim=1).abs() * d / square
        ),
    }
    got = answered(answer(images.clone(), rewards.clone()), "pull")
    expect(
        not isinstance(got, Tensor) or got.shape != (5, 2, 3),
        "return the mean over the two members, [pair, dim]",
    )
    close(
        tensor(got, (5, 3), "the result"),
        right,
        "this is not the mean over the pair of A_m (v* - v_old)",
        mistakes,
    )


@check("Exercise 7")
def check_comb(answer: Answer) -> None:
    """`answer(branches, steps)` is the number of network evaluations of a comb with one trunk."""
    for branches, steps in (((6, 6, 8, 10), 10), ((6,) * 9, 10), ((3, 5), 7), ((2, 2, 2), 3)):
        got = number(answer(branches, steps), "the number")
        trunk = len(branches)
        teeth = sum(count * (steps - k - 1) for k, count in enumerate(branches))
        images = sum(branches)
        mistakes = {
            "the trunk's own evaluations are missing": teeth,
            "siblings share the evaluation of the state they start from": trunk + teeth + images,
            "the trunk ends at the last step that branches": steps + teeth,
            "this is the cost of independent trajectories: siblings share the trunk": steps
            * images,
            "the finished images need no evaluation, and step k is counted from 0": (
                trunk + teeth - images
            ),
            "all steps have the first number of branches: each step has its own": (
                trunk + branches[0] * sum(steps - k - 1 for k in range(trunk))
            ),
        }
        wanted = trunk + teeth
        close(got, wanted, f"{branches} at {steps} steps take {wanted}, not {got:.0f}", mistakes)


_EFFECTS = (0.26, 0.28, 0.24, 0.19, 0.16, 0.12, 0.07, 0.05, 0.03)
"""Standard deviations of siblings' rewards by step, as printed in the lesson."""


@check("Exercise 8")
def check_design(answer: tuple[int, ...]) -> None:
    """`answer` are the branches of a comb within the limits of the exercise."""
    counts = [whole(count, "a number of branches") for count in answered(answer, "branches")]
    expect(len(counts) <= 9, "the last of 10 steps draws nothing: at most 9 steps branch")
    expect(sum(counts) >= 20, f"the comb has {sum(counts)} images of 20: draw more branches")
    expect(
        all(count >= 1 for count in counts),
        "Comb takes numbers of 1 or more: leave out the steps after the last branch",
    )
    expect(
        all(count >= 4 for count in counts),
        "a step has fewer than four siblings: branch at fewer steps, or draw more there",
    )
    variances = [effect**2 for effect in _EFFECTS]
    held = sum(variances[: len(counts)]) / sum(variances)
    expect(held >= 0.8, f"the steps hold {held:.0%} of the variance, not 80%: branch at others")
    cost = len(counts) + sum(count * (9 - step) for step, count in enumerate(counts))
    expect(cost <= 150, f"the comb needs {cost} evaluations of 150: early branches cost most")


check_quiz = quiz(
    __name__,
    (
        "c",
        {
            "a": "the advantages are the same; only the ratios are shared",
            "b": "all three gradients have the same length in the first lines of the table",
        },
    ),
    (
        "b",
        {
            "a": "the correlation with the exact values is 0.99: compare the order of the images",
            "c": "a clip limits the estimate, whatever its scale",
        },
    ),
    (
        "b",
        {
            "a": "with fewer random numbers a variance usually grows",
            "c": "the images are given; only times and noise are shared",
        },
    ),
    (
        "a",
        {
            "b": "similar images make the difference a better derivative",
            "c": "FDFO uses no likelihood",
        },
    ),
    (
        "c",
        {
            "a": "a branch costs one evaluation per remaining step",
            "b": "the trunk is shared; count the steps of the branch itself",
        },
    ),
)
