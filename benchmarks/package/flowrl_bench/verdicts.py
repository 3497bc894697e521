"""Rules that turn runs into verdicts, fixed before the runs; every line has the digest of the rules
at its time.

docs/verdicts.md has them in words, with the reasons. A rule compares; `judge_family` corrects the
p-values of all comparisons of a family, which determine the verdicts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from flowrl_compare.statistics import LEVEL, Inference, Values, mean

from flowrl_bench.evidence import BUDGET, MEASURES, RATE, SMALLEST_OF, Evidence
from flowrl_bench.statistics import holm, rate_difference, wins

HOLDS = "holds here"
FAILS = "does not hold here"
UNDECIDED = "undecided at this power"
BETTER, WORSE, ALIKE = "better", "worse", "no difference that matters"
NO_WORSE = "no worse"
ALPHA = 1 - LEVEL


@dataclass(frozen=True)
class Comparison:
    """One comparison behind a verdict.

    `arms` names one arm or a difference ("a minus b", if `difference`). `estimate`: with the
    p-value of `null`; ratios of budgets are ratios, with `null` 1 by default. `expects`: what a
    claim expects (`BETTER`, `NO_WORSE` or `ALIKE`), "" for a question. `smallest`: the ends of the
    effects that do not matter. `adjusted`: the p-value after the family's correction. `won`:
    fraction of seeds at which the first arm is better. `note` follows the measure's label.
    """

    arms: str
    measure: str
    estimate: Inference
    null: float = 0.0
    expects: str = ""
    smallest: tuple[float, float] = (0.0, 0.0)
    adjusted: float = math.nan
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
    def size(self) -> str:
        """`BETTER`, `WORSE`, `ALIKE` or `UNDECIDED`, relative to `null` (for `ALIKE` claims,
        relative to 0).
        """
        found, (low, high) = self.estimate, self.smallest
        significant = self.adjusted < ALPHA
        inside = low < found.low and found.high < high
        if self.expects == ALIKE:
            inside = significant and low < found.value < high
        elif self.expects == NO_WORSE:
            inside = False
        if inside:
            return ALIKE
        return (
            (BETTER if (found.value > self.null) == MEASURES[self.measure].higher else WORSE)
            if significant
            else UNDECIDED
        )

    @property
    def verdict(self) -> str:
        """The answer to a question, or whether the claim's part holds."""
        if not self.expects or self.size == UNDECIDED:
            return self.size
        return HOLDS if self.size == (ALIKE if self.expects == ALIKE else BETTER) else FAILS


@dataclass(frozen=True)
class Verdict:
    """All comparisons of a rule, judged."""

    comparisons: tuple[Comparison, ...]

    @property
    def verdict(self) -> str:
        """The verdict that all comparisons share; else how many parts of a claim hold, or that the
        answer depends on the arm.
        """
        found = [comparison.verdict for comparison in self.comparisons]
        if len(set(found)) == 1:
            return found[0]
        asks = not self.comparisons[0].expects
        return "depends on the arm" if asks else f"{found.count(HOLDS)} of {len(found)} parts hold"


@runtime_checkable
class Rule(Protocol):
    """From runs to comparisons."""

    def compare(self, evidence: Evidence) -> tuple[Comparison, ...]:
        """The comparisons, not yet judged."""
        ...

    def words(self) -> str:
        """The rule in words."""
        ...


def judge_family(found: Iterable[Sequence[Comparison]]) -> list[Verdict]:
    """Verdicts of the rules of a family, with Holm's correction over all of their comparisons."""
    rules = [tuple(comparisons) for comparisons in found]
    adjusted = iter(
        holm([comparison.estimate.p for comparisons in rules for comparison in comparisons])
    )
    return [
        Verdict(tuple(replace(c, adjusted=next(adjusted)) for c in comparisons))
        for comparisons in rules
    ]


def judge(rule: Rule, evidence: Evidence) -> Verdict:
    """The verdict of a rule that is a family of its own."""
    return judge_family([rule.compare(evidence)])[0]


def by_seed(values: Values) -> Values:
    """[seed] of [seed, task]: the mean over tasks, because runs of one seed share random
    numbers.
    """
    return values.mean(axis=1)


def _null(measure: str, value: float, expects: str) -> float:
    """The null of a difference: 0, the nearer end of the smallest effect (`ALIKE`), or its losing
    end (`NO_WORSE`).
    """
    smallest = SMALLEST_OF[MEASURES[measure].unit]
    if expects == NO_WORSE:
        return -smallest if MEASURES[measure].higher else smallest
    return math.copysign(smallest, value) if expects == ALIKE else 0.0


