"""Solutions and likely mistakes of lesson 10."""

import math

from flowrl_course import lesson_10 as lesson

from tests.course.cases import Case


def shifted(u, shift):
    return shift * u / (1 + (shift - 1) * u)


def count(shapes, rank):
    return sum(rank * (out + wide) for out, wide in shapes)


def folded(a, b, alpha):
    return a, b * (alpha / a.shape[0])


def guided(towards, away, scale):
    return away + scale * (towards - away)


def arithmetic(groups, group_size, steps, minibatches, micro_batch, processes):
    pairs = math.ceil(groups * group_size / minibatches) * steps
    return (
        math.ceil(groups / processes) * group_size,
        pairs,
        math.ceil(pairs / processes / micro_batch),
    )


def in_place(a, b, alpha):
    b *= alpha / a.shape[0]
    return a, b


def memory(samples, steps, elements):
    return samples * (2 * steps + 1) * elements * 4 / 1e9


def passes_of(nfe, train_nfe, gradient_nfe, passes, branches, backward):
    return nfe * passes, train_nfe * passes + gradient_nfe * branches * (backward + 1)


CASES = [
    Case(
        lesson.check_shifted,
        shifted,
        [
            (lambda u, s: u / (s - (s - 1) * u), "towards data"),
            (lambda u, s: s * u, "denominator is missing"),
            (lambda u, s: s * u / (1 + s * u), "s instead of s - 1"),
            (lambda u, s: 3 * u / (1 + 2 * u), "must change nothing"),
            (lambda u, s: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_lora_parameters,
        count,
        [
            (lambda shapes, rank: sum(out * wide for out, wide in shapes), "own weights"),
            (lambda shapes, rank: sum(rank * wide for _, wide in shapes), "A is rank x in, B"),
            (lambda shapes, rank: sum(rank * out for out, _ in shapes), "counted, B"),
            (lambda shapes, rank: sum(rank * out * wide for out, wide in shapes), "multiplied out"),
            (lambda shapes, rank: count(shapes[-1:], rank), "only the last layer"),
        ],
    ),
    Case(
        lesson.check_folded,
        folded,
        [
            (lambda a, b, alpha: (a, b), "nothing is folded"),
            (lambda a, b, alpha: (a * alpha / 4, b * alpha / 4), "has its square"),
            (lambda a, b, alpha: (a, b * alpha), "not alpha"),
            (lambda a, b, alpha: (a, b * alpha / a.shape[1]), "number of columns"),
            (in_place, "in place"),
        ],
    ),
    Case(
        lesson.check_guided,
        guided,
        [
            (lambda p, n, s: guided(n, p, s), "swapped"),
            (lambda p, n, s: p + s * (p - n), "starts at the prompt's"),
            (lambda p, n, s: s * (p - n), "difference alone"),
            (lambda p, n, s: guided(p, n, 4.5), "written into the function"),
        ],
    ),
    Case(
        lesson.check_arithmetic,
        arithmetic,
        [
            (
                lambda p, m, t, u, b, n: (p * m, p * m * t // u, p * m * t // u // b),
                "over all processes",
            ),
            (lambda p, m, t, u, b, n: (p // n * m, 0, 0), "two groups remain"),
            (lambda p, m, t, u, b, n: (18, p * m * t, 9), "all mini-batches together"),
            (lambda p, m, t, u, b, n: (18, 27, 2), "of all processes, not of one"),
            (lambda p, m, t, u, b, n: (18, 78, 2), "so round up first"),
            (lambda p, m, t, u, b, n: (18, 9, 1), "the steps are missing"),
            (lambda p, m, t, u, b, n: (18, 81, 1), "last, smaller micro-batch"),
            (
                lambda p, m, t, u, b, n: (18, 81, 6),
                "backward passes: 81 pairs on 4 processes in micro-batches of 16: this is the",
            ),
            (lambda p, m, t, u, b, n: (18, 81, 2), "wrong for"),
        ],
    ),
    Case(
        lesson.check_memory,
        memory,
        [
            (lambda n, t, e: n * (t + 1) * e * 4 / 1e9, "velocities of the T steps"),
            (lambda n, t, e: memory(n, t, e) / 2, "would be bfloat16"),
            (lambda n, t, e: memory(n, t, e) * 1e9, "these are bytes"),
            (lambda n, t, e: n * 2 * t * e * 4 / 1e9, "have T + 1 nodes, and"),
        ],
    ),
    Case(
        lesson.check_iteration,
        passes_of,
        [
            (
                lambda n, t, g, p, b, k: (n, t * p + g * b * (k + 1)),
                "each evaluation is `passes` forward passes",
            ),
            (lambda n, t, g, p, b, k: (n * p, t * p + g * b * k), "checkpointing is missing"),
            (lambda n, t, g, p, b, k: (n * p, g * p + g * b * (k + 1)), "the base model's"),
            (
                lambda n, t, g, p, b, k: (n * p, t * p + g * p * (k + 1)),
                "both branches are differentiated",
            ),
            (
                lambda n, t, g, p, b, k: (n * p, t * p + t * b * (k + 1)),
                "all evaluations are differentiated",
            ),
        ],
    ),
]
