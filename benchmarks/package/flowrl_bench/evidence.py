"""Numbers computed from finished runs, by which claims are judged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.diagnostics.curves import Values, first_reached
from flowrl.errors import ConfigError
from flowrl_bench.measurements import CURVE
from flowrl_bench.statistics import Estimate, Index, bootstrap, interquartile_mean

Line = Mapping[str, Any]
NEVER = 2.0
"""The budget ratio of a run that never reaches the target; the interquartile mean is hardly affected by its value."""
REWARD, DENSITY, BUDGET, OTHER = "reward", "log-density", "ratio to the baseline's budget", ""


def column(line: Line, name: str) -> list[float]:
    """A column of the learning curve."""
    place = CURVE.index(name)
    return [math.nan if row[place] is None else float(row[place]) for row in line["curve"]]


def _trained(line: Line, name: str, fraction: float = 1.0) -> list[float]:
    """A column without the untrained model, up to a fraction of the run."""
    values = column(line, name)[1:]
    return values[: max(1, round(fraction * len(values)))]


@dataclass(frozen=True)
class Measure:
    """A number per run: `of(line)`, or `against(line, baseline)` with the baseline's runs of the same task.

    `unit` groups measures in figures; `higher` means that higher is better; `start` is the curve's column that has the value
    before training.
    """

    label: str
    unit: str
    of: Callable[[Line], float] | None = None
    against: Callable[[Line, Sequence[Line]], float] | None = None
    higher: bool = True
    start: str = ""


def spent(line: Line, axis: str) -> list[float]:
    """The budget spent at each evaluation: updates (iterations), nfe (sampling, scoring and training) or seconds."""
    if axis == "updates":
        return column(line, "iteration")
    if axis == "nfe":
        return [a + b for a, b in zip(column(line, "nfe"), column(line, "train_nfe"), strict=True)]
    return column(line, axis)


def _finals(runs: Sequence[Line]) -> Values:
    return np.array([column(run, "soft")[-1] for run in runs])


def _budgets(runs: Sequence[Line], axis: str) -> Values:
    return np.array([spent(run, axis)[-1] for run in runs])


def _ratio(line: Line, axis: str, target: Any, budget: Any) -> Values:
    """The spent budget at which the run first has the reward `target`, divided by `budget`; at most `NEVER`."""
    return np.minimum(NEVER, first_reached(spent(line, axis), column(line, "soft"), target) / budget)


def _budget_ratio(axis: str) -> Callable[[Line, Sequence[Line]], float]:
    """Budget until the run reaches the baseline's final reward (IQM over seeds), divided by the baseline's whole budget."""

    def ratio(line: Line, baseline: Sequence[Line]) -> float:
        return float(_ratio(line, axis, interquartile_mean(_finals(baseline)), np.mean(_budgets(baseline, axis))))

    return ratio


def _reward_at_half_budget(axis: str) -> Callable[[Line, Sequence[Line]], float]:
    """The reward when the run has spent half of the baseline's budget."""

    def reward(line: Line, baseline: Sequence[Line]) -> float:
        return float(np.interp(0.5 * np.mean(_budgets(baseline, axis)), spent(line, axis), column(line, "soft")))

    return reward


def _quality_at_reward(line: Line, baseline: Sequence[Line]) -> float:
    """Quality when the run first has the reward that it and every baseline run reach (0.9 of the lowest maximum)."""
    target = 0.9 * min(max(column(run, "soft")) for run in (line, *baseline))
    reached = first_reached(column(line, "iteration"), column(line, "soft"), target)
    return float(np.interp(reached, column(line, "iteration"), column(line, "quality")))


