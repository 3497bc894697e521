"""A method's best learning rate, clip and noise level, found with the same number of short runs for
every method.

The search climbs on a grid (`arms.Knob`): from the start it tries the neighbours of the best point
so far, knob by knob, and continues in a direction while the score improves, so an optimum at an
edge extends the grid. It tries 12 points at most and every point with the same seeds, of which a
larger budget has more (`pilots`). The second half of the budget repeats points with further seeds,
always the one that is best on average so far, until two of them have their share: a point that won
by luck, or that collapses in some seeds, falls behind and another is repeated. Of the points with
enough further seeds, the one whose `level` over these is highest is chosen. The score of a run is
the mean held-out reward over training, the measure of the comparison, or its last reward if that is
lower: a mean hardly sees a collapse near the end. No result uses tuning seeds.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.bench.arms import SHORT, Arm, short_name, tuned_entry
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import column
from flowrl.bench.measurements import CURVE, measure
from flowrl.bench.page import Document, Table
from flowrl.bench.results_file import (
    ResultsFile,
    make_line,
    require_same_code,
    require_unchanged,
    stamp,
)
from flowrl.core.errors import RewardContractError, TrainingError, require
from flowrl.core.options import Workers
from flowrl.run.io import file_lock, write_json
from flowrl.run.jobs import run_jobs
from flowrl.run.reading import read_json
from flowrl.run.records import without_groups
from flowrl.run.workers import Worker

SEEDS = tuple(range(9000, 9100))
"""Seeds of tuning runs, first to last; no result has one of them."""
BUDGETS = {"mixture": 72}
"""Runs per arm by world: 12 points with 3 seeds, and 36 further seeds, at most 18 of a point. One
seed per point misses the best one and takes points that collapse in every tenth run.
"""
BUDGET = 12
"""Runs per arm in other worlds: 6 points, and 6 further seeds, at most 3 of a point."""
FINALISTS = 2
"""The points for which the further seeds suffice."""
STRIDE = 2
"""Steps in one direction before the next knob's turn, so that a long way along one does not use up
the budget.
"""
Point = tuple[int, ...]
"""A level of the grid per knob of the arm, in their order."""
Trial = tuple[Point, int]
"""A run of the search: a point and a seed."""


def usual_budget(world: str) -> int:
    """Runs per arm in a world."""
    return BUDGETS.get(world, BUDGET)


def pilots(budget: int) -> int:
    """Seeds with which every point is tried before the best two are repeated."""
    return max(1, budget // 24)


def proposals(scores: Mapping[Trial, float], knobs: int, budget: int) -> Iterator[Trial]:
    """The next run of the search, from the scores of the runs so far; nothing once `budget` runs
    are scored.

    Deterministic: the order of the runs is a function of the scores alone.
    """
    if len(scores) >= budget:
        return
    confirming, each = budget // 2, pilots(budget)
    by_point = _by_point(scores)
    for point, known in by_point.items():
        if len(known) < each:
            yield point, SEEDS[len(known)]
            return
    means = {point: float(np.mean(known[:each])) for point, known in by_point.items()}
    step = _climb(means, knobs) if (len(means) + 1) * each <= budget - confirming else None
    if step is not None:
        yield step, SEEDS[0]
        return
    most = each + max(1, confirming // FINALISTS)
    open_points = [p for p, known in by_point.items() if len(known) < most] or [*by_point]
    point = min(open_points, key=lambda point: (-float(np.mean(by_point[point])), point))
    yield point, SEEDS[len(by_point[point])]


def _by_point(scores: Mapping[Trial, float]) -> dict[Point, list[float]]:
    by_point: dict[Point, list[float]] = {}
    for (point, _), score in scores.items():
        by_point.setdefault(point, []).append(score)
    return by_point


def _climb(first: Mapping[Point, float], knobs: int) -> Point | None:
    """The next point of the search; None if the best point is better than all its neighbours."""
    here = (0,) * knobs
    if here not in first:
        return here
    while True:
        start = here
        for knob, sign in itertools.product(range(knobs), (1, -1)):
            for _ in range(STRIDE):
                neighbour = tuple(
                    level + sign * (place == knob) for place, level in enumerate(here)
                )
                if neighbour not in first:
                    return neighbour
                if first[neighbour] <= first[here]:
                    break
                here = neighbour
        if here == start:
            return None


def further(scores: Mapping[Trial, float], each: int = 1) -> dict[Point, list[float]]:
    """The scores of the points that have further seeds, without those of the first `each`."""
    return {p: known[each:] for p, known in _by_point(scores).items() if len(known) > each}


def level(scores: Sequence[float]) -> float:
    """The number by which points are compared: the lower of mean and lower quartile over seeds. A
    few collapsed runs lower the mean, a quarter of them the quartile as far as they fell.
    """
    return float(min(np.mean(scores), np.quantile(scores, 0.25)))


def best(scores: Mapping[Trial, float], each: int = 1) -> Point:
    """Of the points with at least half as many further seeds as any other, the one whose `level` is
    highest; without further seeds, the point that is best on average.

    The first `each` seeds selected the points, so their scores would be biased upwards.
    """
    repeated = further(scores, each)
    enough = max(map(len, repeated.values()), default=0) / 2
    levels = {point: level(known) for point, known in repeated.items() if len(known) >= enough}
    judged = levels or {p: float(np.mean(known)) for p, known in _by_point(scores).items()}
    return min(judged, key=lambda point: (-judged[point], point))


def score_of(line: Mapping[str, Any], form: str = "soft") -> float:
    """The lower of a run's mean held-out reward over training and its last one; `form` "reward" is
    the trained form.
    """
    curve = column(line, form)
    return min(float(np.mean(curve[1:])), float(curve[-1]))  # without that before training


@dataclass(frozen=True)
class Search:
    """The search for one arm in one world. `form`: that of the score, see `score_of`; `short`: its
    runs are shorter than results, by `SHORT`.
    """

    arm: Arm
    world: str
    budget: int
    form: str = "soft"
    short: bool = True

    def __post_init__(self) -> None:
        allowed = "1 to 200 runs per method and world"
        require(1 <= self.budget <= 200, "budget", self.budget, allowed)

    def config(self, trial: Trial) -> Any:
        """The settings of a run of the search."""
        point, seed = trial
        shorter = SHORT.get(self.world, {}) if self.short else {}
        return self.arm.run(self.world, self.values(point), **shorter, seed=seed)

    def values(self, point: Point) -> dict[str, float]:
        """The knobs' values at a point."""
        return self.arm.values(self.world, dict(zip(self.arm.knobs, point, strict=True)))

    def made(self, line: Mapping[str, Any]) -> bool:
        """Whether `line` is a run of this search: of this arm with these settings, and not of
        another of its name.
        """
        trial = tuple(line["point"]), line["seed"]
        named = (line["arm"], line["world"], len(trial[0])) == (
            self.arm.name,
            self.world,
            len(self.arm.knobs),
        )
        return named and line["id"] == config_id(self.config(trial))

    def scores(self, lines: Sequence[Mapping[str, Any]]) -> dict[Trial, float]:
        """The scores of the search's runs among `lines`, in the order in which they were
        proposed.
        """
        known, scores = self.known(lines), dict[Trial, float]()
        while (trial := self.proposed(scores)) in known:
            assert trial is not None
            scores[trial] = known[trial]
        return scores

    def known(self, lines: Sequence[Mapping[str, Any]]) -> dict[Trial, float]:
        """The scores of all runs of this arm among `lines`, also of a search with another
        budget.
        """
        return {
            (tuple(line["point"]), line["seed"]): score_of(line, self.form)
            for line in lines
            if self.made(line)
        }

    def proposed(self, scores: Mapping[Trial, float]) -> Trial | None:
        """The next run; None after the last."""
        return next(proposals(scores, len(self.arm.knobs), self.budget), None)


