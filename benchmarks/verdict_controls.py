"""Do calibrated values lead because of their settings, and do they lead with small updates too?

    python benchmarks/verdict_controls.py           # the leads, from the files below; a second
    flowrl compare --task compositional --seeds 7000-7009 \\
        --arm "uniform b: clip_range=0.002, learning_rate=0.004, noise_level=0.98" \\
        --arm "uniform c: clip_range=0.006, learning_rate=0.004, noise_level=0.98" \\
        --arm "calibrated 6: credit=calibrated-gain, initial_noise=independent, groups=6, clip_range=0.002, learning_rate=0.004, noise_level=0.98" \\
        --arm "baseline 6: credit=calibrated-gain(gain_weight=0), initial_noise=independent, groups=6, clip_range=0.002, learning_rate=0.004, noise_level=0.98"

The command made the held-out rewards in results/verdict-images-controls.csv, after the main
comparison had been seen. They are compared with runs of results/verdict-images.jsonl with the same
task and seeds, in percent of what can be gained there (docs/verdict/details.md). Means over seeds
with 95% t intervals, at equal updates and at equal seconds of SD3.5-Medium.
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from reanalysis_statistics import read_lines, t_test

RESULTS = Path(__file__).parent / "results"
GAINED = 0.139
"""What can be gained in the task."""
PLAIN, OURS, BASELINE, SIX = "Flow-GRPO", "calibrated values", "as a baseline", "Flow-GRPO, 6"
COSTS = {
    **dict.fromkeys((PLAIN, "uniform b", "uniform c"), 1.0),
    **dict.fromkeys((OURS, BASELINE), 1.14),
    **dict.fromkeys(("calibrated 6", "baseline 6"), 1.14 * 6 / 16),
    SIX: 6 / 16,
}
"""Seconds of an update over those of Flow-GRPO."""
PAIRS = (
    (OURS, PLAIN),
    ("uniform b", PLAIN),
    ("uniform c", PLAIN),
    (OURS, "uniform b"),
    (BASELINE, "uniform b"),
    ("calibrated 6", SIX),
    ("baseline 6", SIX),
    ("calibrated 6", PLAIN),
)
Curves = dict[str, dict[int, list[tuple[float, float]]]]


def curves() -> Curves:
    """Iterations and held-out rewards by arm and seed."""
    found: Curves = defaultdict(lambda: defaultdict(list))
    with (RESULTS / "verdict-images-controls.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            point = float(row["iteration"]), float(row["soft"])
            found[row["arm"]][int(row["seed"])].append(point)
    names = {"": {16: PLAIN, 6: SIX}, "calibrated-gain()": {16: OURS}}
    names["calibrated-gain(gain_weight=0)"] = {16: BASELINE}
    for line in read_lines(RESULTS / "verdict-images.jsonl"):
        config = line["config"]
        settings = {**config["environment"], **config["algorithm"], **config["rollout"]}
        plain = settings["method"] == "flow-grpo" and settings["group_size"] == 12
        name = names.get(settings["credit"], {}).get(settings["groups"])
        if plain and name and settings["task"] == "compositional":
            found[name][line["seed"]] = [(row[0], row[4]) for row in line["curve"]]
    return found


def lead(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Difference of the mean rewards up to the budget that both have spent, in percent."""
    end = min(first[-1][0], second[-1][0])
    grid = np.linspace(0.0, end, 4001)
    means = [np.interp(grid, *zip(*curve, strict=True)).mean() for curve in (first, second)]
    return 100 * float(means[0] - means[1]) / GAINED


def main() -> None:
    found = curves()
    for first, second in PAIRS:
        cells = []
        for costs in (dict.fromkeys(COSTS, 1.0), COSTS):
            leads = [
                lead(
                    [(costs[first] * t, y) for t, y in found[first][seed]],
                    [(costs[second] * t, y) for t, y in found[second][seed]],
                )
                for seed in sorted(found[second])
            ]
            test = t_test(np.array(leads))
            cells.append(f"{test.mean:+5.1f} [{test.low:+.1f}, {test.high:+.1f}]")
        print(
            f"{first} against {second}, {len(leads)} seeds: {cells[0]} per update, {cells[1]} per second"
        )


if __name__ == "__main__":
    main()
