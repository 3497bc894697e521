"""Reads run folders and summarises the runs of a comparison."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Len

from flowrl.compare.target import CostRatio, Curves, cost_ratio
from flowrl.run.costs import (
    WORLDS,
    Parts,
    measured_prices,
    prices_of,
)
from flowrl.run.reading import reading
from flowrl.run.records import (
    AXES,
    RunRecord,
    finite,
    folder_config,
    load_run,
    shared_curves,
)
from flowrl.run.results import scoring_seconds, short
from flowrl.run.statistics import collapsed, evaluation_noise, mean

REWARDS = ("reward", "reward_form")
"""Settings of the training reward: where they differ, so does what an evaluation calls the reward.
"""


@dataclass(frozen=True)
class ComparisonFile:
    """The entries of a comparison's config.json."""

    arms: Annotated[dict[str, dict[str, Any]], Len(1)]
    seeds: list[int]
    run: dict[str, Any]
    preset: str = "default"
    command: str = ""
    points: dict[str, dict[str, Any]] = field(default_factory=dict)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings in which runs differ."""
    names = dict.fromkeys(name for chosen in settings for name in chosen)
    return [
        name
        for name in names
        if any(chosen.get(name) != settings[0].get(name) for chosen in settings)
    ]


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
        return [run for run in self.runs if run.arm == arm and run.curve(AXES[0], *self.metric)[1]]

    @cached_property
    def differences(self) -> dict[str, dict[str, Any]]:
        """By arm, the settings in which the runs of the arms differ."""
        arms = {run.arm: run.settings for run in self.runs}
        differ = differing(list(arms.values()))
        return {arm: {name: known.get(name) for name in differ} for arm, known in arms.items()}

    @property
    def _differing(self) -> dict[str, Any]:
        return next(iter(self.differences.values()), {})

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of all runs, in their groups, without `differences`."""

        def common(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: common(value) if isinstance(value, dict) else value
                for name, value in values.items()
                if name not in self._differing
            }

        return common(self.runs[0].config if self.runs else self.config["run"])

    @property
    def metric(self) -> tuple[str, ...]:
        """The path of the metric by which the arms are compared: the reward, or the first held-out
        reward if the arms are trained on different rewards.
        """
        heldout = self.config["run"].get("evaluation", {}).get("heldout_rewards", ())
        differ = self._differing.keys() & set(REWARDS)
        return ("heldout", heldout[0]) if differ and heldout else ("reward",)


