"""False-alarm rates and power of the verdict rules, by simulation: `python -m
flowrl_bench.calibration`.

Two arms are drawn from the same law of learning curves (or one is shifted), the rules of
`flowrl_bench.verdicts` judge them, and the verdicts are counted. The laws resemble runs of
benchmarks/results/claims-default-settings.jsonl: their rise, their spread over seeds, the
correlation of paired runs (0.3), the noise of an evaluation, and their share of collapses.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl_bench.evidence import Evidence, Line
from flowrl_bench.measurements import CURVE
from flowrl_bench.statistics import SMALLEST
from flowrl_bench.verdicts import (
    ALIKE,
    ALPHA,
    BETTER,
    HOLDS,
    NO_WORSE,
    WORSE,
    Compare,
    Interaction,
    Rule,
    judge,
    judge_family,
)

SEEDS = (3, 5, 10, 15)
EFFECTS = (0.01, 0.02, 0.05, 0.1)
RATIOS = (1.1, 1.25, 1.5, 2.0)
FAMILY = 20
"""Comparisons of the simulated family."""


@dataclass(frozen=True)
class Law:
    """The law of a run's learning curve: a logistic rise from `start` to `top` with its middle at
    update `middle` and scale `width`.

    `middle_sd`, `top_sd`: standard deviations between seeds, of whose variance the fraction
    `shared` is common to the arms. `noise`: standard deviation of an evaluation. `collapses`: the
    probability that the reward falls to 0.05 to 0.5 within 4 updates, at a time between 0.4 of the
    run and its end. `faster`: the factor by which the rise is faster; `shift`: the increase of the
    mean reward over training, in the shape of the rise. `cost_sd`: standard deviation of the
    logarithm of a run's seconds per update.
    """

    start: float
    top: float
    middle: float
    width: float
    middle_sd: float
    top_sd: float
    noise: float
    collapses: float
    updates: int = 40
    every: int = 2
    shared: float = 0.3
    cost_sd: float = 0.05
    faster: float = 1.0
    shift: float = 0.0

    def line(self, common: np.random.Generator, own: np.random.Generator) -> Line:
        """A line with the curve alone. `common` must be in the same state for the arms of a
        seed.
        """
        draws = math.sqrt(self.shared) * common.normal(size=2) + math.sqrt(
            1 - self.shared
        ) * own.normal(size=2)
        at = np.arange(0, self.updates + 1, self.every, dtype=float)
        middle = max(self.width, self.middle + self.middle_sd * draws[0])
        rise = 1 / (1 + np.exp(-(at * self.faster - middle) / self.width)) - 1 / (
            1 + math.exp(middle / self.width)
        )
        rise *= self.top + self.top_sd * draws[1] - self.start
        rewards = self.start + rise
        when = own.uniform(0.4, 1) * self.updates
        if own.random() < self.collapses:
            bottom = own.uniform(0.05, 0.5)
            fallen = np.clip((at - when) / 4, 0, 1)
            rewards = (1 - fallen) * rewards + fallen * np.minimum(rewards, bottom)
        rewards = rewards + self.shift * rise / np.trapezoid(rise, at) * self.updates
        quality = -2.1 - 1.5 * rewards * (1 - rewards) + 0.05 * own.normal(size=len(at))
        rewards[1:] += self.noise * own.normal(size=len(at) - 1)
        seconds = at * math.exp(self.cost_sd * own.normal())
        columns = {
            "iteration": at,
            "nfe": 100 * at,
            "seconds": seconds,
            "soft": rewards,
            "quality": quality,
        }
        unused = np.zeros_like(at)
        return {"curve": np.stack([columns.get(name, unused) for name in CURVE], 1).tolist()}


LAWS: dict[str, Law] = {
    "fast rise to a plateau": Law(0.22, 0.985, 5.0, 0.9, 0.35, 0.008, 0.003, 0.0),
    "slow rise, widely spread": Law(0.22, 1.0, 29.0, 5.0, 3.0, 0.03, 0.008, 0.0),
    "fast rise, 2 in 10 collapse": Law(0.22, 0.985, 7.0, 1.5, 0.6, 0.01, 0.005, 0.2),
    "image world": Law(0.742, 0.905, 10.0, 5.0, 1.3, 0.008, 0.007, 0.0, 36, 4),
}
"""Laws by name; uniform credit is slow, stepwise gains are fast."""


def experiment(seeds: int, seed: int, **arms: Law) -> Evidence:
    """Runs of arms with `seeds` paired seeds."""
    runs: dict[str, dict[str, list[Line]]] = {}
    for place, (arm, law) in enumerate(arms.items()):
        pairs = [
            (np.random.default_rng((seed, run)), np.random.default_rng((seed, run, place + 1)))
            for run in range(seeds)
        ]
        runs[arm] = {"task": [law.line(*pair) for pair in pairs]}
    return Evidence(runs, tuple(range(seeds)))


@dataclass(frozen=True)
class Case:
    """A false alarm: a rule, whether its verdict is wrong, and how the first arm differs from the
    law of the second.
    """

    rule: Rule
    wrong: frozenset[str]
    change: Mapping[str, float]


def _case(
    measure: str = "area",
    expects: str = "",
    wrong: Sequence[str] = (BETTER, WORSE),
    **change: float,
) -> Case:
    return Case(Compare("first", "second", measure, expects), frozenset(wrong), change)


CASES: dict[str, Case] = {
    "better or worse, mean reward over training": _case(),
    "better or worse, final reward": _case("final"),
    "better or worse, mean reward over equal seconds": _case("reward at equal seconds"),
    "better or worse, ratio of updates": _case("updates"),
    "better or worse, ratio of seconds": _case("seconds"),
    "better or worse, collapse rate": _case("collapse"),
    "better or worse, quality at equal reward": _case("quality at equal reward"),
    "better or worse, quality at equal reward, first arm twice as fast": _case(
        "quality at equal reward", faster=2.0
    ),
    "a claim of better holds, arms alike": _case(expects=BETTER, wrong=(HOLDS,)),
    "a claim of no worse holds, truth 0.02 worse": _case(
        expects=NO_WORSE, wrong=(HOLDS,), shift=-SMALLEST
    ),
    "a claim of no difference holds, truth 0.02": _case(
        expects=ALIKE, wrong=(HOLDS,), shift=SMALLEST
    ),
    "no difference that matters, truth 0.02": _case(wrong=(ALIKE,), shift=SMALLEST),
    "a larger lead holds, leads alike": Case(
        Interaction("first", "second", "third", "fourth"), frozenset({HOLDS}), {}
    ),
}
"""Cases in which a verdict would be wrong, by name."""


def alarms(
    cases: Mapping[str, Case], law: Law, seeds: int, experiments: int, seed: int = 0
) -> dict[str, float]:
    """By case, the fraction of experiments with a wrong verdict; cases with the same difference of
    arms share the experiments.
    """
    counts = dict.fromkeys(cases, 0)
    for change in {tuple(case.change.items()) for case in cases.values()}:
        alike = {name: case for name, case in cases.items() if tuple(case.change.items()) == change}
        leads = any(isinstance(case.rule, Interaction) for case in alike.values())
        arms = {"first": replace(law, **dict(change)), "second": law} | (
            {"third": law, "fourth": law} if leads else {}
        )
        for place in range(experiments):
            found = experiment(seeds, seed + place, **arms)
            for name, case in alike.items():
                counts[name] += judge(case.rule, found).verdict in case.wrong
    return {name: count / experiments for name, count in counts.items()}


def family_alarms(law: Law, seeds: int, experiments: int, seed: int = 0) -> float:
    """Fraction of families of `FAMILY` comparisons of equal arms with at least one verdict of
    better or worse.
    """
    names = [f"arm {place}" for place in range(FAMILY + 1)]
    count = 0
    for place in range(experiments):
        found = experiment(seeds, seed + place, **dict.fromkeys(names, law))
        verdicts = judge_family(Compare(name, names[0]).compare(found) for name in names[1:])
        count += any(verdict.verdict in (BETTER, WORSE) for verdict in verdicts)
    return count / experiments


def power(
    rule: Rule, change: Mapping[str, float], law: Law, seeds: int, experiments: int, seed: int = 0
) -> dict[str, float]:
    """By the number of tests in the family, the fraction of experiments whose verdict is better.

    The other tests find nothing, so Holm's correction is that of the smallest p-value.
    """
    arms = {"first": replace(law, **change), "second": law}
    counts = dict.fromkeys((1, FAMILY), 0)
    for place in range(experiments):
        (comparison,) = rule.compare(experiment(seeds, seed + place, **arms))
        for tests in counts:
            counts[tests] += (
                replace(comparison, adjusted=min(1.0, tests * comparison.estimate.p)).size == BETTER
            )
    return {str(tests): count / experiments for tests, count in counts.items()}


def calibrate(experiments: int = 600) -> dict[str, Any]:
    """All rates and powers, as plain data."""
    few = max(50, experiments // 3)
    rates = {
        label: {str(n): alarms(CASES, law, n, experiments) for n in SEEDS}
        for label, law in LAWS.items()
    }
    families = {
        label: {str(n): family_alarms(law, n, few) for n in SEEDS} for label, law in LAWS.items()
    }
    powers = {
        f"{kind} {size:g}": {
            label: {str(n): power(rule, {change: size}, law, n, few) for n in SEEDS}
            for label, law in LAWS.items()
        }
        for kind, rule, change, sizes in (
            ("reward +", Compare("first", "second"), "shift", EFFECTS),
            ("faster by a factor of", Compare("first", "second", "updates"), "faster", RATIOS),
        )
        for size in sizes
    }
    return {
        "experiments": experiments,
        "fewer": few,
        "alpha": ALPHA,
        "false alarms": rates,
        "families": families,
        "power": powers,
    }


def tables(found: Mapping[str, Any]) -> str:
    """The rates as Markdown: the mean and the largest over laws of every false-alarm rate, then the
    power law by law.
    """
    head = " | ".join(f"{n} seeds" for n in SEEDS)
    lines = [
        "# Calibration of the verdict rules",
        "",
        (
            "Made by `python -m flowrl_bench.calibration`. Laws of learning curves:"
            " `flowrl_bench.calibration.LAWS`."
        ),
        "",
        (
            f"False-alarm rate in percent, mean over {len(LAWS)} laws and largest"
            f" ({found['experiments']} experiments per law, {found['fewer']} of the family):"
        ),
        "",
        f"| wrong verdict | {head} |",
        "|---|" + "---|" * len(SEEDS),
    ]
    rates = {
        name: {n: [law[str(n)][name] for law in found["false alarms"].values()] for n in SEEDS}
        for name in CASES
    }
    rates[f"better or worse, any of {FAMILY} comparisons"] = {
        n: [law[str(n)] for law in found["families"].values()] for n in SEEDS
    }
    for name, by_seeds in rates.items():
        cells = [
            f"{100 * float(np.mean(laws)):.1f} ({100 * max(laws):.1f})"
            for laws in by_seeds.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    few = found["fewer"]
    lines += [
        "",
        (
            f"Power in percent to call the first arm better, alone / in a family of {FAMILY} ({few}"
            " experiments each):"
        ),
        "",
    ]
    lines += [f"| effect | law | {head} |", "|---|---|" + "---|" * len(SEEDS)]
    for name, laws in found["power"].items():
        for law, row in laws.items():
            cells = [
                f"{100 * row[str(n)]['1']:.0f} / {100 * row[str(n)][str(FAMILY)]:.0f}"
                for n in SEEDS
            ]
            lines.append(f"| {name} | {law} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write calibration.json and calibration.md to the folder named on the command line, by default
    benchmarks/results.
    """
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    found = calibrate(int(sys.argv[2]) if len(sys.argv) > 2 else 600)
    (folder / "calibration.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "calibration.md").write_text(tables(found))
    print(tables(found))


if __name__ == "__main__":
    main()
