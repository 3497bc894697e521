"""The comparison that a user sees first, with more seeds: what three seeds may say, and the bound.

    python benchmarks/first_comparison.py --out runs/first [--worlds mixture shapes] [--save]

Runs `flowrl compare` with its default settings (tuned) and `SEEDS` in each world, in the 2-D world
also the arm with exact values. It can be stopped and called again. `--save` writes the final rewards
by arm and seed to benchmarks/results/first-comparison.json, and the curves of exact values to
packages/flowrl_compare/bounds.json. tests/bench/test_first_comparison.py: no lead that seeds 0, 1
and 2 decide has the opposite sign of one that all seeds decide.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from flowrl_compare.bounds import ARM, COUNTS, FILE, bound_settings
from flowrl_compare.results import load_comparison

from flowrl.cli.main import main as main_of_flowrl
from flowrl.io import write_json

SEEDS = {"mixture": range(15), "shapes": range(8)}
RESULTS = Path(__file__).parent / "results" / "first-comparison.json"


def command(world: str) -> list[str]:
    """The arguments of `flowrl compare`."""
    seeds = [*map(str, SEEDS[world])]
    bound = ["--bound"] if world == "mixture" else []
    return ["--world", world, "--seeds", *seeds, *bound]


def compared(world: str, folder: Path, workers: int) -> bool:
    """Run the comparison, or what is missing of it."""
    done = (folder / "config.json").exists()
    words = ["--resume", str(folder)] if done else [*command(world), "--out", str(folder)]
    return main_of_flowrl(["compare", *words, "--workers", str(workers)]) == 0


def finals(folder: Path) -> dict[str, dict[int, float]]:
    """Final held-out rewards by arm and seed."""
    comparison = load_comparison(folder)
    return {
        arm: {run.seed: run.curve("iteration", "reward")[1][-1] for run in comparison.of(arm)}
        for arm in comparison.arms
    }


def bound_entry(folder: Path) -> dict[str, Any]:
    """The curves of exact values, and the settings that they belong to."""
    comparison = load_comparison(folder)
    run = comparison.config["run"]
    groups = [value if isinstance(value, dict) else {name: value} for name, value in run.items()]
    settings = {name: value for group in groups for name, value in group.items()}
    curves = [run.curve("iteration", "reward") for run in comparison.of(ARM)]
    return {
        "settings": {name: settings.get(name) for name in COUNTS},
        "arm": bound_settings("mixture"),
        "command": "flowrl compare " + " ".join(command("mixture")),
        "seeds": [run.seed for run in comparison.of(ARM)],
        "iterations": curves[0][0],
        "curves": [[round(value, 4) for value in y] for _, y in curves],
    }


def main() -> None:
    """Run, and save if all runs are finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worlds", nargs="+", choices=SEEDS, default=[*SEEDS])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    done = [compared(world, options.out / world, options.workers) for world in options.worlds]
    if options.save and all(done):
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found = {
            world: {"command": "flowrl compare " + " ".join(command(world)), "final": rewards}
            for world in options.worlds
            if (rewards := finals(options.out / world))
        }
        write_json(RESULTS, {**known, **found})
        if "mixture" in options.worlds:
            write_json(FILE, [bound_entry(options.out / "mixture")])


if __name__ == "__main__":
    main()
