"""How often the interval of a ratio of costs (`flowrl.compare.target`) contains the ratio.

    python benchmarks/ratio_coverage.py

The ten seeds of the committed image runs stand for all seeds: ten are drawn from them with
replacement, `DRAWS` times, for three arms against Flow-GRPO in each task, with the target fixed or
moving with Flow-GRPO's result. Beside it, the same for Student's interval of the mean difference in
final reward.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.bench.evidence import curves
from flowrl.bench.verdict_runs import CAMPAIGNS, UNIFORM, Study
from flowrl.compare.target import Curves, cost_ratio
from flowrl.run.statistics import mean

RESULTS = Path(__file__).parent / "results" / "verdict-images.jsonl"
ARMS = ("calibrated values", "noise-weighted", "turning points")
DRAWS = 400


def coverage(
    first: Curves, second: Curves, fixed: bool, draws: int, random: np.random.Generator
) -> tuple[float, float]:
    """The shares of draws whose intervals contain the values of all seeds: of the ratio of costs,
    and of the mean difference in final reward.
    """
    seeds = len(first.rewards)
    targets = [float(second.mean(np.arange(seeds)).results)] if fixed else None
    ratio = cost_ratio([(first, second)], targets).value
    differences = first.rewards[:, -1] - second.rewards[:, -1]
    inside = list[Sequence[bool]]()
    for chosen in random.integers(seeds, size=(draws, seeds)):
        pair = tuple(Curves(c.costs[chosen], c.rewards[chosen]) for c in (first, second))
        found, plain = cost_ratio([(pair[0], pair[1])], targets), mean(differences[chosen])
        inside.append(
            (found.low <= ratio <= found.high, plain.low <= differences.mean() <= plain.high)
        )
    both = np.mean(inside, 0)
    return float(both[0]), float(both[1])


def main() -> None:
    """Print a line per case and the means."""
    pairs = Study(CAMPAIGNS["images"], RESULTS).pairs(any_code=True)
    random, found = np.random.default_rng(0), list[tuple[float, float]]()
    for task, lines in pairs.items():
        known = {
            arm: curves([pair[arm] for pair in lines], "stated seconds", "reward")
            for arm in (*ARMS, UNIFORM)
        }
        for arm in ARMS:
            for fixed in (False, True):
                found.append(coverage(known[arm], known[UNIFORM], fixed, DRAWS, random))
                words = "fixed target" if fixed else "Flow-GRPO's result"
                print(f"{task}, {arm}, {words}: {found[-1][0]:.3f}, mean {found[-1][1]:.3f}")
    (moving, plain), (target, _) = np.mean(found[::2], 0), np.mean(found[1::2], 0)
    print(f"Ratio: {moving:.3f}, fixed target: {target:.3f}, mean difference: {plain:.3f}")


if __name__ == "__main__":
    main()
