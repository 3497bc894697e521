"""Do turning points matter, or is it what a mark adds: dose, bonus, sign?

    python benchmarks/turning_controls.py points            # make the missing runs, then the table
    python benchmarks/turning_controls.py images --show     # the table of the runs so far

TP-GRPO pays a decision its gain d_k, and at turning points also the luck F_k of what follows. Every
arm is TP-GRPO with the settings that the verdict's search chose for it; only the marked decisions
differ (`flowrl.bench.rules.TurningPointVariant`): those of another member ("shift"), as many with
F_k of the same size ("dose"), the same among those whose gain and luck agree ("sign"), those that
do not look ahead ("early"), none with the mean bonus of a mark in its place ("bonus"), and none.
Differences of mean held-out reward over training at equal updates, in percent of what can be gained
in the task, paired by seed; 95% intervals. In two dimensions with exact and with completed values.
The runs are in results/turning-WORLD.jsonl; Ctrl-C pauses, and the same command continues.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Line, column, mean_reward
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.suite import make_missing
from flowrl.bench.verdict_runs import CAMPAIGNS, FORM, Task
from flowrl.core.errors import FlowrlError
from flowrl.run.config import RunConfig
from flowrl.run.statistics import mean

RESULTS = Path(__file__).parent / "results"
ARMS = ("turning", "shift", "dose", "sign", "early", "bonus", "none")
SEEDS = {"points": 15, "images": 6}
FIRST_SEED = 7000
PAIRS = (
    ("turning", "sign", "turning, at equal signs and dose"),
    ("sign", "dose", "the sign of the marks: the bonus"),
    ("dose", "shift", "the dose"),
    ("shift", "none", "any marks"),
    ("bonus", "none", "the bonus without marks"),
    ("turning", "bonus", "turning points over the bonus"),
    ("turning", "early", "looking ahead"),
    ("early", "none", "turning points that do not look ahead"),
    ("turning", "none", "turning points at all"),
)
"""Two arms and what they differ in."""
Key = tuple[str, str, str, int]
"""Values, task, arm and seed."""


def numbers(world: str) -> Iterator[tuple[str, dict[str, float], float]]:
    """By task: the settings of the verdict's TP-GRPO, and what can be gained."""
    with (RESULTS / "verdict-arms.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["world"] == world]
    for task in CAMPAIGNS[world].tasks:
        here = [row for row in rows if row["task"] == task]
        (known,) = (row["settings"] for row in here if row["arm"] == "TP-GRPO")
        settings = dict(pair.split("=") for pair in known.split(", "))
        best = max(float(row["final"]) for row in here)
        yield task, {name: float(value) for name, value in settings.items()}, best


def runs(world: str) -> dict[Key, RunConfig]:
    """All runs."""
    campaign, found = CAMPAIGNS[world], dict[Key, RunConfig]()
    for name, settings, _ in numbers(world):
        task = campaign.tasks[name]
        tp_grpo = task.arms(campaign.iterations)["turning points"]
        for values, probe in probes(task).items():
            rule = f"turning-point(probe={probe!r})" if probe else "turning-point"
            for arm in ARMS:
                own = {"credit": f"turning-point-variant(where='{arm}', rule={rule!r})"}
                for seed in range(FIRST_SEED, FIRST_SEED + SEEDS[world]):
                    run = tp_grpo.run(task.world, settings, seed=seed)
                    found[values, name, arm, seed] = run.replace(**own)
    return found


def probes(task: Task) -> dict[str, str]:
    """The probes by the name of their values: TP-GRPO's own, and exact values if there are any."""
    exact = task.oracle.partition("probe='")[2].rpartition("'")[0]
    return {"completed": ""} | ({"exact": exact} if task.is_exact else {})


def share(line: Line, best: float) -> float:
    """Mean held-out reward over training in percent of what can be gained."""
    start = column(line, FORM)[0]
    return 100 * (mean_reward(line, FORM) - start) / (best - start)


def table(world: str, lines: Mapping[str, Line], wanted: Mapping[Key, RunConfig]) -> Iterator[str]:
    """A line per values and pair, of the seeds that all arms and tasks have."""
    best = {name: top for name, _, top in numbers(world)}
    found = {key: lines[config_id(run)] for key, run in wanted.items() if config_id(run) in lines}
    for values in dict.fromkeys(key[0] for key in wanted):
        tasks = list(dict.fromkeys(task for kind, task, *_ in wanted if kind == values))
        every = {seed for *_, seed in wanted}
        seeds = sorted(
            seed
            for seed in every
            if all((values, task, arm, seed) in found for task in tasks for arm in ARMS)
        )
        if len(seeds) < 2:
            continue
        shares = {
            arm: np.array(
                [
                    [share(found[values, task, arm, seed], best[task]) for seed in seeds]
                    for task in tasks
                ]
            )
            for arm in ARMS
        }
        yield f"{world}, {values} values, {len(seeds)} seeds: all tasks; {', '.join(tasks)}"
        for first, second, what in PAIRS:
            differences = shares[first] - shares[second]
            each = ", ".join(mean(row).text(1, True) for row in differences)
            every_task = mean(differences.mean(0)).text(1, True)
            yield f"  {first:>7} - {second:<6} {every_task:<20} {each}  ({what})"


def main() -> int:
    """Make the runs and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", choices=list(SEEDS), help="points or images")
    parser.add_argument("--show", action="store_true", help="make no runs")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    options = parser.parse_args()
    wanted = runs(options.world)
    by_id = {config_id(run): run for run in wanted.values()}
    file = ResultsFile(RESULTS / f"turning-{options.world}.jsonl")
    say = partial(print, flush=True)

    def label(key: str) -> str:
        return f"seed {by_id[key].seed}"

    if not options.show:
        command = f"python benchmarks/turning_controls.py {options.world}"
        if not make_missing(by_id, file, command, options.workers, label, say):
            return 130
    print("\n".join(table(options.world, file.read(any_code=True), wanted)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlowrlError as error:
        sys.exit(f"error: {error}")
