"""Rules that turn runs into verdicts, fixed before the runs; every line has the digest of the rules
when it was made.

docs/verdicts.md states them in words, with the reasons. A rule compares; `judge_family` corrects
the p-values of a family, which determine the verdicts. A comparison outside a family has none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from flowrl_compare.statistics import Inference, Values, mean

from flowrl_bench.evidence import BUDGET, MEASURES, RATE, REWARD, SMALLEST_OF, Evidence, column
from flowrl_bench.statistics import holm, outside, rate_difference, wins

BETTER, WORSE, ALIKE = "better", "worse", "no difference that matters"
BARELY_BETTER, BARELY_WORSE = "better, by less than matters", "worse, by less than matters"
UNDECIDED, SECONDARY = "undecided at this power", "secondary"
VERDICTS = (BETTER, BARELY_BETTER, ALIKE, BARELY_WORSE, WORSE, UNDECIDED)
ALPHA = 0.025
"""The level of Holm's correction. The t test of few seeds has more false alarms on real learning
curves than its level says; at this one, fewer than 5% of families have any
(benchmarks/results/calibration.md).
"""
FEWEST = 5
"""Seeds that a verdict needs."""


@dataclass(frozen=True)
class Gain:
    """The possible gain in a task: mean final reward of the best known arm, minus the reward before
    training.
    """

    start: float
    best: float
    arm: str

    @property
    def size(self) -> float:
        """Best minus start."""
        return self.best - self.start


GAINS: dict[tuple[str, str], Gain] = {
    ("mixture", "direction"): Gain(0.2070, 0.9976, "turning points, 40 steps"),
    ("shapes", "compositional"): Gain(0.7272, 0.8889, "uniform, equal evaluations"),
    ("shapes", "text"): Gain(0.7456, 0.9374, "stepwise gains"),
    ("shapes", "preference"): Gain(0.7403, 0.9511, "stepwise gains"),
}
"""By world and task: best known, over all arms of benchmarks/results/claims.jsonl.xz."""


def gain(world: str, evidence: Evidence) -> float:
    """The possible gain, averaged over tasks: from `GAINS`, else the evidence's best arm."""
    tasks = next(iter(evidence.runs.values()))

    def best(task: str) -> float:
        if (world, task) in GAINS:
            return GAINS[world, task].size
        curves = [[column(run, "soft") for run in runs[task]] for runs in evidence.runs.values()]
        ends = [float(np.mean([curve[-1] for curve in arm])) for arm in curves]
        return max(ends) - float(np.mean([curve[0] for arm in curves for curve in arm]))

    return float(np.mean([best(task) for task in tasks]))


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    `arms` names one arm or a difference ("a minus b", if `difference`). `estimate`: with the
    p-value of no difference; ratios of budgets are ratios. `outside`: the p-value of a difference
    of at least the margin. `adjusted`: both p-values after the family's correction; None: not in a
    family. `won`: fraction of seeds at which the first arm is better. `note` follows the measure's
    label.
    """

    arms: str
    measure: str
    estimate: Inference
    outside: float = math.nan
    adjusted: tuple[float, float] | None = None
    won: float | None = None
    difference: bool = True
    note: str = ""

    @property
    def label(self) -> str:
        """The measure in words."""
        less = (
            self.difference
            and not MEASURES[self.measure].higher
            and MEASURES[self.measure].unit != BUDGET
        )
        return MEASURES[self.measure].label + (" (less is better)" if less else "") + self.note

    @property
    def text(self) -> str:
        """Arms and measure in words."""
        return f"{self.arms}: {self.label}"

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`, or `SECONDARY`."""
        if self.adjusted is None:
            return SECONDARY
        differs, within = (p < ALPHA for p in self.adjusted)
        if not differs:
            return ALIKE if within else UNDECIDED
        null = 1.0 if MEASURES[self.measure].unit == BUDGET else 0.0
        if (self.estimate.value > null) == MEASURES[self.measure].higher:
            return BARELY_BETTER if within else BETTER
        return BARELY_WORSE if within else WORSE


@runtime_checkable
class Rule(Protocol):
    """Turns runs into a comparison."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it compares; runs of other arms do not count."""
        ...

    @property
    def measure(self) -> str:
        """The measure by its name in `MEASURES`."""
        ...

    def compare(self, evidence: Evidence, gain: float) -> Comparison:
        """The comparison, not yet judged; `gain`: the possible gain in the world."""
        ...

    def words(self) -> str:
        """The rule in words."""
        ...


