"""The main comparison: what an arm pays to reach Flow-GRPO's result, and questions that were fixed
before the runs, with their verdicts.

The result of Flow-GRPO in a task is its mean final reward. The cost of an arm until it is a
multiple of Flow-GRPO's own, over several tasks the geometric mean (`flowrl.compare.target`).

An outcome of a question is the difference of two arms in mean held-out reward over training, up to
the budget that both have spent, as a fraction of what can be gained in the task. It is averaged
over the tasks of a world within each seed; the seed is the unit. What can be gained is the highest
mean final reward of an arm minus the mean reward before training. The smallest difference that
matters is `SMALLEST` of it, in both directions. Holm's correction covers both p-values of all
`QUESTIONS` of a world (`flowrl.bench.judging`); all other outcomes are secondary.

In the 2-D world every arm is tuned in every task, with 24 runs of 20 iterations. On images every
arm is tuned in the task compositional, with 12 runs of 12 iterations, and has these numbers in all
three tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from flowrl.bench.evidence import column, curves, fell, mean_reward, reward_at_equal, spent
from flowrl.bench.judging import Comparison, judge_family
from flowrl.bench.results_file import Lines
from flowrl.bench.statistics import SMALLEST
from flowrl.bench.verdict_runs import FORM, ORACLE, UNIFORM
from flowrl.compare.target import CostRatio, Curves, cost_ratio
from flowrl.run.statistics import Estimate, Values, mean

PER_UPDATE, PER_EVALUATION, PER_SECOND = BUDGETS = ("updates", "forwards", "stated seconds")
"""Budgets at which arms are compared (`flowrl.bench.evidence.spent`); seconds are those of
SD3.5-Medium (`flowrl.run.costs`).
"""
POINTS = "turning points"


@dataclass(frozen=True)
class Question:
    """Does `arm` lead `than`, at the same budget?"""

    arm: str
    budget: str = PER_SECOND
    than: str = UNIFORM


QUESTIONS = (
    Question(ORACLE, PER_UPDATE),
    Question("stepwise gains", PER_UPDATE),
    Question(POINTS, PER_UPDATE),
    Question("calibrated values", PER_UPDATE),
    Question(POINTS, PER_UPDATE, "turning points at random steps"),
    *map(
        Question,
        (
            "uniform, larger groups",
            "noise-weighted",
            "stepwise gains",
            POINTS,
            "increments alone",
            "calibrated values",
            "tempflow-grpo",
            "rsm",
            "branch-grpo",
            "tree-grpo",
            "diffusion-nft",
            "dgpo",
            "v-grpo",
            "fdfo",
            "epg",
        ),
    ),
)
"""The questions with a verdict. Per update: what a rule of credit learns from as many samples. Per
second: whether it pays. On images there is no arm with exact values.
"""

CONTROLS = (
    Question("branch-grpo", PER_SECOND, "uniform, 8 groups"),
    Question("tree-grpo", PER_SECOND, "uniform, 10 groups"),
    Question("tempflow-grpo", PER_SECOND, "uniform, 6 groups"),
    Question("rsm", PER_SECOND, "uniform, 6 groups"),
    Question("uniform, 10 groups"),
    Question("uniform, 8 groups"),
    Question("uniform, 6 groups"),
    Question(POINTS, PER_SECOND, "uniform, larger groups"),
    Question("increments alone", PER_SECOND, "uniform, larger groups"),
    Question(POINTS, PER_UPDATE, "turning points, not the first"),
)
"""Secondary, and asked after the first runs in two dimensions had been seen, but the last: is an
arm better than uniform credit whose updates are about as cheap, or as dear? Of 16 groups, 8 cost as
much as the trees of BranchGRPO, 10 as those of TreeGRPO, and 6 as the combs of TempFlow-GRPO and
RSM.
"""


@dataclass(frozen=True)
class Summary:
    """An arm in one task or averaged over tasks: its mean held-out reward over training and its
    final one, the collapsed runs, its cost until the result of uniform credit by budget, its lead
    over it, as fractions of what can be gained, and the cost of an update as a multiple of that of
    uniform credit.
    """

    mean: float
    final: float
    collapses: int
    runs: int
    ratios: Mapping[str, CostRatio]
    leads: Mapping[str, Estimate]
    costs: Mapping[str, float]


class Verdicts:
    """The outcomes of a campaign from its finished runs: `pairs[task]` has the lines of a seed by
    arm.
    """

    def __init__(self, pairs: Mapping[str, Sequence[Lines]]) -> None:
        self.pairs = {task: list(lines) for task, lines in pairs.items() if lines}
        first = next(iter(self.pairs.values()))
        self.seeds = min(len(lines) for lines in self.pairs.values())
        self.arms = list(first[0])
        self._known: dict[tuple[str, ...], Curves] = {}
        self.gains = {task: self._gain(lines) for task, lines in self.pairs.items()}

    def _gain(self, pairs: Sequence[Lines]) -> float:
        """What can be gained in a task."""
        finals = [fmean(column(pair[arm], FORM)[-1] for pair in pairs) for arm in self.arms]
        return max(finals) - fmean(column(pair[UNIFORM], FORM)[0] for pair in pairs)

    def differences(self, arm: str, than: str, budget: str, tasks: Sequence[str] = ()) -> Values:
        """[seed]: `arm` minus `than`, averaged over tasks, in fractions of what can be gained."""
        difference = reward_at_equal(budget, FORM)
        rows = [
            [difference(pair[arm], pair[than]) / self.gains[task] for pair in lines]
            for task, lines in self.pairs.items()
            if not tasks or task in tasks
        ]
        return np.array([row[: self.seeds] for row in rows]).mean(0)

    def ratio(self, arm: str, budget: str, tasks: Sequence[str] = ()) -> CostRatio:
        """The cost of an arm until the result of uniform credit, divided by that of uniform
        credit; over several tasks the geometric mean.
        """
        return cost_ratio(
            [
                (self._curves(task, arm, budget), self._curves(task, UNIFORM, budget))
                for task in self.pairs
                if not tasks or task in tasks
            ]
        )

    def _curves(self, *key: str) -> Curves:
        task, arm, budget = key
        if key not in self._known:
            lines = [pair[arm] for pair in self.pairs[task][: self.seeds]]
            self._known[key] = curves(lines, budget, FORM)
        return self._known[key]

    def lead(self, arm: str, than: str, budget: str, tasks: Sequence[str] = ()) -> Estimate:
        """The mean of `differences` with its interval."""
        return mean(self.differences(arm, than, budget, tasks))

    def answers(self) -> list[tuple[Question, Comparison]]:
        """The questions whose arms have runs, with verdicts."""
        asked = [question for question in QUESTIONS if question.arm in self.arms]
        return [*zip(asked, judge_family([self._compare(q) for q in asked]), strict=True)]

    def controls(self) -> list[tuple[Question, Comparison]]:
        """The secondary questions, without verdicts."""
        asked = (q for q in CONTROLS if {q.arm, q.than} <= set(self.arms))
        return [(question, self._compare(question)) for question in asked]

    def _compare(self, question: Question) -> Comparison:
        values = self.differences(question.arm, question.than, question.budget)
        return Comparison.of(values, SMALLEST)

    def arm(self, name: str, tasks: Sequence[str] = ()) -> Summary:
        """The numbers of an arm."""
        chosen = [lines for task, lines in self.pairs.items() if not tasks or task in tasks]
        curves = [[column(pair[name], FORM) for pair in lines] for lines in chosen]

        def cost(budget: str) -> float:
            spending = (
                [sum(spent(pair[arm], budget)[-1] for pair in lines) for lines in chosen]
                for arm in (name, UNIFORM)
            )
            return fmean(a / b for a, b in zip(*spending, strict=True))

        return Summary(
            mean=fmean(fmean(mean_reward(pair[name], FORM) for pair in lines) for lines in chosen),
            final=fmean(fmean(run[-1] for run in runs) for runs in curves),
            collapses=sum(fell(run) for runs in curves for run in runs),
            runs=sum(map(len, curves)),
            ratios={budget: self.ratio(name, budget, tasks) for budget in BUDGETS},
            leads={budget: self.lead(name, UNIFORM, budget, tasks) for budget in BUDGETS},
            costs={budget: cost(budget) for budget in (PER_EVALUATION, PER_SECOND)},
        )
