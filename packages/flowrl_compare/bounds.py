"""How much credit per decision can gain: learning curves of credit by exact values (2-D world)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flowrl_compare.results import Comparison, mean_curve
from flowrl_compare.tuned import tuned

FILE = Path(__file__).parent / "bounds.json"
"""Shipped curves (`python benchmarks/bounds.py`): the settings that count, seeds, command, curve."""
ARM = "exact values (bound)"
"""The arm of a comparison with `--bound`."""
CREDIT = "stepwise-gain(probe=exact)"
COUNTS = (
    *("world", "task", "reward", "reward_form", "reward_noise", "reward_bias"),
    *("iterations", "groups", "group_size", "num_steps", "window", "minibatches", "ema_decay"),
    *("eval_samples", "eval_steps", "eval_solver"),
)
"""The settings of all runs on which a bound depends."""


def bound_settings(world: str) -> dict[str, Any]:
    """The settings of `ARM`: those tuned for exact values in the world, if it has any."""
    found = tuned().get(world, {}).get("exact values", {"settings": {}})["settings"]
    return {**found, "credit": CREDIT}


@dataclass(frozen=True)
class Bound:
    """The mean held-out reward of tuned exact values over iterations, and where it comes from."""

    iterations: list[float]
    rewards: list[float]
    seeds: int
    command: str


@cache
def shipped() -> list[dict[str, Any]]:
    """The entries of `FILE`."""
    return json.loads(FILE.read_text())


def shipped_bound(run: Mapping[str, Any]) -> Bound | None:
    """The shipped curve for these settings of all runs, by name; None if there is none."""
    counts = {name: run.get(name) for name in COUNTS}
    for entry in shipped():
        if entry["settings"] == counts:
            seeds, command = len(entry["seeds"]), entry["command"]
            return Bound(entry["iterations"], entry["rewards"], seeds, command)
    return None


def bound_of(comparison: Comparison) -> Bound | None:
    """The bound of a comparison: of its own arm, or a shipped one for exactly its settings."""
    if runs := comparison.of(ARM):
        x, y = mean_curve(runs, "iteration", *comparison.metric)
        return Bound(list(x), list(y), len(runs), comparison.config["command"])
    run = comparison.config["run"]
    groups = (value if isinstance(value, dict) else {name: value} for name, value in run.items())
    settings = {name: value for group in groups for name, value in group.items()}
    return shipped_bound(settings) if comparison.metric == ("reward",) else None
