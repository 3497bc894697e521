"""Estimates of the time that a suite's unfinished runs need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flowrl.methods import named_method
from flowrl.probes import Branch, Comb, Completion, Continuation, Substeps
from flowrl.training.config import RunConfig


@dataclass(frozen=True)
class Usual:
    """Processor seconds of a world's runs of `iterations` with `samples` trajectories of 10 steps
    per iteration and no probe, on one 2.5 GHz core; factors by probe.
    """

    seconds: float
    iterations: int
    probes: Mapping[type, float]
    samples: int = 192


USUAL = {
    "mixture": Usual(3.0, 40, {Substeps: 1.4, Completion: 1.4, Continuation: 4.5}),
    "shapes": Usual(95.0, 36, {Substeps: 2.0, Completion: 2.1, Continuation: 10.0}),
}
TREES, FORWARD = (Branch, Comb), ("diffusion-nft", "awm", "dgpo")
TREE_FACTOR, FORWARD_FACTOR = 1.25, 1.35
"""Of the seconds of uniform credit with the default groups: for methods whose groups are trees,
whatever their size, because members share most steps; for losses of the forward process. Measured
in the 2-D world.
"""
FIXED = 0.3
"""The part of an iteration's seconds that does not grow with the number of trajectories. Groups of
40 take 2.6 times as long as groups of 12.
"""
OVERHEAD = 1.45
"""Wall-clock seconds per second of training: evaluation is not counted as training."""


def usual_seconds(config: RunConfig) -> float:
    """Estimated processor seconds of a run, from its world, its method and its size."""
    usual = USUAL.get(config.environment.world, USUAL["shapes"])
    probe = _probe(config.algorithm.method, config.algorithm.credit)
    size = FIXED + (1 - FIXED) * config.rollout.groups * config.rollout.group_size / usual.samples
    factor = TREE_FACTOR if probe in TREES else size * usual.probes.get(probe, 1.0)
    if (config.algorithm.loss.partition("(")[0] or config.algorithm.method) in FORWARD:
        factor *= FORWARD_FACTOR
    return (
        usual.seconds
        * factor
        * config.iterations
        / usual.iterations
        * config.rollout.num_steps
        / 10
    )


@cache
def _probe(method: str, credit: str) -> type:
    return type(named_method(method, credit=credit).credit.probe)


@dataclass
class RemainingTime:
    """Estimates the time that the unfinished runs need.

    A run is expected to take the mean of finished runs with the same settings (except the seed).
    Without any, it takes `usual_seconds` times the ratio of measured to usual seconds of the
    world's finished runs, or of all worlds'.
    """

    runs: Mapping[str, RunConfig]
    workers: int = 1
    _left: dict[str, tuple[str, str, float]] = field(init=False, repr=False)
    _seen: dict[str, list[tuple[float, float]]] = field(
        init=False, repr=False, default_factory=dict
    )
    _work: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        self._left = {
            key: (str(c.replace(seed=0).flat()), c.environment.world, usual_seconds(c))
            for key, c in self.runs.items()
        }

    def finished(self, line: Mapping[str, Any], now: bool = True) -> None:
        """Record a finished run; `now`: it was made since the start of this estimate's clock."""
        kind, world, usual = self._left.pop(line["id"])
        seconds = line["totals"]["seconds"]
        self._work += seconds if now else 0.0
        for group in (kind, world, ""):
            self._seen.setdefault(group, []).append((seconds, usual))

    def seconds(self, elapsed: float) -> float:
        """Wall-clock seconds that the unfinished runs need, `elapsed` seconds after the start."""
        expected = [self._expected(*run) for run in self._left.values()]
        if not expected:
            return 0.0
        # as much as the runs that are being made
        prior = self.workers * sum(expected) / len(expected)
        rate = (elapsed + prior * OVERHEAD / self.workers) / (self._work + prior)
        return rate * sum(expected)

    def _expected(self, kind: str, world: str, usual: float) -> float:
        seen = self._seen.get(kind) or self._seen.get(world) or self._seen.get("") or [(1.0, 1.0)]
        return sum(seconds for seconds, _ in seen) / sum(usual for _, usual in seen) * usual


def duration(seconds: float) -> str:
    """ "40 seconds", "12 minutes" or "3.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
