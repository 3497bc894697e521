"""Checks of the lesson One action or many?."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl_course.checking import answered, check, close, expect, number, tensor

Answer = Callable[..., Any]


@check("Exercise 1")
def check_chunks(answer: Answer) -> None:
    """`answer(log_ratios, chunks)` is the geometric mean of each chunk's ratios, [trajectory,
    step].
    """
    logs = 0.5 * torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    chunks, chunk_of = (1, 4, 2), torch.tensor([0, 1, 1, 1, 1, 2, 2])

    def pooled(values: Tensor, labels: Tensor) -> Tensor:
        same = (labels == labels[:, None]).to(values)
        return values @ (same / same.sum(0))

    sizes = torch.tensor(chunks)[chunk_of]
    mean = pooled(logs, chunk_of)
    got = tensor(answer(logs.clone(), chunks), (4, 7), "the result")
    ends = torch.bucketize(torch.arange(7), torch.tensor(chunks).sort().values, right=True)
    mistakes = {
        "these are logarithms; the ratio is exp of the mean": mean,
        "this is the arithmetic mean of the ratios; average logarithms, then exp": pooled(
            logs.exp(), chunk_of
        ),
        "this is the product of a chunk's ratios; divide the sum of the logarithms by the number "
        "of its steps": (mean * sizes).exp(),
        "every step has its own ratio": logs.exp(),
        "all steps have one ratio, that of the whole trajectory": (
            logs.mean(1, keepdim=True).expand_as(logs).exp()
        ),
        "the mean is also over trajectories; each has its own ratio": (
            mean.mean(0).expand_as(logs).exp()
        ),
        "`chunks` are numbers of steps, not the steps at which a chunk begins": (
            pooled(logs, ends).exp()
        ),
    }
    close(got, mean.exp(), "this is not exp of the mean log-ratio of the step's chunk", mistakes)


@check("Exercise 2")
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
        expect(equal, f"the members of a group have different {name}; they share them")
        expect(
            not bool((part == part[:1]).all()),
            f"all groups have the same {name}; each group has its own",
        )
    inside = (count * times).floor().clamp(max=count - 1) == torch.arange(count)
    expect(bool(inside.all()), "time k of a group is not in [k/K, (k+1)/K]; stratify the times")
    within = count * times[:, 0] - torch.arange(count)
    expect(
        float(within.std()) > 0.2 and bool((within[:, 0] != within[:, 1]).all()),
        "each interval needs a uniform number of its own",
    )
    expect(
        not bool((noise[:, :, 0] == noise[:, :, 1]).any()),
        "the pairs of a group have the same noise; it is independent for each pair",
    )
    normal = abs(float(noise.mean())) < 0.1 and abs(float(noise.std()) - 1) < 0.1
    expect(normal, "the noise is not standard normal; use torch.randn")
    again = answer(groups, members, count, torch.Generator().manual_seed(2))
    expect(
        torch.equal(again[0], times) and torch.equal(again[1], noise),
        "the same generator gives different pairs; draw with `generator`",
    )


@check("Exercise 3")
def check_variances(answer: Answer) -> None:
    """`answer(advantages, gradients)` are the variances with own and with shared pairs."""
    generator = torch.Generator().manual_seed(3)
    advantages = torch.tensor([1.5, -0.4, -0.8, 0.2, -0.5])
    gradients = torch.randn(40, 5, 6, generator=generator)
    gradients = gradients + 2 * torch.randn(40, 1, 6, generator=generator)
    got = answered(answer(advantages.clone(), gradients.clone()), "pair_variances")
    expect(isinstance(got, tuple | list) and len(got) == 2, "return two numbers: own, shared")
    pair = torch.tensor([number(part) for part in got])
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
        "sum over the weights; this is the mean": torch.stack([own, shared]) / 6,
    }
    close(pair, torch.stack([own, shared]), "these are not the two variances", mistakes)


@check("Exercise 4")
def check_difference(answer: Answer) -> None:
    """`answer(old, images)` is v_old - Delta / mean(Delta^2), [pair, 2, dim]."""
    generator = torch.Generator().manual_seed(4)
    old, images = (torch.randn(5, 2, 3, generator=generator) for _ in range(2))
    got = tensor(answer(old.clone(), images.clone()), (5, 2, 3), "the result")
    difference = images - images.mean(1, keepdim=True)
    square = difference.square()

    def target(shift: Tensor, size: Tensor) -> Tensor:
        return old - shift / size

    size = square.mean(-1, keepdim=True)
    mistakes = {
        "the sign is wrong: the velocity points towards noise, so a shift of the image by +Delta "
        "needs -Delta": target(-difference, size),
        "Delta is the difference from the pair's mean, half of that from the other image": (
            target(2 * difference, 4 * size)
        ),
        "the second image has the difference of the first; its own has the opposite sign": (
            target(difference[:, :1].expand_as(old), size)
        ),
        "divide by the mean of the squares, not by their sum": target(difference, 3 * size),
        "divide by the mean square, not by its root": target(difference, size.sqrt()),
        "the mean square is that of each image, not of all pairs": target(
            difference, square.mean()
        ),
        "the division by mean(Delta^2) is missing": old - difference,
        "v_old is missing": target(difference, size) - old,
        "the mean is over all images; each pair has its own": target(
            images - images.mean((0, 1)),
            (images - images.mean((0, 1))).square().mean(-1, keepdim=True),
        ),
    }
    close(got, target(difference, size), "this is not v_old - Delta / mean(Delta^2)", mistakes)


@check("Exercise 5")
def check_comb(answer: Answer) -> None:
    """`answer(branches, steps)` is the number of network evaluations of a comb with one trunk."""
    for branches, steps in (((6, 6, 8, 10), 10), ((6,) * 9, 10), ((3, 5), 7), ((2, 2, 2), 3)):
        got = number(answer(branches, steps), "the number")
        trunk = len(branches)
        teeth = sum(count * (steps - k - 1) for k, count in enumerate(branches))
        images = sum(branches)
        mistakes = {
            "the trunk's own evaluations are missing": teeth,
            "siblings share the evaluation of the state they start from; a branch from step k has "
            "steps - k - 1 of its own": trunk + teeth + images,
            "the trunk ends at the last step that branches": steps + teeth,
            "this is the price of independent trajectories": steps * images,
            "the finished images need no evaluation, and step k is counted from 0": (
                trunk + teeth - images
            ),
            "each step has its own number of branches": (
                trunk + branches[0] * sum(steps - k - 1 for k in range(trunk))
            ),
        }
        wanted = trunk + teeth
        close(got, wanted, f"{branches} at {steps} steps take {wanted}, not {got:.0f}", mistakes)
