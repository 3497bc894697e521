"""Checks of lesson 4, Flow-GRPO on images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import Uniform
from flowrl_course.checking import answered, check, close, expect, number, tensor

Answer = Callable[..., Any]


def _finals() -> Tensor:
    """Rewards of 3 prompts of different difficulty with 4 members each."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(3, 4, generator=generator) * torch.tensor([[0.1], [0.4], [0.2]]) + torch.tensor([[0.1], [0.3], [0.7]])


def _scores(
    final: Tensor, dims: int | tuple[int, ...], std_dims: Any = None, unbiased: bool = False, epsilon: float = 1e-4
) -> Tensor:
    spread = final.std(dim=dims if std_dims is None else std_dims, keepdim=True, unbiased=unbiased)
    return (final - final.mean(dim=dims, keepdim=True)) / (spread + epsilon)


@check("Exercise 1")
def check_uniform(answer: Answer) -> None:
    """`answer(final, steps)` is the uniform credit [prompt, member, step]."""
    final, steps = _finals(), 5
    got = answered(answer(final, steps), "uniform_advantages")
    expect(isinstance(got, Tensor), "the result must be a torch.Tensor")
    expect(got.shape != (3, 4), "the step axis is missing: repeat the scores over the steps, [prompt, member, step]")
    got = tensor(got, (3, 4, steps), "the result")
    expect(
        bool((got == got[..., :1]).all()),
        "the advantages differ from step to step; uniform credit gives every step of a trajectory the same number",
    )
    wanted = Uniform().assign(torch.cat([torch.full((3, 4, steps), torch.nan), final[..., None]], dim=-1))
    slips = {
        "the mean runs over the whole batch: take it over members (dim=1)": _scores(final, (0, 1)),
        "the mean runs over prompts (dim=0); images are compared with those of the same prompt: dim=1": _scores(final, 0),
        "the standard deviation is that of the whole batch; here it is that of the group (dim=1)": _scores(final, 1, (0, 1)),
        "the standard deviation is the unbiased one (divided by G - 1): pass unbiased=False": _scores(final, 1, unbiased=True),
        "the standard deviation is missing: divide by it (plus 1e-4)": final - final.mean(1, keepdim=True),
        "the advantage is not shared out: each step gets the whole of it": _scores(final, 1) / steps,
        "the group's mean is not taken away": final / (final.std(1, keepdim=True, unbiased=False) + 1e-4),
    }
    mistakes = {message: value[..., None].repeat(1, 1, steps) for message, value in slips.items()}
    equal = answer(torch.full((2, 4), 0.3), 2)
    safe = isinstance(equal, Tensor) and bool(torch.isfinite(equal).all())
    expect(safe, "a group of equal rewards gives NaN: add 1e-4 to the standard deviation")
    close(got, wanted, "this is not (R - mean) / (std + 1e-4) over the members of each prompt", mistakes, tolerance=2e-5)


@check("Exercise 2")
def check_silent(answer: Answer) -> None:
    """`answer(success, size)` is the expected fraction of silent groups."""
    success, size = torch.tensor([0.05, 0.3, 0.6, 0.97]), 4
    fail, win = (1 - success) ** size, success**size
    mean = success.mean()
    mistakes = {
        "only groups in which all fail are counted; groups in which all succeed are silent too": fail.mean(),
        "only groups in which all succeed are counted; groups in which all fail are silent too": win.mean(),
        "the formula got the mean success of all prompts; apply it to every prompt, then take the mean": mean**size
        + (1 - mean) ** size,
        "the two probabilities are multiplied; all succeed OR all fail: add them": (fail * win).mean(),
        "this is the fraction of groups that are not silent; return 1 minus this": 1 - (fail + win).mean(),
        "this sums over the prompts; take their mean": (fail + win).sum(),
        "twice the share in which all succeed: all fail has probability (1 - p)^G": 2 * win.mean(),
        "the exponents are one too small: all G members succeed with probability p^G, not p^(G-1)": (fail / (1 - success)).mean()
        + (win / success).mean(),
    }
    got = answer(success, size)
    several = isinstance(got, Tensor) and got.shape == success.shape
    expect(not several, "this is one share per prompt; take the mean over the prompts")
    got = number(got, "silent_share")
    close(got, (fail + win).mean(), "this is not the mean over prompts of p^G + (1 - p)^G", mistakes, tolerance=1e-5)


