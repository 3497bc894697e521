"""Reads run folders and summarises the runs of a comparison."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len

from flowrl.core.errors import ConfigError
from flowrl.reading import as_kind, parse_json, read_json, reading
from flowrl.training.curves import first_reached
from flowrl.training.format import check_format, current_comparison
from flowrl.training.statistics import collapsed, mean

REWARDS = ("reward", "reward_form")
"""Settings of the training reward: where they differ, so does what an evaluation calls the reward.
"""


@dataclass(frozen=True)
class RunRecord:
    """One run: its `arm` (of a run by itself: its method) and `seed`, its `folder`, `rows` (one per
    iteration; row 0: untrained), whether it has `finished`, and the `config` in its config.json.
    """

    arm: str
    seed: int
    folder: Path
    rows: tuple[dict[str, Any], ...]
    finished: bool
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings without their groups, except the seed."""
        found: dict[str, Any] = {}
        for name, value in self.config.items():
            found |= value if isinstance(value, dict) else {name: value}
        return {name: value for name, value in found.items() if name not in ("seed", "format")}

    @property
    def state(self) -> str:
        """finished, not finished, or stopped by an observer, with its reason."""
        stopped = self.rows[-1].get("stopped") if self.rows else ""
        ended = "finished" if self.finished else "not finished"
        return f"stopped by {stopped}" if stopped else ended

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows that contain an evaluation."""
        return [row for row in self.rows if row.get("evaluation")]

    @property
    def heldout_rewards(self) -> list[str]:
        """Names of the held-out rewards that the evaluations contain."""
        return list(
            dict.fromkeys(
                name for row in self.evaluations for name in row["evaluation"].get("heldout", {})
            )
        )

    def curve(self, x: str, *path: str) -> tuple[list[float], list[float]]:
        """`x` (iteration, nfe_total or seconds_total) and the metric at `path` within each
        evaluation that contains it.

        `path` is for example ("strict",), ("proxy",), ("diversity",) or ("heldout", NAME); the
        default is the reward.
        """
        points = [
            (float(row[x]), _number(row["evaluation"], path or ("reward",)))
            for row in self.evaluations
        ]
        found = [(at, value) for at, value in points if value is not None]
        return [at for at, _ in found], [value for _, value in found]

    def mean(self, *path: str) -> float:
        """Mean over the training rows of the number at `path`; NaN if no row contains it."""
        values = [_number(row, path) for row in self.rows if row["iteration"] > 0]
        found = [value for value in values if value is not None]
        return statistics.fmean(found) if found else math.nan


def _number(value: Any, path: Sequence[str]) -> float | None:
    """The number at `path` within nested objects; None if there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Comparison:
    """The `runs` of a comparison, its `folder`, and the `config` in its config.json."""

    folder: Path
    config: dict[str, Any]
    runs: tuple[RunRecord, ...]

    @property
    def arms(self) -> list[str]:
        """Arms with at least one evaluated run, in the order of the configuration."""
        return [arm for arm in self.config["arms"] if self.of(arm)]

    @property
    def baseline(self) -> str:
        """The arm that all others are compared with."""
        return next(iter(self.config["arms"]))

    def of(self, arm: str) -> list[RunRecord]:
        """The arm's runs with at least one evaluation, in the order of the seeds."""
        return [
            run for run in self.runs if run.arm == arm and run.curve("iteration", *self.metric)[1]
        ]

    @cached_property
    def differences(self) -> dict[str, dict[str, Any]]:
        """By arm, the settings in which the runs of the arms differ."""
        settings = {run.arm: run.settings for run in self.runs}
        names = dict.fromkeys(name for values in settings.values() for name in values)
        first = next(iter(settings.values()), {})
        differ = [
            name
            for name in names
            if any(values.get(name) != first.get(name) for values in settings.values())
        ]
        return {
            arm: {name: values.get(name) for name in differ} for arm, values in settings.items()
        }

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of all runs, in their groups, without `differences`."""
        known, differ = (
            self.runs[0].settings if self.runs else {},
            next(iter(self.differences.values()), {}),
        )

        def common(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: common(value) if isinstance(value, dict) else known.get(name, value)
                for name, value in values.items()
                if name not in differ
            }

        return common(self.config["run"])

    @property
    def metric(self) -> tuple[str, ...]:
        """The path of the metric by which the arms are compared: the reward, or the first held-out
        reward if the arms are trained on different rewards.
        """
        differ = next(iter(self.differences.values()), {})
        heldout = (
            self.config["run"].get("evaluation", {}).get("heldout_rewards", ())
            if differ.keys() & set(REWARDS)
            else ()
        )
        return ("heldout", heldout[0]) if heldout else ("reward",)


def load_run(folder: Path, arm: str = "") -> RunRecord:
    """Read a run folder, of a comparison's `arm`; an incomplete last line is ignored.

    Raises `ConfigError` if `folder` is not the folder of a run, or a line of metrics.jsonl is not a
    row of a run.
    """
    settings = _config(folder, "run")
    check_format(folder / "config.json", settings)
    config: _RunFile = _config(folder, "run", _RunFile)
    path, rows = folder / "metrics.jsonl", list[dict[str, Any]]()
    with reading(path):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number}: {str(error)[:200]}") from error
        with reading(f"{path}, line {number}"):
            as_kind(row, MetricsRow)
        rows.append(row)
    done = (folder / "done.json").exists()
    return RunRecord(
        arm or config.algorithm.method, config.seed, folder, tuple(rows), done, settings
    )


def _config(folder: Path, kind: str, content: Any = Any) -> Any:
    try:
        return read_json(folder / "config.json", content)
    except ConfigError as error:
        raise ConfigError(f"{folder} is not the folder of a {kind}: {error}") from error


@dataclass(frozen=True)
class _Algorithm:
    method: str


@dataclass(frozen=True)
class _RunFile:
    """The entries of a run's config.json that are read."""

    algorithm: _Algorithm
    seed: int


