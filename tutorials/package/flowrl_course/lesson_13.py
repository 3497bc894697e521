"""Checks of the lesson on the forward process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.forward import ForwardBatch
from flowrl.flow import uniform_schedule
from flowrl.losses import DGPO, DiffusionNFT
from flowrl.samplers import FlowSDE
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


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _batch(
    new: Tensor, old: Tensor, target: Tensor, time: Tensor, advantages: Tensor
) -> ForwardBatch:
    """Rows of one group."""
    rows = torch.arange(len(new))
    weight = torch.ones(len(new))
    return ForwardBatch(
        time, target, new, advantages, weight, torch.zeros_like(rows), rows, old=old, reference=old
    )


@check("Exercise 1")
def check_target(answer: Answer) -> None:
    """`answer(z, z_next, t, s, noise_level)` is the velocity [sample, dim] with which the mean of
    Flow-SDE is `z_next`.
    """
    schedule, x, x_next = uniform_schedule(5), _normal(1, 4, 3), _normal(2, 4, 3)
    for step, level in ((1, 0.7), (3, 0.4)):
        t, s = (float(schedule.times[node]) for node in (step, step + 1))
        got = tensor(answer(x.clone(), x_next.clone(), t, s, level), (4, 3), "the target")
        delta, drift = t - s, level**2 * (t - s) / (2 * (1 - t))
        k = delta * (1 + level**2 / 2)
        wanted = ((1 - drift) * x - x_next) / k
        mistakes = {
            "the sign is wrong: the mean falls if v grows": -wanted,
            "this is the slope of the step: the noise term changes the mean, too": (
                (x - x_next) / delta
            ),
            "z has the factor 1: the score correction contains z, too": (x - x_next) / k,
            "kappa lacks a factor: the score correction contains v, too": (
                ((1 - drift) * x - x_next) / delta
            ),
            "the drift of z has t in place of 1 - t": (
                ((1 - level**2 * delta / (2 * t)) * x - x_next) / k
            ),
            "Delta is negative: time falls, so Delta = t - s": ((1 + drift) * x - x_next) / -k,
        }
        close(got, wanted, "the mean of the transition with this velocity is not z_next", mistakes)
        mean = FlowSDE(level).transition(x, got.float(), schedule, torch.full((4,), step)).mean
        close(
            mean,
            x_next,
            "the mean of the transition with this velocity is not z_next",
            tolerance=1e-3,
        )


@check("Exercise 2")
def check_minimum(answer: Answer) -> None:
    """`answer(old, target, r, beta)` is the velocity that minimises DiffusionNFT's loss of each
    sample.
    """
    old, target, beta = _normal(4, 4, 3), _normal(5, 4, 3), 0.3
    r = torch.tensor([0.1, 0.5, 0.8, 1.0])
    pull, share = target - old, (2 * r - 1)[:, None]
    mistakes = {
        "this is the step d alone: v is v_old + d": share / beta * pull,
        "multiplied by beta: the minimum is further away for a small beta": (
            old + share * beta * pull
        ),
        "beta is missing: v+ and v- are v_old plus and minus beta d": old + share * pull,
        "the sign is wrong: a good sample attracts": old - share / beta * pull,
        "the bad branch is missing: with r = 1/2 both terms balance at v_old": (
            old + r[:, None] / beta * pull
        ),
        "only the good branch is minimised: for r < 1 the bad one counts, too": old + pull / beta,
        "the factor is r - (1 - r), not half of it": old + share / (2 * beta) * pull,
        "the factor 2 of the squares cancels: both terms have it": old + 2 * share / beta * pull,
        "beta is squared: the slope has one beta, the curvature two": old + share / beta**2 * pull,
    }
    got = answered(answer(old.clone(), target.clone(), r.clone(), beta), "nft_minimum")
    close(
        tensor(got, (4, 3), "the result"),
        old + share / beta * pull,
        "at this velocity the derivative of the loss is not 0",
        mistakes,
    )


@check("Exercise 3")
def check_gradient(answer: Answer) -> None:
    """`answer(advantage, old, target, time)` is the gradient of the released loss at v = v_old,
    [sample, dim].
    """
    old, target, time = _normal(6, 4, 3), _normal(7, 4, 3), torch.tensor([0.9, 0.6, 0.3, 0.5])
    advantages = torch.tensor([1.5, -0.5, 2.0, 0.0])
    got = tensor(
        answer(advantages.clone(), old.clone(), target.clone(), time.clone()),
        (4, 3),
        "the gradient",
    )
    new = old.clone().requires_grad_()
    loss = DiffusionNFT(kl_weight=0.0).loss(_batch(new, old, target, time, advantages)).loss
    wanted = torch.autograd.grad(loss, new)[0] * len(time)
    mean, t = (old - target).abs().mean(1, keepdim=True), time[:, None]
    mistakes = {
        "the sign is wrong: the gradient of |v - v*|^2 is along v - v*": -wanted,
        "the factor 1/dim of the mean over elements is missing": wanted * 3,
        "the factor 2 of the square is missing": wanted / 2,
        "the division by eta is missing": wanted * t * mean,
        "eta has no factor t here: it is a distance of clean estimates": wanted * t,
        "t^2 is missing: the errors are those of clean estimates": wanted / t.square(),
        "the factor 1/A_max of 2r - 1 is still there: look for A_max elsewhere in the loss": wanted
        / 5,
        "the advantage has no effect on the sign: use A, not its absolute value": (
            wanted * advantages.sign()[:, None]
        ),
        "the advantages are not there": 2 * t * (old - target) / mean / 3,
        "eta is the root of the mean square: take the mean absolute value": (
            wanted * mean / (old - target).square().mean(1, keepdim=True).sqrt()
        ),
    }
    close(
        got,
        wanted,
        "this is not the gradient of the loss at v_old: compare with autograd",
        mistakes,
    )


@check("Exercise 4")
def check_reversed(answer: str) -> None:
    """`answer` says what changes at the first update if all advantages change sign."""
    letter = choice(answer, "abc")
    expect(letter != "a", "at v_old the rewards are not in the value: which terms remain at d = 0?")
    expect(letter == "b", "the branches are on opposite sides: differentiate the linear term by d")


@check("Exercise 5")
def check_optimum(answer: Answer) -> None:
    """`answer(advantages, targets, old, penalty)` is the minimiser [dim] of the penalised objective
    at one state, or None.
    """
    targets, old = _normal(8, 5, 3), _normal(9, 3)
    for advantages, penalty in (
        (torch.tensor([1.0, 0.5, -0.4, 0.2, 0.3]), 0.0),
        (torch.tensor([1.0, 0.5, -0.4, 0.2, 0.3]), 0.8),
        (torch.tensor([0.5, -1.0, -0.8, 0.1, -0.3]), 0.9),
    ):
        got = answer(advantages.clone(), targets.clone(), old.clone(), penalty)
        expect(
            got is not None,
            "you return None although mean advantage + penalty is positive: there is a minimum",
        )
        weighted, mean = (advantages[:, None] * targets).mean(0), advantages.mean()
        wanted = (weighted + penalty * old) / (mean + penalty)
        mistakes = {
            "the penalty is in the numerator only": (weighted + penalty * old) / mean,
            "the penalty is in the denominator only: it pulls towards v_old": (
                weighted / (mean + penalty)
            ),
            "the penalty has no effect": weighted / mean,
            "sum and mean are mixed: lambda is added to a mean over the samples": (
                (5 * weighted + penalty * old) / (5 * mean + penalty)
            ),
            "this is v_old plus the gradient step: solve for the zero of the derivative": (
                old + weighted - mean * old
            ),
        }
        close(
            tensor(got, (3,), "the minimiser"), wanted, "the derivative is not zero there", mistakes
        )
    for advantages, penalty in (
        (torch.tensor([0.5, -1.0, -0.8, 0.1, -0.3]), 0.1),
        (torch.tensor([-1.0, 1.0, 0.0, 2.0, -2.0]), 0.0),
    ):
        got = answer(advantages.clone(), targets.clone(), old.clone(), penalty)
        expect(
            got is None,
            "mean advantage plus penalty is not positive: the zero of the derivative is not a"
            " minimum; return None",
        )


@check("Exercise 6")
def check_weights(answer: Answer) -> None:
    """`answer(advantages, errors, reference, beta)` are the weights of the members' errors in
    DGPO's gradient.
    """
    advantages = torch.tensor([[1.0, 0.5, -1.5, 0.0], [2.0, -0.5, -0.5, -1.0]])
    reference = _normal(10, 2, 4).abs() + 0.5
    errors, beta = (reference - 0.2 * advantages + 0.1 * _normal(11, 2, 4)).abs(), 3.0
    got = tensor(
        answer(advantages.clone(), errors.clone(), reference.clone(), beta), (2, 4), "the result"
    )
    gaps = advantages * (errors - reference)
    s = beta * gaps.mean(1, keepdim=True)
    mistakes = {
        "the sign of S is wrong: it falls as the errors of good members fall below the reference": (
            torch.sigmoid(-s) * advantages
        ),
        "every member has a sigmoid of its own: S is one number per group": (
            torch.sigmoid(beta * gaps) * advantages
        ),
        "S is the sum over the members: it is their mean": torch.sigmoid(4 * s) * advantages,
        "S is the mean over all groups": torch.sigmoid(beta * gaps.mean()) * advantages,
        "the reference is missing in S": (
            torch.sigmoid(beta * (advantages * errors).mean(1, keepdim=True)) * advantages
        ),
        "beta_DGPO is missing in S": torch.sigmoid(s / beta) * advantages,
        "beta_DGPO is also a factor of the weights: it cancels": beta
        * torch.sigmoid(s)
        * advantages,
        "the advantages are missing: good and bad members have opposite signs": (
            torch.sigmoid(s).expand(-1, 4)
        ),
    }
    close(
        got,
        torch.sigmoid(s) * advantages,
        "these are not the weights: differentiate the loss by one error",
        mistakes,
    )
    for row in range(2):  # the library agrees with the formula of the lesson
        velocity = errors[row][:, None].sqrt().requires_grad_()
        old, zero = reference[row][:, None].sqrt(), torch.zeros(4, 1)
        loss = (
            DGPO(beta_dpo=beta, clip=None, kl_weight=0.0)
            .loss(_batch(velocity, old, zero, torch.ones(4), advantages[row]))
            .loss
        )
        weights = torch.autograd.grad(loss, velocity)[0][:, 0] * 4 / (2 * velocity.detach()[:, 0])
        close(got[row], weights, "the weights differ from those of flowrl's DGPO")


@check("Exercise 7")
def check_wrong_line(answer: int) -> None:
    """`answer` is the line after which the advantages of a group do not sum to 0."""
    line = whole(answer, "the line")
    expect(1 <= line <= 5, "give the number of a line, 1 to 5")
    expect(line != 1, "line 1 is right: after it the advantages of a group sum to 0")
    expect(line == 2, "this line is that of the formula: look at the advantages that it uses")


@check("Exercise 8")
def check_after_training(answer: str) -> None:
    """`answer` is the predicted change of the cosine."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "the derivation used that v_old is a mean velocity: does training preserve this?",
    )
    expect(letter == "b", "better samples do not make the surrogate exact: check its assumption")


