"""Solutions and likely mistakes of lesson 7."""

import itertools
import math

import torch
from flowrl_course import lesson_07 as lesson

from tests.course.cases import Case

RIGHT = {
    "A": "supported",
    "B": "contradicted",
    "C": "contradicted",
    "D": "supported",
    "E": "open",
    "F": "contradicted",
    "G": "open",
}


def interval(values, quantile=None, unbiased=True, root=True):
    n = len(values)
    quantile = lesson.T_QUANTILE[n - 1] if quantile is None else quantile(n)
    half = quantile * float(values.std(unbiased=unbiased)) / (math.sqrt(n) if root else 1)
    return float(values.mean()), half


def permutation(a, b, counts=lambda split, seen: abs(split) >= abs(seen) - 1e-9):
    values = torch.cat([a, b]).double()
    seen = float(a.double().mean() - b.double().mean())
    found = []
    for chosen in itertools.combinations(range(len(values)), len(a)):
        rest = [i for i in range(len(values)) if i not in chosen]
        found.append(counts(float(values[list(chosen)].mean() - values[rest].mean()), seen))
    return sum(found) / len(found)


def reach(cost, reward, target, never=math.nan):
    for i in range(len(reward)):
        if reward[i] >= target:
            if i == 0:
                return float(cost[0])
            share = (target - reward[i - 1]) / (reward[i] - reward[i - 1])
            return float(cost[i - 1] + share * (cost[i] - cost[i - 1]))
    return never


def next_evaluation(cost, reward, target):
    above = (reward >= target).nonzero().flatten()
    return float(cost[above[0]]) if len(above) else math.nan


def last_crossing(cost, reward, target):
    for i in reversed(range(1, len(reward))):
        if reward[i - 1] < target <= reward[i]:
            return float(
                cost[i - 1]
                + (target - reward[i - 1]) / (reward[i] - reward[i - 1]) * (cost[i] - cost[i - 1])
            )
    return math.nan


def by_bisection(cost, reward, target):
    """As if the rewards were sorted."""
    i = int(torch.searchsorted(reward, torch.tensor(target)))
    if i in (0, len(reward)):
        return float(cost[0]) if i == 0 else math.nan
    share = (target - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(cost[i - 1] + share * (cost[i] - cost[i - 1]))


def tuned(scores, tuning, choose=None, report=None, common=False):
    chooser = scores[..., :tuning] if choose is None else choose(scores, tuning)
    values = (scores[..., tuning:] if report is None else report(scores, tuning)).mean(-1)
    best = chooser.mean(-1).argmax(1)
    if common:
        best = torch.full_like(best, int(chooser.mean(-1).mean(0).argmax()))
    return values[torch.arange(len(values)), best]


CASES = [
    Case(
        lesson.check_interval,
        interval,
        [
            (lambda v: interval(v, lambda n: 1.96), "1.96 holds for a known spread"),
            (lambda v: interval(v, unbiased=False), "divides by n - 1"),
            (lambda v: interval(v, root=False), "divide by the root of n"),
            (lambda v: interval(v, lambda n: lesson.T_QUANTILE[n]), "degrees of freedom"),
            (lambda v: (v.mean(), v.std()), "standard deviation of single seeds"),
            (lambda v: (v.mean(), interval(v)[1] / len(v) ** 0.5), "this divides by n;"),
            (lambda v: (v.mean(), 2 * interval(v)[1]), "whole width"),
            (lambda v: interval(v)[1], "return two numbers"),
            (lambda v: ..., "replace the dots"),
        ],
    ),
    Case(
        lesson.check_permutation,
        permutation,
        [
            (
                lambda a, b: permutation(a, b, lambda split, seen: abs(split) > abs(seen) + 1e-9),
                "p = 0 cannot be",
            ),
            (
                lambda a, b: permutation(a, b, lambda split, seen: split >= seen - 1e-9),
                "one side only",
            ),
            (lambda a, b: ..., "replace the dots"),
            (
                lambda a, b: permutation(
                    a, b, lambda split, seen: split != -seen and abs(split) >= abs(seen) - 1e-9
                ),
                "lost to rounding",
            ),
            (
                lambda a, b: permutation(a, b, lambda split, seen: abs(split) <= abs(seen) + 1e-9),
                "the other tail",
            ),
        ],
    ),
    Case(
        lesson.check_reach,
        reach,
        [
            (next_evaluation, "straight line"),
            (last_crossing, "the last crossing"),
            (lambda c, r, t: reach(c, r, t, never=float(c[-1])), "return nan"),
            (lambda c, r, t: reach(torch.arange(len(c)), r, t), "not a cost"),
            (by_bisection, "falls back"),
            (lambda c, r, t: reach(c, r, t, never=None), "not None"),
        ],
    ),
    Case(
        lesson.check_tuned,
        tuned,
        [
            (lambda s, k: tuned(s, k, choose=lambda x, n: x[..., n:]), "luck is reported as skill"),
            (
                lambda s, k: tuned(s, k, report=lambda x, n: x[..., :n]),
                "the best of several is too good",
            ),
            (lambda s, k: tuned(s, k, common=True), "one setting for all rules"),
            (lambda s, k: tuned(s, k, report=lambda x, n: x), "this reports all seeds"),
            (lambda s, k: s.mean(-1).amax(1), "all seeds choose and all report"),
        ],
    ),
    Case(
        lesson.check_claims,
        RIGHT,
        [
            ({**RIGHT, "C": "supported"}, "without any turning point"),
            ({**RIGHT, "E": "supported"}, "overhead per call"),
            ({**RIGHT, "F": "open"}, "same six prompts"),
            ({**RIGHT, "G": "supported"}, "two dimensions do not decide"),
            ({**RIGHT, "B": ...}, "no answer yet for claim B"),
        ],
    ),
]
