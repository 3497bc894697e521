"""Checks of the lesson What is a step worth?."""

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
    tensor,
)

Answer = Callable[..., Any]


def _values() -> Tensor:
    """Values of 3 prompts, 5 members, 4 decisions, which approach the rewards in the last
    column.
    """
    generator = torch.Generator().manual_seed(13)
    steps = torch.randn(3, 5, 5, generator=generator) * torch.tensor([0.3, 0.2, 0.5, 0.4, 0.1])
    return 0.5 + steps.cumsum(-1) + torch.randn(3, 1, 1, generator=generator)


def _deviations(values: Tensor) -> Tensor:
    return values - values.mean(1, keepdim=True)


def _curved(places: Tensor) -> Tensor:
    """A value of places [..., 2] for which no two mistakes agree."""
    x, y = places.unbind(-1)
    return x.square() + 0.5 * x * y + y + 0.2 * y**3 - 1.5


@check("Exercise 1")
def check_backward(answer: Answer) -> None:
    """`answer(value, means, std, draws, weights)` is the expected value after a step, [row]."""
    generator = torch.Generator().manual_seed(1)
    means, draws = torch.randn(6, 2, generator=generator), torch.randn(4, 2, generator=generator)
    weights, std = torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.6
    got = tensor(answer(_curved, means.clone(), std, draws, weights), (6,), "the result")
    after = _curved(means[:, None] + std * draws)
    mistakes = {
        "this is the value at the mean place, as of a step without noise: average the values of "
        "the places that are drawn": _curved(means),
        "all draws have the same weight: use `weights`": after.mean(1),
        "the weights are missing, and the values are only summed": after.sum(1),
        "this is the value of the mean draw: take the value of each place, then average": _curved(
            means + std * (weights[:, None] * draws).sum(0)
        ),
        "the draws are scaled by the variance: epsilon has the factor std": (
            _curved(means[:, None] + std**2 * draws) * weights
        ).sum(1),
        "std is missing: the draws are standard normal": (
            _curved(means[:, None] + draws) * weights
        ).sum(1),
    }
    wanted = (after * weights).sum(1)
    close(
        got,
        wanted,
        "this is not the expected value after the step: compute one row by hand",
        mistakes,
    )


@check("Exercise 2")
def check_parts(answer: Answer) -> None:
    """`answer(values)` has the mean squares of V*_0 within groups and of every A*, [1 +
    decision].
    """
    values = 3 * _values()
    got = tensor(answer(values.clone()), (5,), "the result")
    worth = values.diff(dim=-1)
    first = _deviations(values)[..., :1]
    parts = torch.cat([first, worth], -1)
    mistakes = {
        "these are the variances of the values V*_k, which contain all earlier steps: take "
        "differences": _deviations(values).square().mean((0, 1)),
        "V*_0 still has its group's mean, which is not due to the noise of a member": torch.cat(
            [values[..., :1], worth], -1
        )
        .square()
        .mean((0, 1)),
        "R - V*_k is everything that comes after z_k: a decision is worth one change": torch.cat(
            [first, values[..., -1:] - values[..., :-1]], -1
        )
        .square()
        .mean((0, 1)),
        "these are standard deviations: take their squares, which add up": (
            parts.square().mean((0, 1)).sqrt()
        ),
        "these are sums of squares: take the mean over prompts and members": (
            parts.square().sum((0, 1))
        ),
        "these are means of the parts, not of their squares": parts.mean((0, 1)),
        "the steps' worth has mean 0 given the state already: do not subtract the group's mean": (
            _deviations(parts).square().mean((0, 1))
        ),
    }
    close(got, parts.square().mean((0, 1)), "these are not the mean squares", mistakes)