_METHODS: dict[str, tuple[int, int, int, bool, bool]] = {
    "Flow-GRPO": (10, 9, 2, True, True),
    "DiffusionNFT": (10, 9, 3, False, False),
    "AWM": (14, 6, 3, False, False),
    "DGPO": (10, 4, 3, True, False),
    "a method with guidance in training only": (8, 5, 2, False, True),
}


@check("Exercise 9")
def check_cost(answer: Answer) -> None:
    """`answer(steps, draws, networks, guided_sampling, guided_training)` are the evaluations of one
    trajectory.
    """
    for name, (steps, draws, networks, sampling, training) in _METHODS.items():
        got = number(answer(steps, draws, networks, sampling, training), "evaluations")
        wanted = steps * (1 + sampling) + draws * networks * (1 + training)
        mistakes = {
            f"{name}: you count the current network only; the others are evaluated at every "
            f"trained pair": (steps * (1 + sampling) + draws * (1 + training)),
            f"{name}: guidance is missing; with it, an evaluation is two": steps + draws * networks,
            f"{name}: only the sampling is counted": steps * (1 + sampling),
            f"{name}: only the training is counted": draws * networks * (1 + training),
            f"{name}: the networks are evaluated at the drawn times, not at every step": (
                steps * (1 + sampling) + steps * networks * (1 + training)
            ),
            f"{name}: sampling takes one network": (
                steps * networks * (1 + sampling) + draws * networks * (1 + training)
            ),
            f"{name}: guidance is counted where it is not used": 2 * (steps + draws * networks),
        }
        for message, value in mistakes.items():
            expect(not (abs(got - value) < 0.5 and value != wanted), message)
        expect(abs(got - wanted) < 0.5, f"{name} takes {wanted} evaluations; you get {got:.0f}")


check_quiz = quiz(
    __name__,
    (
        "a",
        {
            "b": "solvers differ in their errors; the question is what the loss reads",
            "c": "the published settings have a ratio of exactly 1; nothing is corrected",
        },
    ),
    (
        "c",
        {
            "a": "the value does not tell how far the weights moved",
            "b": "with rewards and without, the value at v_old is the same",
        },
    ),
    (
        "b",
        {
            "a": "it cancels in the first gradient",
            "c": "the weight of the KL penalty is another setting, kl_weight",
        },
    ),
    (
        "a",
        {
            "b": "the slope at v_old is not 0",
            "c": "NFT's curvature is positive for every reward; compare AWM's",
        },
    ),
    (
        "b",
        {
            "a": "the trainer counts every evaluation; compare the counts per trajectory",
            "c": "all four methods used Flow-SDE in these runs",
        },
    ),
)
