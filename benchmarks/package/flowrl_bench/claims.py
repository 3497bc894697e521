"""What a claim is, and the runs it needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flowrl.errors import require
from flowrl.training.config import RunConfig, preset
from flowrl_bench.verdicts import Rule

WORLDS: dict[str, dict[str, Any]] = {
    "mixture": {"world": "mixture", "eval_every": 2},
    "shapes": {"world": "shapes", "iterations": 36, "eval_every": 4},
}
"""What all runs of a world share, besides the defaults."""
TASKS: dict[str, tuple[str, ...]] = {"mixture": ("direction",), "shapes": ("compositional", "text", "preference")}
SEEDS: dict[str, tuple[int, ...]] = {"mixture": tuple(range(10)), "shapes": (0, 1, 2)}
QUICK_SEEDS = (0, 1, 2)
"""The quick suite is the first seeds of the full one, on the 2-D world alone."""


@dataclass(frozen=True)
class Claim:
    """A claim or an open question as data.

    `says`: the paper's claim in our words; `source`: the paper; `number`: what it reports. `arms`: changes to the run's settings
    by name; `base`: changes that all arms share; `rule` judges. `tasks`: image tasks on which the claim is tried too (none: the
    2-D world alone). `asks` marks an open question: nobody claims anything. `samples`: arms that are judged by what their sampler
    draws, too (`flowrl_bench.samples`).
    """

    id: str
    says: str
    source: str
    number: str
    arms: Mapping[str, Mapping[str, Any]]
    rule: Rule
    base: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    asks: bool = False
    samples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, f"claim {self.id}: arms", dict(self.arms), "one or more")

    @property
    def worlds(self) -> tuple[str, ...]:
        """Where it is tried."""
        return ("mixture", "shapes") if self.tasks else ("mixture",)

    def configs(self, world: str, seeds: tuple[int, ...]) -> Iterator[tuple[str, str, int, RunConfig]]:
        """(arm, task, seed, run) of every run in a world."""
        tasks = TASKS[world] if world == "mixture" else self.tasks
        for seed in seeds:
            for task in tasks:
                for arm, changes in self.arms.items():
                    yield arm, task, seed, make_run(world, task, seed, {**self.base, **changes})


def make_run(world: str, task: str, seed: int, changes: Mapping[str, Any]) -> RunConfig:
    """The run of an arm: the world's defaults, then the changes. A `credit` names itself as the method."""
    settings = {**WORLDS[world], "task": task, "seed": seed, **changes}
    if "credit" in settings:
        settings.setdefault("method", settings["credit"])
    return _made(tuple(sorted(settings.items())))


@cache
def _made(settings: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Checking a run's settings takes milliseconds, and the page asks for the same thousand runs again and again."""
    return preset("default").apply(**dict(settings))
