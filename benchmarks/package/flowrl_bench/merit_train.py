"""Training runs of the study of merit: the learning success and the cost of every method and
probe.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flowrl_compare.statistics import Estimate

from flowrl.core.errors import ConfigError
from flowrl.probes import Branching
from flowrl.rollout import Groups, group_tree
from flowrl.training.build import make_method, trial_stds
from flowrl.training.config import RunConfig
from flowrl.workers import Worker, run_jobs
from flowrl_bench.digest import code_digest
from flowrl_bench.measurements import CURVE, measure
from flowrl_bench.merit_rows import ROWS, WORLDS
from flowrl_bench.results_file import ResultsFile, provenance
from flowrl_bench.statistics import interquartile_mean

SEEDS = 4
QUICK = {
    "iterations": 1,
    "groups": 2,
    "group_size": 12,
    "num_steps": 10,
    "eval_samples": 8,
    "eval_steps": 2,
}
Key = tuple[str, str, int]
"""(world, row, seed)."""


def train_config(key: Key, quick: bool = False) -> RunConfig:
    """The run of a row: the world's default, evaluated before and after."""
    world, row, seed = key
    run = ROWS[row].run(world, seed=seed, **(QUICK if quick else {}))
    return run.replace(eval_every=run.iterations)


def sampling_nfe(config: RunConfig) -> float | None:
    """Network evaluations for sampling one trajectory without its probe; None for branched trees,
    which cost nothing else.
    """
    method = make_method(config)
    if isinstance(method.credit.probe, Branching):
        return None
    groups = Groups(1, config.rollout.group_size, method.shared_noise)
    tree = group_tree(trial_stds(config), groups, method.credit.probe, torch.Generator())
    return sum(tree.counts[:-1]) / tree.members


def train_run(worker: Worker, key: Key, quick: bool) -> dict[str, Any] | None:
    """One run in plain numbers: rewards before and after, and network evaluations per trajectory;
    None if it was stopped.

    A probe that the world's network does not support gives its error.
    """
    config, started = train_config(key, quick), time.time()
    try:
        measured = measure(config, worker.stopped)
    except ConfigError as error:
        if "guidance of the probe" not in str(error):
            raise
        return {"not_applicable": str(error)}
    if measured is None:
        return None
    first, last = (
        dict(zip(CURVE, row, strict=True)) for row in (measured["curve"][0], measured["curve"][-1])
    )
    per = measured["totals"]["trajectories"]
    nfe, plain = measured["totals"]["nfe"] / per, sampling_nfe(config)
    return {
        "base": first["reward"],
        "final": last["reward"],
        "strict": [first["strict"], last["strict"]],
        "sampling": nfe if plain is None else plain,
        "probe": 0.0 if plain is None else nfe - plain,
        "update": measured["totals"]["train_nfe"] / per,
        "images": measured["totals"]["reward_calls"] / per,
        "seconds": measured["totals"]["seconds"],
        "wall_seconds": time.time() - started,
    }


def read_lines(path: Path) -> dict[Key, dict[str, Any]]:
    """Finished runs by (world, row, seed)."""
    return {
        (line["world"], line["row"], line["seed"]): line for line in ResultsFile(path).unchecked()
    }


def train_jobs(seeds: int, names: Iterable[str] = (), worlds: Iterable[str] = WORLDS) -> list[Key]:
    """All runs, seed by seed, so that all rows have equally many of them at any time."""
    wanted = [row.name for row in ROWS.values() if row.trained and (not names or row.name in names)]
    return [(world, row, seed) for world in worlds for seed in range(seeds) for row in wanted]


def train(
    path: Path,
    jobs: Sequence[Key],
    workers: int,
    quick: bool,
    command: str,
    progress: Callable[[int, int, str], None],
) -> bool:
    """Compute the missing runs in the file `path`, one JSON line each; False if Ctrl-C paused
    it.
    """
    done = read_lines(path)
    missing = [key for key in jobs if key not in done]
    made = {"command": command, "code": code_digest(), **provenance()}
    count = len(jobs) - len(missing)

    def finished(key: Key, result: dict[str, Any] | None) -> None:
        nonlocal count
        if result is not None:
            world, row, seed = key
            ResultsFile(path).append({"world": world, "row": row, "seed": seed, **result, **made})
            count += 1
            progress(count, len(jobs), f"{world}, {row}, seed {seed}")

    return not missing or run_jobs(
        train_run,
        {key: (key, quick) for key in missing},
        workers,
        finished=finished,
        describe=lambda key: f"the run {key}",
    )


@dataclass(frozen=True)
class Learned:
    """Common results of a row's runs: `gain` is final minus base, the interquartile mean over
    seeds.
    """

    world: str
    row: str
    seeds: int
    base: float
    gain: Estimate
    worst: float
    sampling: float
    probe: float
    update: float
    seconds: float

    @property
    def learns(self) -> bool:
        """The interval is above 0, and no seed ends below its base."""
        return self.gain.low > 0 and self.worst >= 0

    @property
    def nfe(self) -> float:
        """Network evaluations per trajectory, those of the update included."""
        return self.sampling + self.probe + self.update


def learned(
    lines: Mapping[Key, Mapping[str, Any]],
) -> tuple[list[Learned], dict[tuple[str, str], str]]:
    """By world and row, and the reasons of those that are not applicable."""
    results, left_out = list[Learned](), dict[tuple[str, str], str]()
    for world in WORLDS:
        for row in ROWS:
            runs = [line for key, line in sorted(lines.items()) if key[:2] == (world, row)]
            kept = [line for line in runs if "not_applicable" not in line]
            if runs and not kept:
                left_out[world, row] = runs[0]["not_applicable"]
            if kept:
                gains = np.asarray([line["final"] - line["base"] for line in kept])
                means = {
                    name: float(np.mean([line[name] for line in kept])) for name in ("base", *COSTS)
                }
                results.append(
                    Learned(
                        world,
                        row,
                        len(kept),
                        gain=interquartile_mean(gains),
                        worst=float(gains.min()),
                        **means,
                    )
                )
    return results, left_out


COSTS = ("sampling", "probe", "update", "seconds")
