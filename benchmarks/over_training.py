"""The arms of a finished comparison, by their mean held-out reward over training.

    python benchmarks/over_training.py FOLDER [ARM=OTHER ...]

FOLDER is that of a `flowrl compare`, whose own table has final rewards only. An arm's line has the
mean of its learning curves over training (a piecewise linear curve, up to the end of the run), its
mean final reward, and for every pair ARM=OTHER the paired differences of both over seeds with 95% t
intervals. Without pairs, all arms are compared with the first.
"""

import argparse
from pathlib import Path

import numpy as np
from flowrl_bench.statistics import Curve, mean_until
from flowrl_compare.results import RunRecord, load_comparison, mean_of


def numbers(run: RunRecord) -> tuple[float, float]:
    """The mean held-out reward over training, and the final one."""
    curve = Curve(*run.curve("iteration", "soft"))
    return mean_until(curve, curve.budgets[-1]), curve.rewards[-1]


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("pairs", nargs="*", metavar="ARM=OTHER")
    options = parser.parse_args()
    comparison = load_comparison(options.folder)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for run in comparison.runs:
        found.setdefault(run.arm, {})[run.seed] = numbers(run)
    for arm, seeds in found.items():
        over, final = (mean_of(values).text() for values in zip(*seeds.values(), strict=True))
        print(f"{arm}: {over} over training, {final} at the end, {len(seeds)} seeds")
    first, *others = found
    pairs = [pair.split("=") for pair in options.pairs] or [[arm, first] for arm in others]
    for arm, other in pairs:
        both = sorted(found[arm].keys() & found[other].keys())
        differences = np.array(
            [np.subtract(found[arm][seed], found[other][seed]) for seed in both]
        ).T
        over, final = (mean_of(values.tolist()).text(sign=True) for values in differences)
        print(f"{arm} - {other}: {over} over training, {final} at the end, {len(both)} seeds")


if __name__ == "__main__":
    main()
