"""Reads run folders: the rows of metrics.jsonl with the settings and prices of their run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.run.costs import (
    STATED,
    Parts,
    Prices,
    cumulated,
    prices_of,
)
from flowrl.run.format import require_format
from flowrl.run.reading import as_kind, parse_json, read_bytes, read_json, reading
from flowrl.run.results import MetricsRow

AXES = ("iteration", "forwards", "seconds_total", "stated_seconds")
"""Budgets of learning curves: iterations, forward equivalents (`flowrl.run.costs`), seconds,
and seconds of the stated model.
"""


@dataclass(frozen=True)
class _RunFile:
    algorithm: dict[str, Any]
    seed: int


def without_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run's config.json by name."""
    groups = (v if isinstance(v, dict) else {name: v} for name, v in config.items())
    return {name: value for group in groups for name, value in group.items()}


@dataclass(frozen=True)
class RunRecord:
    """One run: its `arm` (of a run by itself: its method) and `seed`, its `folder`, `rows` (one per
    iteration; row 0: untrained), whether it has `finished`, the `config` in its config.json, and
    the `prices` of its evaluations (default: those of its config).
    """

    arm: str
    seed: int
    folder: Path
    rows: tuple[dict[str, Any], ...]
    finished: bool
    config: dict[str, Any] = field(default_factory=dict)
    prices: Prices | None = None

    def costs(self, prices: Prices | None = None) -> list[Parts]:
        """The cost so far at every row, by the given `prices`, or else by the run's."""
        counts = [row if row["iteration"] > 0 else {} for row in self.rows]
        return cumulated(counts, prices or self.prices or prices_of(self.config))

    def spent(self, x: str) -> dict[int, float]:
        """The budget `x` of `AXES`, or another entry of every row, by iteration."""
        if x == "forwards":
            values = [cost.total for cost in self.costs()]
        elif x == "stated_seconds":
            values = [STATED.seconds * cost.total for cost in self.costs(STATED)]
        else:
            values = [float(row[x]) for row in self.rows]
        return dict(zip((row["iteration"] for row in self.rows), values, strict=True))

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings without their groups, except the seed."""
        flat = without_groups(self.config)
        return {name: value for name, value in flat.items() if name not in ("seed", "format")}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows that contain an evaluation."""
        return [row for row in self.rows if row.get("evaluation")]

    @property
    def heldout_rewards(self) -> list[str]:
        """Names of the held-out rewards that the evaluations contain."""
        heldout = [row["evaluation"].get("heldout", {}) for row in self.evaluations]
        return list(dict.fromkeys(name for scores in heldout for name in scores))

    @property
    def state(self) -> str:
        """finished, not finished, or stopped by an observer, with its reason."""
        stopped = self.rows[-1].get("stopped") if self.rows else ""
        ended = "finished" if self.finished else "not finished"
        return f"stopped by {stopped}" if stopped else ended

    def _points(self, *path: str) -> list[tuple[dict[str, Any], float]]:
        """The rows that contain a number at `path`, with this number."""
        points = []
        for row in self.rows:
            value: Any = row
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                points.append((row, float(value)))
        return points

    def curve(self, x: str, *path: str) -> tuple[list[float], list[float]]:
        """`x` (see `spent`) and the metric at `path` within each evaluation that contains it.

        `path` is for example ("strict",), ("proxy",), ("diversity",) or ("heldout", NAME); the
        default is the reward.
        """
        points = self._points("evaluation", *(path or ("reward",)))
        spent = self.spent(x) if points else {}
        return [spent[row["iteration"]] for row, _ in points], [value for _, value in points]

    def mean(self, *path: str) -> float:
        """Mean over the training rows of the number at `path`; NaN if no row contains it."""
        values = [value for row, value in self._points(*path) if row["iteration"] > 0]
        return statistics.fmean(values) if values else math.nan


def load_run(folder: Path, arm: str = "") -> RunRecord:
    """Read a run folder, of a comparison's `arm`; an incomplete last line is ignored.

    Raises `ConfigError` if `folder` is not the folder of a run, or a line of metrics.jsonl is not a
    row of a run.
    """
    settings, config = folder_config(folder, "run", _RunFile)
    require_format(folder / "config.json", settings)
    path, rows = folder / "metrics.jsonl", list[dict[str, Any]]()
    with reading(path):
        method = str(config.algorithm["method"])
        lines = read_bytes(path).split(b"\n")[:-1]  # what follows the last one is incomplete
    for number, line in enumerate(lines, 1):
        with reading(f"{path}, line {number}"):
            rows.append(parse_json(line))
            as_kind(rows[-1], MetricsRow)
    done = (folder / "done.json").exists()
    return RunRecord(arm or method, config.seed, folder, tuple(rows), done, settings)


def folder_config(folder: Path, what: str, kind: Any) -> tuple[dict[str, Any], Any]:
    """The content of the config.json of a run or of a comparison, and its entries as a `kind`."""
    path = folder / "config.json"
    try:
        values = read_json(path, dict[str, Any])
        require_format(path, values)
        with reading(path):
            return values, as_kind(values, kind)
    except ConfigError as error:
        raise ConfigError(f"{folder} is not the folder of a {what}: {error}") from error


def shared_curves(
    runs: Sequence[RunRecord], x: str, *path: str
) -> tuple[list[list[float]], list[list[float]]]:
    """`RunRecord.curve` of `x` and `path` of every run, at the iterations that all `runs` have
    evaluated: `x` and the metric [run, evaluation].
    """
    points = list[dict[float, tuple[float, float]]]()
    for run in runs:
        iterations, pairs = run.curve("iteration", *path)[0], zip(*run.curve(x, *path), strict=True)
        points.append(dict(zip(iterations, pairs, strict=True)))
    shared = sorted(set.intersection(*map(set, points))) if points else []
    first, second = ([[curve[i][axis] for i in shared] for curve in points] for axis in (0, 1))
    return first, second


def mean_curve(runs: Sequence[RunRecord], x: str, *path: str) -> tuple[list[float], list[float]]:
    """The means of `shared_curves` over the runs."""
    first, second = (
        [statistics.fmean(column) for column in zip(*table, strict=True)]
        for table in shared_curves(runs, x, *path)
    )
    return first, second


def finite(values: Any) -> Any:
    """Nested values with None for numbers that JSON cannot represent."""
    if isinstance(values, dict):
        return {name: finite(value) for name, value in values.items()}
    if isinstance(values, list):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