def run_folder(name: str, seed: int) -> str:
    """Folder name of the run of arm `name` with `seed` in a comparison, valid on every operating
    system.
    """
    return re.sub(r"[^\w.=,-]+", "_", name).strip("_") + f"-seed{seed}"


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison folder, finished or not. Raises `ConfigError` if `folder` is not the folder
    of a comparison.
    """
    config, entries = folder_config(folder, "comparison", ComparisonFile)
    places = {
        folder / "runs" / run_folder(arm, seed): arm
        for arm in entries.arms
        for seed in entries.seeds
    }
    with reading(folder / "config.json"):  # a name may be too long for the file system
        started = [place for place in places if (place / "metrics.jsonl").exists()]
    runs = [load_run(place, places[place]) for place in started]
    passes = prices_of(runs[0].config).passes if runs else 1
    measured = measured_prices((row for run in runs for row in run.rows), passes)
    priced = [replace(run, prices=prices_of(run.config, measured)) for run in runs]
    return Comparison(folder, config, tuple(priced))


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
    """The mean of `values` with half of its t interval; NaN for no value."""
    if len(values) < 2:
        return Mean(values[0] if values else math.nan, math.nan)
    estimate = mean(values)
    return Mean(estimate.value, estimate.high - estimate.value)


@dataclass(frozen=True)
class Change:
    """A metric at the first (`before`) and at the last evaluation (`after`) that contains it, over
    seeds.
    """

    before: Mean
    after: Mean

    def text(self) -> str:
        """'0.712 to 0.934 ± 0.013'."""
        before = self.before.mean
        return "-" if math.isnan(before) else f"{before:.3f} to {self.after.text()}"


@dataclass(frozen=True)
class Reached:
    """Where an arm reaches the baseline's result, its final mean reward: the `cost` (None: not
    within the run), and the `ratio` of it to the baseline's own cost (None without common seeds).
    """

    cost: float | None = None
    ratio: CostRatio | None = None


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
        collapsed: number of collapsed seeds (`flowrl.run.statistics.collapsed`).
        final_strict: success rate by the strict score.
        to_baseline: by budget of `AXES`, where the arm reaches the baseline's result; without the
            stated model's seconds outside the built-in worlds.
        nfe_per_trajectory: network evaluations of the rollout per trajectory.
        calls_per_iteration: sequential network calls per iteration.
        rewards_per_trajectory: scored images per trajectory.
        train_nfe_per_trajectory: network evaluations of the update per trajectory.
        seconds_rollout: seconds of an iteration's rollout.
        seconds_reward: seconds of an iteration's decoding and scoring.
        seconds_update: seconds of an iteration's update.
        heldout: changes of the proxy, the held-out rewards and the diversity by label.
        settings: the settings in which arms differ.
        cost: forward equivalents per trajectory.
        priced: where the prices of decodes and reward calls come from.
    """

    arm: str
    seeds: int
    base: Mean
    final: Mean
    lead: Mean
    worst: float
    collapsed: int
    final_strict: Mean
    to_baseline: dict[str, Reached]
    nfe_per_trajectory: float
    calls_per_iteration: float
    rewards_per_trajectory: float
    train_nfe_per_trajectory: float
    seconds_rollout: float
    seconds_reward: float
    seconds_update: float
    heldout: dict[str, Change] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    cost: Parts = Parts(0, 0, 0, 0, 0)
    priced: str = ""

    @property
    def difference(self) -> str:
        """`settings` as text, without empty ones and without a method that gave the arm its
        name.
        """
        return difference(self.arm, self.settings)


