"""Checks of the lesson Scale up."""

import math
from collections.abc import Callable
from typing import Any

import torch

from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    numbers,
    quiz,
    same,
    same_gradient,
    tensor,
    whole,
)

Answer = Callable[..., Any]


@check("Exercise 1")
def check_shifted(answer: Answer) -> None:
    """`answer(u, shift)` is the shifted grid."""
    u = torch.tensor([1.0, 0.8, 0.45, 0.1, 0.0])
    got = tensor(answer(u, 3.0), (5,), "the grid")
    expect(
        bool(torch.isfinite(got).all()),
        "at u = 1 the ratio of noise to data is 1/0, so that t is 0/0 or nan: simplify",
    )
    wanted = 3 * u / (1 + 2 * u)
    mistakes = {
        "nothing is shifted yet": u,
        "this shifts towards data: with a shift of 3 the middle of the grid must be above 1/2": (
            u / (3 - 2 * u)
        ),
        "the denominator is missing: t = 1 must stay 1": 3 * u,
        "the denominator is too large: t = 1 must stay 1": 3 * u / (1 + 3 * u),
    }
    close(
        got,
        wanted,
        "this is not the time whose ratio of noise to data is shift times that of u",
        mistakes,
    )
    expect(
        same(answer(u, 1.0), u),
        "a shift of 1 must change nothing: is the 3 written into the function?",
    )
    expect(
        same(answer(u, 6.0), 6 * u / (1 + 5 * u)),
        "with a shift of 6 the grid is wrong: is the 3 written into the function?",
    )


@check("Exercise 2")
def check_lora_parameters(answer: Answer) -> None:
    """`answer(shapes, rank)` counts the trained numbers of LoRA on layers of those (out, in)
    shapes.
    """
    shapes, rank = [(7, 5), (11, 3), (4, 6)], 2
    wanted = rank * sum(out + wide for out, wide in shapes)
    got = number(answer(shapes, rank), "the count")
    full = sum(out * wide for out, wide in shapes)
    mistakes = {
        "these are the layers' own weights, which are frozen": full,
        "this counts B A multiplied out: A and B are trained": rank * full,
        "only one of the two matrices is counted: A is rank x in, B is out x rank": (
            rank * sum(wide for _, wide in shapes)
        ),
        "only one of the two matrices is counted, B: A is rank x in": (
            rank * sum(out for out, _ in shapes)
        ),
        "the rank is missing: each of the matrices has that many rows or columns": sum(
            sum(s) for s in shapes
        ),
        "only the last layer is counted: add up all of them": rank * 10,
        "only the first layer is counted: add up all of them": rank * 12,
    }
    close(
        got,
        wanted,
        f"{got:.0f} instead of {wanted} for the shapes {shapes} and rank {rank}",
        mistakes,
        1e-6,
    )


@check("Exercise 3")
def check_folded(answer: Answer) -> None:
    """`answer(A, B, alpha)` gives matrices for a reader that adds B A and knows no alpha."""
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(4, 6, generator=generator), torch.randn(5, 4, generator=generator)
    alpha = 8.0 * 1.5
    pair = answered(answer(a, b, alpha), "folded")
    expect(isinstance(pair, tuple | list) and len(pair) == 2, "return two matrices, A' and B'")
    new_a, new_b = tensor(pair[0], (4, 6), "A'"), tensor(pair[1], (5, 4), "B'")
    delta = b @ a
    mistakes = {
        "nothing is folded: a reader that knows no alpha would add B A instead of (alpha / "
        "rank) B A": (delta),
        "both matrices got the whole scale, so the product has its square: scale one of them": (
            9 * delta
        ),
        "the scale is alpha / rank, not alpha: the rank is A's number of rows": 12 * delta,
        "the scale is inverted: alpha / rank, not rank / alpha": delta / 3,
        "the rank is A's number of rows, 4 here, not its number of columns": 2 * delta,
        "the rank is B's number of columns, 4 here, not its number of rows": 2.4 * delta,
    }
    close(new_b @ new_a, 3 * delta, "B' A' is not (alpha / rank) B A", mistakes)


@check("Exercise 4")
def check_guided(answer: Answer) -> None:
    """`answer(prompt, negative, scale)` is the guided velocity."""
    generator = torch.Generator().manual_seed(5)
    towards, away = torch.randn(2, 3, 4, generator=generator)
    towards.requires_grad_()
    wanted = away + 4.5 * (towards - away)
    mistakes = {
        "the two are swapped: start at the negative velocity and go beyond the prompt's": (
            towards + 4.5 * (away - towards)
        ),
        "this starts at the prompt's velocity: then scale 1 would not give that one back": (
            towards + 4.5 * (towards - away)
        ),
        "this is the difference alone: it starts at the negative velocity": 4.5 * (towards - away),
        "the negative velocity is not subtracted": away + 4.5 * towards,
        "this is a mean of the two: guidance goes beyond the prompt's velocity": (
            (towards + 4.5 * away) / 5.5
        ),
    }
    velocity = answer(towards, away, 4.5)
    close(
        tensor(velocity, (3, 4), "the velocity"),
        wanted,
        "this is not the guided velocity: what must scale 0 and scale 1 give?",
        mistakes,
    )
    same_gradient(velocity, wanted, towards)
    expect(
        same(answer(towards, away, 1.0), towards),
        "scale 1 must be the prompt's velocity: is the 4.5 written into the function?",
    )