@dataclass(frozen=True)
class _Scores:
    reward: float
    heldout: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsRow:
    """The entries of every line of metrics.jsonl: the `iteration` (0: the untrained model), network
    evaluations (`nfe_total`) and training seconds (`seconds_total`) so far, the scores of the
    `evaluation` if there was one, and the number of `trajectories`.
    """

    iteration: int
    nfe_total: float
    seconds_total: float
    evaluation: _Scores | None = None
    trajectories: float = 1.0


@dataclass(frozen=True)
class _ComparisonFile:
    """The entries of a comparison's config.json that are read."""

    arms: Annotated[dict[str, dict[str, Any]], Len(1)]
    seeds: list[int]
    run: dict[str, Any]


def holds(folder: Path, *entries: str) -> bool:
    """Whether config.json in `folder` was written by flowrl and has one of `entries`: "algorithm"
    for a run, "arms" (in earlier versions "methods") for a comparison.
    """
    try:
        found = read_json(folder / "config.json", dict[str, Any])
    except ConfigError:
        return False
    return any(entry in found for entry in entries)


def has_progress(folder: Path) -> bool:
    """Whether the run in `folder` has an iteration, a checkpoint or a saved failure, which a new
    run would overwrite.
    """
    metrics = folder / "metrics.jsonl"
    found = any((folder / "checkpoints").glob("*")) or any(
        (folder / name).exists() for name in ("failure", "done.json")
    )
    return found or (metrics.exists() and metrics.read_bytes().count(b"\n") > 1)


