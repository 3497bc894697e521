"""False-alarm rates and power of the verdict rules on resampled runs: `python -m
flowrl_bench.calibration`.

A pool is the finished runs of one arm, collapses included. In a simulated family, a baseline and
`FAMILY` arms draw their seeds from the same pool; a pair never has the same run twice, so that the
arms differ by chance only. A known difference is then added, the rules judge the family, and wrong
verdicts are counted.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flowrl_compare.statistics import Inference, Values
from scipy import special

from flowrl_bench.arms import TASKS
from flowrl_bench.catalogue import RETIRED
from flowrl_bench.claims import EQUAL_EVALUATIONS, SEEDS
from flowrl_bench.evidence import MEASURES, RATE, REWARD, SMALLEST_OF, Line
from flowrl_bench.leads import LEADS, UNIFORM
from flowrl_bench.results_file import Lines, ResultsFile
from flowrl_bench.suite import claim_runs
from flowrl_bench.verdicts import (
    ALIKE,
    ALPHA,
    BARELY_BETTER,
    BARELY_WORSE,
    BETTER,
    GAINS,
    UNDECIDED,
    VERDICTS,
    WORSE,
    Comparison,
    judge_family,
)

FAMILY, COUNTS = 20, (5, 10, 15)
"""Comparisons of a family, and numbers of seeds."""
ARMS = {
    "mixture": (
        UNIFORM,
        EQUAL_EVALUATIONS,
        "stepwise gains",
        "turning points",
        "increments alone",
        "noise-weighted",
        "branch-grpo",
        "tree-grpo",
        "tempflow-grpo",
        "granular-grpo",
        "diffusion-nft",
    ),
    "shapes": (UNIFORM, "stepwise gains", "turning points", "diffusion-nft"),
}
"""The arms whose runs are pools."""
OTHER = ("collapse", "quality at equal reward")
"""Further measures of primary outcomes, besides rewards; pools of uniform credit and granular-grpo
in the 2-D world.
"""
EFFECTS = (1.0, 2.0, 4.0)
"""Differences whose power is measured, in margins."""
DROP = 0.3
"""Loss of a collapse in the simulation of rare ones."""


@dataclass(frozen=True)
class Pool:
    """Differences between any two runs of an arm, [run, run], by a measure. `margin`: the smallest
    difference that matters. `events`: of a rate, [run].
    """

    world: str
    task: str
    arm: str
    measure: str
    margin: float
    differences: Values
    events: Values | None = None

    def family(
        self,
        seeds: int,
        shifts: Sequence[float],
        generator: np.random.Generator,
        rare: float = 0.0,
    ) -> list[Comparison]:
        """A family's comparisons, not yet judged: as many as `shifts`, which are the true
        differences. `rare`: the probability that a run of an arm loses `DROP`.
        """
        runs, shape = len(self.differences), (len(shifts), seeds)
        base = generator.integers(0, runs, (1, seeds))
        arms = (base + generator.integers(1, runs, shape)) % runs
        true = np.asarray(shifts)[:, None]
        if self.events is None:
            lost = DROP * (generator.random(shape) < rare)
            differences = self.differences[arms, base] + true - lost
            return comparisons(differences, self.margin, self.measure)
        # a rate rises or falls by exactly the shift: some runs change sides
        rate, first = self.events.mean(), self.events[arms]
        room = np.where(true > 0, 1 - rate, max(rate, 1e-9))
        moved = generator.random(shape) < np.abs(true) / room
        first = np.where(moved, true > 0, first)
        return rate_comparisons(first, np.broadcast_to(self.events[base], shape), self.margin)

    @property
    def name(self) -> dict[str, str]:
        """World, task, arm and measure."""
        return {"world": self.world, "task": self.task, "arm": self.arm, "measure": self.measure}


def comparisons(differences: Values, margin: float, measure: str) -> list[Comparison]:
    """One per row of [comparison, seed], with the p-values of `verdicts.Compare`."""
    freedom = differences.shape[1] - 1
    means = differences.mean(1)
    errors = np.maximum(differences.std(1, ddof=1) / np.sqrt(freedom + 1), 1e-15)
    equal = 2 * special.stdtr(freedom, -np.abs(means) / errors)
    beyond = special.stdtr(freedom, (np.abs(means) - margin) / errors)
    return _made(measure, means, equal, beyond)


def rate_comparisons(first: Values, second: Values, margin: float) -> list[Comparison]:
    """One per row of Booleans [comparison, seed], with the p-values of `verdicts.Compare`."""
    count = first.shape[1] + 2
    more = ((first > second).sum(1) + 1) / count
    less = ((first < second).sum(1) + 1) / count
    centres = more - less
    errors = np.sqrt((more + less - centres**2) / count)
    equal = 2 * special.ndtr(-np.abs(centres) / errors)
    beyond = special.ndtr((np.abs(centres) - margin) / errors)
    return _made("collapse", first.mean(1) - second.mean(1), equal, beyond)


def _made(measure: str, values: Values, equal: Values, beyond: Values) -> list[Comparison]:
    return [
        Comparison("", measure, Inference(value, value, value, p), q)
        for value, p, q in zip(values.tolist(), equal.tolist(), beyond.tolist(), strict=True)
    ]


def pools(lines: Lines) -> Iterator[Pool]:
    """The pools of a results file: mean reward over training of every task and arm of `ARMS`, and
    the measures of `OTHER`.
    """
    for world, names in ARMS.items():
        for name in names:
            claim = next(
                c for c in (*LEADS, *RETIRED.values()) if name in c.arms and world in c.worlds
            )
            runs = claim_runs(claim, world, lines, SEEDS[world]).lines[name]
            for task in TASKS[world]:
                made, size = list(runs[task].values()), GAINS[world, task].size
                yield pool(world, task, name, "area", made, size)
                if world == "mixture" and name in (UNIFORM, "granular-grpo"):
                    for measure in OTHER:
                        yield pool(world, task, name, measure, made, size)


def pool(
    world: str, task: str, arm: str, measure: str, runs: Sequence[Line], gain: float = 1.0
) -> Pool:
    """The pool of an arm's runs by a measure."""
    kind = MEASURES[measure]
    margin = SMALLEST_OF[kind.unit] * (gain if kind.unit == REWARD else 1.0)
    if kind.between is not None:
        table = np.array([[kind.between(a, b) for b in runs] for a in runs])
        return Pool(world, task, arm, measure, margin, table)
    assert kind.of is not None
    values = np.array([kind.of(run) for run in runs])
    events = values if kind.unit == RATE else None
    return Pool(world, task, arm, measure, margin, np.subtract.outer(values, values), events)


