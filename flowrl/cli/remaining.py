"""The time that runs still need, from what their iterations and evaluations have taken so far."""

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.core.errors import ConfigError
from flowrl.training.config import RunConfig

GRADIENT = 3.0
"""Cost of a network evaluation with a gradient, in evaluations without one: a backward pass costs
about two forward passes.
"""


@dataclass(frozen=True)
class Work:
    """Costs of a run in network evaluations: of one iteration and of one evaluation, and when
    evaluations are due.
    """

    iterations: int
    iteration: float
    evaluation: float
    eval_every: int

    def between(self, first: int, last: int) -> float:
        """Cost of the iterations after `first` up to `last`, with the evaluations that are due
        after them.
        """
        due = last // self.eval_every - first // self.eval_every
        due += last == self.iterations and last > first and last % self.eval_every != 0
        return (last - first) * self.iteration + due * self.evaluation


def work_of(config: RunConfig) -> Work:
    """The work that `config` plans (`flowrl.training.plan`); equal iterations if a probe does not
    state its cost.
    """
    from flowrl.training.plan import plan

    try:
        found = plan(config)
    except ConfigError:
        return Work(config.iterations, 1.0, 0.0, config.evaluation.eval_every)
    iteration = found.nfe + found.train_nfe + (GRADIENT - 1) * found.gradient_nfe
    return Work(config.iterations, iteration, found.evaluation_nfe, config.evaluation.eval_every)


@dataclass
class _Progress:
    began: float
    start: int
    """Iterations that were done when the run was continued; -1 before the first message says so."""
    done: int
    first: float
    latest: float


@dataclass
class Remaining:
    """Estimates the seconds until all runs are finished.

    `works` are the runs in the order in which they start, `kinds` their arms, `workers` the runs at
    a time. The seconds per network evaluation are those of the arm's own runs after a whole period
    of evaluations, and until then those of all runs. A run that has not begun takes the mean time
    to start in addition. Runs are assigned to workers as they get free.
    """

    works: Mapping[str, Work]
    kinds: Mapping[str, str]
    workers: int = 1
    kept: Mapping[str, int] = field(default_factory=dict)
    """Iterations of a continued run that its checkpoint has."""
    clock: Callable[[], float] = time.monotonic
    _runs: dict[str, _Progress] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    def began(self, name: str) -> None:
        """The run `name` has started."""
        now = self.clock()
        self._runs.setdefault(name, _Progress(now, -1, 0, now, now))

    def reached(self, name: str, iteration: int) -> None:
        """The run `name` has completed `iteration`, counted from 1; a continued run begins with a
        higher one.
        """
        self.began(name)
        run, now = self._runs[name], self.clock()
        if run.start < 0:
            run.start, run.first = iteration, now
        if iteration > run.done:
            run.done, run.latest = iteration, now

    def ended(self, name: str) -> None:
        """The run `name` is finished, paused or failed."""
        self.began(name)
        self._ended.add(name)

    def seconds(self) -> float | None:
        """Seconds until the last run ends; None before two iterations of a run have been timed."""
        rates = {
            kind: self._rate([n for n in self._runs if self.kinds[n] == kind], True)
            for kind in set(self.kinds.values())
        }
        common = self._rate(list(self._runs), False)
        if common is None:
            return 0.0 if set(self.works) <= self._ended else None
        starts, now = self._mean_start(), self.clock()
        going, waiting = list[float](), list[float]()
        for name, work in self.works.items():
            rate, run = rates[self.kinds[name]] or common, self._runs.get(name)
            if name in self._ended:
                continue
            if run is None:
                waiting.append(
                    starts + rate * work.between(self.kept.get(name, 0), work.iterations)
                )
            elif run.start < 0:
                left = rate * work.between(self.kept.get(name, 0), work.iterations)
                going.append(max(0.0, starts - (now - run.began)) + left)
            else:
                spent = now - run.latest  # on the iteration that is under way
                step = rate * work.between(run.done, min(run.done + 1, work.iterations))
                going.append(rate * work.between(run.done, work.iterations) - min(spent, step))
        return makespan(going, waiting, self.workers)

    def _rate(self, names: Sequence[str], whole: bool) -> float | None:
        """Seconds per network evaluation over the timed iterations of `names`; None if there are
        too few.
        """
        timed = [name for name in names if self._runs[name].start >= 0]
        if whole:
            timed = [
                name
                for name in timed
                if self._iterations(name) >= min(self.works[name].eval_every, self._most(name))
            ]
        done = sum(
            self.works[name].between(self._runs[name].start, self._runs[name].done)
            for name in timed
        )
        seconds = sum(self._runs[name].latest - self._runs[name].first for name in timed)
        return seconds / done if done and seconds > 0 else None

    def _iterations(self, name: str) -> int:
        return self._runs[name].done - self._runs[name].start

    def _most(self, name: str) -> int:
        return self.works[name].iterations - 1

    def _mean_start(self) -> float:
        """Mean seconds from a run's start to the end of its first iteration, less that iteration:
        imports, row 0.
        """
        found = []
        for name, run in self._runs.items():
            if run.start >= 0:
                rate = self._rate([name], False) or 0.0
                found.append(
                    max(
                        0.0,
                        run.first
                        - run.began
                        - rate * self.works[name].between(run.start - 1, run.start),
                    )
                )
        return sum(found) / len(found) if found else 0.0


def makespan(going: Sequence[float], waiting: Sequence[float], workers: int) -> float:
    """Time at which the last job ends when `workers` take the `waiting` jobs in order as those that
    are `going` end.
    """
    ends = [0.0] * max(0, workers - len(going)) + list(going)
    heapq.heapify(ends)
    last = max([0.0, *going])
    for length in waiting:
        end = heapq.heappop(ends) + length
        heapq.heappush(ends, end)
        last = max(last, end)
    return last


def duration(seconds: float | None) -> str:
    """About how long: "under 10 s", "about 40 s", "about 12 min", "about 3.5 h"; "unknown yet" for
    None.
    """
    if seconds is None:
        return "unknown yet"
    if seconds < 10:
        return "under 10 s"
    if seconds < 55:
        return f"about {round(seconds / 10) * 10} s"
    if seconds < 5400:
        return f"about {max(1, round(seconds / 60))} min"
    return f"about {seconds / 3600:.1f} h"
