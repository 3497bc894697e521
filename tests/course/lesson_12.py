"""Solutions and likely mistakes of lesson 12."""

import torch
from flowrl_course import lesson_12 as lesson

from tests.course.cases import Case


def transition(x, x_next, t, s, a, drift=None, factor=True, sign=1):
    delta = t - s
    drift = a**2 * delta / (2 * (1 - t)) if drift is None else drift
    return sign * ((1 - drift) * x - x_next) / (delta * (1 + factor * a**2 / 2))


def branches(velocity, old, target, beta):
    step = beta * (velocity - old)
    return (old + step - target).square(), (old - step - target).square()


def nft(velocity, old, target, r, beta, swap=False, sign=1.0):
    positive, negative = (part.mean(1) for part in branches(velocity, old, target, beta))
    if swap:
        positive, negative = negative, positive
    return r * positive + sign * (1 - r) * negative


def gradient(advantage, old, target, time, scale=1.0):
    error = old - target
    return (
        scale
        * 2
        * advantage[:, None]
        * time[:, None]
        * error
        / error.abs().mean(1, keepdim=True)
        / error.shape[1]
    )


def optimum(advantages, targets, old, penalty, top=1.0, bottom=1.0, sign=True, none=True):
    if none and advantages.mean() + penalty <= 0:
        return None
    weighted = (advantages[:, None] * targets).mean(0)
    return (weighted + top * penalty * old) / (advantages.mean() + bottom * penalty)


def summed(advantages, targets, old, penalty):
    return ((advantages[:, None] * targets).sum(0) + penalty * old) / (advantages.sum() + penalty)


def weights(advantages, errors, reference, beta, sign=1.0):
    return (
        torch.sigmoid(sign * beta * (advantages * (errors - reference)).mean(1, keepdim=True))
        * advantages
    )


CASES = [
    Case(
        lesson.check_target,
        transition,
        [
            (lambda *given: transition(*given, sign=-1), "the sign is wrong"),
            (lambda x, x_next, t, s, a: (x - x_next) / (t - s), "the slope of the step"),
            (lambda *given: transition(*given, drift=0.0), "x has the factor 1"),
            (lambda *given: transition(*given, factor=False), "k lacks the factor"),
            (
                lambda x, x_next, t, s, a: transition(
                    x, x_next, t, s, a, drift=a**2 * (t - s) / (2 * t)
                ),
                "t in place of 1 - t",
            ),
            (
                lambda x, x_next, t, s, a: transition(
                    x, x_next, s, t, a, drift=-(a**2) * (t - s) / (2 * (1 - t))
                ),
                "is negative",
            ),
        ],
    ),
    Case(
        lesson.check_branches,
        nft,
        [
            (lambda *given: 3 * nft(*given), "the elements are summed"),
            (lambda *given: nft(*given).mean(), "the result is one number"),
            (lambda *given: nft(*given, swap=True), "are swapped"),
            (lambda v, old, target, r, beta: nft(v, old, target, r, 1.0), "beta is missing"),
            (lambda *given: nft(*given, sign=-1.0), "is subtracted"),
            (
                lambda v, old, target, r, beta: branches(v, old, target, beta)[0].mean(1),
                "on the same side",
            ),
            (lambda v, old, target, r, beta: r, "this is not r"),
        ],
    ),
    Case(
        lesson.check_gradient,
        gradient,
        [
            (lambda *given: -gradient(*given), "the sign is wrong"),
            (lambda *given: 3 * gradient(*given), "1/dim"),
            (lambda *given: gradient(*given) / 2, "the factor 2"),
            (
                lambda a, old, target, time: (
                    2 * a[:, None] * time[:, None] ** 2 * (old - target) / 3
                ),
                "division by w",
            ),
            (
                lambda a, old, target, time: gradient(a, old, target, time) * time[:, None],
                "w has no factor t",
            ),
            (
                lambda a, old, target, time: gradient(a, old, target, time) / time[:, None] ** 2,
                "t^2 is missing",
            ),
            (lambda *given: gradient(*given) / 5, "it cancels"),
            (
                lambda a, old, target, time: gradient(a.abs(), old, target, time),
                "not its absolute value",
            ),
            (
                lambda a, old, target, time: gradient(torch.ones_like(a), old, target, time),
                "the advantages are not there",
            ),
        ],
    ),
    Case(
        lesson.check_optimum,
        optimum,
        [
            (lambda *given: optimum(*given, bottom=0.0), "in the numerator only"),
            (lambda *given: optimum(*given, top=0.0), "in the denominator only"),
            (lambda *given: optimum(*given, top=0.0, bottom=0.0), "has no effect"),
            (summed, "sum and mean are mixed"),
            (lambda *given: optimum(*given, none=False), "is no minimum"),
            (lambda a, v, old, penalty: None if (a < 0).any() else old, "there is a minimum"),
            (
                lambda a, v, old, penalty: old + (a[:, None] * (v - old)).mean(0),
                "plus the gradient step",
            ),
        ],
    ),
    Case(
        lesson.check_weights,
        weights,
        [
            (lambda *given: weights(*given, sign=-1.0), "the sign of S"),
            (
                lambda a, e, ref, beta: torch.sigmoid(beta * a * (e - ref)) * a,
                "a sigmoid of its own",
            ),
            (lambda a, e, ref, beta: weights(a, e, ref, 4 * beta), "S is the sum"),
            (
                lambda a, e, ref, beta: torch.sigmoid(beta * (a * (e - ref)).mean()) * a,
                "over all groups",
            ),
            (lambda a, e, ref, beta: weights(a, e, 0 * ref, beta), "the reference is missing"),
            (lambda a, e, ref, beta: weights(a, e, ref, 1.0), "beta is missing in S"),
            (
                lambda a, e, ref, beta: beta * weights(a, e, ref, beta),
                "also a factor of the weights",
            ),
            (
                lambda a, e, ref, beta: weights(a, e, ref, beta) / a.where(a != 0, torch.inf),
                "the weight of member i",
            ),
        ],
    ),
    Case(
        lesson.check_cost,
        lambda steps, draws, networks, gs, gt: steps * (1 + gs) + draws * networks * (1 + gt),
        [
            (
                lambda steps, draws, networks, gs, gt: steps * (1 + gs) + draws * (1 + gt),
                "the current network only",
            ),
            (
                lambda steps, draws, networks, gs, gt: steps + draws * networks,
                "guidance is missing",
            ),
            (lambda steps, draws, networks, gs, gt: steps * (1 + gs), "only the sampling"),
            (
                lambda steps, draws, networks, gs, gt: draws * networks * (1 + gt),
                "only the training",
            ),
            (
                lambda steps, draws, networks, gs, gt: steps * (1 + gs + networks * (1 + gt)),
                "at the drawn times",
            ),
            (lambda steps, draws, networks, gs, gt: 0, "you get 0"),
        ],
    ),
]