@check("Exercise 5")
def check_unguided(answer: str) -> None:
    """`answer` describes the ratios without guidance before any update."""
    letter = choice(answer, "abc")
    expect(letter != "a", "the weights are equal, the velocities are not: which of them is used?")
    expect(
        letter == "c",
        "the noise is symmetric around the mean of the policy that sampled: use the other mean",
    )


@check("Exercise 6")
def check_first_iterations(answer: dict[int, str]) -> None:
    """`answer` maps the logs 1, 2, 3 to causes."""
    expect(
        isinstance(answer, dict) and set(answer) == {1, 2, 3},
        "answer with a dict from the numbers 1, 2, 3 to letters",
    )
    given = {log: choice(letter, "abc") for log, letter in answer.items()}
    expect(given[3] == "b", "log 3 has exact ratios: look for a cause that changes rewards only")
    expect(
        given == {1: "c", 2: "a", 3: "b"},
        "compare the sizes: how far do rounding and missing guidance move a ratio above?",
    )


def _arithmetic(
    groups: int, group_size: int, steps: int, minibatches: int, micro_batch: int, processes: int
) -> tuple[int, ...]:
    pairs = math.ceil(groups * group_size / minibatches) * steps
    return (
        math.ceil(groups / processes) * group_size,
        pairs,
        math.ceil(pairs / processes / micro_batch),
    )


@check("Exercise 7")
def check_arithmetic(answer: Answer) -> None:
    """`answer(groups, group_size, steps, minibatches, micro_batch, processes)`: trajectories, pairs
    and backward passes.
    """
    settings = (10, 6, 9, 7, 16, 4)
    found = answered(answer(*settings), "arithmetic")
    names = "return three numbers: trajectories, pairs, backward passes"
    trajectories, pairs, passes = numbers(found, 3, names)
    case = "10 groups of 6 on 4 processes"
    mistakes: dict[str, Any] = {
        f"trajectories: {case}: this is the number over all processes": 60,
        f"trajectories: {case}: whole groups stay together, so a process has 3 groups, not 2.5": 15,
        f"trajectories: {case}: two groups remain if each process takes two; round up": 12,
        f"trajectories: {case}: groups are counted, not their members": 3,
    }
    close(
        trajectories,
        18,
        f"trajectories of the busiest process: {trajectories:g} instead of 18 for {case}",
        mistakes,
        1e-6,
    )
    case = "60 trajectories of 9 stochastic steps in 7 mini-batches"
    mistakes = {
        f"pairs: {case}: every trajectory gives one pair per stochastic step; the steps are "
        f"missing": (9),
        f"pairs: {case}: these are the pairs of all mini-batches together": 540,
        f"pairs: {case}: the trajectories are split, not their pairs: a trajectory's steps "
        f"stay together, so round up first": (78),
        f"pairs: {case}: a number of pairs is whole; round the trajectories up": 540 / 7,
        f"pairs: {case}: 60 in 7 mini-batches are 9, 9, 9, 9, 9, 9 and 6; round up": 72,
        f"pairs: {case}: a mini-batch is drawn from the trajectories of all processes, not "
        f"of one": (27),
    }
    close(pairs, 81, f"pairs of the largest mini-batch: {pairs:g} instead of 81", mistakes, 1e-6)
    case = "81 pairs on 4 processes in micro-batches of 16"
    mistakes = {
        f"backward passes: {case}: the last, smaller micro-batch is missing; round up": 1,
        f"backward passes: {case}: an incomplete micro-batch takes a pass too; round up": 81 / 64,
        f"backward passes: {case}: this is the number over all processes": 6,
        f"backward passes: {case}: one per pair would be a micro-batch of 1": 21,
    }
    close(passes, 2, f"backward passes: {passes:g} instead of 2 for {case}", mistakes, 1e-6)
    for other in ((48, 24, 9, 2, 8, 8), (5, 4, 3, 1, 7, 1), (3, 4, 2, 5, 3, 2)):
        settings_of = "groups, group_size, steps, minibatches, micro_batch, processes"
        expect(
            tuple(numbers(answer(*other), 3, names)) == _arithmetic(*other),
            f"wrong for ({settings_of}) = {other}; expected {_arithmetic(*other)}",
        )


