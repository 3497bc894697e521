"""Solutions and likely mistakes of lesson 3."""

import math

import torch
from flowrl_course import lesson_03 as lesson

from tests.course.cases import Case


def log_prob(x, mean, std):
    return -(x - mean).square().mean(dim=1) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)


def advantage(rewards):
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + 1e-4)


def clipped(new, old, a, c, choose=torch.maximum):
    ratio = (new - old).exp()
    return choose(-a * ratio, -a * ratio.clamp(1 - c, 1 + c)).mean()


def kl(mean, reference, std):
    return (mean - reference).square().mean(dim=1) / (2 * std**2)


CASES = [
    Case(
        lesson.check_log_prob,
        log_prob,
        [
            (
                lambda x, m, s: torch.distributions.Normal(m, s[:, None]).log_prob(x).sum(1),
                "the sum over elements",
            ),
            (lambda x, m, s: -log_prob(x, m, s), "negative log-density"),
            (lambda x, m, s: log_prob(x, m, s) + (x - m).square().mean(1) / s**2, "wrong sign"),
            (
                lambda x, m, s: (
                    -(x - m).square().mean(1) / 2 * s**2 - s.log() - 0.5 * math.log(2 * math.pi)
                ),
                "in brackets",
            ),
            (lambda x, m, s: log_prob(x, m, s) + torch.log(2 * math.pi), "module math"),
            (lambda x, m, s: -(x - m).square().mean(1) / (2 * s**2), "normalisation is missing"),
            (
                lambda x, m, s: torch.distributions.Normal(m, s[:, None]).log_prob(x),
                "one number per sample",
            ),
        ],
    ),
    Case(
        lesson.check_gradient_samples,
        lambda x, m, s, r, b: (r - b) / s**2 * (x - m),
        [
            (lambda x, m, s, r, b: (r - b) * (m - x) / s**2, "the sign is wrong"),
            (lambda x, m, s, r, b: (r - b) * (x - m) / s, "std squared"),
            (lambda x, m, s, r, b: (r - b) * (x - m), "variance is missing"),
            (lambda x, m, s, r, b: (r - b) * (x - m) / (2 * s**2), "the 2 cancels"),
            (lambda x, m, s, r, b: r * (x - m) / s**2, "baseline is missing"),
            (lambda x, m, s, r, b: r * (x - m) / s**2 - b, "from the product"),
            (
                lambda x, m, s, r, b: (r - b) * torch.distributions.Normal(m, s).log_prob(x),
                "needs its derivative",
            ),
            (lambda x, m, s, r, b: ((r - b) * (x - m) / s**2).mean(), "not their mean"),
            (lambda x, m, s, r, b: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_group_advantage,
        advantage,
        [
            (lambda r: (r - r.mean()) / (r.std(correction=0) + 1e-4), "whole batch is one group"),
            (lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4), "G - 1"),
            (
                lambda r: (
                    (r - r.mean(1, keepdim=True))
                    / r.std(1, correction=0, keepdim=True).clamp(min=0)
                ),
                "gives nan",
            ),
            (lambda r: r - r.mean(1, keepdim=True), "not divided by the std"),
            (lambda r: (r - r.mean(1)) / (r.std(1) + 1e-4), "keepdim=True"),
        ],
    ),
    Case(
        lesson.check_clipped_loss,
        clipped,
        [
            (lambda n, o, a, c: clipped(n, o, a, c, torch.minimum), "this takes the minimum"),
            (lambda n, o, a, c: (-a * (n - o).exp()).mean(), "the clip is missing"),
            (lambda n, o, a, c: -clipped(n, o, a, c), "the sign is wrong"),
            (lambda n, o, a, c: clipped(o, n, a, c), "inverted"),
            (lambda n, o, a, c: clipped(n, o, a, c).detach(), "no gradient to the new"),
            (lambda n, o, a, c: clipped(n, o, a, c).item(), "leave out .item()"),
            (lambda n, o, a, c: clipped(n, o, -a, c), "sign of A"),
            (
                lambda n, o, a, c: torch.maximum(
                    -a * n / o, -a * (n / o).clamp(1 - c, 1 + c)
                ).mean(),
                "not new / old",
            ),
            (
                lambda n, o, a, c: torch.maximum(
                    -a * (n - o).exp(), -a * (n - o).exp().clamp(-c, c)
                ).mean(),
                "not near 0",
            ),
            (
                lambda n, o, a, c: max(
                    -a * (n - o).exp(), -a * (n - o).exp().clamp(1 - c, 1 + c)
                ).mean(),
                "torch.maximum",
            ),
            (
                lambda n, o, a, c: (
                    clipped(n, o, a, c).detach()
                    + (-a * (n - o).exp().clamp(1 - c, 1 + c)).mean() * 0
                ),
                "is a part detached",
            ),
        ],
    ),
    Case(
        lesson.check_kl,
        kl,
        [
            (lambda m, r, s: (m - r).square().sum(dim=1) / (2 * s**2), "sum over elements"),
            (lambda m, r, s: (m - r).square().mean(dim=1) / s**2, "the 2 is missing"),
            (lambda m, r, s: (m - r).square().mean(dim=1) / (2 * s), "not by its square"),
            (lambda m, r, s: kl(m, r, s).mean(), "not the mean over the batch"),
            (lambda m, r, s: (m - r).square().mean(dim=1) / 2 * s**2, "in brackets"),
        ],
    ),
    Case(
        lesson.check_translated_clip,
        lambda c, d, own: c * math.sqrt(d / own),
        [
            (lambda c, d, own: c * math.sqrt(own / d), "inverse factor"),
            (lambda c, d, own: c * d / own, "take the root"),
            (lambda c, d, own: c, "unchanged"),
            (lambda c, d, own: c * math.sqrt(d), "change delta per element"),
            (lambda c, d, own: math.sqrt(c * d / own), "applied to the clip range"),
            (lambda c, d, own: math.sqrt(d / own), "multiply it by the clip range"),
            (lambda c, d, own: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_diagnosis,
        {1: "B", 2: "C", 3: "A"},
        [
            ({1: "C", 2: "B", 3: "A"}, "nothing is clipped"),
            ({1: "B", 2: "A", 3: "C"}, "log 2 clips pairs"),
            ({1: "A", 2: "C", 3: "B"}, "log 1 moves a lot"),
            ({1: "A", 2: "A", 3: "A"}, "once"),
        ],
    ),
]
