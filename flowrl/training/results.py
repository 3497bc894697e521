"""Reading run folders back, and the table of a comparison."""

import io
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class RunRecord:
    """One run: its method and seed, one row per iteration (row 0: untrained), and whether it has finished."""

    method: str
    seed: int
    folder: Path
    rows: tuple[dict[str, Any], ...]
    finished: bool

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows that carry an evaluation."""
        return [row for row in self.rows if row.get("evaluation")]

    def curve(self, x: str, score: str = "reward") -> tuple[list[float], list[float]]:
        """(x, evaluation score), x one of iteration, nfe_total, seconds_total."""
        rows = self.evaluations
        return [float(row[x]) for row in rows], [float(row["evaluation"][score]) for row in rows]

    @property
    def heldout(self) -> list[str]:
        """Names of the held-out rewards that were scored beside the reward."""
        return list(dict.fromkeys(name for row in self.evaluations for name in row["evaluation"].get("heldout", {})))

    def beside(self, x: str, *path: str) -> tuple[list[float], list[float]]:
        """(x, number at `path` within an evaluation): ("proxy",), ("diversity",) or ("heldout", NAME), where it was measured."""
        points = [(float(row[x]), _at(row["evaluation"], path)) for row in self.evaluations]
        kept = [(at, value) for at, value in points if value is not None]
        return [at for at, _ in kept], [value for _, value in kept]

    def mean(self, *path: str) -> float:
        """Mean over the training rows of a number at `path`; NaN where no row has it."""
        found = []
        for row in self.rows:
            value = _at(row, path)
            if value is not None and row["iteration"] > 0:
                found.append(value)
        return statistics.fmean(found) if found else math.nan


def _at(value: Any, path: Sequence[str]) -> float | None:
    """The number at `path` within nested objects; None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison folder, and its config.json."""

    folder: Path
    config: dict[str, Any]
    runs: tuple[RunRecord, ...]

    @property
    def methods(self) -> list[str]:
        """Methods that have at least one evaluated run, in the order of the configuration."""
        return [m for m in self.config["methods"] if self.of(m)]

    @property
    def baseline(self) -> str:
        """The method that the others are measured against."""
        return self.config.get("baseline") or self.config["methods"][0]

    def of(self, method: str) -> list[RunRecord]:
        """The method's runs that have been evaluated at least once, by seed."""
        return [run for run in self.runs if run.method == method and run.evaluations]


def load_run(folder: Path) -> RunRecord:
    """Read a run folder; a half-written last line is ignored. Raises `ConfigError` where it is no run folder."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = (folder / "metrics.jsonl").read_text()
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from error
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return RunRecord(config["algorithm"]["method"], int(config["seed"]), folder, tuple(rows), (folder / "done.json").exists())


def run_folder(name: str, seed: int) -> str:
    """The folder of one run of a comparison: a name that can be part of a path on every system."""
    return re.sub(r"[^\w.=,-]+", "_", name).strip("_") + f"-seed{seed}"


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison folder, finished or not. Raises `ConfigError` where it is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        names = config["methods"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is not the folder of a comparison: {error}") from error
    folders = [folder / "runs" / run_folder(name, seed) for name in names for seed in config["seeds"]]
    return Comparison(folder, config, tuple(load_run(f) for f in folders if (f / "metrics.jsonl").exists()))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds (NaN for a single one)."""

    mean: float
    std: float

    def text(self, digits: int = 3) -> str:
        """'0.712 ± 0.013'."""
        if math.isnan(self.mean):
            return "-"
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.std) else f" ± {self.std:.{digits}f}")


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    if not values:
        return Spread(math.nan, math.nan)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


@dataclass(frozen=True)
class Change:
    """A number of the first and of the last evaluation that has it, over seeds."""

    before: Spread
    after: Spread

    def text(self) -> str:
        """'0.712 to 0.934 ± 0.013'."""
        return f"{self.before.mean:.3f} to {self.after.text()}" if self.before.text() != "-" else "-"


@dataclass(frozen=True)
class MethodSummary:
    """One line of the table. Rewards are evaluation rewards (held-out prompts, ODE, averaged weights); `to_baseline_*` say when
    the mean curve over seeds first reaches the baseline's final mean reward (None: not reached); NFE counts the rollout's network
    evaluations. `beside` is what was measured beside the reward, by name (`training.heldout`)."""

    method: str
    seeds: int
    base: Spread
    final: Spread
    best: Spread
    final_strict: Spread
    gain_each_seed: tuple[float, ...]
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
    beside: dict[str, Change] = field(default_factory=dict)


def _beside(runs: Sequence[RunRecord]) -> dict[str, Change]:
    """The proxy, every held-out reward and the diversity, from the first evaluation to the last."""
    names = list(dict.fromkeys(name for run in runs for name in run.heldout))
    paths = {
        "proxy": ("proxy",),
        **{f"held out: {short(name)}": ("heldout", name) for name in names},
        "diversity": ("diversity",),
    }
    found = {label: [run.beside("iteration", *path)[1] for run in runs] for label, path in paths.items()}
    return {
        label: Change(spread([c[0] for c in curves if c]), spread([c[-1] for c in curves if c]))
        for label, curves in found.items()
        if any(curves) or label.startswith("held out")
    }


