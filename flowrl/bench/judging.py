"""Rules that turn runs into verdicts, fixed before the runs; every line has the digest of the rules
when it was made.

`Compare` compares two arms; `judge_family` corrects the p-values of a family, which determine the
verdicts. A comparison outside a family has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl.bench.evidence import Evidence, column
from flowrl.bench.statistics import SMALLEST, holm, outside
from flowrl.run.statistics import Inference, Values, mean

BETTER, WORSE, ALIKE = "better", "worse", "no difference that matters"
BARELY_BETTER, BARELY_WORSE = "better, by less than matters", "worse, by less than matters"
UNDECIDED, SECONDARY = "undecided at this power", "secondary"
VERDICTS = (BETTER, BARELY_BETTER, ALIKE, BARELY_WORSE, WORSE, UNDECIDED)
ALPHA = 0.025
"""The level of Holm's correction. The t test of few seeds has more false alarms on real learning
curves than its level says; at this one, fewer than 5% of families had any (docs/log.md).
"""
FEWEST = 5
"""Seeds that a verdict needs."""


GAINS = {"mixture": 0.9976 - 0.2070, "shapes": 0.8889 - 0.7272}
"""The possible gain by world: mean final reward of the best known arm (turning points with 40
steps, uniform credit at equal evaluations), minus the reward before training, in an earlier study
(docs/studies.md).
"""


def gain(world: str, evidence: Evidence) -> float:
    """The possible gain: from `GAINS`, else that of the evidence's best arm."""
    if world in GAINS:
        return GAINS[world]
    curves = [[column(run, "soft") for run in runs] for runs in evidence.runs.values()]
    ends = [float(np.mean([curve[-1] for curve in arm])) for arm in curves]
    return max(ends) - float(np.mean([curve[0] for arm in curves for curve in arm]))


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    `estimate`: with the p-value of no difference. `outside`: the p-value of a difference of at
    least the margin. `won`: fraction of seeds at which the first arm is better, ties count a half.
    `adjusted`: both p-values after the family's correction; None: not in a family.
    """

    estimate: Inference
    outside: float
    won: float
    adjusted: tuple[float, float] | None = None

    @staticmethod
    def of(differences: Values, margin: float) -> "Comparison":
        """The comparison of two arms by their `differences` [seed]. With fewer than `FEWEST` seeds
        the p-values are NaN.
        """
        estimate, out = mean(differences), math.nan
        if len(differences) < FEWEST:
            estimate = replace(estimate, p=math.nan)
        else:
            out = outside(lambda null: mean(differences, null), margin)
        won = np.mean((differences > 0) + 0.5 * (differences == 0))
        return Comparison(estimate, out, float(won))

    @property
    def p(self) -> float:
        """The corrected p-value of no difference; NaN outside a family and with too few seeds."""
        return self.adjusted[0] if self.adjusted else math.nan

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`, or `SECONDARY`."""
        if self.adjusted is None:
            return SECONDARY
        differs, within = (p < ALPHA for p in self.adjusted)
        if not differs:
            return ALIKE if within else UNDECIDED
        if self.estimate.value > 0:
            return BARELY_BETTER if within else BETTER
        return BARELY_WORSE if within else WORSE


def judge_family(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with verdicts.

    Holm's correction covers both p-values of all comparisons, so that the probability of any wrong
    label in the family is bounded. With fewer than `FEWEST` seeds p-values are NaN.
    """
    corrected = holm([c.estimate.p for c in comparisons] + [c.outside for c in comparisons])
    pairs = zip(corrected[: len(comparisons)], corrected[len(comparisons) :], strict=True)
    return [replace(c, adjusted=pair) for c, pair in zip(comparisons, pairs, strict=True)]


@dataclass(frozen=True)
class Compare:
    """`arm` against `than` by `measure`, a reward."""

    arm: str
    than: str
    measure: str = "area"

    def compare(self, evidence: Evidence, gain: float) -> Comparison:
        """Compare paired seeds; `gain`: the possible gain in the world."""
        differences = evidence.differences(self.arm, self.than, self.measure)
        return Comparison.of(differences, SMALLEST * gain)
