"""The contest: which settings reach Flow-GRPO's result at the least cost. Tasks, targets,
evaluations, budget and prices are fixed; everything else is an entry's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from flowrl.bench.verdict_runs import IMAGES, POINTS, Task
from flowrl.core.errors import require
from flowrl.run.config import (
    AlgorithmConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    preset,
)
from flowrl.run.costs import COUNTS, STATED
from flowrl.run.plan import plan


@dataclass(frozen=True)
class Contest:
    """The fixed part of one world.

    Args:
        tasks: the verdict's tasks by name.
        targets: by task, the held-out reward to reach: the mean final reward of the verdict's
            Flow-GRPO (`benchmarks/results/verdict-arms.csv`).
        settings: by task, those of Flow-GRPO in the verdict, which an entry changes.
        iterations: iterations of Flow-GRPO in the verdict. Their cost is the unit of an entry's,
            and twice their cost the budget of a run.
        evaluations: evaluations of a run that spends the budget.
    """

    tasks: Mapping[str, Task]
    targets: Mapping[str, float]
    settings: Mapping[str, Mapping[str, Any]]
    iterations: int
    evaluations: int = 24

    @cached_property
    def costs(self) -> Mapping[str, float]:
        """By task, the cost of Flow-GRPO's result in the verdict, in stated seconds."""
        each = {task: iteration_seconds(self._usual(task, {})) for task in self.tasks}
        return {task: self.iterations * seconds for task, seconds in each.items()}

    @property
    def budget(self) -> float:
        """The budget of a run in seconds of the stated model."""
        return 2 * max(self.costs.values())

    def _usual(self, task: str, settings: Mapping[str, Any]) -> RunConfig:
        known = self.tasks[task]
        arm = known.arms(1)["uniform"]
        fixed = {"world": known.world, **FIXED, **known.changes}
        fixed = {name: value for name, value in fixed.items() if name not in FREE}
        other = sorted(settings.keys() - FREE)
        require(not other, "settings", other, f"those that the contest does not fix: {_FREE}")
        usual = {**arm.settings, **self.settings[task], **settings}
        usual = {name: value for name, value in usual.items() if name not in fixed}
        return preset("default").apply(**usual, **fixed)

    def run(
        self, task: str, settings: Mapping[str, Any], seed: int, share: float = 1.0
    ) -> RunConfig:
        """A run of an entry.

        Args:
            task: one of `tasks`.
            settings: those of the entry.
            seed: the seed.
            share: the share of the budget that it spends.

        Returns:
            The run: as many iterations as the budget pays by the counts of `flowrl.run.plan`, at
            least one, or fewer if `settings` has "iterations", after which a learning rate that
            falls has its last value; and evaluations at equal shares of the budget.

        Raises:
            ConfigError: a setting is fixed by the contest, or not allowed.
        """
        own = {name: value for name, value in settings.items() if name != "iterations"}
        base = self._usual(task, own)
        paid = max(1, int(share * self.budget / iteration_seconds(base) + 1e-6))
        every = max(1, round(paid / (share * self.evaluations)))
        iterations = min(paid, settings.get("iterations", paid))
        return base.replace(iterations=iterations, eval_every=every, seed=seed)


FREE = {
    item.name for group in (AlgorithmConfig, RolloutConfig, OptimConfig) for item in fields(group)
} - {"start_from"}
"""The settings that are an entry's."""
_FREE = "iterations, and settings of the groups algorithm, rollout and optim but start_from"
FIXED: dict[str, Any] = {"eval_samples": 384, "eval_steps": 20}
"""The evaluation, where a task has no other."""


def iteration_seconds(config: RunConfig) -> float:
    """Seconds of an iteration on the stated model, by planned counts."""
    planned = plan(config)
    counts = {name: getattr(planned, name) for name in COUNTS if name != "decodes"}
    return STATED.seconds * STATED.parts(counts).total


def _settings(clip: float, rate: float, noise: float) -> dict[str, Any]:
    numbers = {"clip_range": clip, "learning_rate": rate, "noise_level": noise}
    return {**numbers, "initial_noise": "independent"}


CONTESTS = {
    "images": Contest(
        IMAGES,
        {"compositional": 0.8483, "text": 0.8630, "preference": 0.9297},
        dict.fromkeys(IMAGES, _settings(0.006, 0.004, 0.7)),
        12,
    ),
    "points": Contest(
        POINTS,
        {"default": 0.9581, "noise-0.3": 0.9548, "strict": 0.9842, "16-dimensions": 0.9062},
        {
            "default": _settings(0.18, 0.02, 0.7),
            "noise-0.3": _settings(0.06, 0.02, 0.98),
            "strict": _settings(0.06, 0.02, 0.7),
            "16-dimensions": _settings(0.0212, 0.04, 0.7),
        },
        20,
    ),
}