def run_folder(name: str, seed: int) -> str:
    """Folder name of the run of arm `name` with `seed` in a comparison, valid on every operating
    system.
    """
    return re.sub(r"[^\w.=,-]+", "_", name).strip("_") + f"-seed{seed}"


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison folder, finished or not. Raises `ConfigError` if `folder` is not the folder
    of a comparison.
    """
    path = folder / "config.json"
    with reading(path):
        config = current_comparison(_config(folder, "comparison", dict[str, Any]))
        try:
            found: _ComparisonFile = as_kind(config, _ComparisonFile)
        except ValueError as error:
            raise ConfigError(
                f"{folder} is not the folder of a comparison: {str(error)[:200]}"
            ) from error
    folders = {
        folder / "runs" / run_folder(name, seed): name
        for name in found.arms
        for seed in found.seeds
    }
    with reading(path):  # a name may be too long for the file system
        started = {
            place: name for place, name in folders.items() if (place / "metrics.jsonl").exists()
        }
    return Comparison(
        folder, config, tuple(load_run(place, name) for place, name in started.items())
    )


@dataclass(frozen=True)
class Mean:
    """`mean` over seeds, and `half` the width of its 95% interval (Student's t; NaN for a single
    seed).
    """

    mean: float
    half: float

    def text(self, digits: int = 3, sign: bool = False) -> str:
        """'0.712 ± 0.013'."""
        if math.isnan(self.mean):
            return "-"
        value = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return value + ("" if math.isnan(self.half) else f" ± {self.half:.{digits}f}")


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of `values` with half of its t interval (`flowrl.training.diagnostics.mean`); NaN
    for no value.
    """
    if not values:
        return Mean(math.nan, math.nan)
    found = mean(values)
    return Mean(found.value, found.high - found.value if math.isfinite(found.high) else math.nan)


@dataclass(frozen=True)
class Change:
    """A metric at the first (`before`) and at the last evaluation (`after`) that contains it, over
    seeds.
    """

    before: Mean
    after: Mean

    def text(self) -> str:
        """'0.712 to 0.934 ± 0.013'."""
        return (
            f"{self.before.mean:.3f} to {self.after.text()}" if self.before.text() != "-" else "-"
        )


@dataclass(frozen=True)
class ArmSummary:
    """One row of the results table: evaluation rewards (held-out prompts, ODE sampler, averaged
    weights) and costs.

    Args:
        arm: name of the arm.
        seeds: number of seeds.
        base: reward before training.
        final: reward at the last evaluation.
        lead: final reward minus the baseline's, paired by seed.
        worst: lowest final reward of a seed.
        collapsed: number of collapsed seeds.
        final_strict: success rate by the strict score.
        to_baseline_iterations: where the mean curve over seeds first reaches the baseline's final
            mean reward; None: not reached.
        to_baseline_nfe: the same point in network evaluations of the rollout.
        to_baseline_seconds: the same point in seconds.
        nfe_per_trajectory: network evaluations of the rollout per trajectory.
        calls_per_iteration: sequential network calls per iteration.
        rewards_per_trajectory: scored images per trajectory.
        train_nfe_per_trajectory: network evaluations of the update per trajectory.
        seconds_rollout: seconds of an iteration's rollout.
        seconds_reward: seconds of an iteration's scoring.
        seconds_update: seconds of an iteration's update.
        heldout: changes of the proxy, the held-out rewards and the diversity by label.
        settings: the settings in which arms differ.
    """

    arm: str
    seeds: int
    base: Mean
    final: Mean
    lead: Mean
    worst: float
    collapsed: int
    final_strict: Mean
    to_baseline_iterations: float | None
    to_baseline_nfe: float | None
    to_baseline_seconds: float | None
    nfe_per_trajectory: float
    calls_per_iteration: float
    rewards_per_trajectory: float
    train_nfe_per_trajectory: float
    seconds_rollout: float
    seconds_reward: float
    seconds_update: float
    heldout: dict[str, Change] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def difference(self) -> str:
        """`settings` as text, without empty ones and without a method that gave the arm its
        name.
        """
        return difference(self.arm, self.settings)


def difference(arm: str, settings: Mapping[str, Any]) -> str:
    """The `settings` of an `arm` as text, without empty ones and without a method that gave the arm
    its name.
    """
    named = {
        name: value
        for name, value in settings.items()
        if (name, value) != ("method", arm) and value not in ("", [], (), None)
    }
    return ", ".join(f"{name}={_plain(value)}" for name, value in named.items())


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _heldout(runs: Sequence[RunRecord]) -> dict[str, Change]:
    """Changes of the proxy, of every held-out reward and of the diversity."""
    names = list(dict.fromkeys(name for run in runs for name in run.heldout_rewards))
    paths = {
        "proxy": ("proxy",),
        **{f"held out: {short(name)}": ("heldout", name) for name in names},
        "diversity": ("diversity",),
    }
    found = {
        label: [run.curve("iteration", *path)[1] for run in runs] for label, path in paths.items()
    }
    return {
        label: Change(mean_of([c[0] for c in curves if c]), mean_of([c[-1] for c in curves if c]))
        for label, curves in found.items()
        if any(curves) or label.startswith("held out")
    }


