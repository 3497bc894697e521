"""The definitions of ``docs/verdicts.md``, written a second time with numpy and scipy only, for
``reanalysis.py``.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import isotonic_regression

Values = NDArray[np.float64]
Settings = Mapping[str, Any]
Key = tuple[int, str]
DEFAULTS: dict[str, dict[str, Any]] = {  # of settings that a search or an arm changes
    "mixture": {
        "learning_rate": 0.02,
        "clip_range": 0.002,
        "noise_level": 0.7,
        "loss": "clipped",
        "group_size": 12,
    },
    "shapes": {
        "learning_rate": 0.004,
        "clip_range": 0.002,
        "noise_level": 0.7,
        "loss": "clipped",
        "group_size": 12,
    },
}
IGNORED = {"seed", "task", "method", "credit", "rule", "overlap_rewards", "world"}
UPDATE, SAMPLING, TRAINING, SECONDS, REWARD = 0, 1, 2, 3, 7
"""Columns of a line's curve. Network evaluations are SAMPLING (with scoring) + TRAINING; evaluating
the curve costs none.
"""
AXES = {"training": "updates", "equal NFE": "NFE", "equal seconds": "seconds"}
NUMBER = r"[-+]?\d+\.\d+"
SMALLEST, RATIO, RATE = 0.02, float(np.log(1.1)), 0.1


class Run(NamedTuple):
    """A line of the results file."""

    world: str
    key: Key
    settings: Settings
    curve: Values

    @property
    def rewards(self) -> Values:
        """Held-out rewards at the evaluations."""
        return self.curve[:, REWARD]

    @property
    def trajectories(self) -> int:
        """Trajectories sampled for training."""
        return (
            int(self.settings["iterations"])
            * int(self.settings["groups"])
            * int(self.settings["group_size"])
        )

    @property
    def collapsed(self) -> bool:
        """Whether the run ends below its best, or below its start."""
        return bool(
            self.rewards[-1] < self.rewards.max() - 0.1 or self.rewards[-1] < self.rewards[0] - 0.02
        )

    def budgets(self, axis: str) -> Values:
        """Updates, network evaluations or seconds spent at the evaluations."""
        if axis == "NFE":
            return self.curve[:, SAMPLING] + self.curve[:, TRAINING]
        return self.curve[:, {"updates": UPDATE, "seconds": SECONDS}[axis]]

    def area(self, axis: str = "updates", budget: float | None = None) -> float:
        """Mean of the piecewise linear curve up to `budget` (the whole one)."""
        x = self.budgets(axis)
        end = x[-1] if budget is None else budget
        points = np.append(x[x < end], end)
        return float(np.trapezoid(np.interp(points, x, self.rewards), points) / end)

    def rise(self) -> Values:
        """Monotone rewards up to a collapse: the first evaluation after the best mean of three that
        is 0.1 below that mean.
        """
        y = self.rewards
        smooth = np.array([y[0], *((y[:-2] + y[1:-1] + y[2:]) / 3), (y[-2] + 2 * y[-1]) / 3])
        best = int(smooth.argmax())
        fallen = np.flatnonzero(y[best:] < smooth[best] - 0.1)
        end = best + int(fallen[0]) if len(fallen) else len(y)
        return np.asarray(isotonic_regression(y[: end or None]).x)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the archive PATH.gz; of the file if there is no archive."""
    archive = path.with_name(f"{path.name}.gz")
    data = gzip.decompress(archive.read_bytes()) if archive.exists() else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def read_runs(path: Path) -> list[Run]:
    runs = []
    for line in read_lines(path):
        config = line["config"]
        settings = {name: value for name, value in config.items() if not isinstance(value, dict)}
        for group in (group for group in config.values() if isinstance(group, dict)):
            settings |= group
        named = settings["method"] == "tempflow-grpo" or not settings["credit"]
        rule = settings["method"] if named else settings["credit"]
        settings["rule"] = "random" if rule == "random(seed=0)" else rule
        settings["sampler"] = settings["sampler"] or "flow-sde"
        curve = np.array(line["curve"], dtype=float)
        runs.append(Run(settings["world"], (line["seed"], settings["task"]), settings, curve))
    return runs


