"""The definitions of ``docs/verdicts.md``, written a second time with numpy and scipy only, for
``reanalysis.py``.
"""

import json
import lzma
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
UPDATE, SAMPLING, TRAINING, SECONDS, REWARD, QUALITY = 0, 1, 2, 3, 7, 8
"""Columns of a line's curve. SAMPLING includes probes; evaluating the curve costs nothing."""
FORWARDS, STATED = "forward equivalents", "seconds of the stated model"
AXES = {"training": "updates", f"equal {FORWARDS}": FORWARDS, f"equal {STATED}": STATED}
BACKWARD, CHECKPOINTED = 3, 4
"""Cost of a forward with its backward pass in forward passes, without and with checkpointing."""
SCORED = {"mixture": 0.0, "shapes": (3_178_496 + 1_333_248) / 8_396_800}
"""Cost of decoding and scoring an image in forward passes, by the FLOPs in
``benchmarks/results/flops.json``.
"""
FLOPS = {"forward": 2_442_642_604_032, "gradient": 5_259_447_582_720}
"""Of SD3.5-Medium at 512 pixels for one latent, with a LoRA, by the same file; guidance doubles
both.
"""
FLOPS_SCORED = 2_514_971_787_264 + 381_679_304_704
"""Of its decoder and PickScore for one image."""
SUSTAINED = 200e12
"""Assumed FLOP/s."""
NETWORKS = {"clipped": 1, "diffusion-nft": 2, "dgpo": 3, "awm": 4}
"""Network evaluations in a loss's update for each one with a gradient; a KL penalty needs one more."""
AT_REWARD = "log-density under the data at equal reward"
NUMBER = r"[-+]?\d+\.\d+"
SMALLEST, RATIO, RATE, DENSITY = 0.05, float(np.log(1.1)), 0.1, 0.05
"""The smallest difference in reward is a fraction of the possible gain."""
LEVEL, FEWEST = 0.025, 5


