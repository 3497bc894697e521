"""Rules that turn runs into verdicts. They are fixed before the runs; every line has the digest of the rules it was made under.

HOLDS and FAILS need the whole 95% interval on one side; everything else is undecided.
"""

from dataclasses import dataclass, field
from typing import Protocol

from flowrl_bench.evidence import MEASURES, Evidence
from flowrl_bench.statistics import Estimate, difference, improvement, level

HOLDS = "holds here"
FAILS = "does not hold here"
UNDECIDED = "undecided at this power"
BETTER, WORSE, ALIKE = "better", "worse", "no difference that matters"


@dataclass(frozen=True)
class Comparison:
    """One comparison behind a verdict: the measure of some arms, with its interval.

    `arms` names one arm or a difference ("a minus b", if `difference`); `note` follows the measure's label. `probability` is
    P(a run of the first arm beats one of the second), for differences of two arms.
    """

    arms: str
    measure: str
    estimate: Estimate
    verdict: str
    probability: Estimate | None = None
    difference: bool = True
    note: str = ""

    @property
    def label(self) -> str:
        """The measure in words."""
        return MEASURES[self.measure].label + self.note

    @property
    def text(self) -> str:
        """Arms and measure in words."""
        return f"{self.arms}: {self.label}"


@dataclass(frozen=True)
class Verdict:
    """The verdict and all comparisons behind it."""

    verdict: str
    comparisons: tuple[Comparison, ...]

    @property
    def main(self) -> Comparison:
        """The comparison that decided: the first that has the verdict, else the first."""
        return next((c for c in self.comparisons if c.verdict == self.verdict), self.comparisons[0])


