"""Correlations over looks with intervals, and the trajectories that a verdict needs, from the
microscope's lines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from flowrl_compare.statistics import Inference, mean

from flowrl_bench.ceilings import ceiling
from flowrl_bench.statistics import detectable
from flowrl_bench.true_advantage import LEAST_RELIABILITY, correlation

Line = Mapping[str, Any]
SEPARATED, POWER = 0.05, 0.8
"""A verdict separates two rules if it finds a difference of this size between their correlations
with this probability.
"""


def jackknife(statistic: Callable[[Sequence[Any]], float], looks: Sequence[Any]) -> Inference:
    """The t interval of the pseudo-values n s(all) - (n - 1) s(all but i) over looks.

    `statistic` pools all looks that it gets, which has less bias than a mean of ratios of small
    looks. The value is the statistic of all looks. Source: Tukey 1958.
    """
    pooled, count = statistic(looks), len(looks)
    if count < 2:
        return Inference(pooled, -math.inf, math.inf)
    left_out = [statistic([*looks[:i], *looks[i + 1 :]]) for i in range(count)]
    estimate = mean([count * pooled - (count - 1) * value for value in left_out])
    shift = pooled - estimate.value
    return Inference(pooled, estimate.low + shift, estimate.high + shift, estimate.p)


@dataclass(frozen=True)
class Lines:
    """The lines of a results file, by the key of their cell."""

    lines: Mapping[str, Line]

    def of(
        self, world: str, stage: str = "before", noise: str = "independent", method: str = ""
    ) -> list[Line]:
        """The lines of all looks of a cell, in order."""
        wanted = {"world": world, "stage": stage, "noise": noise, "method": method}
        lines = [
            line
            for line in self.lines.values()
            if {**line["cell"], "look": 0} == {**wanted, "look": 0}
        ]
        return sorted(lines, key=lambda line: line["cell"]["look"])

    def worlds(self) -> list[str]:
        """Worlds whose untrained policy has lines, the 2-D world first."""
        return [world for world in ("mixture", "shapes") if self.of(world)]

    def rules(self) -> list[str]:
        """Rules in order."""
        return list(
            dict.fromkeys(
                row["rule"] for world in self.worlds() for row in self.of(world)[0]["rows"]
            )
        )


def row_of(line: Line, form: str, rule: str, noise: float = 0.0) -> Line:
    """A rule's row in a line."""
    return next(
        row
        for row in line["rows"]
        if (row["form"], row["rule"], row["noise"]) == (form, rule, noise)
    )


def _any(line: Line, form: str) -> Line:
    return next(row for row in line["rows"] if row["form"] == form)


def pooled_correlation(rows: Sequence[Line]) -> float:
    """The corrected correlation of the trajectories of all rows together."""
    return correlation(torch.tensor([row["sums"] for row in rows], dtype=torch.float64))


def measurable(lines: Sequence[Line], form: str) -> bool:
    """Whether the true advantages of a cell vary by more than their noise: not if (almost) every
    image gets the same reward, for a 0/1 reward at least 98% of them.
    """
    rewards = [line["truth"][form]["reward"] for line in lines if form == "strict"]
    if rewards and not 0.02 < sum(rewards) / len(rewards) < 0.98:
        return False
    sums = torch.tensor([_any(line, form)["sums"] for line in lines], dtype=torch.float64).sum(0)
    count, total, squares, noise = (float(sums[i]) for i in (0, 2, 4, 6))
    variance = squares / count - (total / count) ** 2
    return variance > 1e-8 and 1 - noise / count / variance > LEAST_RELIABILITY


def over_looks(lines: Sequence[Line], form: str, rule: str, noise: float = 0.0) -> Inference:
    """A rule's correlation in a cell, with its interval over looks, within [-1, 1]."""
    inference = jackknife(pooled_correlation, [row_of(line, form, rule, noise) for line in lines])
    return (
        inference
        if len(lines) < 2
        else replace(inference, low=max(-1.0, inference.low), high=min(1.0, inference.high))
    )