def short(spec: str) -> str:
    """A reward's spec as figures and tables show it: without a file's folder, and without a long list of options."""
    head, bracket, rest = spec.partition("(")
    head = head.rpartition("/")[2]
    return head + (f"({rest}" if bracket and len(rest) <= 24 else "(...)" if bracket else "")


def mean_curve(runs: Sequence[RunRecord], x: str, score: str = "reward") -> tuple[list[float], list[float]]:
    """The mean over seeds at the evaluations that all of them have."""
    curves = [run.curve(x, score) for run in runs]
    length = min((len(curve[0]) for curve in curves), default=0)
    xs = [statistics.fmean(curve[0][i] for curve in curves) for i in range(length)]
    return xs, [statistics.fmean(curve[1][i] for curve in curves) for i in range(length)]


def reaches(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Where the curve first reaches `target`, linearly between its points; None where it never does."""
    for i, y in enumerate(ys):
        if y >= target - 1e-12:
            if i == 0:
                return xs[0]
            share = (target - ys[i - 1]) / (y - ys[i - 1])
            return xs[i - 1] + share * (xs[i] - xs[i - 1])
    return None


def summarise(comparison: Comparison) -> list[MethodSummary]:
    """One summary per method that has been evaluated."""
    baseline = mean_curve(comparison.of(comparison.baseline), "iteration")[1]
    target = baseline[-1] if baseline and baseline[-1] > baseline[0] else math.inf  # nothing to reach without a gain
    result = []
    for method in comparison.methods:
        runs = comparison.of(method)
        rewards = [run.curve("iteration")[1] for run in runs]
        reached = {x: reaches(*mean_curve(runs, x), target) for x in ("iteration", "nfe_total", "seconds_total")}
        per_run = {key: statistics.fmean(run.mean(key) for run in runs) for key in ("nfe", "calls", "reward_calls", "train_nfe")}
        samples = statistics.fmean(run.mean("trajectories") for run in runs)
        phases = {p: statistics.fmean(run.mean("phases", p) for run in runs) for p in ("rollout", "reward", "update")}
        result.append(
            MethodSummary(
                method=method,
                seeds=len(runs),
                base=spread([r[0] for r in rewards]),
                final=spread([r[-1] for r in rewards]),
                best=spread([max(r) for r in rewards]),
                final_strict=spread([run.curve("iteration", "strict")[1][-1] for run in runs]),
                gain_each_seed=tuple(r[-1] - r[0] for r in rewards),
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
                beside=_beside(runs),
            )
        )
    return result


def summary_values(summaries: Sequence[MethodSummary]) -> list[dict[str, Any]]:
    """Plain values for JSON (NaN becomes null)."""
    return json.loads(json.dumps([asdict(s) for s in summaries]).replace("NaN", "null"))


ROWS: tuple[tuple[str, Callable[[MethodSummary], str]], ...] = (
    ("seeds", lambda s: str(s.seeds)),
    ("reward before", lambda s: f"{s.base.mean:.3f}"),
    ("final reward", lambda s: s.final.text()),
    ("best reward", lambda s: s.best.text()),
    ("final strict success", lambda s: s.final_strict.text()),
    ("smallest gain of a seed", lambda s: f"{min(s.gain_each_seed):+.3f}"),
    ("iterations to baseline", lambda s: _reached(s.to_baseline_iterations, ".1f")),
    ("NFE to baseline", lambda s: _reached(s.to_baseline_nfe, ",.0f")),
    ("seconds to baseline", lambda s: _reached(s.to_baseline_seconds, ".0f")),
    ("NFE/trajectory", lambda s: f"{s.nfe_per_trajectory:.1f}"),
    ("network calls/iteration", lambda s: f"{s.calls_per_iteration:.0f}"),
    ("reward calls/trajectory", lambda s: f"{s.rewards_per_trajectory:.1f}"),
    ("s/iteration: rollout", lambda s: f"{s.seconds_rollout:.2f}"),
    ("s/iteration: reward", lambda s: f"{s.seconds_reward:.2f}"),
    ("s/iteration: update", lambda s: f"{s.seconds_update:.2f}"),
)
"""The table's lines: what they say, and a method's cell."""


Row = tuple[str, Callable[[MethodSummary], str]]


def table_rows(summaries: Sequence[MethodSummary]) -> list[Row]:
    """The table's lines: those of every comparison, and what was measured beside the reward."""
    names = dict.fromkeys(name for summary in summaries for name in summary.beside)
    beside: list[Row] = [(name, lambda s, name=name: s.beside[name].text() if name in s.beside else "-") for name in names]
    place = next(i for i, (name, _) in enumerate(ROWS) if name == "smallest gain of a seed") + 1
    return [*ROWS[:place], *beside, *ROWS[place:]]


def _reached(value: float | None, digits: str) -> str:
    return "not reached" if value is None else f"{value:{digits}}"


def print_table(summaries: Sequence[MethodSummary], console: Console) -> None:
    """One aligned table, a column per method; rewards are mean ± sample standard deviation over seeds, seconds per iteration."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.method, justify="right", min_width=13)
    for name, cell in table_rows(summaries):
        table.add_row(name, *(cell(summary) for summary in summaries))
    console.print(table)


def as_text(summaries: Sequence[MethodSummary]) -> str:
    """The table as plain text, at most 120 columns wide."""
    console = Console(width=120, record=True, file=io.StringIO())
    print_table(summaries, console)
    return console.export_text()