@dataclass(frozen=True)
class Compare:
    """`arm` against `than` by `measure`. `expects`: see `Comparison`. `at_most`: of ratios of
    budgets, the null instead of 1.
    """

    arm: str
    than: str
    measure: str = "area"
    expects: str = ""
    at_most: float = 1.0

    def compare(self, evidence: Evidence) -> tuple[Comparison, ...]:
        """One comparison of paired seeds (collapse rates: of paired runs)."""
        measure = MEASURES[self.measure]
        runs = evidence.differences(self.arm, self.than, self.measure)
        gains = by_seed(runs) if measure.higher else -by_seed(runs)
        null = (
            math.log(self.at_most)
            if self.at_most != 1
            else _null(self.measure, float(runs.mean()), self.expects)
        )
        smallest, note, arms = SMALLEST_OF[measure.unit], "", f"{self.arm} minus {self.than}"
        ends = (-smallest, smallest)
        if measure.unit == RATE:
            found = rate_difference(
                evidence.values(self.arm, self.measure),
                evidence.values(self.than, self.measure),
                null,
            )
        else:
            found = mean(by_seed(runs), null)
        if measure.unit == BUDGET:
            found, null, ends, arms = (
                found.exponential(),
                math.exp(null),
                (1 / math.exp(smallest), math.exp(smallest)),
                self.arm,
            )
            never = evidence.never(self.arm, self.than, self.measure)
            note = f" to {self.than}'s{_never(never, (self.arm, self.than))}"
            arms = f"{self.arm} over {self.than}"
        won = wins(gains, np.zeros_like(gains))
        return (
            Comparison(
                arms,
                self.measure,
                found,
                null,
                self.expects,
                ends,
                math.nan,
                won,
                measure.unit != BUDGET,
                note,
            ),
        )

    def words(self) -> str:
        """The rule in words."""
        measure = MEASURES[self.measure]
        limit = f" than {self.at_most:g} of it" if self.at_most != 1 else ""
        expected = f"expects {self.expects}{limit}" if self.expects else "asks"
        return f"{expected}: {self.arm} against {self.than} ({measure.label})"


def _never(count: tuple[int, int], arms: tuple[str, str]) -> str:
    """Censored pairs of runs in words."""
    parts = [
        f"{arm} missed a reward in {number}"
        for arm, number in zip(arms, count, strict=True)
        if number
    ]
    return f" (a bound: {', '.join(parts)})" if parts else ""


@dataclass(frozen=True)
class Interaction:
    """`arm` minus `than` is larger than `other` minus `other_than`, by `measure`."""

    arm: str
    than: str
    other: str
    other_than: str
    measure: str = "area"
    expects: str = BETTER

    def compare(self, evidence: Evidence) -> tuple[Comparison, ...]:
        """One comparison of the two paired differences."""
        first = evidence.differences(self.arm, self.than, self.measure)
        second = evidence.differences(self.other, self.other_than, self.measure)
        smallest = SMALLEST_OF[MEASURES[self.measure].unit]
        found = mean(
            by_seed(first - second),
            _null(self.measure, float((first - second).mean()), self.expects),
        )
        arms = f"({self.arm} minus {self.than}) minus ({self.other} minus {self.other_than})"
        won = wins(by_seed(first), by_seed(second))
        return (
            Comparison(
                arms, self.measure, found, 0.0, self.expects, (-smallest, smallest), won=won
            ),
        )

    def words(self) -> str:
        """The rule in words."""
        expected = f"expects {self.expects}" if self.expects else "asks"
        return (
            f"{expected}: the lead of {self.arm} over {self.than} against that of {self.other} over"
            f" {self.other_than}"
        )


@dataclass(frozen=True)
class Level:
    """`measure` of `arm` is above `threshold`."""

    arm: str
    measure: str
    threshold: float = 0.0
    expects: str = BETTER

    def compare(self, evidence: Evidence) -> tuple[Comparison, ...]:
        """One comparison with the threshold."""
        found = mean(by_seed(evidence.values(self.arm, self.measure)), self.threshold)
        return (
            Comparison(
                self.arm, self.measure, found, self.threshold, self.expects, difference=False
            ),
        )

    def words(self) -> str:
        """The rule in words."""
        return f"expects more than {self.threshold:g}: {self.arm} ({MEASURES[self.measure].label})"


@dataclass(frozen=True)
class Parts:
    """Several rules, counted one by one."""

    rules: tuple[Rule, ...] = field(default_factory=tuple)

    def compare(self, evidence: Evidence) -> tuple[Comparison, ...]:
        """The comparisons of all rules."""
        return tuple(comparison for rule in self.rules for comparison in rule.compare(evidence))

    def words(self) -> str:
        """The rules in words."""
        return "; ".join(rule.words() for rule in self.rules)


def each(arms: Iterable[str], than: str, measure: str = "area", expects: str = "") -> Parts:
    """Each of `arms` against `than`."""
    return Parts(tuple(Compare(arm, than, measure, expects) for arm in arms))