def change(before: Sequence[Line], after: Sequence[Line], form: str, rule: str) -> Inference:
    """A rule's correlation in the cell `after` minus that in `before`, paired by look."""
    first = {line["cell"]["look"]: row_of(line, form, rule) for line in before}
    pairs = [
        (first[look], row_of(line, form, rule))
        for line in after
        if (look := line["cell"]["look"]) in first
    ]

    def difference(chosen: Sequence[tuple[Line, Line]]) -> float:
        return pooled_correlation([b for _, b in chosen]) - pooled_correlation(
            [a for a, _ in chosen]
        )

    return jackknife(difference, pairs)


def difference(lines: Sequence[Line], form: str, rule: str, other: str) -> Inference:
    """The correlation of `rule` minus that of `other` on the same trajectories."""
    pairs = [(row_of(line, form, rule), row_of(line, form, other)) for line in lines]

    def statistic(chosen: Sequence[tuple[Line, Line]]) -> float:
        return pooled_correlation([a for a, _ in chosen]) - pooled_correlation(
            [b for _, b in chosen]
        )

    return jackknife(statistic, pairs)


def ceiling_of(lines: Sequence[Line], form: str, rule: str) -> float:
    """A rule's ceiling, from all looks together; NaN if none has it."""
    sums = [
        torch.tensor(row["ceiling"], dtype=torch.float64)
        for row in (row_of(line, form, rule) for line in lines)
        if "ceiling" in row
    ]
    return ceiling(torch.stack(sums).sum(0)) if sums else math.nan


def groups_needed(spread: float, size: float = SEPARATED, power: float = POWER) -> int:
    """The smallest number of groups at which a two-sided t test at 5% finds a mean difference of
    `size` with probability `power`.

    `spread`: standard deviation over groups of the difference of two rules' pseudo-values.
    """
    least, most = 2, 3
    while detectable(spread, most, power=power) > size:
        least, most = most, 2 * most
        if most > 10**6:
            return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (
            (middle, most) if detectable(spread, middle, power=power) > size else (least, middle)
        )
    return least if detectable(spread, least, power=power) <= size else most


def spread_of(lines: Sequence[Line], form: str, rule: str, other: str) -> float:
    """Standard deviation over groups, within looks, of the difference of two rules'
    pseudo-values.
    """
    variances = []
    for line in lines:
        gap = np.subtract(row_of(line, form, rule)["groups"], row_of(line, form, other)["groups"])
        variances.append(float(gap.var(ddof=1)))
    return math.sqrt(sum(variances) / len(variances))


@dataclass(frozen=True)
class Needed:
    """The number of trajectories that separates two rules by `SEPARATED`, at one policy: for the
    `middle` and the `worst` pair of rules.

    `looks` of this study find the difference `found` with probability `POWER` (the median pair).
    """

    trajectories: int
    middle: int
    worst: int
    looks: int
    found: float


def needed(lines: Sequence[Line], form: str, rules: Sequence[str]) -> Needed:
    """Over all pairs of `rules` in a cell."""
    members = lines[0]["trajectories"] // len(row_of(lines[0], form, rules[0])["groups"])
    counts, detectable = [], []
    for rule, other in combinations(rules, 2):
        spread = spread_of(lines, form, rule, other)
        if spread < 1e-6:  # the same credit
            continue
        counts.append(groups_needed(spread) * members)
        interval = difference(lines, form, rule, other)
        reach = (interval.high - interval.low) / 2
        detectable.append(_detectable_from(reach, len(lines)))
    total = sum(line["trajectories"] for line in lines)
    return Needed(
        total,
        round(float(np.median(counts))),
        max(counts),
        len(lines),
        float(np.median(detectable)),
    )


def _detectable_from(reach: float, looks: int) -> float:
    """The difference found with probability `POWER`, from the half-width of a 95% t interval over
    looks.
    """
    if looks < 2:
        return math.inf
    from scipy import stats  # a second of import time

    spread = reach / float(stats.t.ppf(0.975, looks - 1)) * math.sqrt(looks)
    return detectable(spread, looks, power=POWER)


def gradient_mean(lines: Sequence[Line], rule: str, name: str) -> Inference | None:
    """The mean over looks of a number of the rule's gradient rows; None without rows or, for a
    cosine, without signal.
    """
    rows = [row for line in lines for row in line["rows"] if row["rule"] == rule]
    if not rows or (name == "cosine" and not all(row["detected"] for row in rows)):
        return None
    return mean([min(1.0, row[name]) if name == "cosine" else row[name] for row in rows])
