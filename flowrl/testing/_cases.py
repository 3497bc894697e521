"""Cases of the contract tests: the checked arguments of the functions of `flowrl.testing`, and a
maker of the part.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.core.errors import require
from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Prompt
from flowrl.testing import (
    credit,
    group_reward,
    policy,
    probe,
    reward,
    sampler,
    solver,
    window,
    world,
)
from flowrl.testing.findings import maker
from flowrl.testing.reward import Examples


def credit_case(rule: Any, decisions: int | None) -> Callable[[], credit.Case]:
    require(decisions is None or decisions >= 1, "decisions", decisions, "1 or more, or None")
    make = maker(rule)
    return lambda: credit.Case(make(), decisions)


def sampler_case(part: Any, steps: int) -> Callable[[], sampler.Case]:
    require(steps >= 1, "steps", steps, "1 or more")
    make = maker(part)
    return lambda: sampler.Case(make(), steps)


def solver_case(part: Any, steps: int) -> Callable[[], solver.Case]:
    require(steps >= 1, "steps", steps, "1 or more")
    make = maker(part)
    return lambda: solver.Case(make(), steps)


def window_case(part: Any, steps: int) -> Callable[[], window.Case]:
    require(steps >= 1, "steps", steps, "1 or more")
    make = maker(part)
    return lambda: window.Case(make(), steps)


def probe_case(part: Any, policy: FlowPolicy | None, members: int) -> Callable[[], probe.Case]:
    require(members >= 1, "members", members, "1 or more")
    make = maker(part)
    return lambda: probe.Case(make(), policy, members)


def reward_case(
    part: Any, examples: Examples | Callable[[], Examples] | None
) -> Callable[[], reward.Case]:
    images, prompts = reward.examples_of(examples)
    make = maker(part, share=True)
    return lambda: reward.Case(make(), images, prompts)


def group_reward_case(
    part: Any, examples: Examples | Callable[[], Examples] | None
) -> Callable[[], group_reward.Case]:
    images, prompts = group_reward.examples_of(examples)
    make = maker(part, share=True)
    return lambda: group_reward.Case(make(), images, prompts)


def policy_case(
    part: Any, prompts: Sequence[Prompt | str], tolerance: float
) -> Callable[[], policy.Case]:
    require(tolerance > 0, "tolerance", tolerance, "above 0")
    chosen, make = policy.prompts_of(prompts), maker(part, share=True)
    return lambda: policy.Case(make(), chosen, tolerance)


def world_case(part: Any) -> Callable[[], world.Case]:
    make = maker(part, share=True)
    return lambda: world.Case(make())
