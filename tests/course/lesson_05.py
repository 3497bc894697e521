"""Solutions and likely mistakes of lesson 5."""

import torch
from flowrl_course import lesson_05 as lesson

from tests.course.cases import Case


def substeps(
    velocity, x, t, v, count, still=False, sign=-1.0, length=None, always=False, tick=None, late=0
):
    length = t / count if length is None else length
    for k in range(count):
        if k > 0 or always:
            v = velocity(x, t if still else t - (k - late) * (tick or t / count))
        x = x + sign * length * v
    return x


def joint(gained, dims=(1, 2), unbiased=False):
    spread = gained.std(dim=dims, keepdim=True, unbiased=unbiased)
    return (gained - gained.mean(dim=dims, keepdim=True)) / (spread + 1e-4)


def generalised(gained, lam):
    steps = range(gained.shape[-1])
    return torch.stack(
        [sum(lam ** (k - i) * gained[..., k] for k in steps if k >= i) for i in steps], dim=-1
    )


def past(gained, lam):
    return generalised(gained.flip(-1), lam).flip(-1)


def odds(cosine):
    return cosine / (1 - cosine)


CASES = [
    Case(
        lesson.check_gains,
        lambda r: r.diff(dim=-1),
        [
            (lambda r: -r.diff(dim=-1), "the sign is wrong"),
            (lambda r: r[..., -1:] - r[..., :-1], "reward-to-go"),
            (lambda r: r.diff(dim=-1, prepend=r[..., :1]), "one less"),
            (lambda r: r[..., 1:] - r[..., :1], "since the start"),
            (lambda r: r.diff(dim=1), "along another axis"),
        ],
    ),
    Case(
        lesson.check_figure_1,
        dict(lesson.FIGURE_1),
        [
            ({**lesson.FIGURE_1, "g at 0.86": 8}, "g at 0.86: find the node"),
            ({**lesson.FIGURE_1, "g at 0.71": 2}, "g at 0.71: find the node"),
            (
                dict(zip(lesson.FIGURE_1, (2, 4, 1), strict=True)),
                "not of the step that leads to it",
            ),
            (dict(zip(lesson.FIGURE_1, (4, 6, 3), strict=True)), "one too large"),
            (dict(zip(lesson.FIGURE_1, (7, 5, 8), strict=True)), "count from the image"),
            (dict(zip(lesson.FIGURE_1, (3, 5, 3), strict=True)), "leads out of the dip"),
            (dict(zip(lesson.FIGURE_1, (3, 5, 4), strict=True)), "the step into node j"),
            ({"g at 0.86": 3}, "with the keys"),
            (dict.fromkeys(lesson.FIGURE_1, ...), "replace the dots"),
        ],
    ),
    Case(
        lesson.check_substeps,
        substeps,
        [
            (lambda f, x, t, v, n: x - t * v, "Tweedie estimate"),
            (
                lambda f, x, t, v, n: substeps(f, x, t, v, n, still=True),
                "always evaluated at the time t",
            ),
            (lambda f, x, t, v, n: substeps(f, x, t, v, n, length=1 / n), "length 1 / count"),
            (
                lambda f, x, t, v, n: substeps(f, x, t, v, n, length=1 / n, tick=1 / n),
                "and the times too",
            ),
            (lambda f, x, t, v, n: substeps(f, x, t, v, n, late=1), "behind its state"),
            (
                lambda f, x, t, v, n: substeps(
                    lambda y, s: f(y, torch.full((len(y),), s)), x, t, v, n
                ),
                "one per sample",
            ),
            (lambda f, x, t, v, n: substeps(f, x, t, v, n, sign=1.0), "the sign is wrong"),
            (lambda f, x, t, v, n: substeps(f, x, t, v, n, always=True), "3 suffice"),
        ],
    ),
    Case(
        lesson.check_joint,
        joint,
        [
            (lambda g: joint(g, (1,)), "every decision is normalised by itself"),
            (lambda g: joint(g, (2,)), "every trajectory is normalised by itself"),
            (lambda g: joint(g, (0, 1, 2)), "prompts are mixed"),
            (lambda g: joint(g, unbiased=True), "unbiased=False"),
        ],
    ),
    Case(
        lesson.check_generalised,
        generalised,
        [
            (past, "runs over the past"),
            (lambda g, lam: generalised(g, lam).flip(-1), "reversed order"),
            (lambda g, lam: generalised(g, lam) - g, "own gain is left out"),
            (lambda g, lam: generalised(g, 1.0), "lambda is not applied"),
            (lambda g, lam: lam * generalised(g, lam), "discounted too"),
            (lambda g, lam: (1 - lam) * generalised(g, lam), "no factor 1 - lambda"),
            (lambda g, lam: (1 - lam) * g + lam * generalised(g, 1.0), "not mixed linearly"),
            (lambda g, lam: g.copy_(generalised(g, lam)), "was changed"),
        ],
    ),
    Case(
        lesson.check_worth,
        lambda weak, strong: odds(strong) / odds(weak),
        [
            (lambda weak, strong: strong / weak, "ratio of the cosines"),
            (lambda weak, strong: odds(weak) / odds(strong), "the inverse"),
            (lambda weak, strong: (strong / weak) ** 2, "squared cosines"),
            (lambda weak, strong: (odds(strong) / odds(weak)) ** 0.5, "no root"),
        ],
    ),
]
