"""The form of a claim, the arms of most claims, and the runs that a claim needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from flowrl.core.errors import require
from flowrl.training.config import RunConfig
from flowrl_bench.arms import ARMS, TASKS, claims_values, tuned
from flowrl_bench.digest import config_id
from flowrl_bench.verdicts import Rule

SEEDS: dict[str, tuple[int, ...]] = {
    "mixture": tuple(range(100, 115)),
    "shapes": tuple(range(100, 115)),
}
"""Seeds that no earlier result and no search has used."""
QUICK_SEEDS = (100, 101, 102, 103, 104)
"""Seeds of the quick suite, which has runs in the 2-D world only."""

_NOISY = {"credit": "stepwise-gain(probe='continuation:8')"}
EQUAL_EVALUATIONS = "uniform, equal evaluations"
_EARLIER = {"method": "flow-grpo", "group_size": {"mixture": 40, "shapes": 36}}
MADE = {
    **ARMS,
    EQUAL_EVALUATIONS: replace(
        ARMS["uniform, larger groups"], name=EQUAL_EVALUATIONS, settings=_EARLIER
    ),
    "true advantages": replace(ARMS["true advantages"], settings=_NOISY, oracle=False),
}
"""The arms as the committed runs of the claims have them. There, true advantages are estimated by 8
continuations: they were made before there were exact values. Larger groups were made with as many
evaluations as turning points, before an evaluation with a gradient counted three: this arm keeps
these runs under another name.
"""

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
NO_PAPER, SELF_TEST = "no paper reports it", "self-test"


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

    `says`: the paper's claim in our words; `source`: the paper; `number`: the result it reports,
    and the verdict that agrees with it, `expects`. `arms`: changes to the run's settings, by name;
    `base`: changes that all arms share. `primary` has the answer, in the worlds in which
    `flowrl_bench.catalogue.PRIMARY` lists the claim; the estimates of `secondary` accompany it.
    `tasks`: image tasks on which the claim is also tested (none: the 2-D world only); `in_2d`:
    whether it is tested in the 2-D world. `samples`: arms that are also judged by samples of their
    stochastic sampler (`flowrl_bench.measurements.observe`).
    """

    id: str
    says: str
    source: str
    number: str
    arms: Mapping[str, Arm]
    primary: Rule
    secondary: tuple[Rule, ...] = ()
    expects: str = ""
    base: Arm = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    in_2d: bool = True
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
    def asks(self) -> bool:
        """Whether it is an open question."""
        return self.source == NO_PAPER

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The primary rule, then the secondary ones."""
        return (self.primary, *self.secondary)

    @property
    def worlds(self) -> tuple[str, ...]:
        """The worlds in which the claim is tested."""
        return (*(("mixture",) if self.in_2d else ()), *(("shapes",) if self.tasks else ()))

    def outcome(self, world: str, rule: Rule) -> tuple[str, ...]:
        """What a rule compares: the world, the measure, and the runs of the arms. Equal for two
        claims that ask the same.
        """
        tasks = TASKS[world] if world == "mixture" else self.tasks
        runs = (
            config_id(make_run(world, task, 0, {**self.base, **self.arms[arm]}))
            for arm in rule.arms
            for task in tasks
        )
        return (world, rule.measure, *runs)

    def configs(
        self, world: str, seeds: tuple[int, ...]
    ) -> Iterator[tuple[str, str, int, RunConfig]]:
        """(arm, task, seed, run) of every run in a world."""
        tasks = TASKS[world] if world == "mixture" else self.tasks
        for seed in seeds:
            for task in tasks:
                for arm, changes in self.arms.items():
                    yield arm, task, seed, make_run(world, task, seed, {**self.base, **changes})


def question(
    key: str, says: str, arms: Mapping[str, Arm], primary: Rule, *secondary: Rule, **options: Any
) -> Claim:
    """An open question."""
    return Claim(key, says, NO_PAPER, "-", arms, primary, secondary, **options)


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


def made_values(world: str, arm: str) -> dict[str, float]:
    """The values of an arm's runs; of a newer arm those of the present search."""
    return claims_values(world, arm) or (
        tuned(world, arm) if arm in ARMS else MADE[arm].values(world, {})
    )


@cache
def _made(arm: str, world: str, settings: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Cached, because a check of a run's settings takes milliseconds and the page needs the same
    thousand runs several times.
    """
    values = made_values(world, arm)
    return MADE[arm].run(world, values, **dict(settings))
