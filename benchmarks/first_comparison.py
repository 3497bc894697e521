"""The comparison that a user sees first, with more seeds: what three seeds may say, and the bound.

    python benchmarks/first_comparison.py --out runs/first

Runs `flowrl compare --world mixture` with its default (tuned) settings, 15 seeds and the arm with
exact values; it can be stopped and called again. Writes final rewards and mean rewards over training
by world, arm and seed to benchmarks/results/first-comparison.json, and the curves of exact values to
flowrl/compare/bounds.json. The rewards on images there are of an earlier study (`claims` in
docs/studies.md), and stay. tests/bench/test_second_analysis.py: no lead that seeds 0, 1 and 2
decide has the opposite sign of one that all seeds decide.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.cli.main import main as flowrl
from flowrl.compare.bounds import bound_of, ship
from flowrl.compare.results import load_comparison
from flowrl.run.io import write_json
from flowrl.run.reading import read_json
from flowrl.run.records import without_groups

ROOT = Path(__file__).parent / "results"
SEEDS = range(15)
WORDS = ["--world", "mixture", "--seeds", *map(str, SEEDS), "--bound"]
COMMAND = "flowrl compare " + " ".join(WORDS)
Curves = dict[str, dict[int, list[float]]]
"""Held-out rewards from before training to its end, by arm and seed."""


def summary(curves: Curves) -> dict[str, dict[str, dict[int, float]]]:
    """Final rewards, and means over the evaluations after the first."""
    return {
        name: {arm: {s: round(of(c), 5) for s, c in runs.items()} for arm, runs in curves.items()}
        for name, of in {"final": lambda c: c[-1], "mean": lambda c: fmean(c[1:])}.items()
    }


def main() -> int:
    """Run what is missing, and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    text = (
        "after a change of the exact arm: only it and uniform credit; the others stay as they are"
    )
    parser.add_argument("--only-bound", action="store_true", help=text)
    options = parser.parse_args()
    started = (options.out / "config.json").exists()
    methods = ["--methods", "flow-grpo"] if options.only_bound else []
    new = [*WORDS, *methods, "--out", str(options.out)]
    words = ["--resume", str(options.out)] if started else new
    if code := flowrl(["compare", *words, "--workers", str(options.workers)]):
        return code
    comparison = load_comparison(options.out)
    curves = {
        arm: {run.seed: run.curve("iteration", "reward")[1] for run in comparison.of(arm)}
        for arm in comparison.arms
    }
    results = read_json(ROOT / "first-comparison.json", dict[str, Any])
    known = results["mixture"]
    made = {name: {**known[name], **arms} for name, arms in summary(curves).items()}
    write_json(ROOT / "first-comparison.json", {**results, "mixture": {"command": COMMAND, **made}})
    bound = bound_of(comparison)
    assert bound is not None
    ship(without_groups(comparison.config["run"]), "mixture", replace(bound, command=COMMAND))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