@check("Exercise 8")
def check_settings(answer: dict[str, int]) -> None:
    """`answer` has groups, group_size, minibatches and micro_batch within the limits."""
    names = ("groups", "group_size", "minibatches", "micro_batch")
    expect(isinstance(answer, dict) and set(answer) == set(names), "keep the names of the settings")
    groups, size, minibatches, micro = (whole(answer[name], name) for name in names)
    expect(min(groups, minibatches, micro) >= 1, "all settings are at least 1")
    expect(size >= 16, "a group has fewer than 16 members: use larger groups")
    expect(groups * size >= 512, f"{groups * size} trajectories of 512: use more groups")
    expect(groups % 8 == 0, f"{groups} groups on 8 GPUs: some GPUs wait for the others")
    expect(micro <= 4, "the activations do not fit: use micro-batches of at most 4 pairs")
    expect(minibatches <= 4, "too many updates per rollout: use at most 4 mini-batches")
    passes = _arithmetic(groups, size, 9, minibatches, micro, 8)[2]
    expect(passes <= 40, f"{passes} backward passes of 40: a mini-batch must have fewer pairs")


@check("Exercise 9")
def check_memory(answer: Answer) -> None:
    """`answer(samples, steps, elements)` is the gigabytes of stored float32 trajectories."""
    samples, steps, elements = 96, 10, 65536
    wanted = samples * (2 * steps + 1) * elements * 4 / 1e9
    got = number(answer(samples, steps, elements), "the answer")
    mistakes = {
        "these are bytes; divide by 1e9": wanted * 1e9,
        "these are numbers, not bytes: float32 takes 4 bytes each": wanted / 4,
        "2 bytes per number would be bfloat16: nodes are stored in float32": wanted / 2,
        "T steps have T + 1 nodes, and a velocity each": wanted * 2 * steps / (2 * steps + 1),
        "only the nodes are counted: the velocities of the T steps are stored too": (
            wanted * (steps + 1) / (2 * steps + 1)
        ),
        "only the velocities are counted: the T + 1 nodes are stored too": (
            wanted * steps / (2 * steps + 1)
        ),
        "T steps have T + 1 nodes but only T velocities": (
            wanted * (2 * steps + 2) / (2 * steps + 1)
        ),
        "these are gibibytes (2**30): take 1e9": wanted * 1e9 / 2**30,
    }
    close(got, wanted, f"{got:.4g} instead of {wanted:.4g} GB", mistakes, 1e-4)
    other = number(answer(1000, 20, 10**6), "the answer")
    close(other, 164.0, f"{other:.4g} instead of 164 GB for 1000 samples of 20 steps", {}, 1e-4)


@check("Exercise 10")
def check_iteration(answer: Answer) -> None:
    """`answer(nfe, train_nfe, gradient_nfe, passes, branches, backward)`: forward passes of
    sampling and of the update.
    """
    found = answered(answer(100, 70, 30, 2, 1, 1.5), "iteration_passes")
    sampling, update = numbers(found, 2, "return two numbers: sampling and update")
    mistakes = {"guidance is missing: each evaluation is `passes` forward passes": 100.0}
    close(
        sampling,
        200.0,
        f"sampling: {sampling:g} instead of 200 for 100 evaluations with 2 passes each",
        mistakes,
        1e-9,
    )
    mistakes = {
        "the repeated forward pass of checkpointing is missing": 140 + 30 * 1.5,
        "the backward passes are missing": 140.0,
        "the evaluations without a gradient (the base model's) are missing": 60 + 30 * 2.5,
        "guidance is missing in the update": 70 + 30 * 2.5,
        "both branches are differentiated: with branches = 1 only the prompt's is": 140 + 60 * 2.5,
        "all evaluations are differentiated: only gradient_nfe of them are": 140 + 70 * 2.5,
    }
    close(update, 215.0, f"update: {update:g} instead of 215", mistakes, 1e-9)
    for branches, wanted, case in (
        (1, (10.0, 20.0), "without guidance"),
        (2, (20.0, 40.0), "if both branches are differentiated"),
    ):
        other = tuple(numbers(answer(10, 8, 4, branches, branches, 2.0), 2, "return two numbers"))
        expect(
            same(torch.tensor(other), torch.tensor(wanted)), f"{other} instead of {wanted} {case}"
        )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the penalty compares means of transitions, which need a network",
            "c": "the average follows the trained weights; the reference does not move",
        },
    ),
    (
        "a",
        {
            "b": "gradients are added up over all processes",
            "c": "a mini-batch is counted over all processes",
        },
    ),
    (
        "c",
        {
            "a": "each pair is clipped on its own, by its own error",
            "b": "the penalty compares with the base model; the LoRA is still zero",
        },
    ),
    (
        "a",
        {
            "b": "micro-batches are weighted by their numbers of pairs and added up",
            "c": "all pairs of the mini-batch are still in the sum",
        },
    ),
    (
        "b",
        {
            "a": "gradients of activations are needed to reach the LoRA of the first layers",
            "c": "checkpointing adds a forward pass",
        },
    ),
)