@check("Exercise 3")
def check_early_values(answer: str) -> None:
    """`answer` is the predicted course of r2 of the exact values of early states."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "r2 is no property of the value alone: it compares differences between members, which"
        " change",
    )
    expect(
        letter == "c",
        "certainty leaves no differences to predict: ask which steps cause those that remain",
    )


@check("Exercise 4")
def check_break_even(answer: Answer) -> None:
    """`answer(worth, reward)` is the error of a gain at which it correlates with A* as well as the
    reward does.
    """
    for worth, reward in ((0.3, 0.5), (1.0, 3.0), (0.02, 0.07)):
        wanted = (reward**2 - worth**2) ** 0.5
        mistakes = {
            "standard deviations do not subtract: subtract their squares": reward - worth,
            "this is a variance: the question is for a standard deviation": wanted**2,
            "the gain's variance is that of A* plus that of the error, so A* must be subtracted": (
                reward**2 + worth**2
            )
            ** 0.5,
            "this is the std of R: the gain contains A* besides its error": reward,
            "this is where the error is as large as A*, with correlation 0.71: R has another": (
                worth
            ),
        }
        got = number(answer(worth, reward), "break_even")
        hint = f"for {worth} and {reward} both correlations are equal at {wanted:.3f}"
        close(got, wanted, f"{hint}; you get {got:.3f}", mistakes)


@check("Exercise 5")
def check_calibrate(answer: Answer) -> None:
    """`answer(value, reward)` is the slope of the reward on the value within groups, in [0, 1], and
    r2.
    """
    reward = _values()[..., -1]
    good = _values()[..., 2]
    for value, situation in (
        (good, ""),
        (0.2 * good, "for values that are too narrow, "),
        (-good, "for values that are lower where rewards are higher, "),
    ):
        got = answered(answer(value.clone(), reward.clone()), "calibrate")
        pair = torch.tensor(numbers(got, 2, "return two numbers: slope, r2"))
        v, r = _deviations(value), _deviations(reward)
        products = torch.stack([v * r, v * v, r * r])
        vr, vv, rr = products.sum((1, 2))
        by_group = products.sum(2)

        def table(slope: Tensor, r2: Tensor) -> Tensor:
            return torch.stack([slope, r2])

        limited, positive = (vr / vv).clamp(0, 1), vr.clamp(min=0)
        r2 = positive.square() / (vv * rr)
        a, b = value - value.mean(), reward - reward.mean()
        pooled = (a * b).sum()
        mistakes = {
            "the mean is that of all prompts: credit compares within groups, so each group has "
            "its own": table(
                (pooled / a.square().sum()).clamp(0, 1),
                pooled.clamp(min=0).square() / (a.square().sum() * b.square().sum()),
            ),
            "the means are not subtracted": table(
                ((value * reward).sum() / value.square().sum()).clamp(0, 1),
                (value * reward).sum().clamp(min=0).square()
                / (value.square().sum() * reward.square().sum()),
            ),
            "this slope is that of the value on the reward: divide by the values' squares": table(
                (vr / rr).clamp(0, 1), r2
            ),
            "the second number is the correlation: r2 is its square": table(limited, r2.sqrt()),
            "the limited slope is used in r2: limit it afterwards": table(
                limited, limited * positive / rr
            ),
            "the slope is not limited to [0, 1]": table(vr / vv, r2),
            "a negative slope is cut, but r2 is not: such a value must not count at all": table(
                limited, vr.square() / (vv * rr)
            ),
            "the sum of products is negative: then both numbers are 0": table(
                (vr / vv).clamp(max=1), vr.square() / (vv * rr)
            ),
            "the slopes of the groups are averaged: sum over all groups, then divide": table(
                (by_group[0] / by_group[1]).clamp(0, 1).mean(),
                (by_group[0].clamp(min=0).square() / (by_group[1] * by_group[2])).mean(),
            ),
        }
        otherwise = f"{situation}slope and r2 are {limited:.3f} and {r2:.3f}"
        close(pair, table(limited, r2), otherwise, mistakes)


@check("Exercise 6")
def check_causes(answer: dict[int, str]) -> None:
    """`answer` maps the logs 1, 2, 3 to causes."""
    expect(
        isinstance(answer, dict) and set(answer) == {1, 2, 3},
        "answer with a dict from the numbers 1, 2, 3 to letters",
    )
    given = {log: choice(letter, "abc") for log, letter in answer.items()}
    expect(given[1] != "a", "log 1 has r2 near 1: a critic without training predicts nothing")
    expect(
        given[1] != "c",
        "the mean reward of log 1 is low: its policy has not solved the task",
    )
    expect(
        given[2] == "c",
        "late states of log 2 have a slope near 1: their units are right, and they predict much",
    )
    expect(given[3] == "a", "values in other units still predict: r2 of log 3 is 0 everywhere")


@check("Exercise 7")
def check_credit(answer: Answer) -> None:
    """`answer(values, slope, r2)` is the calibrated credit before Z, [prompt, member, decision]."""
    values = _values()
    slope = torch.tensor([0.4, 0.9, 0.7, 0.8, 1.0])
    r2 = torch.tensor([0.1, 0.3, 0.5, 0.8, 1.0])

    def credit(p: Tensor, w: Tensor, reward: Tensor) -> Tensor:
        return w * p[..., 1:] + (1 - w) * reward - p[..., :-1]

    d = _deviations(values)
    p, r, w = slope * d, d[..., -1:], r2[1:]
    got = tensor(answer(values.clone(), slope.clone(), r2.clone()), (3, 5, 4), "the result")
    mistakes = {
        "the weight of decision k is that of the value after it, r2[k + 1]": credit(p, r2[:-1], r),
        "the slopes are missing: a prediction is slope_k times the deviation of V_k": credit(
            d, w, r
        ),
        "the prediction before the decision is not subtracted": credit(p, w, r) + p[..., :-1],
        "r2 and 1 - r2 are swapped: r2 is the weight of the prediction": credit(p, 1 - w, r),
        "the group's means are not subtracted": credit(slope * values, w, values[..., -1:]),
        "this is the gain of the predictions: what they leave unexplained, 1 - r2, goes to the "
        "final reward": p.diff(dim=-1),
        "this is the reward beyond the prediction before the decision, with r2 = 0": r
        - p[..., :-1],
    }
    close(
        got,
        credit(p, w, r),
        "this is not the change of the calibrated estimate: compute one decision by hand",
        mistakes,
    )


@check("Exercise 8")
def check_better_trained(answer: str) -> None:
    """`answer` says with which clip ranges the even weight trains better."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "a higher correlation need not train better: it treats noise and bias alike",
    )
    expect(
        letter == "c",
        "a wider clip range lets errors of the values act sooner: compare how much of a poor value"
        " each weight uses",
    )


check_quiz = quiz(
    __name__,
    (
        "a",
        {
            "b": "values are defined in the whole plane; the places need not be data",
            "c": "both would differ with an exact integral as well",
        },
    ),
    (
        "b",
        {
            "a": "the deviation of R from the group contains the luck of all decisions",
            "c": "the sum over decisions telescopes; one term is the change by one draw",
        },
    ),
    (
        "c",
        {
            "a": "uniform credit has an error as well; compare the two standard deviations",
            "b": "break-even with nine equal steps is at an error of 2.8 times the gain",
        },
    ),
    (
        "b",
        {
            "a": "Z divides by the standard deviation of the gains, which is small here, too",
            "c": "only equal gains give 0",
        },
    ),
    (
        "a",
        {
            "b": "the slope is limited to 1",
            "c": "their error is that of the grid, which is far below the luck of later steps",
        },
    ),
)
