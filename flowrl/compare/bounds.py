"""How much credit per decision can gain: learning curves of credit by exact values (2-D world)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.compare.results import Comparison
from flowrl.run.config import TRACKER, RunConfig
from flowrl.run.io import write_json
from flowrl.run.presets import tuned
from flowrl.run.records import without_groups
from flowrl.run.statistics import collapsed

FILE = Path(__file__).parent / "bounds.json"
"""Shipped curves with the settings that they belong to (`python benchmarks/first_comparison.py`,
`python benchmarks/rule_bound.py`).
"""
ARM = "exact values (oracle)"
"""The arm of a comparison with `--bound`."""
CREDIT = "stepwise-gain(normalise=step, probe=exact)"
"""Z per decision, the scale of uniform credit: with joint Z most of an update is at the last drawn
step, next to steps without credit. In a window that leaves such steps the oracle can collapse with
either.
"""
WITHOUT_EFFECT = (
    *(
        "format",
        "seed",
        "device",
        *TRACKER,
        "observe",
        "strict",
        "checkpoint_every",
        "keep_checkpoints",
    ),
    *(
        "on_reward_error",
        "reward_timeout",
        "save_experience",
        "max_batch",
        "chunk",
        "overlap_rewards",
        "offload",
    ),
    *("eval_every", "heldout_rewards", "diversity", "diversity_prompts", "diversity_samples"),
)
"""The settings on which the curve does not depend."""


def bound_settings(world: str, chosen: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The settings of `ARM`: those tuned for exact values in the world, if it has any, except for
    those that are `chosen` for all arms.
    """
    found = tuned().get(world, {}).get("true advantages", {"settings": {}})["settings"]
    return {**{n: v for n, v in found.items() if n not in chosen}, "credit": CREDIT}


@dataclass(frozen=True)
class Bound:
    """Held-out rewards of tuned exact values over iterations, a curve for each of `seeds`, and the
    command that made them.
    """

    iterations: Sequence[float]
    curves: Sequence[Sequence[float]]
    seeds: Sequence[int]
    command: str

    @property
    def rewards(self) -> list[float]:
        """The median over seeds, since the oracle itself can collapse."""
        return [median(column) for column in zip(*self.curves, strict=True)]

    @property
    def collapsed(self) -> int:
        """How many seeds collapsed."""
        return sum(map(collapsed, self.curves))


@cache
def shipped() -> list[dict[str, Any]]:
    """The entries of `FILE`."""
    return json.loads(FILE.read_text())


def settings_that_count(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which a curve depends, by name; those that `run` lacks are the defaults."""
    values = {**RunConfig().typed(), **run}
    known = {name: value for name, value in values.items() if name not in WITHOUT_EFFECT}
    return json.loads(json.dumps(known))  # JSON has no tuples


def shipped_bound(run: Mapping[str, Any]) -> Bound | None:
    """The shipped curve for these settings of all runs, by name; None if there is none."""
    settings = settings_that_count(run)
    for entry in shipped():
        if settings_that_count(entry["settings"]) == settings:
            return Bound(*(entry[name] for name in ("iterations", "curves", "seeds", "command")))
    return None


def ship(run: Mapping[str, Any], world: str, bound: Bound) -> None:
    """Put the bound of runs in a world with these settings into `FILE`, in place of one that the
    same command has made.
    """
    entry = {
        "settings": settings_that_count(run),
        "arm": bound_settings(world),
        "command": bound.command,
        "seeds": bound.seeds,
        "iterations": bound.iterations,
        "curves": [[round(reward, 4) for reward in curve] for curve in bound.curves],
    }
    write_json(FILE, [*(one for one in shipped() if one["command"] != bound.command), entry])


def bound_of(comparison: Comparison) -> Bound | None:
    """The bound of a comparison: of its own arm, or a shipped one for exactly its settings."""
    if runs := comparison.of(ARM):
        curves = [run.curve("iteration", *comparison.metric) for run in runs]
        length = min(len(x) for x, _ in curves)
        rewards = [y[:length] for _, y in curves]
        seeds = [run.seed for run in runs]
        return Bound(curves[0][0][:length], rewards, seeds, comparison.config["command"])
    run = without_groups(comparison.config["run"])
    return shipped_bound(run) if comparison.metric == ("reward",) else None
