"""Numbers computed from finished runs, on which verdicts are based."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flowrl_compare.costs import STATED, STATED_NAME, prices_of
from flowrl_compare.results import differing, without_groups
from flowrl_compare.statistics import Values, collapsed

from flowrl.core.errors import ConfigError
from flowrl.training.config import RunConfig
from flowrl_bench.digest import config_id
from flowrl_bench.measurements import CURVE
from flowrl_bench.statistics import Curve, mean_until

Line = Mapping[str, Any]


def column(line: Line, name: str) -> list[float]:
    """A column of the learning curve; the reward for a form that the run's world does not have."""
    if name in CURVE[5:8] and all(row[CURVE.index(name)] is None for row in line["curve"]):
        name = "reward"
    index = CURVE.index(name)
    return [math.nan if row[index] is None else float(row[index]) for row in line["curve"]]


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
    rows: list[dict[str, Any]] = [dict(zip(CURVE, row, strict=True)) for row in line["curve"]]
    return [unit * prices.parts(row).total for row in rows]


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
    """

    label: str
    of: Callable[[Line], float] | None = None
    between: Callable[[Line, Line], float] | None = None


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
    "area": Measure("mean reward over training", mean_reward("soft")),
    "collapse": Measure("collapse rate", lambda line: float(collapsed(column(line, "soft")))),
    **{
        f"reward at equal {axis}": Measure(
            f"mean reward over equal {words}", between=reward_at_equal(axis)
        )
        for axis, words in AXES.items()
        if axis != "updates"
    },
}
"""Measures by name."""


@dataclass(frozen=True)
class Evidence:
    """Finished runs in one world: `runs[arm][task]` holds a line per seed, in the
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
        """arm - than of every pair of runs, [seed, task]. `ConfigError`: no such arm."""
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

    def _measure(self, measure: str, *arms: str) -> Measure:
        missing = [arm for arm in arms if arm not in self.runs]
        if missing or measure not in MEASURES:
            raise ConfigError(f"evidence: no arm {missing} or measure {measure!r}")
        return MEASURES[measure]