def diverged(iterations: int, message: str) -> dict[str, Any]:
    """What is recorded of a run whose numbers became infinite: rewards of 0, the lowest of the
    built-in worlds.
    """
    rows = [
        {**dict.fromkeys(CURVE, 0.0), "iteration": float(iteration)}
        for iteration in (0, iterations)
    ]
    return {
        "curve": [[row[name] for name in CURVE] for row in rows],
        "totals": {},
        "phases": {},
        "gains": None,
        "diverged": message,
    }


def _tune(
    worker: Worker, search: Search, lines: list[dict[str, Any]], command: str, made: dict[str, Any]
) -> bool:
    """Make the missing runs of a search, a message each; False if it was stopped."""
    require_same_code(made["code"])
    lines = [*lines, *worker.sent]
    scores, known = search.scores(lines), search.known(lines)
    while (trial := search.proposed(scores)) is not None:
        if trial in known:
            scores[trial] = known[trial]
            continue
        config = search.config(trial)
        key = config_id(config)
        try:
            result = measure(config, worker.stopped)
        except (TrainingError, RewardContractError) as error:
            result = diverged(config.iterations, str(error))
        if result is None:
            return False
        require_unchanged(config, key, made["code"])
        scores[trial] = score_of(result, search.form)
        head = {
            "arm": search.arm.name,
            "world": search.world,
            "point": trial[0],
            "values": search.values(trial[0]),
        }
        line = {**head, "score": scores[trial], **make_line(config, result, command, key, made)}
        worker.send(line)
    return True


