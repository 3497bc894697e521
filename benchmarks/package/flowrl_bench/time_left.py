"""How long the runs that are left will take, where cheap and dear ones are mixed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flowrl.methods import named_method
from flowrl.training.config import RunConfig
from flowrl.types import Completion, Continuation, Substeps

USUAL = {"mixture": 3.0, "shapes": 95.0}
"""Processor seconds of a run without a probe with the claims' settings, on one 2.5 GHz core."""
DEARER: dict[str, dict[type, float]] = {
    "mixture": {Substeps: 1.4, Completion: 1.4, Continuation: 4.5},
    "shapes": {Substeps: 2.0, Completion: 2.1, Continuation: 10.0},
}
"""How much longer it takes with a probe."""
LENGTH = {"mixture": 40, "shapes": 36}
"""Iterations of a usual run; it has 10 steps."""
AROUND = 1.45
"""Seconds on the clock per second of training: evaluation comes on top."""


def known(config: RunConfig) -> float:
    """Processor seconds that a run takes, by what is known of its world, its probe, and its length."""
    world = config.environment.world if config.environment.world in USUAL else "shapes"
    factor = DEARER[world].get(_probe(config.algorithm.method, config.algorithm.credit), 1.0)
    return USUAL[world] * factor * config.iterations / LENGTH[world] * config.rollout.num_steps / 10


@cache
def _probe(method: str, credit: str) -> type:
    return type(named_method(method, credit=credit).credit.probe)


def _kind(values: Mapping[str, Any]) -> str:
    """All settings but the seed: runs of one kind take about as long."""
    return json.dumps({name: value for name, value in values.items() if name != "seed"}, sort_keys=True)


@dataclass
class Pace:
    """Told every run that has finished, it says how many seconds the others need.

    A run is expected to take the mean of the finished runs with the same settings; without any, what is `known` of it, times
    how far off that was for the world's finished runs so far (for those of all worlds, where the world has none).
    """

    runs: Mapping[str, RunConfig]
    workers: int = 1
    _left: dict[str, tuple[str, str, float]] = field(init=False, repr=False)
    _seen: dict[str, list[tuple[float, float]]] = field(init=False, repr=False, default_factory=dict)
    _work: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        self._left = {key: (_kind(c.as_dict()), c.environment.world, known(c)) for key, c in self.runs.items()}

    def finished(self, line: Mapping[str, Any], now: bool = True) -> None:
        """A run's line; `now`: it was made since this pace's clock started."""
        kind, world, usual = self._left.pop(line["id"])
        seconds = line["totals"]["seconds"]
        self._work += seconds if now else 0.0
        for group in (kind, world, ""):
            self._seen.setdefault(group, []).append((seconds, usual))

    def left(self, elapsed: float) -> float:
        """Seconds on the clock that the runs which are left need, after `elapsed` seconds."""
        expected = [self._expected(*run) for run in self._left.values()]
        if not expected:
            return 0.0
        trial = self.workers * sum(expected) / len(expected)  # what is under way, and so many runs' worth of doubt
        rate = (elapsed + trial * AROUND / self.workers) / (self._work + trial)
        return rate * sum(expected)

    def _expected(self, kind: str, world: str, usual: float) -> float:
        own = self._seen.get(kind)
        if own:
            return _ratio(own) * usual
        return _ratio(self._seen.get(world) or self._seen.get("") or [(1.0, 1.0)]) * usual


def _ratio(seen: Sequence[tuple[float, float]]) -> float:
    return sum(seconds for seconds, _ in seen) / sum(usual for _, usual in seen)


def words(seconds: float) -> str:
    """ "40 seconds", "12 minutes" or "3.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
