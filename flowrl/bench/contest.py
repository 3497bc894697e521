"""The contest: which settings reach Flow-GRPO's result at the least cost. Tasks, targets,
evaluations, budget and prices are fixed; everything else is an entry's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.bench.verdict_runs import IMAGES, Task
from flowrl.core.errors import require
from flowrl.run.config import RunConfig, preset
from flowrl.run.costs import COUNTS, STATED
from flowrl.run.plan import plan


@dataclass(frozen=True)
class Contest:
    """The fixed part of one world.

    Args:
        tasks: the verdict's tasks by name.
        targets: by task, the held-out reward to reach: the mean final reward of the verdict's
            Flow-GRPO (`benchmarks/results/verdict-arms.csv`).
        settings: those of Flow-GRPO in the verdict, which an entry changes.
        iterations: the budget of a run, in iterations of Flow-GRPO with these settings.
        evaluations: evaluations of a run that spends the budget.
    """

    tasks: Mapping[str, Task]
    targets: Mapping[str, float]
    settings: Mapping[str, Any]
    iterations: int
    evaluations: int = 24

    @property
    def budget(self) -> float:
        """The budget of a run in seconds of the stated model."""
        return self.iterations * max(
            iteration_seconds(self._usual(task, {})) for task in self.tasks
        )

    def _usual(self, task: str, settings: Mapping[str, Any]) -> RunConfig:
        known = self.tasks[task]
        arm = known.arms(1)["uniform"]
        fixed = {"world": known.world, **FIXED, **known.changes}
        fixed = {name: value for name, value in fixed.items() if name not in CHOSEN}
        taken = sorted({"iterations", "seed", "eval_every", *fixed} & settings.keys())
        require(not taken, "settings", taken, "those that the contest does not fix")
        usual = {**arm.settings, **self.settings, **settings}
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
            least one, and evaluations at equal shares of it.

        Raises:
            ConfigError: a setting is fixed by the contest, or not allowed.
        """
        base = self._usual(task, settings)
        iterations = max(1, int(share * self.budget / iteration_seconds(base) + 1e-6))
        every = max(1, round(iterations / (share * self.evaluations)))
        return base.replace(iterations=iterations, eval_every=every, seed=seed)


CHOSEN = ("window", "iterations", "initial_noise", "method")
"""Settings of the verdict's tasks that are an entry's."""
FIXED: dict[str, Any] = {"eval_samples": 384, "eval_steps": 20}
"""The evaluation, where a task has no other."""


def iteration_seconds(config: RunConfig) -> float:
    """Seconds of an iteration on the stated model, by planned counts."""
    planned = plan(config)
    counts = {name: getattr(planned, name) for name in COUNTS if name != "decodes"}
    return STATED.seconds * STATED.parts(counts).total


CONTESTS = {
    "images": Contest(
        IMAGES,
        {"compositional": 0.8483, "text": 0.8630, "preference": 0.9297},
        {
            "clip_range": 0.006,
            "learning_rate": 0.004,
            "noise_level": 0.7,
            "initial_noise": "independent",
        },
        24,
    ),
}
