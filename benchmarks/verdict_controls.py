"""Do calibrated values lead because of their settings, and do they lead with small updates too?

    python benchmarks/verdict_controls.py           # the leads, from the files below; a second
    flowrl compare --task compositional --seeds 7000-7009 \\
        --arm "uniform b: clip_range=0.002, learning_rate=0.004, noise_level=0.98" \\
        --arm "uniform c: clip_range=0.006, learning_rate=0.004, noise_level=0.98" \\
        --arm "calibrated 6: credit=calibrated-gain, initial_noise=independent, groups=6, clip_range=0.002, learning_rate=0.004, noise_level=0.98" \\
        --arm "baseline 6: credit=calibrated-gain(gain_weight=0), initial_noise=independent, groups=6, clip_range=0.002, learning_rate=0.004, noise_level=0.98"
    flowrl compare --task compositional --seeds 7000-7003 --clip-range 0.002 --learning-rate 0.004 --noise-level 0.7 \\
        --arm "continuations: method=stepwise-flow-grpo, credit=stepwise-gain(probe='continuation:16')"

The commands made the held-out rewards in results/verdict-images-controls.csv, after the main
comparison had been seen. They are compared with runs of results/verdict-images.jsonl with the same
task and seeds, in percent of what can be gained there (results/verdict-arms.csv). The last line is
the mean over three tasks of results/cheap-values-images.csv, earlier runs in which both arms have
the same settings (docs/studies.md). Means over seeds with 95% t
intervals, at equal updates and at equal seconds of SD3.5-Medium.
"""

import csv
from collections import defaultdict
from pathlib import Path

from flowrl.bench.results_file import ResultsFile
from flowrl.bench.statistics import Curve, mean_until
from flowrl.run.statistics import mean

RESULTS = Path(__file__).parent / "results"
GAINED = {"compositional": 0.139, "text": 0.210, "preference": 0.202}
"""What can be gained in the tasks."""
PLAIN, OURS, BASELINE, SIX = "Flow-GRPO", "calibrated values", "as a baseline", "Flow-GRPO, 6"
COSTS = {
    **dict.fromkeys((PLAIN, "uniform b", "uniform c"), 1.0),
    **dict.fromkeys((OURS, BASELINE), 1.14),
    **dict.fromkeys(("calibrated 6", "baseline 6"), 1.14 * 6 / 16),
    SIX: 6 / 16,
}
"""Seconds of an update over those of Flow-GRPO, as far as they are known."""
PAIRS = (
    (OURS, PLAIN),
    ("uniform b", PLAIN),
    ("uniform c", PLAIN),
    (OURS, "uniform b"),
    (BASELINE, "uniform b"),
    ("calibrated 6", SIX),
    ("baseline 6", SIX),
    ("calibrated 6", PLAIN),
    ("continuations", PLAIN),
    ("continuations", OURS),
)
Points = list[tuple[float, float]]
Curves = dict[str, dict[int, Points]]


def curves() -> Curves:
    """Iterations and held-out rewards by arm and seed."""
    found: Curves = defaultdict(lambda: defaultdict(list))
    with (RESULTS / "verdict-images-controls.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            point = float(row["iteration"]), float(row["soft"])
            found[row["arm"]][int(row["seed"])].append(point)
    names = {"": {16: PLAIN, 6: SIX}, "calibrated-gain()": {16: OURS}}
    names["calibrated-gain(gain_weight=0)"] = {16: BASELINE}
    for line in ResultsFile(RESULTS / "verdict-images.jsonl").unchecked():
        config = line["config"]
        settings = {**config["environment"], **config["algorithm"], **config["rollout"]}
        plain = settings["method"] == "flow-grpo" and settings["group_size"] == 12
        name = names.get(settings["credit"], {}).get(settings["groups"])
        if plain and name and settings["task"] == "compositional":
            found[name][line["seed"]] = [(row[0], row[4]) for row in line["curve"]]
    return found


def lead(
    first: Points,
    second: Points,
    costs: tuple[float, float] = (1.0, 1.0),
    gained: float = GAINED["compositional"],
) -> float:
    """Difference of the mean rewards up to the budget that both have spent, in percent."""
    curves = [
        Curve([cost * t for t, _ in points], [y for _, y in points])
        for cost, points in zip(costs, (first, second), strict=True)
    ]
    end = min(curve.budgets[-1] for curve in curves)
    means = [mean_until(curve, end) for curve in curves]
    return 100 * (means[0] - means[1]) / gained


def equal_settings(cost: float) -> list[float]:
    """Leads of calibrated values by seed, means over the tasks; both arms have the same settings."""
    found: dict[tuple[str, str, int], Points] = defaultdict(list)
    with (RESULTS / "cheap-values-images.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["task"], row["arm"], int(row["seed"])
            found[key].append((float(row["iteration"]), float(row["soft"])))

    def of(task: str, seed: int) -> float:
        pair = (found[task, arm, seed] for arm in ("calibrated", "uniform"))
        return lead(*pair, (cost, 1.0), GAINED[task])

    seeds = sorted({seed for _, _, seed in found})
    return [sum(of(task, seed) for task in GAINED) / len(GAINED) for seed in seeds]


def main() -> None:
    """Print the leads."""
    found = curves()
    for first, second in PAIRS:
        seeds = sorted(set(found[first]) & set(found[second]))
        pairs = [(found[first][seed], found[second][seed]) for seed in seeds]
        per_update, per_second = mean([lead(*pair) for pair in pairs]).text(1, True), "-"
        if first in COSTS:
            costs = COSTS[first], COSTS[second]
            per_second = mean([lead(*pair, costs) for pair in pairs]).text(1, True)
        print(
            f"{first} - {second}, {len(seeds)} seeds: {per_update} per update, {per_second} per second"
        )
    equal = [equal_settings(cost) for cost in (1.0, COSTS[OURS])]
    per_update, per_second = (mean(leads).text(1, True) for leads in equal)
    print(
        f"equal settings, {len(equal[0])} seeds: {per_update} per update, {per_second} per second"
    )


if __name__ == "__main__":
    main()