TRUTHS = ("alike", "at the margin", "half of each")


def shifts(truth: str, margin: float, generator: np.random.Generator) -> Values:
    """The true differences of a family."""
    differences = margin * generator.choice([-1.0, 1.0], FAMILY)
    differences[: {"alike": FAMILY, "at the margin": 0, "half of each": FAMILY // 2}[truth]] = 0.0
    return differences


def wrong(comparison: Comparison, shift: float) -> bool:
    """Whether a verdict contradicts a true difference of 0, or of the margin in either
    direction.
    """
    if comparison.verdict == UNDECIDED:
        return False
    if shift == 0:
        return comparison.verdict != ALIKE
    up = (shift > 0) == MEASURES[comparison.measure].higher
    return comparison.verdict != (BETTER if up else WORSE)


def alarms(chosen: Pool, seeds: int, truth: str, experiments: int, seed: int = 0) -> dict[str, Any]:
    """Fractions of families with a wrong verdict, by its word and of any word, and the fraction of
    comparisons with any verdict.
    """
    generator = np.random.default_rng(seed)
    counts: dict[str, int] = dict.fromkeys((*VERDICTS, "any"), 0)
    decided = 0
    for _ in range(experiments):
        true = shifts(truth, chosen.margin, generator)
        family = judge_family(chosen.family(seeds, true.tolist(), generator))
        false = {c.verdict for c, s in zip(family, true, strict=True) if wrong(c, float(s))}
        for label in (*false, *(("any",) if false else ())):
            counts[label] += 1
        decided += sum(c.verdict != UNDECIDED for c in family)
    rates = {label: count / experiments for label, count in counts.items() if label != UNDECIDED}
    return {
        **chosen.name,
        "seeds": seeds,
        "truth": truth,
        **rates,
        "decided": decided / experiments / FAMILY,
    }


def power(chosen: Pool, seeds: int, effect: float, experiments: int) -> float:
    """The probability that a difference of `effect` margins is called better, if the other arms of
    the family are alike.
    """
    generator, called = np.random.default_rng(1), 0
    true = [effect * chosen.margin] + [0.0] * (FAMILY - 1)
    for _ in range(experiments):
        first = judge_family(chosen.family(seeds, true, generator))[0]
        called += first.verdict in (BETTER, BARELY_BETTER)
    return called / experiments


def rare(chosen: Pool, seeds: int, experiments: int) -> float:
    """Fraction of comparisons that find no difference, or less than one that matters, although one
    arm collapses so often that it loses the margin.
    """
    generator, called = np.random.default_rng(2), 0
    for _ in range(experiments):
        family = chosen.family(seeds, [0.0] * FAMILY, generator, chosen.margin / DROP)
        called += sum(c.verdict in (ALIKE, BARELY_WORSE) for c in judge_family(family))
    return called / experiments / FAMILY


def calibrate(lines: Lines, experiments: int, command: str) -> dict[str, Any]:
    """All rates, as plain data."""
    known, few = list(pools(lines)), max(20, experiments // 10)
    rewards = [pool for pool in known if pool.measure == "area"]
    chosen = {
        f"{pool.world}, {pool.task}, {pool.arm}": pool
        for pool in rewards
        if pool.arm in (UNIFORM, "turning points")
    }
    steady = chosen["mixture, direction, turning points"]
    return {
        "command": command,
        "experiments": experiments,
        "fewer": few,
        "alpha": ALPHA,
        "family": FAMILY,
        "families": [
            alarms(pool, n, truth, experiments)
            for pool in known
            for n in COUNTS
            for truth in TRUTHS
        ],
        "power": [
            {"pool": name, "seeds": n, **{f"{e:g}": power(pool, n, e, few) for e in EFFECTS}}
            for name, pool in chosen.items()
            for n in COUNTS
        ],
        "rare collapses": {str(n): rare(steady, n, few) for n in COUNTS},
    }


def tables(results: Mapping[str, Any]) -> str:
    """The rates as Markdown."""
    size, rows = results["family"], results["families"]
    labels = [label for label in VERDICTS if label != UNDECIDED]
    error = 100 * (0.05 * 0.95 / results["experiments"]) ** 0.5
    lines = [
        "# Calibration of the verdict rules",
        "",
        f"Made by `{results['command']}`. Families of {size} comparisons, runs resampled from one"
        f" arm ({results['experiments']} families per cell; standard error {error:.1f} percentage"
        f" points at 5%). Level of Holm's correction: {results['alpha']:g}.",
        "",
        "Families with at least one wrong verdict, in percent: mean over pools, and the largest.",
        "",
        f"| truth | measure | seeds | pools | {' | '.join(labels)} | any | comparisons decided |",
        "|---|---|---|---|" + "---|" * (len(labels) + 2),
    ]
    keys = dict.fromkeys((row["truth"], row["measure"], row["seeds"]) for row in rows)
    for key in keys:
        cell = [r for r in rows if (r["truth"], r["measure"], r["seeds"]) == key]
        numbers = [_percent([r[label] for r in cell]) for label in (*labels, "any")]
        decided = f"{100 * float(np.mean([r['decided'] for r in cell])):.0f}"
        words = (key[0], MEASURES[key[1]].label, str(key[2]), str(len(cell)))
        lines.append(f"| {' | '.join((*words, *numbers, decided))} |")
    lines += [
        "",
        f"Any wrong verdict in a family by pool, in percent, for {' / '.join(map(str, COUNTS))}"
        " seeds:",
        "",
        f"| world | task | arm | measure | {' | '.join(TRUTHS)} |",
        "|---|---|---|---|" + "---|" * len(TRUTHS),
    ]
    names = ("world", "task", "arm", "measure")
    for name in dict.fromkeys(tuple(row[n] for n in names) for row in rows):
        mine = [r for r in rows if tuple(r[n] for n in names) == name]
        cells = [
            " / ".join(f"{100 * r['any']:.1f}" for r in mine if r["truth"] == t) for t in TRUTHS
        ]
        lines.append(f"| {' | '.join((*name, *cells))} |")
    effects = [f"{effect:g}" for effect in EFFECTS]
    lines += [
        "",
        f"Power in percent to call one arm better, the other {size - 1} alike ({results['fewer']}"
        " families; differences in margins):",
        "",
        f"| pool | seeds | {' | '.join(effects)} |",
        "|---|---|" + "---|" * len(effects),
    ]
    for row in results["power"]:
        cells = [f"{100 * row[effect]:.0f}" for effect in effects]
        lines.append(f"| {row['pool']} | {row['seeds']} | {' | '.join(cells)} |")
    rates = ", ".join(f"{n} seeds {100 * r:.0f}%" for n, r in results["rare collapses"].items())
    lines += [
        "",
        f"Limit: a copy of turning points in the 2-D world that loses {DROP} in rare"
        " collapses, and so"
        f" exactly the margin on average, is called without a difference that matters: {rates} of"
        " the comparisons in families of 20 such copies. Some samples of so few seeds contain no"
        " collapse.",
    ]
    return "\n".join(lines) + "\n"


def _percent(rates: Sequence[float]) -> str:
    return f"{100 * float(np.mean(rates)):.1f} ({100 * max(rates):.1f})"


def main() -> None:
    """Write calibration.json and calibration.md to the folder of results named on the command line,
    by default benchmarks/results; then the number of families.
    """
    folder = sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results"
    experiments = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    lines = ResultsFile(Path(folder) / "claims.jsonl").read(any_code=True)
    command = f"python -m flowrl_bench.calibration {folder} {experiments}"
    results = calibrate(lines, experiments, command)
    Path(folder, "calibration.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(folder, "calibration.md").write_text(tables(results))
    print(tables(results))


if __name__ == "__main__":
    main()
