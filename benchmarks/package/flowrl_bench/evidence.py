"""Numbers computed from finished runs, on which verdicts are based."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flowrl_compare.costs import COUNTS, STATED, STATED_NAME, prices_of
from flowrl_compare.results import differing, without_groups
from flowrl_compare.statistics import Values, collapsed

from flowrl.core.errors import ConfigError, FlowrlError
from flowrl.training.config import RunConfig
from flowrl.training.plan import plan
from flowrl_bench.digest import OWN_RULES, config_id
from flowrl_bench.measurements import CURVE
from flowrl_bench.statistics import (
    SMALLEST,
    SMALLEST_DENSITY,
    SMALLEST_RATE,
    SMALLEST_RATIO,
    Curve,
    Passage,
    first_passage,
    mean_until,
    shift_at_equal_reward,
)

Line = Mapping[str, Any]
REWARD, DENSITY, BUDGET, RATE, OTHER = "reward", "log-density", "ratio of budgets", "rate", ""
SMALLEST_OF: dict[str, float] = {
    REWARD: SMALLEST,
    DENSITY: SMALLEST_DENSITY,
    RATE: SMALLEST_RATE,
    BUDGET: math.log(SMALLEST_RATIO),
    OTHER: 0.0,
}
"""The smallest effect of interest by unit (for ratios of budgets, of their logarithm); 0: none."""


def column(line: Line, name: str) -> list[float]:
    """A column of the learning curve; the reward for a form that the run's world does not have."""
    if name in CURVE[5:8] and all(row[CURVE.index(name)] is None for row in line["curve"]):
        name = "reward"
    index = CURVE.index(name)
    return [math.nan if row[index] is None else float(row[index]) for row in line["curve"]]


def counts(line: Line) -> list[dict[str, float]]:
    """The `COUNTS` so far at each evaluation.

    Lines of older versions have `nfe` and `train_nfe` alone. The fraction of `train_nfe` with a
    gradient then follows from the settings, decodes and reward calls grow in proportion to `nfe`,
    and probes remain a part of sampling.
    """
    if CURVE.index(COUNTS[-1]) < len(line["curve"][-1]):
        return [dict(zip(CURVE, row, strict=True)) for row in line["curve"]]
    totals, share = line["totals"], 1.0
    if "config" in line:
        settings = {name: value for name, value in line["config"].items() if name != "seed"}
        share = gradient_share(json.dumps(settings, sort_keys=True))
    scored = totals.get("reward_calls", 0.0) / (totals["nfe"] or 1.0)
    return [
        {
            "nfe": nfe,
            "train_nfe": train,
            "gradient_nfe": share * train,
            "reward_calls": scored * nfe,
        }
        for nfe, train in zip(column(line, "nfe"), column(line, "train_nfe"), strict=True)
    ]


@cache
def gradient_share(settings: str) -> float:
    """The planned fraction of the update's evaluations with a gradient; 1 if it is unknown."""
    with suppress(FlowrlError):
        planned = plan(RunConfig.from_dict(json.loads(settings)).in_own_words(*OWN_RULES))
        return planned.gradient_nfe / (planned.train_nfe or 1.0)
    return 1.0


def spent(line: Line, axis: str) -> list[float]:
    """The budget at each evaluation: updates (iterations), forwards (forward equivalents by
    `flowrl_compare.costs`), seconds (of the processor), stated seconds (of the stated model), world
    seconds (in the 2-D world the processor's, else the stated model's), or nfe (evaluations of the
    network, all alike).
    """
    if axis == "updates":
        return column(line, "iteration")
    if axis == "nfe":
        return [a + b for a, b in zip(column(line, "nfe"), column(line, "train_nfe"), strict=True)]
    config = line.get("config", {})
    in_2d = config.get("environment", {}).get("world", "mixture") == "mixture"
    if axis == "seconds" or (axis == "world seconds" and in_2d):
        return column(line, "seconds")
    prices, unit = (prices_of(config), 1.0) if axis == "forwards" else (STATED, STATED.seconds)
    return [unit * prices.parts(row).total for row in counts(line)]