class Rule(Protocol):
    """From runs to a verdict."""

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict and the comparisons behind it."""
        ...

    def words(self) -> str:
        """The rule in words."""
        ...


def _compare(evidence: Evidence, arm: str, than: str, measure: str) -> tuple[Estimate, Estimate]:
    """(paired difference so that more is better, probability of improvement)."""
    mine, theirs = evidence.values(arm, measure, than), evidence.values(than, measure, than)
    if not MEASURES[measure].higher:
        mine, theirs = [-m for m in mine], [-t for t in theirs]
    return difference(mine, theirs), improvement(mine, theirs)


def _all(verdicts: list[str]) -> str:
    return FAILS if FAILS in verdicts else HOLDS if all(v == HOLDS for v in verdicts) else UNDECIDED


@dataclass(frozen=True)
class Beats:
    """`arm` is better than `than` by `measure`. Holds: the interval of the difference is above 0; fails: below `least`."""

    arm: str
    than: str
    measure: str = "area"
    least: float = 0.01

    def judge(self, evidence: Evidence) -> Verdict:
        """See the class."""
        found, chance = _compare(evidence, self.arm, self.than, self.measure)
        verdict = HOLDS if found.low > 0 else FAILS if found.high < self.least else UNDECIDED
        note = "" if MEASURES[self.measure].higher else " (sign reversed: less is better)"
        return Verdict(verdict, (Comparison(f"{self.arm} minus {self.than}", self.measure, found, verdict, chance, note=note),))

    def words(self) -> str:
        """The rule in words."""
        label = MEASURES[self.measure].label
        return f"holds if {self.arm} beats {self.than} by more than 0 ({label}), fails if by less than {self.least:g}"


@dataclass(frozen=True)
class NoWorse:
    """`arm` loses at most `margin` against `than`. Holds: the interval is above -margin; fails: below it."""

    arm: str
    than: str
    measure: str = "area"
    margin: float = 0.02

    def judge(self, evidence: Evidence) -> Verdict:
        """See the class."""
        found, chance = _compare(evidence, self.arm, self.than, self.measure)
        verdict = HOLDS if found.low > -self.margin else FAILS if found.high < -self.margin else UNDECIDED
        return Verdict(verdict, (Comparison(f"{self.arm} minus {self.than}", self.measure, found, verdict, chance),))

    def words(self) -> str:
        """The rule in words."""
        return f"holds if {self.arm} loses at most {self.margin:g} against {self.than} ({MEASURES[self.measure].label})"


@dataclass(frozen=True)
class Alike:
    """All `arms` are within `margin` of the first by `measure`."""

    arms: tuple[str, ...]
    measure: str = "area"
    margin: float = 0.02

    def judge(self, evidence: Evidence) -> Verdict:
        """Holds: every interval lies within +-margin; fails: one lies outside."""
        shown = []
        for arm in self.arms[1:]:
            found, chance = _compare(evidence, arm, self.arms[0], self.measure)
            inside = found.low > -self.margin and found.high < self.margin
            outside = found.high < -self.margin or found.low > self.margin
            verdict = HOLDS if inside else FAILS if outside else UNDECIDED
            shown.append(Comparison(f"{arm} minus {self.arms[0]}", self.measure, found, verdict, chance))
        return Verdict(_all([c.verdict for c in shown]), tuple(shown))

    def words(self) -> str:
        """The rule in words."""
        return f"holds if all of {', '.join(self.arms)} lie within {self.margin:g} of the first ({MEASURES[self.measure].label})"


@dataclass(frozen=True)
class Needs:
    """`arm` needs at most the fraction `at_most` of the budget of `of` (`axis`: updates, nfe or seconds) for its final reward."""

    arm: str
    of: str
    axis: str = "updates"
    at_most: float = 1.0

    def judge(self, evidence: Evidence) -> Verdict:
        """Holds: the interval of the budget ratio is below `at_most`; fails: above it."""
        found = evidence.budget_ratio(self.arm, self.axis, self.of)
        verdict = HOLDS if found.high < self.at_most else FAILS if found.low > self.at_most else UNDECIDED
        return Verdict(verdict, (Comparison(self.arm, self.axis, found, verdict, difference=False, note=f" ({self.of})"),))

    def words(self) -> str:
        """The rule in words."""
        return f"holds if {self.arm} needs less than {self.at_most:g} of the {self.axis} of {self.of} for the same final reward"


@dataclass(frozen=True)
class Best:
    """`arm` is better than every one of `others`."""

    arm: str
    others: tuple[str, ...]
    measure: str = "area"

    def judge(self, evidence: Evidence) -> Verdict:
        """Holds: better than each; fails: worse than one."""
        shown = []
        for other in self.others:
            found, chance = _compare(evidence, self.arm, other, self.measure)
            verdict = HOLDS if found.low > 0 else FAILS if found.high < 0 else UNDECIDED
            shown.append(Comparison(f"{self.arm} minus {other}", self.measure, found, verdict, chance))
        return Verdict(_all([c.verdict for c in shown]), tuple(shown))

    def words(self) -> str:
        """The rule in words."""
        label = MEASURES[self.measure].label
        return f"holds if {self.arm} beats each of {', '.join(self.others)}, fails if one beats it ({label})"


@dataclass(frozen=True)
class Above:
    """`measure` of `arm` is above `threshold`."""

    arm: str
    measure: str
    threshold: float = 0.0

    def judge(self, evidence: Evidence) -> Verdict:
        """Holds: the interval is above; fails: below."""
        found = level(evidence.values(self.arm, self.measure))
        verdict = HOLDS if found.low > self.threshold else FAILS if found.high < self.threshold else UNDECIDED
        return Verdict(verdict, (Comparison(self.arm, self.measure, found, verdict, difference=False),))

    def words(self) -> str:
        """The rule in words."""
        return f"holds if for {self.arm} {MEASURES[self.measure].label} is above {self.threshold:g}"


@dataclass(frozen=True)
class WidensBy:
    """The lead of `arm` over `than` is larger than that of `other` over `other_than`, by `measure`."""

    arm: str
    than: str
    other: str
    other_than: str
    measure: str = "area"
    least: float = 0.01

    def judge(self, evidence: Evidence) -> Verdict:
        """As `Beats`, for the difference of the two paired differences."""
        values = [evidence.values(name, self.measure) for name in (self.arm, self.than, self.other, self.other_than)]
        first = [a - b for a, b in zip(values[0], values[1], strict=True)]
        second = [a - b for a, b in zip(values[2], values[3], strict=True)]
        found = difference(first, second)
        verdict = HOLDS if found.low > 0 else FAILS if found.high < self.least else UNDECIDED
        arms = f"({self.arm} minus {self.than}) minus ({self.other} minus {self.other_than})"
        return Verdict(verdict, (Comparison(arms, self.measure, found, verdict),))

    def words(self) -> str:
        """The rule in words."""
        return f"holds if {self.arm} gains more over {self.than} than {self.other} over {self.other_than}"


@dataclass(frozen=True)
class All:
    """Every one of `rules`: holds if all hold, fails if one fails."""

    rules: tuple[Rule, ...] = field(default_factory=tuple)

    def judge(self, evidence: Evidence) -> Verdict:
        """See the class."""
        found = [rule.judge(evidence) for rule in self.rules]
        return Verdict(_all([f.verdict for f in found]), tuple(c for f in found for c in f.comparisons))

    def words(self) -> str:
        """The rules in words."""
        return "; and ".join(rule.words() for rule in self.rules)


@dataclass(frozen=True)
class Answer:
    """An open question: each of `arms` against `than`. Better, worse, alike (within `margin`) or undecided.

    The verdict is that of the first arm; all are shown.
    """

    arms: tuple[str, ...]
    than: str
    measure: str = "area"
    margin: float = 0.02

    def judge(self, evidence: Evidence) -> Verdict:
        """Alike: the interval lies within +-margin; else better (worse): it lies above (below) 0."""
        shown = []
        for arm in self.arms:
            found, chance = _compare(evidence, arm, self.than, self.measure)
            alike = found.low > -self.margin and found.high < self.margin
            verdict = ALIKE if alike else BETTER if found.low > 0 else WORSE if found.high < 0 else UNDECIDED
            shown.append(Comparison(f"{arm} minus {self.than}", self.measure, found, verdict, chance))
        return Verdict(shown[0].verdict, tuple(shown))

    def words(self) -> str:
        """The rule in words."""
        return f"{', '.join(self.arms)} against {self.than} ({MEASURES[self.measure].label}); alike means within {self.margin:g}"
