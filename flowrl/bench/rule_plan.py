"""The runs that compare a rule with tuned baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from flowrl.bench.arms import ARMS, SHORT, WORLDS, Arm, chosen_worlds, tuned
from flowrl.bench.tune import Search, usual_budget
from flowrl.core.errors import require
from flowrl.run.config import RunConfig

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
ORACLE = ARMS["true advantages"]
"""Exact credit, the bound of the pages: no competitor, because its values cost no other arm's
evaluations.
"""
Key = tuple[str, str, int]
"""World, arm and seed of a run of the results."""


@dataclass(frozen=True)
class Part:
    """What is made in a world: `budget` runs of the rule's search (0: none), and `seeds` runs of
    the rule and each baseline, from `first_seed` on. In a world of the user's, the baselines are
    searched, too. `bound`: exact credit is run as well, unless its curves are shipped.
    """

    world: str
    budget: int
    seeds: int
    baselines: tuple[str, ...] = BASELINES
    bound: bool = False
    first_seed: int = FIRST_SEED

    @property
    def numbers(self) -> tuple[int, ...]:
        """The seeds of the results."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

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
        return {name: self._runs(arm, at) for name, (arm, at) in chosen.items()}

    def exact(self) -> list[RunConfig]:
        """The runs of exact credit, by seed; none outside the 2-D world."""
        known = self.world in ORACLE.worlds
        return self._runs(ORACLE, tuned(self.world, ORACLE.name)) if known else []

    def _runs(self, arm: Arm, values: Mapping[str, float]) -> list[RunConfig]:
        """The runs of an arm, by seed."""
        length = LENGTH.get(self.world, {})
        return [arm.run(self.world, values, **length, seed=seed) for seed in self.numbers]


FULL = {
    "mixture": Part("mixture", usual_budget("mixture"), 20),
    "shapes": Part("shapes", usual_budget("shapes"), 8),
}
QUICK = {
    "mixture": Part("mixture", usual_budget("mixture"), 8),
    "shapes": Part("shapes", 0, 5, ("uniform",)),
}
"""The parts of the usual and the quick comparison: by the costs of single runs 21 to 25 and 4 to 6
minutes on two idle cores.
"""


def usual(world: str, quick: bool) -> Part:
    """The usual or the quick comparison in a world."""
    known = QUICK if quick else FULL
    return (
        known[world]
        if world in known
        else Part(world, 6, 5, ("uniform",))
        if quick
        else Part(world, usual_budget(world), 8)
    )


def make_parts(
    quick: bool = False,
    world: str = "all",
    seeds: int = 0,
    budget: int = -1,
    bound: bool = False,
    first_seed: int = FIRST_SEED,
) -> list[Part]:
    """The parts of a comparison. `seeds`: of every world, 0 for the usual number; `budget`:
    likewise, -1 for the usual one; `bound`: with exact credit. Raises `ConfigError` for values
    that are not allowed, and for `bound` without the 2-D world.
    """
    require(
        seeds == 0 or 2 <= seeds <= 1000, "seeds", seeds, "2 to 1000, or 0 for the usual number"
    )
    parts = [usual(name, quick) for name in chosen_worlds(world)]
    exact = any(part.exact() for part in parts)
    require(exact or not bound, "bound", bound, "only for the 2-D world, which has exact values")
    return [
        replace(
            part,
            budget=part.budget if budget < 0 else budget,
            seeds=seeds or part.seeds,
            bound=bound,
            first_seed=first_seed,
        )
        for part in parts
    ]