@check("Exercise 3")
def check_cost(answer: Answer) -> None:
    """`answer(trajectories, steps, decisions)` is the number of evaluations of one iteration."""
    for trajectories, steps, decisions in ((96, 10, 4), (7, 40, 39)):
        mistakes = {
            "the backward pass is missing: a training evaluation counts as 3": trajectories * (steps + decisions),
            "every step is trained here; only the stochastic ones have a log-probability to train": trajectories * 4 * steps,
            "the sampling is missing: one evaluation per step of every trajectory": trajectories * 3 * decisions,
            "the update is missing: 3 evaluations per decision": trajectories * steps,
            "this is for one trajectory: multiply everything by the number of trajectories": steps + 3 * decisions,
            "the update must be counted per trajectory too": trajectories * steps + 3 * decisions,
            "sampling and update are added, not multiplied": trajectories * steps * 3 * decisions,
            "each trajectory has one training evaluation per decision, not per decision and step": trajectories
            * steps
            * (1 + 3 * decisions),
            "the factor 3 holds for the update only; sampling has no backward pass": 3 * trajectories * (steps + decisions),
            "the stochastic steps are sampled too: count all steps once, and the decisions again with 3": trajectories
            * (steps + 2 * decisions),
            "3 is forward and backward together": trajectories * (steps + 4 * decisions),
            "sampling must be counted per trajectory too": steps + 3 * trajectories * decisions,
        }
        got = number(answer(trajectories, steps, decisions), "iteration_cost")
        close(got, trajectories * (steps + 3 * decisions), "this is not trajectories x (steps + 3 decisions)", mistakes, 1e-6)


def _bools(value: Any, count: int) -> Tensor:
    if isinstance(value, list | tuple):
        value = torch.tensor(value)
    expect(isinstance(answered(value, "pushing"), Tensor), "the result must be a torch.Tensor of booleans")
    expect(value.dtype == torch.bool, f"the result has dtype {value.dtype}; booleans are wanted")
    return tensor(value, (count,), "the result")


@check("Exercise 4")
def check_pushing(answer: Answer) -> None:
    """`answer(ratio, advantage, clip)` says which pairs have a gradient."""
    ratio = torch.tensor([0.7, 0.7, 0.95, 0.95, 1.0, 1.0, 1.05, 1.05, 1.4, 1.4])
    advantage = torch.tensor([1.0, -1.0] * 5) * torch.linspace(0.3, 2.0, 10)
    clip = 0.1
    leaf = ratio.clone().requires_grad_(True)
    torch.maximum(-advantage * leaf, -advantage * leaf.clamp(1 - clip, 1 + clip)).sum().backward()
    wanted = leaf.grad is not None and leaf.grad != 0
    assert isinstance(wanted, Tensor)
    inside = (ratio - 1).abs() <= clip
    positive = advantage > 0
    mistakes = {
        "every pair outside 1 - c to 1 + c is dropped; but a good pair whose ratio fell still pushes back up": inside,
        "the sides are swapped: a good pair stops when its ratio has grown beyond 1 + c, not when it fell": ~(
            (positive & (ratio < 1 - clip)) | (~positive & (ratio > 1 + clip))
        ),
        "these are the pairs whose gradient is zero; return the others": ~wanted,
        "the upper bound holds for good pairs only: a bad pair whose ratio grew must be pushed down": ratio <= 1 + clip,
        "pairs with negative advantages push too, down": wanted & positive,
        "not all of them: where the clipped term is the larger loss, it is constant in the ratio": torch.ones(
            10, dtype=torch.bool
        ),
    }
    got = _bools(answer(ratio, advantage, clip), len(ratio))
    close(got, wanted, "compare with the derivative of max(-A ratio, -A clip(ratio)) by hand: four cases, A > 0 or < 0", mistakes)