def short(spec: str) -> str:
    """Label of a reward spec in figures and tables: without folders and without options longer than
    24 characters.
    """
    head, bracket, rest = spec.partition("(")
    head = head.rpartition("/")[2]
    return head + (f"({rest}" if bracket and len(rest) <= 24 else "(...)" if bracket else "")


def mean_curve(runs: Sequence[RunRecord], x: str, *path: str) -> tuple[list[float], list[float]]:
    """`RunRecord.curve` of `x` and `path` averaged over seeds, at the iterations that all `runs`
    have evaluated.
    """
    tables = [
        dict(
            zip(
                run.curve("iteration", *path)[0],
                zip(*run.curve(x, *path), strict=True),
                strict=True,
            )
        )
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    means = [
        [statistics.fmean(table[at][axis] for table in tables) for at in shared] for axis in (0, 1)
    ]
    return means[0], means[1]


def summarise(comparison: Comparison) -> list[ArmSummary]:
    """One summary per evaluated arm."""
    metric = comparison.metric
    baseline = mean_curve(comparison.of(comparison.baseline), "iteration", *metric)[1]
    finals = {
        run.seed: run.curve("iteration", *metric)[1][-1]
        for run in comparison.of(comparison.baseline)
    }
    # no target without a gain
    target = baseline[-1] if baseline and baseline[-1] > baseline[0] else math.inf
    result = []
    for arm in comparison.arms:
        runs = comparison.of(arm)
        rewards = [run.curve("iteration", *metric)[1] for run in runs]
        axes = ("iteration", "nfe_total", "seconds_total")
        reached = {
            x: _finite(float(first_reached(*mean_curve(runs, x, *metric), target))) for x in axes
        }
        per_run = {
            key: statistics.fmean(run.mean(key) for run in runs)
            for key in ("nfe", "calls", "reward_calls", "train_nfe")
        }
        samples = statistics.fmean(run.mean("trajectories") for run in runs)
        phases = {
            p: statistics.fmean(run.mean("phases", p) for run in runs)
            for p in ("rollout", "reward", "update")
        }
        result.append(
            ArmSummary(
                arm=arm,
                seeds=len(runs),
                base=mean_of([r[0] for r in rewards]),
                final=mean_of([r[-1] for r in rewards]),
                lead=mean_of(
                    [
                        r[-1] - finals[run.seed]
                        for run, r in zip(runs, rewards, strict=True)
                        if run.seed in finals
                    ]
                ),
                worst=min(r[-1] for r in rewards),
                collapsed=sum(map(collapsed, rewards)),
                final_strict=mean_of(
                    [last for run in runs for last in run.curve("iteration", "strict")[1][-1:]]
                ),
                to_baseline_iterations=reached["iteration"],
                to_baseline_nfe=reached["nfe_total"],
                to_baseline_seconds=reached["seconds_total"],
                nfe_per_trajectory=per_run["nfe"] / samples,
                calls_per_iteration=per_run["calls"],
                rewards_per_trajectory=per_run["reward_calls"] / samples,
                train_nfe_per_trajectory=per_run["train_nfe"] / samples,
                seconds_rollout=phases["rollout"],
                seconds_reward=phases["reward"],
                seconds_update=phases["update"],
                heldout=_heldout(runs),
                settings=comparison.differences[arm],
            )
        )
    return result


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summary_values(summaries: Sequence[ArmSummary]) -> list[dict[str, Any]]:
    """Plain values for JSON (NaN becomes null)."""
    return json.loads(json.dumps([asdict(s) for s in summaries]).replace("NaN", "null"))