def judge_family(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with verdicts.

    Holm's correction covers both p-values of all comparisons, so that the probability of any wrong
    label in the family is bounded. With fewer than `FEWEST` seeds p-values are NaN.
    """
    corrected = holm([c.estimate.p for c in comparisons] + [c.outside for c in comparisons])
    pairs = zip(corrected[: len(comparisons)], corrected[len(comparisons) :], strict=True)
    return [replace(c, adjusted=pair) for c, pair in zip(comparisons, pairs, strict=True)]


def by_seed(values: Values) -> Values:
    """[seed] of [seed, task]: the mean over tasks, because runs of one seed share random
    numbers.
    """
    return values.mean(axis=1)


def _tested(
    test: Callable[[float], Inference], measure: str, gain: float, seeds: int
) -> tuple[Inference, float]:
    """The estimate with the p-value of no difference, and the p-value of one that matters."""
    unit = MEASURES[measure].unit
    estimate = test(0.0)
    if seeds < FEWEST:
        return replace(estimate, p=math.nan), math.nan
    return estimate, outside(test, SMALLEST_OF[unit] * (gain if unit == REWARD else 1.0))


@dataclass(frozen=True)
class Compare:
    """`arm` against `than` by `measure`."""

    arm: str
    than: str
    measure: str = "area"

    @property
    def arms(self) -> tuple[str, ...]:
        """Both arms."""
        return self.arm, self.than

    def compare(self, evidence: Evidence, gain: float) -> Comparison:
        """Compare paired seeds (for collapse rates, paired runs)."""
        measure = MEASURES[self.measure]
        runs = evidence.differences(self.arm, self.than, self.measure)
        gains = by_seed(runs) if measure.higher else -by_seed(runs)

        def test(null: float) -> Inference:
            if measure.unit == RATE:
                first, second = (evidence.values(arm, self.measure) for arm in self.arms)
                return rate_difference(first, second, null)
            return mean(by_seed(runs), null)

        effect, outer = _tested(test, self.measure, gain, len(runs))
        won = wins(gains, np.zeros_like(gains))
        if measure.unit != BUDGET:
            arms = f"{self.arm} minus {self.than}"
            return Comparison(arms, self.measure, effect, outer, None, won)
        never = evidence.never(self.arm, self.than, self.measure)
        note = f" to {self.than}'s{_never(never, self.arms)}"
        arms = f"{self.arm} over {self.than}"
        return Comparison(
            arms, self.measure, effect.exponential(), outer, None, won, difference=False, note=note
        )

    def words(self) -> str:
        """The rule in words."""
        return f"{self.arm} against {self.than} ({MEASURES[self.measure].label})"


def _never(count: tuple[int, int], arms: tuple[str, ...]) -> str:
    """Censored pairs of runs in words."""
    parts = [
        f"{arm} missed a reward in {number}"
        for arm, number in zip(arms, count, strict=True)
        if number
    ]
    return f" (a bound: {', '.join(parts)})" if parts else ""


@dataclass(frozen=True)
class Interaction:
    """`arm` minus `than`, minus `other` minus `other_than`, by `measure`."""

    arm: str
    than: str
    other: str
    other_than: str
    measure: str = "area"

    @property
    def arms(self) -> tuple[str, ...]:
        """The four arms."""
        return self.arm, self.than, self.other, self.other_than

    def compare(self, evidence: Evidence, gain: float) -> Comparison:
        """Compare the two paired differences."""
        first = by_seed(evidence.differences(self.arm, self.than, self.measure))
        second = by_seed(evidence.differences(self.other, self.other_than, self.measure))
        tested = _tested(lambda null: mean(first - second, null), self.measure, gain, len(first))
        arms = f"({self.arm} minus {self.than}) minus ({self.other} minus {self.other_than})"
        return Comparison(arms, self.measure, *tested, None, wins(first, second))

    def words(self) -> str:
        """The rule in words."""
        return (
            f"the lead of {self.arm} over {self.than} against that of {self.other} over"
            f" {self.other_than}"
        )


@dataclass(frozen=True)
class Level:
    """`measure` of `arm` against 0."""

    arm: str
    measure: str

    @property
    def arms(self) -> tuple[str, ...]:
        """The arm."""
        return (self.arm,)

    def compare(self, evidence: Evidence, gain: float) -> Comparison:
        """Compare the mean over seeds with 0."""
        values = by_seed(evidence.values(self.arm, self.measure))
        tested = _tested(lambda null: mean(values, null), self.measure, gain, len(values))
        return Comparison(self.arm, self.measure, *tested, difference=False)

    def words(self) -> str:
        """The rule in words."""
        return f"{self.arm} against 0 ({MEASURES[self.measure].label})"


def each(arms: Sequence[str], than: str, measure: str = "area") -> tuple[Compare, ...]:
    """Each of `arms` against `than`."""
    return tuple(Compare(arm, than, measure) for arm in arms)
