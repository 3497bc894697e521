"""Solutions and likely mistakes of lesson 1."""

from itertools import pairwise

import torch
from flowrl_course import lesson_01 as lesson

from flowrl.flow import GaussianMixture
from tests.course.cases import Case

RING = GaussianMixture.ring()


def interpolate(clean, noise, time):
    t = time[:, None]
    return (1 - t) * clean + t * noise


def loss(network, clean, noise, time):
    return (network(interpolate(clean, noise, time), time) - (noise - clean)).square().mean()


def euler(velocity, noise, times, sign=-1.0, ahead=0):
    nodes = [noise]
    for i in range(len(times) - 1):
        x = nodes[-1]
        nodes.append(
            x + sign * (times[i] - times[i + 1]) * velocity(x, times[i + ahead].expand(len(x)))
        )
    return torch.stack(nodes)


def changing_in_place(velocity, noise, times):
    nodes, x = [noise], noise
    for t, s in pairwise(times):
        x -= (t - s) * velocity(x, t.expand(len(x)))
        nodes.append(x)
    return torch.stack(nodes)


def error(noise, steps, reduce=lambda gap: gap.square().sum(1).mean().sqrt(), fine=640):
    ends = [
        euler(RING.velocity, noise, torch.linspace(1, 0, count + 1))[-1] for count in (steps, fine)
    ]
    return float(reduce(ends[0] - ends[1]))


CASES = [
    Case(
        lesson.check_interpolate,
        interpolate,
        [
            (lambda c, n, t: interpolate(n, c, t), "the ends are swapped"),
            (lambda c, n, t: (1 - t) * c + t * n, "time[:, None]"),
            (lambda c, n, t: c + t[:, None] * n, "must add up to 1"),
            (lambda c, n, t: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_loss,
        loss,
        [
            (
                lambda f, c, n, t: (f(interpolate(c, n, t), t) - (c - n)).square().mean(),
                "sign of the target",
            ),
            (lambda f, c, n, t: (f(c, t) - (n - c)).square().mean(), "given the clean data"),
            (
                lambda f, c, n, t: (f(interpolate(c, n, t), t) - (n - c)).square().sum(),
                "this is a sum",
            ),
            (
                lambda f, c, n, t: (f(interpolate(c, n, t), t) - n).square().mean(),
                "the target is the noise",
            ),
            (lambda f, c, n, t: loss(f, c, n, t).detach(), "do not detach"),
            (lambda f, c, n, t: loss(f, c, n, t).item(), "leave out .item()"),
            (lambda f, c, n, t: loss(f, c, n, t).sqrt(), "take no root"),
            (
                lambda f, c, n, t: (f(interpolate(c, n, t), t) - (n - c)).abs().mean(),
                "absolute values",
            ),
        ],
    ),
    Case(
        lesson.check_euler,
        euler,
        [
            (lambda v, n, t: euler(v, n, t, sign=1.0), "the sign is wrong"),
            (lambda v, n, t: euler(v, n, t, ahead=1), "where the step starts"),
            (lambda v, n, t: torch.stack([n]), "only the noise came back"),
            (lambda v, n, t: euler(v, n, t)[1:], "node 0 is the noise"),
            (lambda v, n, t: euler(lambda x, time: v(x, time[0]), n, t), "one per sample"),
            (changing_in_place, "write x = x - ..."),
            (
                lambda v, n, t: euler(v, n, torch.cat([t, t[-1:]]), ahead=len(t)),
                "T + 1 times and T steps",
            ),
        ],
    ),
    Case(
        lesson.check_tweedie,
        lambda x, v, t: x - t[:, None] * v,
        [
            (lambda x, v, t: x + t[:, None] * v, "the sign is wrong"),
            (lambda x, v, t: x - v, "the whole velocity"),
            (lambda x, v, t: x - t * v, "time[:, None]"),
            (lambda x, v, t: x - (1 - t[:, None]) * v, "already passed"),
            (lambda x, v, t: x + (1 - t[:, None]) * v, "estimate of the noise"),
        ],
    ),
    Case(
        lesson.check_euler_error,
        error,
        [
            (lambda n, s: error(n, s, lambda g: g.square().sum(1).mean()), "take its root"),
            (lambda n, s: error(n, s, lambda g: g.square().mean().sqrt()), "sums over them"),
            (
                lambda n, s: error(n, s, lambda g: g.norm(dim=1).mean()),
                "return the root mean square",
            ),
            (lambda n, s: error(n, s) + 0.1, "must be 0"),
            (lambda n, s: error(n, s - 1, fine=639), "steps + 1"),
        ],
    ),
]
