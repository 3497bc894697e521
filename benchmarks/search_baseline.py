"""Flow-GRPO's cheapest settings in a world, in all its tasks together, by successive halving.

    python benchmarks/search_baseline.py images         # make the missing runs, then the table
    python benchmarks/search_baseline.py points --show  # the table of the runs so far

The first point is the verdict's Flow-GRPO; the others are drawn at random from `SPACES`. Each rung
(`RUNGS`) gives its points a share of the contest's budget (`flowrl.bench.contest`) in every task
and keeps the best: a score is the share of the way to the target at the end of the run, mean over
tasks and seeds. The last points and the verdict's are run with the whole budget on fresh seeds, and
compared by the cost until the targets. The runs are in results/baseline-WORLD.jsonl; Ctrl-C pauses,
and the same command continues.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.bench.contest import CONTESTS, Contest, iteration_seconds
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Line, column, curves
from flowrl.bench.record import over_flow_grpo
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.suite import make_missing
from flowrl.compare.target import Curves
from flowrl.core.errors import ConfigError, FlowrlError
from flowrl.run.config import RunConfig

RESULTS = Path(__file__).parent / "results"
SPACE: dict[str, tuple[Any, ...]] = {
    "noise_level": (0.35, 0.5, 0.7, 0.98, 1.37),
    "clip_range": (5e-4, 1e-3, 2e-3, 6e-3, 2e-2),
    "learning_rate": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "lr_schedule": ("constant", "linear", "cosine"),
    "groups": (4, 6, 8, 12, 16),
    "group_size": (6, 8, 12, 16, 24),
    "minibatches": (1, 2, 4, 8),
    "window": ("2:7", "0:5", "1:8", "0:9", "3:6", "4:9"),
    "ema_decay": (0.0, 0.5, 0.8, 0.9),
}
"""Settings and their values. A learning rate that falls ends at a tenth of its first value."""
SPACES = {
    "images": SPACE,
    "points": {
        **SPACE,
        "clip_range": (6e-3, 2e-2, 6e-2, 0.18, 0.5),
        "learning_rate": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    },
}
"""By world; the order of the settings decides which points are drawn."""
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Rung:
    """`points` that are run with a `share` of the budget and the `seeds`."""

    points: int
    share: float
    seeds: tuple[int, ...]


RUNGS = (
    Rung(96, 1 / 8, (9000,)),
    Rung(32, 1 / 4, (9001, 9002)),
    Rung(10, 1 / 2, (9003, 9004, 9005, 9006)),
)
CHOICE = Rung(3, 1.0, tuple(range(9020, 9024)))
"""The points that are compared by cost, and the fresh seeds."""


def points(world: str, count: int) -> list[Point]:
    """The verdict's settings, then distinct random ones that can be run."""
    random, drawn = np.random.default_rng(0), list[Point]([{}])
    while len(drawn) < count:
        point = {
            name: values[random.integers(len(values))] for name, values in SPACES[world].items()
        }
        if point["lr_schedule"] != "constant":
            point["final_learning_rate"] = 0.1
        if point not in drawn and allowed(CONTESTS[world], point):
            drawn.append(point)
    return drawn


def allowed(contest: Contest, point: Point) -> bool:
    """Whether the settings can be run and an iteration costs at most an eighth of the budget."""
    try:
        run = contest.run(next(iter(contest.tasks)), point, 0)
        return iteration_seconds(run) <= contest.budget * RUNGS[0].share
    except ConfigError:
        return False


def runs_of(contest: Contest, point: Point, rung: Rung) -> dict[tuple[str, int], RunConfig]:
    """A point's runs by task and seed; those of a rung are evaluated at their end alone."""
    found = dict[tuple[str, int], RunConfig]()
    for task in contest.tasks:
        for seed in rung.seeds:
            run = contest.run(task, point, seed, rung.share)
            once = {} if rung is CHOICE else {"eval_every": run.iterations}
            found[task, seed] = run.replace(**once)
    return found


def progress_to_target(contest: Contest, lines: Mapping[tuple[str, int], Line]) -> float:
    """The share of the way from the first reward to the target, mean over tasks and seeds."""
    shares = list[float]()
    for (task, _), line in lines.items():
        first, *_, last = column(line, "reward")
        shares.append((last - first) / (contest.targets[task] - first))
    return float(np.mean(shares))


def best(scores: Sequence[float], count: int) -> list[int]:
    """The places of the `count` highest scores, highest first; of equal ones the earlier."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


def made(
    world: str,
    chosen: Sequence[Point],
    rung: Rung,
    file: ResultsFile,
    workers: int,
    show: bool,
) -> list[dict[tuple[str, int], Line]] | None:
    """The lines of a rung's runs by point; None if some are missing."""
    runs = [runs_of(CONTESTS[world], point, rung) for point in chosen]
    by_id = {config_id(run): run for part in runs for run in part.values()}
    done = file.read(any_code=show)
    missing = [key for key in by_id if key not in done]
    if missing and not show:
        words = f"{len(chosen)} points, {rung.share:g} of the budget"
        command = f"python benchmarks/search_baseline.py {world}"
        say = partial(print, flush=True)
        if not make_missing(by_id, file, command, workers, lambda key: words, say):
            return None
        done = file.read()
    if any(key not in done for key in by_id):
        print(f"{len(missing)} of {len(by_id)} runs are missing: {rung}")
        return None
    return [{key: done[config_id(run)] for key, run in part.items()} for part in runs]


def arm_curves(lines: Mapping[tuple[str, int], Line], task: str) -> Curves:
    """The learning curves of a finalist in a task."""
    return curves([lines[task, seed] for seed in CHOICE.seeds], "stated seconds", "reward")


def text(point: Point) -> str:
    """A point's settings."""
    return ", ".join(f"{name}={value}" for name, value in point.items()) or "the verdict's"


def main() -> int:
    """Search and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", choices=list(SPACES), help="images or points")
    parser.add_argument("--show", action="store_true", help="make no runs")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    options = parser.parse_args()
    world, contest = options.world, CONTESTS[options.world]
    file = ResultsFile(RESULTS / f"baseline-{world}.jsonl")
    survivors = points(world, RUNGS[0].points)
    for rung, keep in zip(RUNGS, (*(r.points for r in RUNGS[1:]), CHOICE.points), strict=True):
        lines = made(world, survivors, rung, file, options.workers, options.show)
        if lines is None:
            return 1
        scores = [progress_to_target(contest, part) for part in lines]
        kept = best(scores, keep)
        print(f"\n{rung.share:g} of the budget, {len(rung.seeds)} seeds: share of the way")
        for place in kept:
            print(f"  {scores[place]:.3f}  {text(survivors[place])}")
        if {} in survivors:
            print(f"  {scores[survivors.index({})]:.3f}  {text({})}")
        survivors = [survivors[place] for place in kept]
    finalists = [{}, *(point for point in survivors if point)]
    lines = made(world, finalists, CHOICE, file, options.workers, options.show)
    if lines is None:
        return 1
    print("\nCost until the targets over Flow-GRPO's in the verdict (seconds of SD3.5-Medium):")
    for point, part in zip(finalists, lines, strict=True):
        arm = {task: arm_curves(part, task) for task in contest.tasks}
        each = [over_flow_grpo(contest, {task: own}).text() for task, own in arm.items()]
        print(f"  {over_flow_grpo(contest, arm).text():<20} {'; '.join(each)}  {text(point)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlowrlError as error:
        sys.exit(f"error: {error}")