class Run(NamedTuple):
    """A line of the results file."""

    world: str
    key: Key
    settings: Settings
    curve: Values
    scored: float

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

    @property
    def networks(self) -> int:
        """Network evaluations in the update for each one with a gradient."""
        return NETWORKS[self.settings["loss"].split("(")[0]] + (self.settings["kl_weight"] > 0)

    @property
    def update(self) -> float:
        """Cost of an evaluation in the update in forward passes, on average."""
        backward = CHECKPOINTED if self.settings["gradient_checkpointing"] else BACKWARD
        return 1 + (backward - 1) / self.networks

    @property
    def images(self) -> float:
        """Scored images per sampling evaluation, averaged over the run: lines have only its total."""
        return self.scored / self.curve[-1, SAMPLING]

    def budgets(self, axis: str) -> Values:
        """Updates, forward equivalents or seconds spent up to each evaluation; in the 2-D world, the
        seconds measured on the processor.
        """
        sampled, updated = self.curve[:, SAMPLING], self.curve[:, TRAINING]
        if axis == FORWARDS:
            return sampled * (1 + SCORED[self.world] * self.images) + updated * self.update
        if axis == STATED and self.world == "shapes":
            trained = updated / self.networks
            flops = 2 * FLOPS["forward"] * (sampled + updated - trained)
            flops += 2 * FLOPS["gradient"] * trained + FLOPS_SCORED * self.images * sampled
            return flops / SUSTAINED
        return self.curve[:, {"updates": UPDATE, STATED: SECONDS}[axis]]

    def area(self, axis: str = "updates", budget: float | None = None) -> float:
        """Mean of the piecewise linear curve up to `budget` (the whole one)."""
        x = self.budgets(axis)
        end = x[-1] if budget is None else budget
        points = np.append(x[x < end], end)
        return float(np.trapezoid(np.interp(points, x, self.rewards), points) / end)

    def rise(self) -> Values:
        """Monotone rewards up to a collapse: the first evaluation, after the best mean of three, that
        is 0.1 below it.
        """
        y = self.rewards
        smooth = np.array([y[0], *((y[:-2] + y[1:-1] + y[2:]) / 3), (y[-2] + 2 * y[-1]) / 3])
        best = int(smooth.argmax())
        fallen = np.flatnonzero(y[best:] < smooth[best] - 0.1)
        end = best + int(fallen[0]) if len(fallen) else len(y)
        return np.asarray(isotonic_regression(y[: end or None]).x)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the archive PATH.xz; of the file if there is no archive."""
    archive = path.with_name(f"{path.name}.xz")
    data = lzma.decompress(archive.read_bytes()) if archive.exists() else path.read_bytes()
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
        key, scored = (line["seed"], settings["task"]), line["totals"]["reward_calls"]
        runs.append(Run(settings["world"], key, settings, curve, scored))
    return runs


class Results:
    """The runs of a file, found by settings; settings that are not named have the file's most
    frequent value in that world.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.cache: dict[str, dict[Key, Run]] = {}
        counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        for run in runs:
            self.runs[run.world].append(run)
            for name in run.settings.keys() - IGNORED:
                counts[run.world][name][json.dumps(run.settings[name])] += 1
        self.most_frequent = {
            world: {name: json.loads(count.most_common(1)[0][0]) for name, count in named.items()}
            for world, named in counts.items()
        }

    def gains(self) -> dict[tuple[str, str], tuple[float, float]]:
        """By world and task: reward before training, and mean final reward of the best arm."""
        gains = {}
        for world, runs in self.runs.items():
            for task in {run.key[1] for run in runs}:
                ends: dict[str, list[float]] = defaultdict(list)
                task_runs = [run for run in runs if run.key[1] == task]
                for run in task_runs:
                    named = {n: v for n, v in run.settings.items() if n != "seed"}
                    ends[json.dumps(named, sort_keys=True)].append(float(run.rewards[-1]))
                best = max(float(np.mean(values)) for values in ends.values())
                gains[world, task] = float(np.mean([run.rewards[0] for run in task_runs])), best
        return gains

    def find(self, world: str, settings: Settings) -> dict[Key, Run]:
        """The runs with these settings, by seed and task; only seeds that have runs of all tasks."""
        complete = {**self.most_frequent.get(world, {}), **DEFAULTS[world], **settings}
        name = world + json.dumps(complete, sort_keys=True)
        if name not in self.cache:
            self.cache[name] = self._find(world, complete)
        return self.cache[name]

    def _find(self, world: str, settings: Settings) -> dict[Key, Run]:
        matching: dict[Key, Run] = {}
        for run in self.runs[world]:
            if all(run.settings.get(name) == value for name, value in settings.items()):
                if run.key in matching:
                    raise ValueError(
                        f"two runs of seed and task {run.key} have the settings {settings}"
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
    """Difference of paired rates: a run is added to each kind of discordant pair, then a normal
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


def quality_shift(first: Run, second: Run) -> float:
    """The shift of the first run in a common cubic of quality in monotone reward, over the rewards
    that both reach.
    """
    top = min(first.rise()[-1], second.rise()[-1]) + 1e-9
    rows: list[tuple[float, float, float]] = []
    for run, shift in ((first, 1.0), (second, 0.0)):
        pairs = zip(run.rise(), run.curve[:, QUALITY], strict=False)
        rows += [(reward, quality, shift) for reward, quality in pairs if reward <= top]
    x, y, indicator = np.array(rows).T
    z = (x - x.mean()) / max(float(np.ptp(x)), 1e-9)
    design = np.stack([z**0, z, z**2, z**3, indicator], axis=1)
    return float(np.linalg.lstsq(design, y, rcond=None)[0][-1])


def by_seed(pairs: Mapping[Key, float]) -> Values:
    """Tasks averaged within the seed."""
    return np.array(
        [
            np.mean([v for k, v in pairs.items() if k[0] == seed])
            for seed in sorted({k[0] for k in pairs})
        ],
        np.float64,
    )


def outside(middle: float, error: float, margin: float, freedom: float) -> float:
    """p-value of a difference of at least the margin, by two one-sided tests."""
    if error == 0:
        return float(abs(middle) >= margin)
    return float(stats.t.cdf((abs(middle) - margin) / error, freedom))


class Comparison(NamedTuple):
    """`test` of first minus second (of log ratios), the p-value against a difference that matters;
    `sign` is -1 if less is better.
    """

    test: Test
    outside: float
    seeds: int
    won: float
    sign: int = 1
    log: bool = False

    def symbol(self, equal: float, outside: float) -> str:
        """A symbol of the page, from the corrected p-values."""
        if equal >= LEVEL:
            return "=" if outside < LEVEL else "?"
        better = self.sign * self.test.mean > 0
        return {1: "△▲", 0: "▽▼"}[better][outside >= LEVEL]


def lead(first: Run, second: Run, measure: str) -> float:
    """first - second of two runs of a seed, or the log of their ratio."""
    if measure == "final reward":
        return float(first.rewards[-1] - second.rewards[-1])
    if match := re.fullmatch(rf"(updates|{FORWARDS}|{STATED}) to equal rewards, ratio", measure):
        return log_ratio(first, second, match[1])
    if measure == AT_REWARD:
        return quality_shift(first, second)
    axis = AXES[measure.removeprefix("mean reward over ")]
    budget = min(first.budgets(axis)[-1], second.budgets(axis)[-1])
    return first.area(axis, budget) - second.area(axis, budget)


class Asked(NamedTuple):
    """A rule of the page: the arms that it compares, and the measure."""

    arms: tuple[str, ...]
    measure: str


def asked(rule: str) -> Asked | None:
    """A rule in words; None for a measure that is not covered."""
    if match := re.fullmatch(
        r"(.+) against (.+) \((mean reward over .+|final reward|collapse rate|.+ to equal rewards,"
        rf" ratio|{AT_REWARD})\)",
        rule,
    ):
        return Asked((match[1], match[2]), match[3])
    interaction = re.fullmatch(r"the lead of (.+) over (.+) against that of (.+) over (.+)", rule)
    return Asked(tuple(interaction.groups()), "mean reward over training") if interaction else None


def compare(rule: Asked, runs: Mapping[str, Mapping[Key, Run]], gain: float) -> Comparison | None:
    """A rule over the runs that its arms have in common; None if there are too few seeds."""
    keys = sorted(set.intersection(*(set(runs[arm]) for arm in rule.arms)))
    arms = [[runs[arm][key] for key in keys] for arm in rule.arms]
    seeds = len({seed for seed, _ in keys})
    if seeds < FEWEST:
        return None
    if rule.measure == "collapse rate":
        collapsed = [np.array([run.collapsed for run in side]) for side in arms]
        wins = won(by_seed(dict(zip(keys, collapsed[1] * 1.0 - collapsed[0], strict=True))))
        test = bonett_price(*collapsed)
        half = (test.high - test.low) / 2
        error = half / float(stats.norm.ppf(0.975))
        p = outside((test.low + test.high) / 2, error, RATE, np.inf)
        return Comparison(test, p, seeds, wins, -1)

    def leads(first: list[Run], second: list[Run]) -> Values:
        pairs = zip(keys, first, second, strict=True)
        return by_seed({key: lead(a, b, rule.measure) for key, a, b in pairs})

    values = leads(*arms[:2]) - (leads(*arms[2:]) if len(arms) > 2 else 0.0)
    log = rule.measure.endswith("ratio")
    margin = RATIO if log else DENSITY if rule.measure == AT_REWARD else SMALLEST * gain
    sign = -1 if log else 1
    error = float(values.std(ddof=1)) / seeds**0.5
    p = outside(float(values.mean()), error, margin, seeds - 1)
    return Comparison(t_test(values), p, seeds, won(sign * values), sign, log)


def won(values: Values) -> float:
    return float(np.where(values == 0, 0.5, values > 0).mean())
