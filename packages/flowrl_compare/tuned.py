"""The settings that `flowrl bench tune` found for the methods in the built-in worlds."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.core.errors import require
from flowrl.training.build import unread
from flowrl.training.config import RunConfig
from flowrl_compare.arms import Arms, arm_run, of_arm

FILE = Path(__file__).parent / "tuned.json"
"""By world and arm: its `method` ("" for rules that are none), the `values` that were found, and
the `settings` of a run with them. In a world every arm had the same number of runs (`flowrl bench
tune`); the oracle's values were found with joint normalisation, on a grid of 29 x 29 points.
"""
BASELINE = "flow-grpo"


@cache
def tuned() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """The content of `FILE`."""
    return json.loads(FILE.read_text())


def of_method(world: str, method: str) -> dict[str, Any] | None:
    """The tuned settings of a method in a world; None if it was not tuned there."""
    for arm in tuned().get(world, {}).values():
        if arm["method"] == method:
            return {name: value for name, value in arm["settings"].items() if name != "method"}
    return None


def tuned_arms(
    run: RunConfig, arms: Arms, chosen: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The `arms` of a comparison with tuned settings below their own.

    An arm that was not tuned (a credit rule of one's own, a loss, another method) has those of
    uniform credit, as far as its parts read them. The settings `chosen` for all arms win.

    Args:
        run: the settings that the arms do not change.
        arms: the arms.
        chosen: settings given for all arms.

    Returns:
        The arms, and the names of those that were not tuned themselves. Raises `ConfigError` if a
        world has no tuned settings or an arm is not allowed.
    """
    world = str(run.environment.world)
    usual = of_method(world, BASELINE) or {}
    require(bool(usual), "settings", "tuned", f"world or published in {world}")
    changed, untuned = dict[str, dict[str, Any]](), list[str]()
    for arm, settings in arms.items():
        own = set(settings) <= {"method"} and of_method(world, settings.get("method", BASELINE))
        found = own or usual
        found = {n: v for n, v in found.items() if n not in chosen and n not in settings}
        if not own:
            untuned.append(arm)
        with of_arm(arm):
            without = unread(arm_run(run, {**found, **settings}), found)
        found = {name: value for name, value in found.items() if name not in without}
        changed[arm] = {**found, **settings}
    return changed, untuned
