"""What rules cost, as measured: evaluations, calls, seconds by phase, memory, and the price of a gain."""

import json
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.diagnostics.statistics import level
from flowrl.io import write_json
from flowrl.training.config import RunConfig
from flowrl.training.results import reaches
from flowrl_bench.claims import SEEDS, make_run
from flowrl_bench.document import Table
from flowrl_bench.evidence import column, spent
from flowrl_bench.measure import PHASES, measure
from flowrl_bench.records import code_hash, config_hash, provenance
from flowrl_bench.tables import WORLD_WORDS

Lines = Mapping[str, Mapping[str, Any]]
ARMS: dict[str, dict[str, Any]] = {
    "uniform (no probe)": {"method": "flow-grpo"},
    "gains, one step": {"credit": "stepwise-gain(probe=tweedie)"},
    "gains, 5 substeps": {"method": "stepwise-flow-grpo"},
    "gains, whole ODE": {"credit": "stepwise-gain(probe=completion)"},
    "turning points": {"method": "tp-grpo"},
}
"""A method or rule per probe."""


def _memory(values: dict[str, Any]) -> float:
    """MiB that a run's process peaked at, in a process of its own."""
    measure(RunConfig.from_dict(values))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def peak_memory(
    worlds: Sequence[str] = ("mixture", "shapes"), arms: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Peak resident memory in MiB of a two-iteration run per world and arm, each in a fresh process, one after the other."""
    found = []
    for world in worlds:
        task = {"mixture": "direction", "shapes": "compositional"}[world]
        for name, changes in (arms or ARMS).items():
            config = make_run(world, task, 0, {**changes, "iterations": 2, "eval_every": 2})
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found.append({"world": world, "arm": name, "peak_mib": pool.submit(_memory, config.as_dict()).result()})
    return found


def kept_memory(path: Path, measure: bool, code: str = "") -> list[dict[str, Any]]:
    """Peak memory from the file at `path`; where it is missing or of other code, measured now if `measure`, else nothing.

    `code`: the hash that the file must have; default that of this code.
    """
    if path.exists():
        kept = json.loads(path.read_text())
        if kept.get("code") == (code or code_hash()):
            return kept["rows"]
    if not measure:
        return []
    rows = peak_memory()
    write_json(path, {"code": code_hash(), **provenance(), "rows": rows})
    return rows


def cost_table(
    lines: Lines, arms: Mapping[str, Mapping[str, Any]] | None = None, memory: Sequence[Mapping[str, Any]] = ()
) -> Table:
    """Means over all finished runs of each arm with the world's own settings; memory where it was measured."""
    head = (
        "world", "rule", "runs", "NFE/trajectory", "reward calls/trajectory", "network calls/iteration",
        *(f"s/iteration: {phase}" for phase in PHASES), "reward gained per million NFE, whole run", "peak memory (MiB)",
    )  # fmt: skip
    rows = []
    by_seed: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines.values():
        by_seed.setdefault(config_hash(RunConfig.from_dict({**line["config"], "seed": 0})), []).append(line)
    for world, task in (("mixture", "direction"), ("shapes", "compositional")):
        for name, changes in (arms or ARMS).items():
            runs = by_seed.get(config_hash(make_run(world, task, 0, changes)), [])
            peak = next((f"{m['peak_mib']:.0f}" for m in memory if m["world"] == world and m["arm"] == name), "-")
            if runs:
                rows.append((WORLD_WORDS[world], name, str(len(runs)), *_cost(runs), peak))
    return Table(head, rows)


def _cost(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def mean(of: Any) -> float:
        return statistics.fmean(of(run) for run in runs)

    iterations = runs[0]["config"]["iterations"]
    price = mean(lambda r: 1e6 * (column(r, "soft")[-1] - column(r, "soft")[0]) / (r["totals"]["nfe"] + r["totals"]["train_nfe"]))
    return (
        f"{mean(lambda r: r['totals']['nfe'] / r['totals']['trajectories']):.1f}",
        f"{mean(lambda r: r['totals']['reward_calls'] / r['totals']['trajectories']):.1f}",
        f"{mean(lambda r: r['totals']['calls'] / iterations):.0f}",
        *(f"{mean(lambda r, p=phase: r['phases'][p]):.3f}" for phase in PHASES),
        f"{price:.2f}",
    )


LEVELS: dict[str, dict[str, Any]] = {
    "uniform": {"method": "flow-grpo"},
    "gains, 5 substeps": {"method": "stepwise-flow-grpo"},
    "turning points": {"method": "tp-grpo"},
}
"""Rules whose price for a level of reward is told, at the default clip and at one ten times as wide."""


def level_table(lines: Lines) -> Table | None:
    """Updates, evaluations and seconds until a level of held-out reward, and their ratios to uniform credit at the same clip.

    The level: what all of these runs reach at some time, rounded down to a twentieth. Ratios are those of runs of one seed.
    """
    axes = {"updates": 1.0, "nfe": 1e6, "seconds": 1.0}
    head = (
        "world",
        "reward",
        "clip",
        "rule",
        "seeds",
        "updates",
        "million NFE",
        "seconds",
        *(f"{axis} / uniform's" for axis in ("updates", "NFE", "seconds")),
    )
    rows = []
    for world, task in (("mixture", "direction"), ("shapes", "compositional")):
        runs, seeds = _runs_by_clip(lines, world, task)
        if not seeds:
            continue
        highest = min(max(column(run, "soft")) for arms in runs.values() for arm in arms.values() for run in arm)
        target = np.floor(highest * 20) / 20
        for clip, arms in runs.items():
            price = {
                (arm, axis): np.array([reaches(spent(run, axis), column(run, "soft"), target) for run in of]) / unit
                for arm, of in arms.items()
                for axis, unit in axes.items()
            }
            for arm in arms:
                cells = [_digits(level([price[arm, axis]]).value) for axis in axes]
                ratios = [level([price[arm, axis] / price["uniform", axis]]) for axis in axes]
                shown = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if len(seeds) > 1 else f"{r.value:.2f}" for r in ratios]
                shown = ["1"] * len(axes) if arm == "uniform" else shown
                rows.append((WORLD_WORDS[world], f"{target:.2f}", clip, arm, str(len(seeds)), *cells, *shown))
    return Table(head, rows) if rows else None


def _runs_by_clip(lines: Lines, world: str, task: str) -> tuple[dict[str, dict[str, list[Mapping[str, Any]]]], list[int]]:
    """Runs by clip and rule, of the seeds that all of them have."""

    def key(seed: int, changes: Mapping[str, Any]) -> str:
        return config_hash(make_run(world, task, seed, changes))

    cells = {
        str(changes.get("clip_range", RunConfig().algorithm.clip_range)): {arm: {**of, **changes} for arm, of in LEVELS.items()}
        for changes in ({}, {"clip_range": 2e-2})
    }
    every = [changes for arms in cells.values() for changes in arms.values()]
    seeds = [seed for seed in SEEDS[world] if all(key(seed, changes) in lines for changes in every)]
    runs = {clip: {arm: [lines[key(seed, c)] for seed in seeds] for arm, c in arms.items()} for clip, arms in cells.items()}
    return runs, seeds


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"
