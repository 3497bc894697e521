"""The runs that compare a rule with tuned baselines, and their duration on this machine."""

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flowrl.core.errors import require
from flowrl.training.config import RunConfig, preset
from flowrl.workers import Worker, run_jobs, worker_count
from flowrl_bench.arms import ARMS, SHORT, TASKS, WORLDS, Arm, chosen_worlds, settings_of, tuned
from flowrl_bench.measurements import measure
from flowrl_bench.tune import Search

BASELINES = ("uniform", "stepwise gains", "turning points")
"""The arms that a rule is compared with, at the settings that `flowrl bench tune` found for them.
"""
FIRST_SEED = 200
"""The first seed of these results; no search and no other result has it or a later one below 9000.
"""
LENGTH: dict[str, dict[str, Any]] = {
    "mixture": {},
    "shapes": {"iterations": SHORT["shapes"]["iterations"]},
}
"""How results differ from `arms.WORLDS`: runs in the image world are as long as those of the
search.
"""
START = 20.0
"""Seconds until worker processes have started and every method's golden run is made."""


Key = tuple[str, str, int]
"""World, arm and seed of a run of the results."""


@dataclass(frozen=True)
class Part:
    """What is made in a world: `budget` runs of the rule's search (0: none), and `seeds` runs of
    the rule and each baseline. In a world of the user's, the baselines are searched, too.
    """

    world: str
    budget: int
    seeds: int
    baselines: tuple[str, ...] = BASELINES

    @property
    def numbers(self) -> tuple[int, ...]:
        """The seeds of the results."""
        return tuple(range(FIRST_SEED, FIRST_SEED + self.seeds))

    def search(self, rule: Arm) -> Search | None:
        """The search for the rule's settings."""
        return Search(rule, self.world, self.budget) if self.budget else None

    def searches(self, rule: Arm) -> list[Search]:
        """The searches for the settings of the rule and, in a world of the user's, of the
        baselines.
        """
        others = [ARMS[name] for name in self.baselines] if self.world not in WORLDS else []
        return [search for arm in (rule, *others) if (search := self.search(arm))]

    def arms(
        self,
        rule: Arm,
        values: Mapping[str, float],
        baselines: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> dict[str, list[RunConfig]]:
        """The runs of the baselines, at the settings in `baselines` or those found before, and of
        the rule at `values`, a list over seeds each, by the arm's name.
        """
        at_baselines = {
            name: (ARMS[name], baselines.get(name) or tuned(self.world, name))
            for name in self.baselines
        }
        chosen = {**at_baselines, rule.name: (rule, values)}
        return {
            name: [
                arm.run(self.world, at, **LENGTH.get(self.world, {}), seed=seed)
                for seed in self.numbers
            ]
            for name, (arm, at) in chosen.items()
        }

    @property
    def task(self) -> str:
        """The world's task."""
        return (
            TASKS[self.world][0]
            if self.world in TASKS
            else preset("default").apply(**settings_of(self.world)).environment.task
        )


FULL = {"mixture": Part("mixture", 12, 20), "shapes": Part("shapes", 6, 8)}
QUICK = {"mixture": Part("mixture", 6, 8), "shapes": Part("shapes", 0, 4, ("uniform",))}
"""The parts of the usual and the quick comparison: by the costs of single runs 21 to 25 and 4 to 6
minutes on two idle cores.
"""


def usual(world: str, quick: bool) -> Part:
    """The usual or the quick comparison in a world."""
    known = QUICK if quick else FULL
    return (
        known[world]
        if world in known
        else Part(world, 6, 4, ("uniform",))
        if quick
        else Part(world, 12, 8)
    )


def make_parts(
    quick: bool = False, world: str = "all", seeds: int = 0, budget: int = -1
) -> list[Part]:
    """The parts of a comparison. `seeds`: of every world, 0 for the usual number; `budget`:
    likewise, -1 for the usual one.
    """
    require(
        seeds == 0 or 2 <= seeds <= 1000, "seeds", seeds, "2 to 1000, or 0 for the usual number"
    )
    require(-1 <= budget <= 200, "budget", budget, "0 to 200 runs, or -1 for the usual number")
    parts = [usual(one, quick) for one in chosen_worlds(world)]
    return [
        Part(p.world, p.budget if budget < 0 else budget, seeds or p.seeds, p.baselines)
        for p in parts
    ]


@dataclass(frozen=True)
class Cost:
    """Wall-clock seconds of an arm in a world: of an iteration, and of an evaluation per held-out
    sample.
    """

    iteration: float
    sample: float

    def of(self, config: RunConfig) -> float:
        """Expected seconds of a run."""
        evaluations = 1 + math.ceil(config.iterations / config.evaluation.eval_every)
        return (
            config.iterations * self.iteration
            + evaluations * config.evaluation.eval_samples * self.sample
        )


PROBES: dict[str, dict[str, int]] = {
    "mixture": {"iterations": 10, "eval_samples": 768},
    "shapes": {"iterations": 2, "eval_samples": 192},
}
"""The run that is timed in each world, after one iteration that is not."""


def probe(worker: Worker | None, config: RunConfig) -> Cost:
    """The cost of an arm, by a short run in a process that has already made an iteration.

    Processor seconds of iterations and of the rest (two evaluations), both times the ratio of
    wall-clock to processor seconds.
    """
    settings = PROBES.get(
        config.environment.world, {"iterations": 2, "eval_samples": config.evaluation.eval_samples}
    )
    measure(config.replace(iterations=1, eval_every=1, eval_samples=36))
    started, before = time.monotonic(), time.process_time()
    found = measure(config.replace(**settings, eval_every=settings["iterations"]))
    assert found is not None  # nothing stops it
    cpu = time.process_time() - before
    ratio, training = (time.monotonic() - started) / cpu, found["totals"]["seconds"]
    return Cost(
        ratio * training / settings["iterations"],
        ratio * (cpu - training) / 2 / settings["eval_samples"],
    )


def costs(
    arms: Mapping[tuple[str, str], RunConfig], workers: int
) -> dict[tuple[str, str], Cost] | None:
    """The cost by world and arm, as many at a time as there will be runs; None if Ctrl-C ended
    it.
    """
    found: dict[tuple[str, str], Cost] = {}
    jobs = {key: (config,) for key, config in arms.items()}
    done = run_jobs(
        probe,
        jobs,
        workers,
        finished=found.__setitem__,
        describe=lambda key: f"timing {key[1]} ({key[0]})",
    )
    return found if done else None


def makespan(jobs: Sequence[float], workers: int) -> float:
    """The time at which the last of `jobs` (seconds) ends if each begins, in order, on the first of
    `workers` that is free.
    """
    ends = [0.0] * max(1, workers)
    for seconds in jobs:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


@dataclass
class Clock:
    """Expected remaining time. `searches`: expected seconds of the missing runs of each search, by
    its key; `results`: those of the other runs, in order. Searches come first; the runs of one
    search follow each other on one worker.

    After a part of the work, what is left is expected to take as much longer than planned as the
    finished part did.
    """

    searches: dict[Any, list[float]]
    results: dict[Key, float]
    workers: int = 0
    _total: float = field(init=False)

    def __post_init__(self) -> None:
        self._total = self._planned()

    def _planned(self) -> float:
        chains = [sum(runs) for runs in self.searches.values() if runs]
        first = makespan(chains, worker_count(self.workers, max(1, len(chains))))
        return first + makespan(
            list(self.results.values()), worker_count(self.workers, max(1, len(self.results)))
        )

    def searched(self, search: Any) -> None:
        """Record a finished run of a search."""
        self.searches[search].pop(0)

    def finished(self, key: Key) -> None:
        """Record another finished run."""
        self.results.pop(key)

    def seconds(self, elapsed: float = 0.0) -> float:
        """Wall-clock seconds until the last run ends, `elapsed` seconds after the first began."""
        left, prior = self._planned(), 0.1 * self._total
        if elapsed <= 0 or self._total <= 0:
            return left
        return left * (elapsed + prior) / (self._total - left + prior)
