"""The comparison that a user sees first, with more seeds: what three seeds may say, and the bound.

    python benchmarks/first_comparison.py --out runs/first

Runs `flowrl compare --world mixture` with its default (tuned) settings, 15 seeds and the arm with
exact values; it can be stopped and called again. In the image world it takes the claims' runs with
the same settings, up to the default number of iterations. Writes final rewards and mean rewards over
training by world, arm and seed to benchmarks/results/first-comparison.json, and the curves of exact
values to packages/flowrl_compare/bounds.json. tests/bench/test_first_comparison.py: no lead that
seeds 0, 1 and 2 decide has the opposite sign of one that all seeds decide.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl_bench import claims
from flowrl_bench.arms import ARMS, tuned
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import column
from flowrl_bench.results_file import ResultsFile
from flowrl_compare.bounds import ARM, bound_settings, settings_that_count, ship
from flowrl_compare.results import load_comparison, without_groups

from flowrl.cli.main import main as flowrl
from flowrl.io import write_json
from flowrl.reading import read_json
from flowrl.training.config import RunConfig

ROOT = Path(__file__).parent / "results"
SEEDS = range(15)
WORDS = ["--world", "mixture", "--seeds", *map(str, SEEDS), "--bound"]
COMMAND = "flowrl compare " + " ".join(WORDS)
IMAGES = ("uniform", "stepwise gains", "turning points")
Curves = dict[str, dict[int, list[float]]]
"""Held-out rewards from before training to its end, by arm and seed."""


def of_folder(folder: Path) -> tuple[Curves, list[float]]:
    """The curves of a comparison, and their iterations."""
    comparison = load_comparison(folder)
    runs = {arm: comparison.of(arm) for arm in comparison.arms}
    curves = {
        arm: {run.seed: run.curve("iteration", "reward")[1] for run in seeds}
        for arm, seeds in runs.items()
    }
    return curves, runs[ARM][0].curve("iteration", "reward")[0]


def of_claims(iterations: int = RunConfig().iterations) -> Curves:
    """The curves of the claims' runs on images at the tuned settings, up to an iteration."""
    lines = ResultsFile(ROOT / "claims.jsonl").unchecked()
    by_id, curves = {line["id"]: line for line in lines}, Curves()
    for name in IMAGES:
        arm, curves[name] = ARMS[name], {}
        for seed in claims.SEEDS["shapes"]:
            run = arm.run("shapes", tuned("shapes", name), task="compositional", seed=seed)
            if line := by_id.get(config_id(run)):
                rewards = zip(column(line, "iteration"), column(line, "soft"), strict=True)
                curves[name][seed] = [reward for at, reward in rewards if at <= iterations]
    return curves


def summary(curves: Curves) -> dict[str, dict[str, dict[int, float]]]:
    """Final rewards, and means over the evaluations after the first."""
    return {
        name: {arm: {s: round(of(c), 5) for s, c in runs.items()} for arm, runs in curves.items()}
        for name, of in {"final": lambda c: c[-1], "mean": lambda c: fmean(c[1:])}.items()
    }


def bound_entry(folder: Path, curves: Curves, iterations: list[float]) -> dict[str, Any]:
    """The curves of exact values, and the settings that they belong to."""
    return {
        "settings": settings_that_count(without_groups(load_comparison(folder).config["run"])),
        "arm": bound_settings("mixture"),
        "command": COMMAND,
        "seeds": [*curves[ARM]],
        "iterations": iterations,
        "curves": [[round(reward, 4) for reward in rewards] for rewards in curves[ARM].values()],
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
    curves, iterations = of_folder(options.out)
    images = {"command": "flowrl bench claims --world shapes", **summary(of_claims())}
    known = read_json(ROOT / "first-comparison.json", dict[str, Any])["mixture"]
    made = {name: {**known[name], **arms} for name, arms in summary(curves).items()}
    results = {"mixture": {"command": COMMAND, **made}, "shapes": images}
    write_json(ROOT / "first-comparison.json", results)
    ship(bound_entry(options.out, curves, iterations))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
