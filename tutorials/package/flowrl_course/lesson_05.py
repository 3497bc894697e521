"""Checks of the lesson on Flow-GRPO."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl import Schedule
from flowrl.flow import kl
from flowrl.samplers import FlowSDE
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
def check_success(answer: Answer) -> None:
    """`answer(successes, members)` are the advantages of a success and of a failure."""
    for successes, members in ((2, 12), (3, 4), (5, 7)):
        p = successes / members
        right = torch.tensor([1 - p, -p]) / (p * (1 - p)) ** 0.5
        sample = (1 - 1 / members) ** 0.5
        mistakes = {
            "the order is success, failure": right.flip(0),
            "not divided by the standard deviation of the group": right * (p * (1 - p)) ** 0.5,
            "divided by the variance: take the root of p (1 - p)": right / (p * (1 - p)) ** 0.5,
            "this is the standard deviation with G - 1: the group advantage divides by G": (
                right * sample
            ),
            "a failure has less reward than its group: its advantage is negative": right.abs(),
            "the variance of the rewards is not p: it is the mean of R^2 minus the square of the"
            " mean of R": (torch.tensor([1 - p, -p]) / p**0.5),
            "p and 1 - p are swapped: the mean of the rewards is the share of successes": (
                torch.tensor([p, p - 1]) / (p * (1 - p)) ** 0.5
            ),
            "the mean is not subtracted": torch.tensor([1.0, 0.0]) / (p * (1 - p)) ** 0.5,
        }
        got = numbers(answer(successes, members), 2, "return two numbers: of a success, a failure")
        close(
            torch.tensor(got),
            right,
            f"with {successes} successes of {members} these are not the rewards minus their mean,"
            " divided by their standard deviation",
            mistakes,
            1e-3,
        )


@check("Exercise 3")
def check_silent(answer: Answer) -> None:
    """`answer(success, size)` is the expected fraction of silent groups."""
    success, size = torch.tensor([0.05, 0.3, 0.6, 0.97]), 4
    fail, win = (1 - success) ** size, success**size
    mean = success.mean()
    mistakes = {
        "only groups in which all fail are counted; groups in which all succeed are silent too": (
            fail.mean()
        ),
        "only groups in which all succeed are counted; groups in which all fail are silent too": (
            win.mean()
        ),
        "the formula got the mean success of all prompts; apply it to every prompt, then "
        "take the mean": (mean**size + (1 - mean) ** size),
        "the two probabilities are multiplied; all succeed OR all fail: add them": (
            (fail * win).mean()
        ),
        "this is the fraction of groups that are not silent; return 1 minus this": (
            1 - (fail + win).mean()
        ),
        "this sums over the prompts; take their mean": (fail + win).sum(),
        "twice the share in which all succeed: that all fail has another probability": 2
        * win.mean(),
        "the exponents are one too small: the first member must be equal to the others, too": (
            (fail / (1 - success)).mean() + (win / success).mean()
        ),
    }
    got = answer(success, size)
    several = isinstance(got, Tensor) and got.shape == success.shape
    expect(not several, "this is one share per prompt; take the mean over the prompts")
    got = number(got, "silent_share")
    close(
        got,
        (fail + win).mean(),
        "this is not the mean share of groups with equal rewards: try one prompt and G = 2 by hand",
        mistakes,
        tolerance=1e-5,
    )


@check("Exercise 4")
def check_cost(answer: Answer) -> None:
    """`answer(trajectories, steps, decisions)` is the number of evaluations of one iteration."""
    for trajectories, steps, decisions in ((96, 10, 4), (7, 40, 39)):
        mistakes = {
            "the backward pass is missing: a training evaluation counts as 3": (
                trajectories * (steps + decisions)
            ),
            "every step is trained here; only the stochastic ones have a log-probability to "
            "train": (trajectories * 4 * steps),
            "the sampling is missing: one evaluation per step of every trajectory": (
                trajectories * 3 * decisions
            ),
            "the update is missing: 3 evaluations per decision": trajectories * steps,
            "this is for one trajectory: multiply everything by the number of trajectories": (
                steps + 3 * decisions
            ),
            "the update must be counted per trajectory too": trajectories * steps + 3 * decisions,
            "sampling and update are added, not multiplied": trajectories * steps * 3 * decisions,
            "each trajectory has one training evaluation per decision, not per decision and step": (
                trajectories * steps * (1 + 3 * decisions)
            ),
            "the factor 3 holds for the update only; sampling has no backward pass": (
                3 * trajectories * (steps + decisions)
            ),
            "the stochastic steps are sampled too: count all steps once, and the decisions "
            "again with 3": (trajectories * (steps + 2 * decisions)),
            "3 is forward and backward together": trajectories * (steps + 4 * decisions),
            "sampling must be counted per trajectory too": steps + 3 * trajectories * decisions,
        }
        got = number(answer(trajectories, steps, decisions), "iteration_cost")
        close(
            got,
            trajectories * (steps + 3 * decisions),
            "this is not sampling and update of all trajectories: count one trajectory by hand",
            mistakes,
            1e-6,
        )


def _bools(value: Any, count: int) -> Tensor:
    if isinstance(value, list | tuple):
        value = torch.tensor(value)
    expect(
        isinstance(answered(value, "pushing"), Tensor),
        "the result must be a torch.Tensor of booleans",
    )
    expect(value.dtype == torch.bool, f"the result has dtype {value.dtype}; booleans are wanted")
    return tensor(value, (count,), "the result")


@check("Exercise 6")
def check_kl_from_velocities(answer: Answer) -> None:
    """`answer(velocity, reference_velocity, t, s, noise_level)` is the KL per element of a Flow-SDE
    step.
    """
    for t, s, a in ((0.7, 0.55, 0.8), (0.8, 0.5, 0.5)):
        _check_kl(answer, t, s, a)


def _check_kl(answer: Answer, t: float, s: float, a: float) -> None:
    schedule, index = Schedule(torch.tensor([0.9, t, s, 0.0])), torch.ones(6, dtype=torch.long)
    generator = torch.Generator().manual_seed(8)
    x, velocity, reference = (torch.randn(6, 5, generator=generator) for _ in range(3))
    velocity.requires_grad_()
    new, old = (FlowSDE(a).transition(x, v, schedule, index) for v in (velocity, reference))
    wanted, delta, sigma = kl(new, old), t - s, a * (t / (1 - t)) ** 0.5
    squares = (velocity - reference).square().mean(1)
    factor = sigma * (1 - t) / (2 * t) + 1 / sigma
    swapped = a * ((1 - t) / t) ** 0.5
    mistakes = {
        "this is the sum over elements; return the mean, which does not grow with the resolution": (
            wanted * 5
        ),
        "the bracket is not squared": delta / 2 * factor * squares,
        "the step length is missing: a longer step has a larger KL": wanted / delta,
        "the power of Delta is wrong: means differ by a multiple of Delta, and so does std^2": (
            wanted / delta**2
        ),
        "this is the KL times Delta, as the released code computes it; the exact KL has "
        "Delta to the power of one": (wanted * delta),
        "a factor 2 is missing: the KL of two Gaussians has it": wanted * 2,
        "the squares of the two terms are added: add the terms before you square": (
            delta / 2 * ((sigma * (1 - t) / (2 * t)) ** 2 + 1 / sigma**2) * squares
        ),
        "only the ODE's own term is there: the score correction contains the velocity, too": (
            delta / 2 / sigma**2 * squares
        ),
        "only the score correction is there: the ODE's own term contains the velocity, too": (
            delta / 2 * (sigma * (1 - t) / (2 * t)) ** 2 * squares
        ),
        "sigma_t has t and 1 - t swapped: there is more noise near t = 1": (
            delta / 2 * (swapped * (1 - t) / (2 * t) + 1 / swapped) ** 2 * squares
        ),
        "the root in sigma_t is missing: look at the definition of the noise level": (
            delta / 2 * (a / 2 + (1 - t) / (a * t)) ** 2 * squares
        ),
        "sigma_t is the noise level only: it depends on t as well": (
            delta / 2 * (a * (1 - t) / (2 * t) + 1 / a) ** 2 * squares
        ),
        "the velocities are not squared": (
            delta / 2 * factor**2 * (velocity - reference).abs().mean(1)
        ),
        "the difference is averaged before it is squared, so that signs cancel": (
            delta / 2 * factor**2 * (velocity - reference).mean(1).square()
        ),
    }
    got = answered(answer(velocity, reference, t, s, a), "kl_from_velocities")
    expect(
        not same(got, wanted.mean()), "return one number per sample, not the mean over the batch"
    )
    expect(
        not isinstance(got, Tensor) or got.shape != (6, 5),
        "return one number per sample: take the mean over elements",
    )
    close(
        tensor(got, (6,), "the KL"),
        wanted,
        "this is not the KL of the two Flow-SDE transitions (flow.kl)",
        mistakes,
    )
    same_gradient(got, wanted, velocity)


ESTIMATORS = {
    "A": (True, "A: k_1 is a difference of log-densities of one sample"),
    "B": (False, "B: exp(-l) - 1 + l is smallest at l = 0"),
    "C": (False, "C: k_2 is the expansion of k_3 for small l, and nothing else"),
    "D": (False, "D: for small l, k_3 is about l^2 / 2; what are the sizes of l and l^2?"),
    "E": (True, "E: the exponential in k_3 is huge for a few samples"),
    "F": (False, "F: the gradient of k_1 at fixed samples is grad log pi; what is its mean?"),
}
"""Whether each statement on the estimators is true, and the reason."""


@check("Exercise 7")
def check_estimators(answer: Mapping[str, bool]) -> None:
    """`answer` maps the letters A to F to whether the statement is true."""
    expect(
        isinstance(answer, Mapping) and set(answer) == set(ESTIMATORS),
        f"give a dict with the keys {', '.join(ESTIMATORS)}",
    )
    answered(None if any(value is ... for value in answer.values()) else answer, "all statements")
    for letter, (true, reason) in ESTIMATORS.items():
        expect(answer[letter] in (True, False), f"{letter}: answer True or False")
        expect(bool(answer[letter]) == true, f"look again at {reason}")


@check("Exercise 8")
def check_path_kl(answer: Answer) -> None:
    """`answer(step_kl, elements)` is the KL of the path in nats."""
    step_kl, elements = torch.rand(5, 3, generator=torch.Generator().manual_seed(9)) / 50, 40
    wanted = elements * step_kl.sum(1).mean()
    mistakes = {
        "this is the mean over steps; the KLs of the steps of a trajectory add up": wanted / 3,
        "this is the KL of the path per element: multiply by the number of elements": (
            wanted / elements
        ),
        "this is the sum over samples; the formula is an expectation, so take their mean": (
            wanted * 5
        ),
        "this is the mean over everything; sum over steps, and multiply by the elements": (
            step_kl.mean()
        ),
        "steps and elements add up; the mean over samples is missing, and so is the factor "
        "for elements": (step_kl.sum()),
        "divided by the elements; the step's KL is already per element, so multiply": (
            wanted / elements**2
        ),
        "the KLs of the steps are multiplied; those of probabilities multiply, but their "
        "logarithms add up": (elements * step_kl.prod(1).mean()),
    }
    got = answered(answer(step_kl, elements), "path_kl")
    expect(
        not isinstance(got, Tensor) or got.numel() == 1,
        "return one number: the mean over samples of the sum over steps",
    )
    close(
        number(got, "path_kl"),
        wanted,
        "this is not the KL of the whole path in nats: which axis is a sum, which a mean?",
        mistakes,
        1e-6,
    )


@check("Exercise 9")
def check_pushing(answer: Answer) -> None:
    """`answer(ratio, advantage, clip)` says which pairs have a gradient."""
    pairs = torch.cartesian_prod(
        torch.tensor([0.7, 0.95, 1.0, 1.05, 1.4]), torch.tensor([0.3, -0.3, 2.0, -2.0])
    )
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1))
    ratio, advantage = pairs[order].unbind(1)
    clip = 0.1
    leaf = ratio.clone().requires_grad_(True)
    torch.maximum(-advantage * leaf, -advantage * leaf.clamp(1 - clip, 1 + clip)).sum().backward()
    wanted = leaf.grad is not None and leaf.grad != 0
    assert isinstance(wanted, Tensor)
    inside = (ratio - 1).abs() <= clip
    positive = advantage > 0
    mistakes = {
        "every pair outside 1 - c to 1 + c is dropped; but a good pair whose ratio fell "
        "still pushes back up": (inside),
        "the sides are swapped: a good pair stops when its ratio has grown beyond 1 + c, not "
        "when it fell": ~((positive & (ratio < 1 - clip)) | (~positive & (ratio > 1 + clip))),
        "these are the pairs whose gradient is zero; return the others": ~wanted,
        "the upper bound holds for good pairs only: a bad pair whose ratio grew must be "
        "pushed down": (ratio <= 1 + clip),
        "pairs with negative advantages push too, down": wanted & positive,
        "not all of them: where the clipped term is the larger loss, it is constant in the ratio": (
            torch.ones_like(wanted)
        ),
    }
    got = _bools(answer(ratio, advantage, clip), len(ratio))
    close(
        got,
        wanted,
        "compare with the derivative of max(-A ratio, -A clip(ratio)) by hand: four cases, A > 0"
        " or < 0",
        mistakes,
    )


@check("Exercise 2")
def check_strongest_step(answer: str) -> None:
    """`answer` is the predicted case in which the rewards differ most."""
    letter = choice(answer, "abc")
    expect(letter != "b", "late noise is noise to the network: what do the last steps remove?")
    expect(
        letter == "a",
        "the distribution over all noises is preserved, but here the initial noise is the same: ask"
        " what the noise of one step can still change",
    )


@check("Exercise 5")
def check_plan(answer: dict[str, int]) -> None:
    """`answer` is a plan of an iteration that meets all conditions."""
    keys = ("groups", "members", "steps", "decisions")
    right_keys = isinstance(answer, dict) and set(answer) == set(keys)
    expect(right_keys, f"give a dict of {', '.join(keys)}")
    groups, members, steps, decisions = (whole(answer[key], key) for key in keys)
    silent, cost = 0.9**members + 0.1**members, groups * members * (steps + 3 * decisions)
    expect(silent <= 0.3, f"{silent:.0%} of the groups are silent: enlarge the groups")
    expect(groups >= 8, "fewer than 8 groups: save on steps or decisions instead")
    expect(steps >= 8, "fewer than 8 steps: save on the decisions instead")
    expect(decisions >= 4, "fewer than 4 decisions: save on members or steps instead")
    expect(
        decisions < steps,
        "more decisions than stochastic steps: the last step follows the ODE, so at most steps - 1",
    )
    expect(
        cost <= 2400,
        f"{cost:,.0f} evaluations are too many: a decision costs three evaluations, a step one",
    )


@check("Exercise 10")
def check_changed_setting(answer: str) -> None:
    """`answer` is the changed setting of the failed run."""
    letter = choice(answer, "abcd")
    expect(letter != "a", "most groups are not silent: compare group_std with the stable run")
    expect(letter != "b", "the policy does change: look at approx_kl")
    expect(letter == "c", "many pairs keep their gradient: look at clip_fraction")


check_quiz = quiz(
    __name__,
    (
        "c",
        {
            "a": "no decision is preferred: all get the same number",
            "b": "the others add noise, not a bias: their noise is independent of this one",
        },
    ),
    (
        "a",
        {
            "b": "the group is its own baseline: what is R minus the mean?",
            "c": "with equal rewards no image is the best of its group",
        },
    ),
    (
        "b",
        {
            "a": "the update trains on decisions, and the window still has five",
            "c": "the number of decisions is unchanged; every step is sampled, though",
        },
    ),
    (
        "c",
        {
            "a": "this is the mean over samples, steps and elements; the path KL is a sum",
            "b": "this is the path KL per element; the elements add up, too",
        },
    ),
    (
        "b",
        {
            "a": "in the collapse above the reward rose for one more iteration, then fell",
            "c": "larger groups make the advantages less noisy; the steps remain as large",
        },
    ),
)
