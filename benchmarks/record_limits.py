"""Where does the record on images hold? Longer runs, and rewards that are strict, noisy or hacked.

    python benchmarks/record_limits.py            # make the missing runs, then the table
    python benchmarks/record_limits.py --show     # the table of the runs so far

The record (docs/records.md) against the searched Flow-GRPO, each with its settings of all tasks;
falling rates reach their last value at the end of each run. Conditions: the cost of 75 iterations of
Flow-GRPO, as in the preset "long"; and of 24 iterations with a training reward of 0 or 1 ("strict"),
with noise of standard deviation 0.3 on every training score ("noisy"), and with a training score
that also rises with brightness ("hackable": twice the mean pixel value), which evaluation leaves
out. Held-out rewards of the averaged weights: the last one, the best one, and the number of runs
that fell by the verdict's limits; 95% intervals over 5 seeds, differences paired by seed. The runs
are in results/record-limits.jsonl; Ctrl-C pauses, and the same command continues.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.bench.contest import CONTESTS, iteration_seconds
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Line, column, fell
from flowrl.bench.record import BASELINE, read_tries, standing
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.suite import make_missing
from flowrl.core.errors import FlowrlError
from flowrl.run.config import RunConfig
from flowrl.run.statistics import mean

ROOT = Path(__file__).parents[1]
CONTEST = CONTESTS["images"]
EVALUATIONS = 12
SEEDS = range(7600, 7605)
CONDITIONS: dict[str, tuple[tuple[str, ...], float, dict[str, Any]]] = {
    "long": (tuple(CONTEST.tasks), 6.25, {}),
    "strict": (("compositional", "text"), 2.0, {"reward_form": "strict"}),
    "noisy": (("text",), 2.0, {"reward_noise": 0.3}),
    "hackable": (("preference",), 2.0, {"reward_bias": 2.0}),
}
"""Tasks, cost over Flow-GRPO's 12 iterations, and settings."""
Key = tuple[str, str, str, int]
"""Condition, task, arm and seed."""


def arms() -> dict[str, Mapping[str, Any]]:
    """The settings of the searched Flow-GRPO and of the record, without the length of the runs."""
    tries = read_tries(ROOT / "benchmarks/records", "images")
    chosen = (next(t for t in tries if t.name == BASELINE), standing(tries))
    return {
        t.name: {name: value for name, value in t.settings.items() if name != "iterations"}
        for t in chosen
        if t
    }


def runs() -> dict[Key, RunConfig]:
    """All runs, at equal cost within a condition."""
    found = dict[Key, RunConfig]()
    for condition, (tasks, share, own) in CONDITIONS.items():
        for task, (arm, settings) in product(tasks, arms().items()):
            base = CONTEST.run(task, settings, 0).replace(**own)
            iterations = int(share * CONTEST.costs[task] / iteration_seconds(base) + 1e-6)
            every = max(1, round(iterations / EVALUATIONS))
            long = base.replace(iterations=iterations, eval_every=every)
            found |= {(condition, task, arm, seed): long.replace(seed=seed) for seed in SEEDS}
    return found


def table(lines: Mapping[str, Line], wanted: Mapping[Key, RunConfig]) -> Iterator[str]:
    """A line per condition, task and arm, of the seeds that both arms have."""
    found = {key: lines[config_id(run)] for key, run in wanted.items() if config_id(run) in lines}
    names = list(arms())
    for condition, (tasks, share, _) in CONDITIONS.items():
        for task in tasks:
            wanted_seeds = {seed: [(condition, task, arm, seed) for arm in names] for seed in SEEDS}
            seeds = [seed for seed, keys in wanted_seeds.items() if found.keys() >= {*keys}]
            if len(seeds) < 2:
                continue
            yield f"{condition}, {task}: {share:g} times the cost of Flow-GRPO's result, {len(seeds)} seeds"
            rewards = {
                arm: [column(found[condition, task, arm, seed], "reward") for seed in seeds]
                for arm in names
            }
            ends = {arm: np.array([row[-1] for row in rows]) for arm, rows in rewards.items()}
            for arm, rows in rewards.items():
                best = mean([max(row) for row in rows]).text()
                own = f"last {mean(ends[arm]).text()}, best {best}, {sum(map(fell, rows))} fell"
                yield f"  {arm:<24} {own}"
            lead = mean(ends[names[-1]] - ends[names[0]])
            yield f"  {'difference of the last':<24} {lead.text(3, True)}"


def main() -> int:
    """Make the runs and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", action="store_true", help="make no runs")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    options = parser.parse_args()
    wanted = runs()
    by_id = {config_id(run): (key, run) for key, run in wanted.items()}
    file = ResultsFile(ROOT / "benchmarks" / "results" / "record-limits.jsonl")

    def label(key: str) -> str:
        return ", ".join(map(str, by_id[key][0]))

    if not options.show:
        made = {key: run for key, (_, run) in by_id.items()}
        command, say = "python benchmarks/record_limits.py", partial(print, flush=True)
        if not make_missing(made, file, command, options.workers, label, say):
            return 130
    print("\n".join(table(file.read(any_code=True), wanted)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlowrlError as error:
        sys.exit(f"error: {error}")
