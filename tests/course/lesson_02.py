"""Solutions and likely mistakes of lesson 2."""

import math
from itertools import pairwise

import torch
from flowrl_course import lesson_02 as lesson

from tests.course.cases import Case


def score(x, v, time):
    t = time[:, None]
    return -(x + (1 - t) * v) / t


def flow_sde(x, v, t, s, a):
    delta, variance = t - s, a**2 * t / (1 - t)
    return x - delta * v - variance * delta / (2 * t) * (x + (1 - t) * v), (variance * delta) ** 0.5


def ends(velocity, x, times, a, correct, generator, keep=0.0, noise=lambda std: std, draws=None):
    """The solution; `keep` is the part of the correction that stays when left out; `draws`, the
    number of draws per step.
    """
    for t, s in pairwise(times):
        v = velocity(x, torch.full((len(x),), t))
        mean, std = flow_sde(x, v, t, s, a)
        part = 1.0 if correct else keep
        mean = part * mean + (1 - part) * (x - (t - s) * v)
        x = mean + noise(std) * torch.randn((draws or len(x), 2), generator=generator)
    return x


def excess(t, s, sigma):
    d = t - s
    return d**2 * sigma**2 * (1 / t + sigma**2 / (4 * t**2))


def cps(x, v, t, s, eta):
    std = s * torch.sin(torch.tensor(eta * torch.pi / 2))
    return (1 - s) * (x - t * v) + (s**2 - std**2).clamp(min=0).sqrt() * (x + (1 - t) * v), std


GOOD = {"FlowSDE": 10, "CPS": 9, "DDIMSDE": 8}
CASES = [
    Case(
        lesson.check_score,
        score,
        [
            (lambda x, v, t: -score(x, v, t), "the sign is wrong"),
            (lambda x, v, t: score(x, v, t) * t[:, None], "not divided by"),
            (lambda x, v, t: -(x - t[:, None] * v) / t[:, None], "clean estimate"),
            (lambda x, v, t: score(x, v, t) / t[:, None], "t squared"),
        ],
    ),
    Case(
        lesson.check_flow_sde,
        flow_sde,
        [
            (lambda x, v, t, s, a: (x - (t - s) * v, flow_sde(x, v, t, s, a)[1]), "the ODE's mean"),
            (
                lambda x, v, t, s, a: (
                    flow_sde(x, v, t, s, a)[0],
                    a * math.sqrt(t / (1 - t)) * (t - s),
                ),
                "root of Delta",
            ),
            (
                lambda x, v, t, s, a: (
                    2 * (x - (t - s) * v) - flow_sde(x, v, t, s, a)[0],
                    flow_sde(x, v, t, s, a)[1],
                ),
                "wrong sign",
            ),
            (lambda x, v, t, s, a: flow_sde(x, v, t, s, a)[0], "return two values"),
            (
                lambda x, v, t, s, a: (
                    flow_sde(x, v, t, s, a)[0],
                    a * t / (1 - t) * (t - s) ** 0.5,
                ),
                "root in sigma",
            ),
            (
                lambda x, v, t, s, a: (
                    flow_sde(x, v, t, s, a)[0] + torch.randn(7, 2),
                    flow_sde(x, v, t, s, a)[1],
                ),
                "noise is not drawn",
            ),
            (lambda x, v, t, s, a: (..., ...), "replace the dots"),
        ],
    ),
    Case(
        lesson.check_sde_ends,
        ends,
        [
            (lambda v, x, t, a, c, g: x, "returned unchanged"),
            (lambda v, x, t, a, c, g: ends(v, x, t, a, True, g), "`correct` has no effect"),
            (lambda v, x, t, a, c, g: ends(v, x, t, a, not c, g), "swapped"),
            (
                lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, noise=lambda std: 0.0),
                "the noise is missing",
            ),
            (
                lambda v, x, t, a, c, g: ends(v, x, t, a if c else 0.0, c, g),
                "the noise is missing too",
            ),
            (lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, keep=-1.0), "opposite sign"),
            (lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, keep=2.0), "twice as large"),
            (
                lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, noise=lambda std: std**2),
                "by std twice",
            ),
            (lambda v, x, t, a, c, g: ends(v, x, t[:2], a, c, g), "ends after one step"),
            (lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, draws=1), "of the shape of x"),
            (
                lambda v, x, t, a, c, g: ends(v, x, t, a, c, torch.default_generator),
                "two calls with equal generators",
            ),
            (
                lambda v, x, t, a, c, g: ends(v, x, t, a, c, g, noise=lambda std: 1.3 * std),
                "standard deviation of",
            ),
        ],
    ),
    Case(
        lesson.check_excess_variance,
        excess,
        [
            (lambda t, s, sigma: excess(t, s, sigma) + s**2, "subtract s squared"),
            (lambda t, s, sigma: sigma**2 * (t - s), "only the new noise"),
            (
                lambda t, s, sigma: s - sigma**2 * (t - s) / (2 * t) + sigma**2 * (t - s) - s**2,
                "square s - sigma",
            ),
            (
                lambda t, s, sigma: sigma**2 * (t - s) ** 2 / t,
                "change of the old noise's coefficient",
            ),
            (
                lambda t, s, sigma: (excess(t, s, sigma) + s**2) ** 0.5 - s,
                "difference of standard deviations",
            ),
            (lambda t, s, sigma: excess(t, s, sigma) + (1 - s) ** 2, "no variance"),
            (
                lambda t, s, sigma: (s - sigma**2 * (t - s) / (2 * t)) ** 2 - s**2,
                "new noise is missing",
            ),
        ],
    ),
    Case(
        lesson.check_cps,
        cps,
        [
            (
                lambda x, v, t, s, e: (
                    (1 - s) * (x - t * v) + s * (x + (1 - t) * v),
                    cps(x, v, t, s, e)[1],
                ),
                "whole coefficient",
            ),
            (lambda x, v, t, s, e: (cps(x, v, t, s, e)[0], s * math.sin(e)), "radians"),
            (
                lambda x, v, t, s, e: (
                    (1 - s) * (x - t * v) + (s**2 - cps(x, v, t, s, e)[1] ** 2) * (x + (1 - t) * v),
                    cps(x, v, t, s, e)[1],
                ),
                "the root is missing",
            ),
            (
                lambda x, v, t, s, e: (
                    cps(x, v, t, s, e)[0],
                    cps(x, v, t, s, e)[1] * math.sqrt(t - s),
                ),
                "no root of Delta",
            ),
            (
                lambda x, v, t, s, e: (
                    (1 - s) * (x - t * v) + (s - cps(x, v, t, s, e)[1]) * (x + (1 - t) * v),
                    cps(x, v, t, s, e)[1],
                ),
                "deviations were subtracted",
            ),
        ],
    ),
    Case(
        lesson.check_decisions,
        GOOD,
        [
            ({**GOOD, "FlowSDE": 9}, "takes a wrapper"),
            ({**GOOD, "CPS": 10}, "factor s at the last step"),
            ({**GOOD, "DDIMSDE": 9}, "at the first step"),
            ({"CPS": 9, "DDIMSDE": 8}, "no entry for FlowSDE"),
        ],
    ),
]
