"""Numbers computed from finished runs, on which verdicts are based."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.bench.digest import config_id
from flowrl.bench.measurements import CURVE
from flowrl.bench.statistics import Curve, mean_until
from flowrl.compare.results import differing
from flowrl.compare.target import Curves
from flowrl.core.errors import ConfigError
from flowrl.run.config import RunConfig
from flowrl.run.costs import STATED, prices_of
from flowrl.run.records import without_groups
from flowrl.run.statistics import Values

Line = Mapping[str, Any]


def column(line: Line, name: str) -> list[float]:
    """A column of the learning curve; the reward for a form that the run's world does not have."""
    if name in CURVE[5:8] and all(row[CURVE.index(name)] is None for row in line["curve"]):
        name = "reward"
    index = CURVE.index(name)
    return [math.nan if row[index] is None else float(row[index]) for row in line["curve"]]


def spent(line: Line, axis: str) -> list[float]:
    """The budget at each evaluation: updates (iterations), forwards (forward equivalents by
    `flowrl.run.costs`), seconds (of the processor) or stated seconds (of the stated model).
    """
    if axis == "updates":
        return column(line, "iteration")
    if axis == "seconds":
        return column(line, "seconds")
    own = axis == "forwards"
    prices, unit = (prices_of(line.get("config", {})), 1.0) if own else (STATED, STATED.seconds)
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


def curves(lines: Sequence[Line], axis: str, rewards: str = "soft") -> Curves:
    """The learning curves of an arm's runs over a budget, in the order of the seeds."""
    budgets = [spent(line, axis) for line in lines]
    return Curves(np.array(budgets), np.array([column(line, rewards) for line in lines]))


def mean_reward(line: Line, rewards: str = "soft") -> float:
    """The mean of a column over the run, as a piecewise linear function of updates."""
    history = curve(line, "updates", rewards)
    return mean_until(history, history.budgets[-1])


def reward_at_equal(axis: str, rewards: str = "soft") -> Callable[[Line, Line], float]:
    """The difference of mean rewards (a column) up to the budget that both runs have spent."""

    def difference(line: Line, other: Line) -> float:
        first, second = curve(line, axis, rewards), curve(other, axis, rewards)
        common = min(first.budgets[-1], second.budgets[-1])
        return mean_until(first, common) - mean_until(second, common)

    return difference


def fell(rewards: Sequence[float]) -> bool:
    """Whether a run ends more than 0.1 below its best reward, or more than 0.02 below its first:
    the limits of the verdict, whose rewards are in [0, 1]. They were fixed before its runs; other
    runs have `flowrl.run.statistics.collapsed`, which has no unit.
    """
    # not by rounding
    return rewards[-1] < max(max(rewards) - 0.1, rewards[0] - 0.02) - 1e-9


MEASURES: dict[str, Callable[[Line], float]] = {
    "area": mean_reward,
    "collapse": lambda line: float(fell(column(line, "soft"))),
}
"""Numbers per run."""
COMPARISONS: dict[str, Callable[[Line, Line], float]] = {
    f"reward at equal {axis}": reward_at_equal(axis) for axis in ("forwards", "stated seconds")
}
"""Numbers per pair of runs of a seed; exchanging the runs changes the sign."""


@dataclass(frozen=True)
class Evidence:
    """Finished runs in one world: `runs[arm]` has a line per seed, in the order of `seeds`."""

    runs: Mapping[str, Sequence[Line]]
    seeds: tuple[int, ...]

    def values(self, arm: str, measure: str) -> Values:
        """One of `MEASURES` for every run of an arm, [seed]. `ConfigError`: no such arm."""
        return np.array([MEASURES[measure](line) for line in self._of(arm)])

    def differences(self, arm: str, than: str, measure: str) -> Values:
        """arm - than of every pair of runs, [seed], by one of `MEASURES` or `COMPARISONS`.
        `ConfigError`: no such arm.
        """
        if measure in MEASURES:
            return self.values(arm, measure) - self.values(than, measure)
        pairs = zip(self._of(arm), self._of(than), strict=True)
        return np.array([COMPARISONS[measure](*pair) for pair in pairs])

    def _of(self, arm: str) -> Sequence[Line]:
        if arm not in self.runs:
            raise ConfigError(f"evidence: no arm {arm!r}")
        return self.runs[arm]
