"""The form of a claim, the arms that most claims compare, and the runs that a claim needs."""

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
"""Settings that all runs in a world share, besides the defaults."""
TASKS: dict[str, tuple[str, ...]] = {"mixture": ("direction",), "shapes": ("compositional", "text", "preference")}
SEEDS: dict[str, tuple[int, ...]] = {"mixture": tuple(range(10)), "shapes": (0, 1, 2)}
QUICK_SEEDS = (0, 1, 2)
"""Seeds of the quick suite, which has runs in the 2-D world only."""

Arm = Mapping[str, Any]
"""The changes to a run's settings that make up one arm."""
UNIFORM: Arm = {"method": "flow-grpo"}
GAINS: Arm = {"method": "stepwise-flow-grpo"}
POINTS: Arm = {"method": "tp-grpo"}
METHODS: dict[str, Arm] = {"uniform": UNIFORM, "stepwise": GAINS, "turning points": POINTS}
LONG_WINDOW: Arm = {"window": "all-but-last"}
NO_PAPER = "no paper reports it"


def gains(options: str) -> Arm:
    """The arm of stepwise gains with other options."""
    return {"credit": f"stepwise-gain({options})"}


@dataclass(frozen=True)
class Claim:
    """A claim or an open question as data.

    `says`: the paper's claim in our words; `source`: the paper; `number`: the result it reports. `arms`: changes to the run's
    settings, by name; `base`: changes that all arms share; `rule` turns runs into a verdict. `tasks`: image tasks on which the
    claim is also tried (none: the 2-D world only). `asks` marks an open question. `samples`: arms that are also judged by
    samples of their stochastic sampler (`flowrl_bench.measurements.observe`).
    """

    id: str
    says: str
    source: str
    number: str
    arms: Mapping[str, Arm]
    rule: Rule
    base: Arm = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    asks: bool = False
    samples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, f"claim {self.id}: arms", dict(self.arms), "one or more")

    @property
    def worlds(self) -> tuple[str, ...]:
        """The worlds in which the claim is tried."""
        return ("mixture", "shapes") if self.tasks else ("mixture",)

    def configs(self, world: str, seeds: tuple[int, ...]) -> Iterator[tuple[str, str, int, RunConfig]]:
        """(arm, task, seed, run) of every run in a world."""
        tasks = TASKS[world] if world == "mixture" else self.tasks
        for seed in seeds:
            for task in tasks:
                for arm, changes in self.arms.items():
                    yield arm, task, seed, make_run(world, task, seed, {**self.base, **changes})


def question(key: str, says: str, arms: Mapping[str, Arm], rule: Rule, **options: Any) -> Claim:
    """An open question."""
    return Claim(key, says, NO_PAPER, "-", arms, rule, asks=True, **options)


def make_run(world: str, task: str, seed: int, changes: Arm) -> RunConfig:
    """The run of an arm: the world's defaults, then the changes. A `credit` is also the name of its method."""
    settings = {**WORLDS[world], "task": task, "seed": seed, **changes}
    if "credit" in settings:
        settings.setdefault("method", settings["credit"])
    return _made(tuple(sorted(settings.items())))


@cache
def _made(settings: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Cached, because checking a run's settings takes milliseconds and the page needs the same thousand runs several times."""
    return preset("default").apply(**dict(settings))