def difference(arm: str, settings: Mapping[str, Any]) -> str:
    """The `settings` of an `arm` as text, as in `ArmSummary.difference`."""
    texts = {
        name: f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
        for name, value in settings.items()
        if (name, value) != ("method", arm) and value not in ("", [], (), None)
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def summarise(comparison: Comparison) -> list[ArmSummary]:
    """One summary per evaluated arm."""
    path, runs = comparison.metric, comparison.of(comparison.baseline)
    finals = {run.seed: run.curve("iteration", *path)[1][-1] for run in runs}
    return [_summary(comparison, arm, finals) for arm in comparison.arms]


def _summary(comparison: Comparison, arm: str, baseline: Mapping[int, float]) -> ArmSummary:
    """The summary of an arm, given the baseline's final rewards by seed."""
    path, runs = comparison.metric, comparison.of(arm)
    rewards = [run.curve("iteration", *path)[1] for run in runs]
    finals = {run.seed: curve[-1] for run, curve in zip(runs, rewards, strict=True)}
    axes = AXES if runs[0].settings.get("world", "mixture") in WORLDS else AXES[:-1]

    def over_seeds(*path: str) -> float:
        return statistics.fmean(run.mean(*path) for run in runs)

    trajectories = over_seeds("trajectories")
    return ArmSummary(
        arm,
        len(runs),
        base=mean_of([curve[0] for curve in rewards]),
        final=mean_of(list(finals.values())),
        lead=mean_of([finals[seed] - baseline[seed] for seed in finals if seed in baseline]),
        worst=min(finals.values()),
        collapsed=sum(map(_collapsed, runs, rewards)),
        final_strict=_change(runs, "strict").after,
        to_baseline={axis: _reached(comparison, runs, axis) for axis in axes},
        cost=_cost(runs),
        priced=(runs[0].prices or prices_of(runs[0].config)).source,
        nfe_per_trajectory=over_seeds("nfe") / trajectories,
        calls_per_iteration=over_seeds("calls"),
        rewards_per_trajectory=over_seeds("reward_calls") / trajectories,
        train_nfe_per_trajectory=over_seeds("train_nfe") / trajectories,
        seconds_rollout=over_seeds("phases", "rollout"),
        seconds_reward=statistics.fmean(map(_scoring, runs)),
        seconds_update=over_seeds("phases", "update"),
        heldout=_heldout(runs),
        settings=comparison.differences[arm],
    )


def _reached(comparison: Comparison, runs: Sequence[RunRecord], axis: str) -> Reached:
    """Where an arm's `runs` reach the baseline's result, over the seeds that both have."""
    others = comparison.of(comparison.baseline)
    seeds = sorted({run.seed for run in runs} & {run.seed for run in others})
    arm, baseline = (
        shared_curves([run for run in known if run.seed in seeds], axis, *comparison.metric)
        for known in (runs, others)
    )
    if not (seeds and arm[0][0] and baseline[0][0]):
        return Reached()
    arm, baseline = (Curves(*map(np.array, table)) for table in (arm, baseline))
    cost = arm.cost(float(baseline.mean(np.arange(len(seeds))).results))
    ratio = cost_ratio([(arm, baseline)])
    return Reached(cost if math.isfinite(cost) else None, ratio)


def _scoring(run: RunRecord) -> float:
    """Seconds of an iteration's decoding and scoring, mean over iterations."""
    rows = [scoring_seconds(row["phases"]) for row in run.rows if row.get("phases")]
    return statistics.fmean(rows) if rows else math.nan


def _collapsed(run: RunRecord, rewards: Sequence[float]) -> bool:
    """Whether a run's `rewards` on held-out prompts have collapsed at its end."""
    spreads = [row["reward_std"] for row in run.rows if "reward_std" in row]
    samples = run.settings.get("eval_samples", 1)
    noise = evaluation_noise(statistics.median(spreads), samples) if spreads else 0.0
    return collapsed(rewards, noise)


def _cost(runs: Sequence[RunRecord]) -> Parts:
    """Forward equivalents per trajectory of all `runs`."""
    rows = [row for run in runs for row in run.rows if row["iteration"] > 0]
    trajectories = sum(row.get("trajectories", math.nan) for row in rows) or math.nan
    ends = [vars(run.costs()[-1]) for run in runs]
    sums = Parts(**{name: sum(end[name] for end in ends) for name in ends[0]})
    return sums.scaled(1 / trajectories)


def _change(runs: Sequence[RunRecord], *path: str) -> Change:
    """The change of the metric at `path` over the runs that contain it."""
    curves = [curve for run in runs if (curve := run.curve("iteration", *path)[1])]
    return Change(mean_of([c[0] for c in curves]), mean_of([c[-1] for c in curves]))


def _heldout(runs: Sequence[RunRecord]) -> dict[str, Change]:
    """Changes of the proxy, of every held-out reward and of the diversity; of a held-out reward
    also if no evaluation has succeeded.
    """
    names = dict.fromkeys(name for run in runs for name in run.heldout_rewards)
    rewards = {f"held out: {short(name)}": _change(runs, "heldout", name) for name in names}
    proxy, diversity = _change(runs, "proxy"), _change(runs, "diversity")
    return (
        ({} if proxy.text() == "-" else {"proxy": proxy})
        | rewards
        | ({} if diversity.text() == "-" else {"diversity": diversity})
    )


def summary_values(summaries: Sequence[ArmSummary]) -> list[dict[str, Any]]:
    """Plain values for JSON."""
    return finite([asdict(summary) for summary in summaries])


def evaluation_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row per evaluation of every run: arm, seed, the settings in which the arms differ, the
    budgets of `AXES`, and the scores with their paths in metrics.jsonl, as in "evaluation.reward".
    """
    rows = []
    for run in comparison.runs:
        spent = {axis: run.spent(axis) for axis in AXES}
        for row in run.evaluations:
            budgets = {axis: values[row["iteration"]] for axis, values in spent.items()}
            scores = paths({"evaluation": row["evaluation"]})
            rows.append(
                {"arm": run.arm, "seed": run.seed}
                | comparison.differences[run.arm]
                | {**budgets, "iteration": row["iteration"], **scores}
            )
    return rows


def paths(values: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested values by their paths, joined with dots."""
    flat = {}
    for name, value in values.items():
        path = f"{start}{name}"
        flat |= paths(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
