"""The form of a claim, the arms of most claims, and the runs that a claim needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flowrl.core.errors import require
from flowrl.training.config import RunConfig
from flowrl_bench.arms import ARMS, TASKS, claims_values
from flowrl_bench.verdicts import Rule

SEEDS: dict[str, tuple[int, ...]] = {
    "mixture": tuple(range(100, 115)),
    "shapes": tuple(range(100, 115)),
}
"""Seeds that no earlier result and no search has used."""
QUICK_SEEDS = (100, 101, 102)
"""Seeds of the quick suite, which has runs in the 2-D world only."""

Arm = Mapping[str, Any]
"""The settings that make up one arm: those that were found for the entry "arm" of
`flowrl_bench.arms`, and changes to them.
"""
UNIFORM: Arm = {"arm": "uniform"}
GAINS: Arm = {"arm": "stepwise gains"}
POINTS: Arm = {"arm": "turning points"}
METHODS: dict[str, Arm] = {"uniform": UNIFORM, "stepwise": GAINS, "turning points": POINTS}
LONG_WINDOW: Arm = {"window": ":-1"}
DEFAULTS: Arm = {"clip_range": 2e-3, "learning_rate": 2e-2, "noise_level": 0.7}
"""The defaults of `flowrl compare` in the 2-D world."""
BINDING_KL = 0.1
"""A weight whose gradient is 0.39 of the policy term's for uniform credit in the 2-D world (0.27
for turning points; seed 9050, 40 iterations), so that the KL changes what is learned; 0.04 has
0.17, and 1 keeps the reward below 0.5.
"""
KL_WEIGHTS = (0.03, BINDING_KL, 0.3)
"""The frontier of reward and closeness to the base model."""
NO_PAPER = "no paper reports it"


def gains(options: str) -> Arm:
    """The arm of stepwise gains with other options but the same learning rate, clip and noise
    level.
    """
    return {**GAINS, "credit": f"stepwise-gain({options})"}


def points(options: str) -> Arm:
    """The arm of turning points with other options but the same learning rate, clip and noise
    level.
    """
    return {**POINTS, "credit": f"turning-point({options})"}


def variant(options: str) -> Arm:
    """The arm of a variant of turning points with the same learning rate, clip and noise level."""
    return {**POINTS, "credit": f"turning-point-variant({options})"}


@dataclass(frozen=True)
class Claim:
    """A claim or an open question as data.

    `says`: the paper's claim in our words; `source`: the paper; `number`: the result it reports.
    `arms`: changes to the run's settings, by name; `base`: changes that all arms share; `rule`
    turns runs into a verdict. `tasks`: image tasks on which the claim is also tested (none: the 2-D
    world only); `in_2d`: whether it is tested in the 2-D world. `asks` marks an open question.
    `samples`: arms that are also judged by samples of their stochastic sampler
    (`flowrl_bench.measurements.observe`).
    """

    id: str
    says: str
    source: str
    number: str
    arms: Mapping[str, Arm]
    rule: Rule
    base: Arm = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    in_2d: bool = True
    asks: bool = False
    samples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, f"claim {self.id}: arms", dict(self.arms), "one or more")
        require(
            bool(self.worlds),
            f"claim {self.id}: tasks",
            self.tasks,
            "one or more, if it is not tested in the 2-D world",
        )

    @property
    def worlds(self) -> tuple[str, ...]:
        """The worlds in which the claim is tested."""
        return (*(("mixture",) if self.in_2d else ()), *(("shapes",) if self.tasks else ()))

    def configs(
        self, world: str, seeds: tuple[int, ...]
    ) -> Iterator[tuple[str, str, int, RunConfig]]:
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
    """The run of an arm: the world's settings, the tuned settings of the arm from which it starts,
    then the changes.

    A `credit` is also the name of its method.
    """
    settings = {
        "task": task,
        "seed": seed,
        **{name: value for name, value in changes.items() if name != "arm"},
    }
    if "credit" in settings:
        settings.setdefault("method", settings["credit"])
    return _made(changes["arm"], world, tuple(sorted(settings.items())))


@cache
def _made(arm: str, world: str, settings: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Cached, because a check of a run's settings takes milliseconds and the page needs the same
    thousand runs several times.
    """
    values = claims_values(world, arm) or ARMS[arm].values(world, {})
    return ARMS[arm].run(world, values, **dict(settings))