def tune(
    searches: Sequence[Search],
    path: Path,
    command: str,
    workers: Workers = 0,
    progress: Callable[[Mapping[str, Any], int], None] = lambda line, done: None,
) -> bool:
    """Compute the searches' missing runs, one line of the file each; False if Ctrl-C paused it."""
    file = ResultsFile(path)
    with file_lock(path, command):
        lines = file.unchecked()
        done = sum(len(search.scores(lines)) for search in searches)

        def received(key: Any, line: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            file.append(line)
            progress(line, done)

        made = stamp()
        jobs = {
            (search.world, search.arm.name): (
                search,
                [
                    line
                    for line in lines
                    if (line["arm"], line["world"]) == (search.arm.name, search.world)
                ],
                command,
                made,
            )
            for search in searches
        }
        finished: list[bool] = []
        complete = run_jobs(
            _tune,
            jobs,
            workers,
            finished=lambda key, ended: finished.append(ended),
            received=received,
            describe=lambda key: f"the search for {key[1]} in {key[0]}",
        )
        return complete and all(finished)


def chosen(search: Search, lines: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The values that the search found; None while runs are missing."""
    scores = search.scores(lines)
    if len(scores) < search.budget:
        return None
    return search.values(best(scores, pilots(search.budget)))


@dataclass(frozen=True)
class Tried:
    """Settings that a search tried: their `values`, the score of each run by its place in the
    search, those of the seeds of all points (`first`) and of further ones, and whether the search
    chose them.
    """

    values: Mapping[str, float]
    first: Mapping[int, float]
    further: Mapping[int, float]
    chosen: bool


def tried(search: Search, lines: Sequence[Mapping[str, Any]]) -> list[Tried]:
    """The settings that a search has tried, in order."""
    scores, each = search.scores(lines), pilots(search.budget)
    places: dict[Point, list[tuple[int, float]]] = {}
    for place, ((point, _), score) in enumerate(scores.items(), 1):
        places.setdefault(point, []).append((place, score))
    winner = best(scores, each) if scores else None
    return [
        Tried(search.values(p), dict(known[:each]), dict(known[each:]), p == winner)
        for p, known in places.items()
    ]


def choices(searches: Sequence[Search], path: Path) -> str:
    """A line per search: the chosen values and their score with its range over seeds, or the number
    of missing runs.
    """
    lines, texts = ResultsFile(path).unchecked(), []
    for search in searches:
        scores, values = search.scores(lines), chosen(search, lines)
        place = f"{short_name(search.world)}, {search.arm.name}"
        if values is None:
            texts.append(
                f"{place}: {search.budget - len(scores)} of {search.budget} runs are missing"
            )
            continue
        each = pilots(search.budget)
        repeated = further(scores, each).get(best(scores, each)) or [max(scores.values())]
        settings = ", ".join(f"{name} {value:g}" for name, value in values.items())
        spread = f"{min(repeated):.3f} to {max(repeated):.3f}, {len(repeated)} seeds"
        texts.append(f"{place}: {settings}; score {np.mean(repeated):.3f} ({spread})")
    return "\n".join(texts)


def chosen_settings(chosen: Mapping[tuple[str, str], Mapping[str, float]]) -> Table:
    """What the searches chose, by task and arm; "-" for a number that an arm does not have."""
    knobs = list(dict.fromkeys(knob for values in chosen.values() for knob in values))
    cells = [
        [*key, *(f"{values[knob]:g}" if knob in values else "-" for knob in knobs)]
        for key, values in chosen.items()
    ]
    return Table(["task", "arm", *(knob.replace("_", " ") for knob in knobs)], cells)


def for_paper(searches: Sequence[Search], log: Path, folder: Path, command: str) -> list[Path]:
    """Write every run of the searches, and what they chose, to a folder
    (`flowrl.compare.paper.write_paper`).
    """
    lines = ResultsFile(log).unchecked()
    page, rows, settings = Document("Chosen settings"), list[dict[str, Any]](), list[Any]()
    values: dict[tuple[str, str], dict[str, float]] = {}
    for search in searches:
        labels = {"world": short_name(search.world), "arm": search.arm.name}
        made = [line for line in lines if search.made(line)]
        rows += [
            {**labels, **line["values"], "seed": line["seed"], "score": score_of(line, search.form)}
            for line in made
        ]
        settings += [without_groups(line["config"]) for line in made]
        if (best_values := chosen(search, lines)) is not None:
            values[short_name(search.world), search.arm.name] = best_values
    page.blocks.append(chosen_settings(values))
    return page.for_paper(folder, rows, settings, command)


def save(searches: Sequence[Search], log: Path, path: Path) -> None:
    """Write the values and settings of every finished search, by world and arm, to the JSON file
    at `path`;
    other entries stay.
    """
    lines = ResultsFile(log).unchecked()
    values: dict[str, dict[str, Any]] = (
        read_json(path, dict[str, dict[str, Any]]) if path.exists() else {}
    )
    for search in searches:
        winner = chosen(search, lines)
        if winner is not None:
            entry = tuned_entry(search.arm, search.world, winner)
            values.setdefault(search.world, {})[search.arm.name] = entry
    write_json(path, values)
