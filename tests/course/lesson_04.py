"""Solutions and likely mistakes of lesson 4."""

import torch
from flowrl_course import lesson_04 as lesson

from tests.course.cases import Case


def uniform(final, steps, dim=1, std_dim=None, unbiased=False, epsilon=1e-4):
    spread = final.std(dim=dim if std_dim is None else std_dim, keepdim=True, unbiased=unbiased)
    scores = (final - final.mean(dim=dim, keepdim=True)) / (spread + epsilon)
    return scores[:, :, None].repeat(1, 1, steps)


def velocity_kl(v, w, t, s, a, power=2, delta=1, sigma=lambda a, t: a * (t / (1 - t)) ** 0.5):
    noise = sigma(a, t)
    factor = (t - s) ** delta / 2 * (noise * (1 - t) / (2 * t) + 1 / noise) ** power
    return factor * (v - w).square().mean(dim=1)


def estimates(ell):
    return ell, ell**2 / 2, torch.expm1(-ell) + ell


def pushing(ratio, advantage, clip):
    return ~(((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip)))


CASES = [
    Case(
        lesson.check_uniform,
        uniform,
        [
            (lambda f, s: uniform(f, s, dim=(0, 1)), "the whole batch: take it over members"),
            (lambda f, s: uniform(f, s, dim=0), "runs over prompts"),
            (
                lambda f, s: uniform(f, s, std_dim=(0, 1)),
                "standard deviation is that of the whole batch",
            ),
            (lambda f, s: uniform(f, s, unbiased=True), "unbiased=False"),
            (lambda f, s: uniform(f, s, epsilon=0.0), "equal rewards gives NaN"),
            (lambda f, s: uniform(f, s)[..., 0], "axis of decisions is missing"),
            (lambda f, s: uniform(f, s) / s, "not shared out"),
            (lambda f, s: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_silent,
        lambda p, g: float((p**g + (1 - p) ** g).mean()),
        [
            (lambda p, g: float(((1 - p) ** g).mean()), "only groups in which all fail"),
            (lambda p, g: float((p**g).mean()), "only groups in which all succeed"),
            (lambda p, g: float(p.mean() ** g + (1 - p.mean()) ** g), "apply it to every prompt"),
            (lambda p, g: float((p**g * (1 - p) ** g).mean()), "add them"),
            (lambda p, g: p**g + (1 - p) ** g, "one share per prompt"),
            (lambda p, g: (p ** (g - 1) + (1 - p) ** (g - 1)).mean(), "not p^(G-1)"),
            (lambda p, g: 2 * (p**g).mean(), "all fail has probability"),
            (lambda p, g: 1 - float((p**g + (1 - p) ** g).mean()), "groups that are not silent"),
        ],
    ),
    Case(
        lesson.check_cost,
        lambda n, t, d: n * (t + 3 * d),
        [
            (lambda n, t, d: n * (t + d), "backward pass is missing"),
            (lambda n, t, d: n * 4 * t, "only the stochastic ones"),
            (lambda n, t, d: t + 3 * d, "for one trajectory"),
            (lambda n, t, d: 3 * n * d, "sampling is missing"),
            (lambda n, t, d: n * t + 3 * d, "update must be counted per trajectory"),
            (lambda n, t, d: n * t * 3 * d, "added, not multiplied"),
            (lambda n, t, d: n * t + 3 * n * d * t, "not per decision and step"),
            (lambda n, t, d: 3 * n * (t + d), "no backward pass"),
            (lambda n, t, d: n * (t - d) + 3 * n * d, "sampled too"),
            (lambda n, t, d: n * (t + 4 * d), "together"),
        ],
    ),
    Case(
        lesson.check_kl_from_velocities,
        velocity_kl,
        [
            (lambda v, w, t, s, a: velocity_kl(v, w, t, s, a) * v.shape[1], "sum over elements"),
            (lambda v, w, t, s, a: velocity_kl(v, w, t, s, a, power=1), "not squared"),
            (lambda v, w, t, s, a: velocity_kl(v, w, t, s, a, delta=0), "step length is missing"),
            (lambda v, w, t, s, a: velocity_kl(v, w, t, s, a, delta=2), "released code"),
            (
                lambda v, w, t, s, a: velocity_kl(v, w, t, s, a, sigma=lambda a, t: a),
                "noise level only",
            ),
            (
                lambda v, w, t, s, a: velocity_kl(
                    v, w, t, s, a, sigma=lambda a, t: a * t / (1 - t)
                ),
                "root in sigma",
            ),
            (
                lambda v, w, t, s, a: velocity_kl(
                    v, w, t, s, a, sigma=lambda a, t: a * ((1 - t) / t) ** 0.5
                ),
                "swapped",
            ),
            (
                lambda v, w, t, s, a: velocity_kl(v, w, t, s, a).mean(),
                "not the mean over the batch",
            ),
            (lambda v, w, t, s, a: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_kl_estimates,
        estimates,
        [
            (lambda ell: (-ell, ell**2 / 2, torch.expm1(-ell) + ell), "the sign is wrong: k1"),
            (lambda ell: (ell, ell**2, torch.expm1(-ell) + ell), "factor 1/2"),
            (lambda ell: (ell, ell**2 / 2, torch.expm1(ell) - ell), "r is inverted"),
            (lambda ell: (ell, ell**2 / 2, torch.expm1(-ell) - ell), "sign of log_ratio"),
            (lambda ell: (ell, ell**2 / 2, (-ell).exp() + ell), "the -1 is missing"),
            (lambda ell: ell, "three tensors"),
            (lambda ell: (..., ..., ...), "replace the dots"),
        ],
    ),
    Case(
        lesson.check_path_kl,
        lambda k, d: d * k.sum(1).mean(),
        [
            (lambda k, d: float(d * k.mean()), "mean over steps"),
            (lambda k, d: float(k.sum(1).mean()), "per element: multiply"),
            (lambda k, d: float(d * k.sum()), "sum over samples"),
            (lambda k, d: float(k.mean()), "mean over everything"),
            (lambda k, d: float(k.sum(1).mean() / d), "divided by the elements"),
            (lambda k, d: d * k.sum(1), "return one number"),
        ],
    ),
    Case(
        lesson.check_pushing,
        pushing,
        [
            (lambda r, a, c: (r - 1).abs() <= c, "every pair outside"),
            (
                lambda r, a, c: ~(((a > 0) & (r < 1 - c)) | ((a < 0) & (r > 1 + c))),
                "sides are swapped",
            ),
            (lambda r, a, c: ~pushing(r, a, c), "whose gradient is zero"),
            (lambda r, a, c: torch.ones_like(r) > 0, "not all of them"),
            (lambda r, a, c: r <= 1 + c, "upper bound holds for good pairs only"),
            (lambda r, a, c: pushing(r, a, c).float(), "booleans are wanted"),
        ],
    ),
]