def labelled(
    name: str,
    runs: Iterable[tuple[tuple[str, str, int], RunConfig | None]],
    lines: Mapping[str, Line],
) -> Iterator[tuple[dict[str, str], Line]]:
    """The lines of `runs`, given by a label `name`, an arm and a seed, with label and arm; without
    those that are not made.
    """
    for (label, arm, _), run in runs:
        if run is not None and (line := lines.get(config_id(run))):
            yield {name: label, "arm": arm}, line


def evaluation_rows(
    runs: Iterable[tuple[Mapping[str, str], Line]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per evaluation of every line: its labels, the seed, the settings in which the lines
    differ, and the learning curve with its budgets; then the settings of every line.
    """
    lines = list(runs)
    settings = [without_groups(line["config"]) for _, line in lines]
    differ, rows = differing(settings), list[dict[str, Any]]()
    for (labels, line), chosen in zip(lines, settings, strict=True):
        budgets = {axis: spent(line, axis) for axis in ("forwards", "stated seconds")}
        for number, values in enumerate(line["curve"]):
            scores = dict(zip(CURVE, values, strict=False))
            totals = {axis.replace(" ", "_"): cost[number] for axis, cost in budgets.items()}
            different = {name: chosen.get(name) for name in differ}
            rows.append({**labels, "seed": line["seed"], **different, **totals, **scores})
    return rows, settings


def curve(line: Line, axis: str = "updates", rewards: str = "soft") -> Curve:
    """The learning curve over a budget; `rewards` names a column."""
    return Curve(spent(line, axis), column(line, rewards))


@dataclass(frozen=True)
class Measure:
    """A number per run, `of(line)`, or per pair of runs of a seed, `between(line, other)`;
    exchanging them changes its sign.

    `unit` groups measures in figures and decides on the smallest effect of interest; `higher` means
    that higher is better; `start` is the curve's column that has the value before training. A ratio
    of budgets is measured by its logarithm.
    """

    label: str
    unit: str
    of: Callable[[Line], float] | None = None
    between: Callable[[Line, Line], float] | None = None
    higher: bool = True
    start: str = ""


def mean_reward(column_name: str, fraction: float = 1.0) -> Callable[[Line], float]:
    """The mean of a column over the run, or its first part, as a piecewise linear function of
    updates.
    """

    def reward(line: Line) -> float:
        history = curve(line, "updates", column_name)
        return mean_until(
            history, history.budgets[0] + fraction * (history.budgets[-1] - history.budgets[0])
        )

    return reward


def reward_at_equal(axis: str, rewards: str = "soft") -> Callable[[Line, Line], float]:
    """The difference of mean rewards (a column) up to the budget that both runs have spent."""

    def difference(line: Line, other: Line) -> float:
        first, second = curve(line, axis, rewards), curve(other, axis, rewards)
        common = min(first.budgets[-1], second.budgets[-1])
        return mean_until(first, common) - mean_until(second, common)

    return difference


def passage(line: Line, other: Line, axis: str) -> Passage:
    """First passage of two runs of a seed at common rewards, on an axis of budget."""
    return first_passage(curve(line, axis), curve(other, axis))


def _quality_at_reward(line: Line, other: Line) -> float:
    """The shift of quality at equal reward."""
    return shift_at_equal_reward(
        curve(line), curve(other), column(line, "quality"), column(other, "quality")
    )


def _early_gains(line: Line) -> float:
    """log2 of the ratio of mean |g_i| in the first third to that in the last third of the steps
    with a gain; first quarter of training.
    """
    gains = [g for g in line["gains"][0] if g > 1e-9]
    third = max(1, len(gains) // 3)
    return float(np.log2(np.mean(gains[:third]) / np.mean(gains[-third:])))


def _points_over_null(line: Line) -> float:
    after = line["samples"]["after"]
    return after["points"] - after["null"]


def _reward(label: str, value: Callable[[Line], float], start: str, higher: bool = True) -> Measure:
    return Measure(label, REWARD, value, higher=higher, start=start)


def _budget(axis: str, label: str) -> Measure:
    def log_ratio(line: Line, other: Line) -> float:
        return passage(line, other, axis).log_ratio

    return Measure(f"{label} to equal rewards, ratio", BUDGET, between=log_ratio, higher=False)


AXES = {
    "updates": "updates",
    "nfe": "NFE",
    "forwards": "forward equivalents",
    "seconds": "seconds",
    "stated seconds": f"seconds of {STATED_NAME}",
    "world seconds": "seconds of the stated model",
}
"""Budgets by name, in words."""

MEASURES: dict[str, Measure] = {
    "area": _reward("mean reward over training", mean_reward("soft"), "soft"),
    "strict area": _reward("mean strict success over training", mean_reward("strict"), "strict"),
    "early": _reward("mean reward over the first quarter", mean_reward("soft", 0.25), "soft"),
    "final": _reward("final reward", lambda line: column(line, "soft")[-1], "soft"),
    "final strict": _reward(
        "final strict success", lambda line: column(line, "strict")[-1], "strict"
    ),
    "drop": _reward(
        "best minus final reward",
        lambda line: max(column(line, "soft")) - column(line, "soft")[-1],
        "",
        False,
    ),
    "collapse": Measure(
        "collapse rate", RATE, lambda line: float(collapsed(column(line, "soft"))), higher=False
    ),
    "quality": Measure(
        "final log-density under the data",
        DENSITY,
        lambda line: column(line, "quality")[-1],
        start="quality",
    ),
    "diversity": Measure(
        "final distance between samples of a prompt",
        OTHER,
        lambda line: column(line, "diversity")[-1],
        start="diversity",
    ),
    "sampler quality": Measure(
        "log-density of the untrained sampler's own samples",
        DENSITY,
        lambda line: line["samples"]["before"]["quality"],
    ),
    "early gains": Measure("log2 of the ratio of early to late gains", OTHER, _early_gains),
    "turning points": Measure(
        "turning points per trajectory", OTHER, lambda line: line["samples"]["after"]["points"]
    ),
    "turning points over null": Measure(
        "turning points per trajectory, minus those of random signs", OTHER, _points_over_null
    ),
    **{axis: _budget(axis, words) for axis, words in AXES.items()},
    **{
        f"reward at equal {axis}": Measure(
            f"mean reward over equal {words}", REWARD, between=reward_at_equal(axis)
        )
        for axis, words in AXES.items()
        if axis != "updates"
    },
    "quality at equal reward": Measure(
        "log-density under the data at equal reward", DENSITY, between=_quality_at_reward
    ),
}
"""Measures by name."""


@dataclass(frozen=True)
class Evidence:
    """Finished runs of one claim in one world: `runs[arm][task]` holds a line per seed, in the
    order of `seeds`.
    """

    runs: Mapping[str, Mapping[str, Sequence[Line]]]
    seeds: tuple[int, ...]

    def values(self, arm: str, measure: str) -> Values:
        """The measure of every run of an arm, [seed, task]. `ConfigError`: no such arm, or the
        measure needs two runs.
        """
        value = self._measure(measure, arm).of
        if value is None:
            raise ConfigError(f"evidence: {measure!r} compares two runs")
        return np.array([[value(line) for line in lines] for lines in self.runs[arm].values()]).T

    def differences(self, arm: str, than: str, measure: str) -> Values:
        """arm - than of every pair of runs, [seed, task] (ratios of budgets: of the logarithms).
        `ConfigError`: no such arm.
        """
        between = self._measure(measure, arm, than).between
        if between is None:
            return self.values(arm, measure) - self.values(than, measure)
        rows = [
            [
                between(*pair)
                for pair in zip(self.runs[arm][task], self.runs[than][task], strict=True)
            ]
            for task in self.runs[arm]
        ]
        return np.array(rows).T

    def never(self, arm: str, than: str, axis: str) -> tuple[int, int]:
        """Pairs of runs in which `arm` and in which `than` missed a common reward."""
        tasks = self.runs[arm]
        passages = [
            passage(*pair, axis)
            for task in tasks
            for pair in zip(tasks[task], self.runs[than][task], strict=True)
        ]
        return sum(p.first_never for p in passages), sum(p.second_never for p in passages)

    def _measure(self, measure: str, *arms: str) -> Measure:
        missing = [arm for arm in arms if arm not in self.runs]
        if missing or measure not in MEASURES:
            raise ConfigError(f"evidence: no arm {missing} or measure {measure!r}")
        return MEASURES[measure]
