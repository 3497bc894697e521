"""Numbers read off finished runs: what a claim is judged by."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flowrl.diagnostics.statistics import Estimate, Index, Values, bootstrap, interquartile_mean
from flowrl.errors import ConfigError
from flowrl.training.results import reaches
from flowrl_bench.measure import CURVE

Line = Mapping[str, Any]
NEVER = 2.0
"""Share of the baseline's budget that counts for a run which never got there; the interquartile mean hardly sees it."""


def column(line: Line, name: str) -> list[float]:
    """A column of the curve."""
    place = CURVE.index(name)
    return [math.nan if row[place] is None else float(row[place]) for row in line["curve"]]


def _after(line: Line, name: str, share: float = 1.0) -> list[float]:
    """A column without the untrained model, up to `share` of the run."""
    values = column(line, name)[1:]
    return values[: max(1, round(share * len(values)))]


@dataclass(frozen=True)
class Measure:
    """A number per run: `of(line)`, or `against(line, baseline)`, the baseline's runs of the same task. `higher` is better."""

    label: str
    of: Callable[[Line], float] | None = None
    against: Callable[[Line, Sequence[Line]], float] | None = None
    higher: bool = True


def spent(line: Line, axis: str) -> list[float]:
    """The curve's budget so far: updates (iterations), nfe (sampling, scoring and training) or seconds."""
    if axis == "updates":
        return column(line, "iteration")
    if axis == "nfe":
        return [a + b for a, b in zip(column(line, "nfe"), column(line, "train_nfe"), strict=True)]
    return column(line, axis)


def _share(axis: str) -> Callable[[Line, Sequence[Line]], float]:
    """Budget until the run reaches the baseline's final reward (IQM over seeds), over the baseline's whole budget."""

    def share(line: Line, baseline: Sequence[Line]) -> float:
        final, whole = _finals(baseline), _wholes(baseline, axis)
        return float(_reached(line, axis, interquartile_mean(final), np.mean(whole)))

    return share


def _finals(runs: Sequence[Line]) -> Values:
    return np.array([column(run, "soft")[-1] for run in runs])


def _wholes(runs: Sequence[Line], axis: str) -> Values:
    return np.array([spent(run, axis)[-1] for run in runs])


def _reached(line: Line, axis: str, target: ArrayLike, whole: ArrayLike) -> Values:
    """The share of `whole` at which the run first has the reward `target`, linearly between evaluations; `NEVER` at the most."""
    budget, height = np.array(spent(line, axis)), np.array(column(line, "soft"))
    first = np.searchsorted(np.maximum.accumulate(height), np.asarray(target) - 1e-12)
    there = np.clip(first, 1, len(height) - 1)
    rise = height[there] - height[there - 1]
    part = (target - height[there - 1]) / np.where(rise > 0, rise, 1.0)
    found = np.where(first == 0, budget[0], budget[there - 1] + part * (budget[there] - budget[there - 1]))
    return np.where(first == len(height), NEVER, np.minimum(NEVER, found / whole))


def _at(axis: str) -> Callable[[Line, Sequence[Line]], float]:
    """The reward when as much has been spent as the baseline spends in half of its run."""

    def value(line: Line, baseline: Sequence[Line]) -> float:
        budget = 0.5 * float(np.mean([spent(run, axis)[-1] for run in baseline]))
        return float(np.interp(budget, spent(line, axis), column(line, "soft")))

    return value


def _quality_at_reward(line: Line, baseline: Sequence[Line]) -> float:
    """Quality where the run first has the reward that every run of it and of the baseline reaches (0.9 of the lowest best)."""
    target = 0.9 * min(max(column(run, "soft")) for run in (line, *baseline))
    found = reaches(column(line, "iteration"), column(line, "soft"), target)
    return float(np.interp(found or 0.0, column(line, "iteration"), column(line, "quality")))