def _early_gains(line: Line) -> float:
    """log2 of mean |g_i| over the first third of the steps that gain anything, over the last third; first quarter of training."""
    gains = [g for g in line["gains"][0] if g > 1e-9]
    third = max(1, len(gains) // 3)
    return float(np.log2(np.mean(gains[:third]) / np.mean(gains[-third:])))


def _points_over_null(line: Line) -> float:
    after = line["samples"]["after"]
    return after["points"] - after["null"]


def _reward(label: str, of: Callable[[Line], float], start: str, higher: bool = True) -> Measure:
    return Measure(label, REWARD, of, higher=higher, start=start)


def _budget(axis: str, label: str) -> Measure:
    words = f"{label} to the baseline's final reward, as a fraction of the baseline's"
    return Measure(words, BUDGET, against=_budget_ratio(axis), higher=False)


MEASURES: dict[str, Measure] = {
    "area": _reward("mean reward over training", lambda line: float(np.mean(_trained(line, "soft"))), "soft"),
    "strict area": _reward("mean strict success over training", lambda line: float(np.mean(_trained(line, "strict"))), "strict"),
    "early": _reward("mean reward over the first quarter", lambda line: float(np.mean(_trained(line, "soft", 0.25))), "soft"),
    "final": _reward("final reward", lambda line: column(line, "soft")[-1], "soft"),
    "final strict": _reward("final strict success", lambda line: column(line, "strict")[-1], "strict"),
    "drop": _reward("best minus final reward", lambda line: max(column(line, "soft")) - column(line, "soft")[-1], "", False),
    "quality": Measure("final log-density under the data", DENSITY, lambda line: column(line, "quality")[-1], start="quality"),
    "diversity": Measure(
        "final distance between samples of a prompt", OTHER, lambda line: column(line, "diversity")[-1], start="diversity"
    ),
    "sampler quality": Measure(
        "log-density of the untrained sampler's own samples", DENSITY, lambda line: line["samples"]["before"]["quality"]
    ),
    "early gains": Measure("log2 of the ratio of early to late gains", OTHER, _early_gains),
    "turning points": Measure("turning points per trajectory", OTHER, lambda line: line["samples"]["after"]["points"]),
    "turning points over null": Measure("turning points per trajectory, minus those of random signs", OTHER, _points_over_null),
    "updates": _budget("updates", "updates"),
    "nfe": _budget("nfe", "NFE"),
    "seconds": _budget("seconds", "seconds"),
    "reward at equal nfe": Measure("reward at half of the baseline's NFE", REWARD, against=_reward_at_half_budget("nfe")),
    "reward at equal seconds": Measure(
        "reward at half of the baseline's seconds", REWARD, against=_reward_at_half_budget("seconds")
    ),
    "quality at equal reward": Measure(
        "log-density under the data at equal reward", DENSITY, against=_quality_at_reward, start="quality"
    ),
}
"""Measures by name."""


@dataclass(frozen=True)
class Evidence:
    """Finished runs of one claim in one world: `runs[arm][task]` holds a line per seed, in the order of `seeds`."""

    runs: Mapping[str, Mapping[str, Sequence[Line]]]
    seeds: tuple[int, ...]

    def values(self, arm: str, measure: str, baseline: str = "") -> list[Values]:
        """The measure of every run of an arm, an array [seed] per task. Raises `ConfigError` for an unknown arm or measure."""
        if arm not in self.runs or measure not in MEASURES:
            raise ConfigError(f"evidence: no arm {arm!r} or measure {measure!r}")
        chosen = MEASURES[measure]
        found = []
        for task, lines in self.runs[arm].items():
            if chosen.of is not None:
                found.append(np.array([chosen.of(line) for line in lines]))
            else:
                assert chosen.against is not None
                others = self.runs[baseline or arm][task]
                found.append(np.array([chosen.against(line, others) for line in lines]))
        return found

    def budget_ratio(self, arm: str, axis: str, of: str) -> Estimate:
        """The budget (updates, nfe or seconds) after which `arm` has the final reward of `of`, over the whole budget of `of`.

        Seeds of both arms are resampled together, because the target has an error too. The interval lies within 0 and `NEVER`.
        """
        mine = list(self.runs[arm].values())
        finals = [_finals(runs) for runs in self.runs[of].values()]
        budgets = [_budgets(runs, axis) for runs in self.runs[of].values()]
        measured = axis

        def statistic(*index: Index, axis: int = -1) -> Values:
            ratios = []
            for lines, final, budget, chosen in zip(mine, finals, budgets, index, strict=True):
                goal = interquartile_mean(final[chosen]), budget[chosen].mean(-1)
                every = np.stack([_ratio(line, measured, *goal) for line in lines], -1)
                ratios.append(np.take_along_axis(every, chosen, -1))
            return interquartile_mean(np.concatenate(ratios, -1), axis)

        found = bootstrap(statistic, [len(lines) for lines in mine])
        return Estimate(found.value, max(0.0, found.low), found.high if math.isinf(found.high) else min(NEVER, found.high))