class Results:
    """The runs of a file, found by settings; those that are not named have the file's most frequent
    value in that world.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.found: dict[str, dict[Key, Run]] = {}
        counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        for run in runs:
            self.runs[run.world].append(run)
            for name in run.settings.keys() - IGNORED:
                counts[run.world][name][json.dumps(run.settings[name])] += 1
        self.usual = {
            world: {name: json.loads(count.most_common(1)[0][0]) for name, count in named.items()}
            for world, named in counts.items()
        }

    def find(self, world: str, settings: Settings) -> dict[Key, Run]:
        """The runs with these settings, by seed and task, of the seeds that have runs of all
        tasks.
        """
        wanted = {**self.usual.get(world, {}), **DEFAULTS[world], **settings}
        name = world + json.dumps(wanted, sort_keys=True)
        if name not in self.found:
            self.found[name] = self._find(world, wanted)
        return self.found[name]

    def _find(self, world: str, wanted: Settings) -> dict[Key, Run]:
        matching: dict[Key, Run] = {}
        for run in self.runs[world]:
            if all(run.settings.get(name) == value for name, value in wanted.items()):
                if run.key in matching:
                    raise ValueError(
                        f"two runs of seed and task {run.key} have the settings {wanted}"
                    )
                matching[run.key] = run
        tasks = Counter(seed for seed, _ in matching)  # a seed counts once all its tasks are there
        return {key: run for key, run in matching.items() if tasks[key[0]] == max(tasks.values())}


class Test(NamedTuple):
    """A mean, its 95% interval and the two-sided p-value of the null."""

    mean: float
    low: float
    high: float
    p: float


def t_test(values: Values, null: float = 0.0) -> Test:
    mean, error = float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5
    if error == 0:
        return Test(mean, mean, mean, float(mean == null))
    half = stats.t.ppf(0.975, len(values) - 1) * error
    return Test(
        mean,
        mean - half,
        mean + half,
        2 * float(stats.t.sf(abs(mean - null) / error, len(values) - 1)),
    )


def bonett_price(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Test:
    """Difference of paired rates: a run is added to both kinds of discordant pairs, then a normal
    interval and test.
    """
    n = len(first) + 2
    more, less = ((first & ~second).sum() + 1) / n, ((second & ~first).sum() + 1) / n
    middle, error = more - less, ((more + less - (more - less) ** 2) / n) ** 0.5
    half = stats.norm.ppf(0.975) * error
    p = 2 * float(stats.norm.sf(abs(middle) / error))
    return Test(float(first.mean() - second.mean()), middle - half, middle + half, p)


def holm(p: list[float]) -> list[float]:
    order = np.argsort(p, kind="stable")
    corrected = np.maximum.accumulate(np.array(p)[order] * (len(p) - np.arange(len(p))))
    return np.minimum(1, corrected)[np.argsort(order, kind="stable")].tolist()


def log_ratio(first: Run, second: Run, axis: str) -> float:
    """Mean log ratio of the budgets at which the runs reach common levels."""
    rises = first.rise(), second.rise()
    start = (rises[0][0] + rises[1][0]) / 2
    top = max(min(rises[0][-1], rises[1][-1]), start + 0.05)
    logs = []
    for run, y in zip((first, second), rises, strict=True):
        x, sums = run.budgets(axis), 0.0
        for level in start + np.array([0.5, 0.7, 0.9]) * (top - start):
            i = int(np.searchsorted(y, level))
            slope = (level - y[i - 1]) / (y[i] - y[i - 1]) if 0 < i < len(y) else 0.0
            reached = x[-1] if i == len(y) else x[max(i - 1, 0)] + slope * (x[i] - x[max(i - 1, 0)])
            sums += np.log(max(reached, x[1])) / 3
        logs.append(sums)
    return float(logs[0] - logs[1])


def by_seed(pairs: Mapping[Key, float]) -> Values:
    """Tasks averaged within the seed."""
    return np.array(
        [
            np.mean([v for k, v in pairs.items() if k[0] == seed])
            for seed in sorted({k[0] for k in pairs})
        ],
        np.float64,
    )


class Comparison(NamedTuple):
    """`test` of first minus second (of log ratios); `sign` is -1 if less is better; `null` and
    `smallest` in the same unit.
    """

    test: Test
    seeds: int
    won: float
    sign: int = 1
    smallest: float = SMALLEST
    null: float = 0.0
    log: bool = False

    def verdict(self, p: float, rule: str) -> str:
        """A symbol of the page, at the corrected p-value."""
        inside = -self.smallest < self.test.low and self.test.high < self.smallest
        if rule.startswith("expects no difference"):
            inside = p < 0.05 and abs(self.test.mean) < self.smallest
        inside = inside and not rule.startswith("expects no worse")
        better = self.sign * (self.test.mean - self.null) > 0
        word = "=" if inside else "?" if p >= 0.05 else "▲" if better else "▼"
        if rule.startswith("asks") or word == "?":
            return word
        return "✓" if word == ("=" if rule.startswith("expects no difference") else "▲") else "✗"


def lead(first: Run, second: Run, measure: str) -> float:
    """first - second of two runs of a seed, or the log of their ratio."""
    if measure == "final reward":
        return float(first.rewards[-1] - second.rewards[-1])
    if match := re.fullmatch(r"(updates|NFE|seconds) to equal rewards, ratio", measure):
        return log_ratio(first, second, match[1])
    axis = AXES[measure.removeprefix("mean reward over ")]
    budget = min(first.budgets(axis)[-1], second.budgets(axis)[-1])
    return first.area(axis, budget) - second.area(axis, budget)


def compare(rule: str, runs: Mapping[str, Mapping[Key, Run]]) -> Comparison | None:
    """A rule over the runs that all arms of its claim have; None for a measure that is not
    covered.
    """
    keys = sorted(set.intersection(*(set(runs_of_arm) for runs_of_arm in runs.values())))
    arms = {name: [runs_of_arm[key] for key in keys] for name, runs_of_arm in runs.items()}
    two = re.fullmatch(
        r"\S.*?: (.+) against (.+) \((mean reward over .+|final reward|collapse rate|.+ to equal"
        r" rewards, ratio)\)",
        rule,
    )
    four = re.fullmatch(r"\S.*?: the lead of (.+) over (.+) against that of (.+) over (.+)", rule)
    if four:
        leads = [
            by_seed(
                {
                    key: lead(a, b, "mean reward over training")
                    for key, a, b in zip(keys, arms[x], arms[y], strict=True)
                }
            )
            for x, y in (four.groups()[:2], four.groups()[2:])
        ]
        return Comparison(t_test(leads[0] - leads[1]), len(leads[0]), won(leads[0] - leads[1]))
    if not two:
        return None
    first, second, measure = arms[two[1]], arms[two[2]], two[3]
    if measure == "collapse rate":
        down = [np.array([run.collapsed for run in side]) for side in (first, second)]
        wins = won(by_seed(dict(zip(keys, down[1] * 1.0 - down[0], strict=True))))
        return Comparison(bonett_price(*down), len({seed for seed, _ in keys}), wins, -1, RATE)
    values = by_seed(
        {key: lead(a, b, measure) for key, a, b in zip(keys, first, second, strict=True)}
    )
    log = measure.endswith("ratio")
    sign, smallest, null = (-1, RATIO, 0.0) if log else (1, SMALLEST, 0.0)
    if limit := re.match(rf"expects better than ({NUMBER}) of it", rule):
        null = float(np.log(float(limit[1])))
    if rule.startswith("expects no worse"):
        null = -sign * smallest
    if rule.startswith("expects no difference"):
        null = float(np.copysign(smallest, values.mean()))
    return Comparison(
        t_test(values, null), len(values), won(sign * values), sign, smallest, null, log
    )


def won(values: Values) -> float:
    return float(np.where(values == 0, 0.5, values > 0).mean())