def _share_of_early_gains(line: Line) -> float:
    """log2 of mean |g_i| at the first third of the steps that gain anything over the last third; first quarter of training."""
    gains = [g for g in line["gains"][0] if g > 1e-9]
    third = max(1, len(gains) // 3)
    return float(np.log2(np.mean(gains[:third]) / np.mean(gains[-third:])))


_TO = "to the baseline's final reward, share of the baseline's"
MEASURES: dict[str, Measure] = {
    "area": Measure("mean reward over training", lambda line: float(np.mean(_after(line, "soft")))),
    "strict area": Measure("mean strict success over training", lambda line: float(np.mean(_after(line, "strict")))),
    "early": Measure("mean reward over the first quarter", lambda line: float(np.mean(_after(line, "soft", 0.25)))),
    "final": Measure("final reward", lambda line: column(line, "soft")[-1]),
    "final strict": Measure("final strict success", lambda line: column(line, "strict")[-1]),
    "drop": Measure("best minus final reward", lambda line: max(column(line, "soft")) - column(line, "soft")[-1], higher=False),
    "quality": Measure("final log-density under the data", lambda line: column(line, "quality")[-1]),
    "diversity": Measure("final distance between samples of a prompt", lambda line: column(line, "diversity")[-1]),
    "sampler quality": Measure(
        "log-density of the sampler's own samples, untrained", lambda line: line["samples"]["before"]["quality"]
    ),
    "early gains": Measure("log2 of gains at early over late steps", _share_of_early_gains),
    "turning points": Measure("turning points per trajectory", lambda line: line["samples"]["after"]["points"]),
    "turning points over null": Measure(
        "turning points per trajectory, beyond signs drawn at random",
        lambda line: line["samples"]["after"]["points"] - line["samples"]["after"]["null"],
    ),
    "updates": Measure(f"updates {_TO}", against=_share("updates"), higher=False),
    "nfe": Measure(f"NFE {_TO}", against=_share("nfe"), higher=False),
    "seconds": Measure(f"seconds {_TO}", against=_share("seconds"), higher=False),
    "reward at equal nfe": Measure("reward at half of the baseline's NFE", against=_at("nfe")),
    "reward at equal seconds": Measure("reward at half of the baseline's seconds", against=_at("seconds")),
    "quality at equal reward": Measure("log-density under the data at equal reward", against=_quality_at_reward),
}
"""What a run is judged by, by name."""


@dataclass(frozen=True)
class Evidence:
    """Finished runs of one claim in one world: `runs[arm][task]` are lines in the order of `seeds`, the same for all arms."""

    runs: Mapping[str, Mapping[str, Sequence[Line]]]
    seeds: tuple[int, ...]

    def values(self, arm: str, measure: str, baseline: str = "") -> list[Values]:
        """The measure of every run of an arm, one array [seed] per task. Raises `ConfigError` for an unknown arm or measure."""
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

    def share(self, arm: str, axis: str, of: str) -> Estimate:
        """The budget (updates, nfe or seconds) after which `arm` has the final reward of `of`, as a share of `of`'s whole budget.

        Seeds of both are resampled together: the target is measured as well, and its error belongs in the interval, which lies
        between 0 and `NEVER`.
        """
        mine = list(self.runs[arm].values())
        finals = [_finals(runs) for runs in self.runs[of].values()]
        wholes = [_wholes(runs, axis) for runs in self.runs[of].values()]
        what = axis

        def statistic(*index: Index, axis: int = -1) -> Values:
            shares = []
            for lines, final, whole, chosen in zip(mine, finals, wholes, index, strict=True):
                goal = interquartile_mean(final[chosen]), whole[chosen].mean(-1)
                every = np.stack([_reached(line, what, *goal) for line in lines], -1)
                shares.append(np.take_along_axis(every, chosen, -1))
            return interquartile_mean(np.concatenate(shares, -1), axis)

        found = bootstrap(statistic, [len(lines) for lines in mine])
        return Estimate(found.value, max(0.0, found.low), found.high if math.isinf(found.high) else min(NEVER, found.high))
