"""The settings tuned by `flowrl bench tune` for the methods in the built-in worlds."""

from collections.abc import Mapping
from typing import Any

from flowrl.compare.arms import Arms, arm_run, of_arm
from flowrl.core.errors import require
from flowrl.run.config import RunConfig
from flowrl.run.presets import of_method
from flowrl.run.reads import unread

BASELINE = "flow-grpo"


def tuned_arms(
    run: RunConfig, arms: Arms, chosen: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The `arms` of a comparison with tuned settings below their own.

    An arm that was not tuned (a credit rule of one's own, a loss, another method) gets those of
    uniform credit that its parts read. The settings `chosen` for all arms take precedence.

    Args:
        run: the settings that the arms do not change.
        arms: the arms.
        chosen: settings given for all arms.

    Returns:
        The arms, and the names of those that were not tuned themselves. Raises `ConfigError` if a
        world has no tuned settings or an arm is not allowed.
    """
    world = str(run.environment.world)
    baseline = of_method(world, BASELINE) or {}
    require(bool(baseline), "settings", "tuned", f"world or published in {world}")
    changed, untuned = dict[str, dict[str, Any]](), list[str]()
    for arm, settings in arms.items():
        matched = set(settings) <= {"method"} and of_method(world, settings.get("method", BASELINE))
        values = matched or baseline
        values = {n: v for n, v in values.items() if n not in chosen and n not in settings}
        if not matched:
            untuned.append(arm)
        with of_arm(arm):
            unused = unread(arm_run(run, {**values, **settings}), values)
        values = {name: value for name, value in values.items() if name not in unused}
        changed[arm] = {**values, **settings}
    return changed, untuned
