"""Solutions and likely mistakes of lesson 6."""

import torch
from flowrl_course import lesson_06 as lesson

from tests.course.cases import Case


def complete(velocity, x, node, times, first=None, last=None):
    for i in range(node if first is None else first, len(times) - 1 if last is None else last):
        x = x - (times[i] - times[i + 1]) * velocity(x, times[i])
    return x


def along(values):
    return values.diff(dim=-1).sign() * (values[..., -1:] - values[..., :1]).sign()


def later(pairs):
    return torch.cat([torch.zeros_like(pairs[..., :1]), pairs], dim=-1)


def plain(values):
    return later((along(values)[..., :-1] < 0) & (along(values)[..., 1:] > 0))


def consistent(values, after=1, first=True):
    rest = values[..., -1:] - (values[..., 1:] if after else values[..., :-1])
    agrees = values.diff(dim=-1) * rest > 0
    turns = plain(values) & agrees
    if first:
        turns[..., 0] = agrees[..., 0]
    return turns


def balance(turns, size, pick=0):
    up, down = (
        size[turns & (size > 0)].sort(descending=True).values,
        size[turns & (size < 0)].sort().values,
    )
    k = min(len(up), len(down))
    if k == 0:
        return turns
    if pick:
        return turns & (((size > 0) & (size <= up[-k])) | ((size < 0) & (size >= down[-k])))
    return turns & ((size >= up[k - 1]) | (size <= down[k - 1]))


def per_prompt(turns, size):
    return torch.stack([balance(t, s) for t, s in zip(turns, size, strict=True)])


def count(turning, nodes, shape=(200, 200), walk=False, reduce=lambda turns: turns.sum(-1).mean()):
    noise = torch.randn(*shape, nodes, generator=torch.Generator().manual_seed(3))
    return float(reduce(turning(noise.cumsum(-1) if walk else noise).float()))


PLAIN, CONSISTENT = {"a": [2], "b": [2], "c": [0, 2]}, {"a": [2], "b": [2], "c": [0]}

CASES = [
    Case(
        lesson.check_complete,
        complete,
        [
            (lambda f, x, n, t: complete(f, x, n, t, first=0), "only the remaining steps"),
            (lambda f, x, n, t: x - t[n] * f(x, t[n]), "one-step (Tweedie)"),
            (lambda f, x, n, t: complete(f, x, n, t, last=len(t) - 2), "one step is missing"),
            (lambda f, x, n, t: complete(f, x, n + 1, t), "begin at node itself"),
            (
                lambda f, x, n, t: complete(lambda y, s: f(y, s.expand(len(y))), x, n, t),
                "one per sample",
            ),
        ],
    ),
    Case(
        lesson.check_by_hand,
        (PLAIN, CONSISTENT),
        [
            (({"a": [1], "b": [1], "c": [0, 1]}, CONSISTENT), "decision 2, not 1"),
            (({"a": [2], "b": [2], "c": [0, 1, 2, 3]}, CONSISTENT), "goes with the trend"),
            (({"a": [2], "b": [2], "c": [2]}, CONSISTENT), "decision 0 of c is missing"),
            ((PLAIN, PLAIN), "not consistent"),
            (({"a": [3], "b": [3], "c": [1, 3]}, CONSISTENT), "one too large"),
            (({"a": [2], "b": [], "c": [0, 2]}, CONSISTENT), "turning points of b go down"),
            (({"a": [2], "b": [2], "c": [0, 2], "d": []}, CONSISTENT), "the keys a, b, c"),
            (({"a": ..., "b": ..., "c": ...}, CONSISTENT), "not answered yet"),
        ],
    ),
    Case(
        lesson.check_plain,
        plain,
        [
            (
                lambda r: later(r.diff(dim=-1)[..., :-1] * r.diff(dim=-1)[..., 1:] < 0),
                "every change of direction",
            ),
            (
                lambda r: later((r.diff(dim=-1)[..., :-1] < 0) & (r.diff(dim=-1)[..., 1:] > 0)),
                "only turns upwards",
            ),
            (lambda r: plain(r).roll(-1, dims=-1), "one too early"),
            (lambda r: later((along(r)[..., :-1] <= 0) & (along(r)[..., 1:] > 0)), "use < 0"),
            (lambda r: plain(r)[..., 1:], "fill decision 0"),
        ],
    ),
    Case(
        lesson.check_consistent,
        consistent,
        [
            (
                lambda r: consistent(r, after=0),
                "own gain; what comes after decision k is R - R_{k+1}",
            ),
            (lambda r: consistent(r, first=False), "the first decision is missing"),
            (
                lambda r: torch.cat([along(r)[..., :1] > 0, consistent(r)[..., 1:]], dim=-1),
                "follows the plain rule",
            ),
            (
                lambda r: torch.cat([along(r)[..., :1] > 0, plain(r)[..., 1:]], dim=-1),
                "these are the plain turning points",
            ),
        ],
    ),
    Case(
        lesson.check_paper_labels,
        {5: 0.35, 2: 0.45},
        [
            ({0: 0.35, 3: 0.45}, "our numbers of decisions"),
            ({4: 0.35, 1: 0.45}, "one too small"),
            ({5: 0.10, 2: 0.15}, "these are the increments"),
            ({5: 0.25, 2: 0.30}, "changes after the decision"),
            ({5: 0.35, 2: 0.35}, "trend Δ for both"),
            ({5: -0.35, 2: -0.45}, "signs are wrong"),
            ({2: 0.45}, "first decision is missing"),
            ({5: 0.35}, "after one down is missing"),
            ({5: 0.35, 2: 0.45, 1: 0.30}, "nothing turns there"),
            ({5: 0.35, 3: 0.40}, "against the trend"),
            ({...: ...}, "replace the dots"),
        ],
    ),
    Case(
        lesson.check_balance,
        balance,
        [
            (lambda t, s: t, "nothing is dropped"),
            (lambda t, s: balance(t, s, pick=1), "the smallest are kept"),
            (per_prompt, "balanced by itself"),
            (
                lambda t, s: (
                    balance(t, s) if (t & (s < 0)).any() and (t & (s > 0)).any() else t & False
                ),
                "all of them remain",
            ),
        ],
    ),
    Case(
        lesson.check_null,
        count,
        [
            (lambda f, n: count(f, n, reduce=lambda turns: turns.mean()), "share of decisions"),
            (lambda f, n: count(f, n, walk=True), "random walk"),
            (lambda f, n: count(f, n, reduce=lambda turns: turns.sum()), "total over trajectories"),
            (lambda f, n: count(f, n + 1), "11 columns"),
            (lambda f, n: count(f, 10), "another length: use `columns`"),
            (lambda f, n: count(f, n, shape=(10, 40)), "too few"),
        ],
    ),
]
