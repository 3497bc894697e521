"""Contract tests: the contracts of flowrl's protocols as tests for parts of any package.

In a test file, two lines make one pytest case per promise::

    from flowrl.testing import credit_contract
    test_my_rule = credit_contract(MyRule())

In a notebook, ``check_credit(MyRule())`` lists which promises are kept. The argument is an object
(copied for every promise), a class, or a function that makes a part. A failure names the promise,
the observed value, and the usual cause. If a basic promise is broken (shape, randomness), promises
that would fail for the same reason are not tried.

`without` names promises that a part breaks on purpose. Only the functions that end in ``_contract``
need pytest; they raise `ConfigError` if it is not installed. Before a run, `flowrl.training.trial`
checks the user's own parts with this package.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Prompt
from flowrl.testing import (
    credit,
    forward_loss,
    group_reward,
    loss,
    policy,
    probe,
    reward,
    sampler,
    solver,
    window,
    world,
)
from flowrl.testing._cases import (
    credit_case,
    group_reward_case,
    policy_case,
    probe_case,
    reward_case,
    sampler_case,
    solver_case,
    window_case,
    world_case,
)
from flowrl.testing.findings import ContractAdvice, ContractBroken, Finding, Findings, maker
from flowrl.testing.reward import Examples
from flowrl.testing.tiny import (
    TINY,
    TINY_VIDEO,
    tiny_flux,
    tiny_flux_policy,
    tiny_qwen_image,
    tiny_qwen_image_policy,
    tiny_sd3,
    tiny_sd3_policy,
    tiny_wan,
    tiny_wan_policy,
)

__all__ = [
    "TINY",
    "TINY_VIDEO",
    "ContractAdvice",
    "ContractBroken",
    "Finding",
    "Findings",
    "check_credit",
    "check_forward_loss",
    "check_group_reward",
    "check_loss",
    "check_policy",
    "check_probe",
    "check_reward",
    "check_sampler",
    "check_solver",
    "check_window",
    "check_world",
    "credit_contract",
    "forward_loss_contract",
    "group_reward_contract",
    "loss_contract",
    "policy_contract",
    "probe_contract",
    "reward_contract",
    "sampler_contract",
    "solver_contract",
    "tiny_flux",
    "tiny_flux_policy",
    "tiny_qwen_image",
    "tiny_qwen_image_policy",
    "tiny_sd3",
    "tiny_sd3_policy",
    "tiny_wan",
    "tiny_wan_policy",
    "window_contract",
    "world_contract",
]

TestFunction = Callable[..., None]
PROMPTS = ("a red fox", "two blue cars", "a house", "the sea at night")


def credit_contract(
    rule: Any, decisions: int | None = None, without: Sequence[str] = ()
) -> TestFunction:
    """A pytest function that checks a credit rule against the contract of `CreditAssigner` or
    `ExperienceCredit`.

    Args:
        rule: the credit rule: an object (copied for every promise), a class, or a function that
            makes it.
        decisions: number of decisions, if the rule requires one; None for several.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return credit.CONTRACT.as_test(credit_case(rule, decisions), without)


def sampler_contract(part: Any, steps: int = 10, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a sampler against the contract of `Sampler`.

    Args:
        part: the sampler: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return sampler.CONTRACT.as_test(sampler_case(part, steps), without)


def solver_contract(part: Any, steps: int = 10, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a solver against the contract of `MultistepSolver`.

    Args:
        part: the solver: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return solver.CONTRACT.as_test(solver_case(part, steps), without)


def window_contract(part: Any, steps: int = 20, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a window against the contract of `Window`.

    Args:
        part: the window: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids, which the window must fit.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return window.CONTRACT.as_test(window_case(part, steps), without)


def loss_contract(part: Any, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a policy loss against the contract of `PolicyLoss`.

    Args:
        part: the policy loss: an object (copied for every promise), a class, or a function that
            makes it.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return loss.CONTRACT.as_test(maker(part), without)


def forward_loss_contract(part: Any, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a forward-process loss against the contract of `ForwardLoss`.

    Args:
        part: the forward-process loss: an object (copied for every promise), a class, or a function
            that makes it.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return forward_loss.CONTRACT.as_test(maker(part), without)


def reward_contract(
    part: Any,
    examples: Examples | Callable[[], Examples] | None = None,
    without: Sequence[str] = (),
) -> TestFunction:
    """A pytest function that checks a reward model against the contract of `RewardModel`.

    Args:
        part: the reward model: an object (not copied), a class, or a function that makes it.
        examples: images [sample, channel, height, width] or videos [sample, frame, ...] in [0, 1]
            and as many prompts, two or more; or a function that makes them; None: smooth random
            images of 32x32 with plain prompts.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return reward.CONTRACT.as_test(reward_case(part, examples), without)


def group_reward_contract(
    part: Any,
    examples: Examples | Callable[[], Examples] | None = None,
    without: Sequence[str] = (),
) -> TestFunction:
    """A pytest function that checks a group reward against the contract of `GroupReward`.

    Args:
        part: the group reward: an object (not copied), a class, or a function that makes it.
        examples: images [prompt, member, channel, height, width], or videos, with two or more
            prompts of three or more members, and the prompts; or a function that makes them; None:
            smooth random images of 32x32.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return group_reward.CONTRACT.as_test(group_reward_case(part, examples), without)


def policy_contract(
    part: Any,
    prompts: Sequence[Prompt | str] = PROMPTS,
    tolerance: float = 1e-4,
    without: Sequence[str] = (),
) -> TestFunction:
    """A pytest function that checks a policy against the contract of `FlowPolicy`.

    Args:
        part: the policy: an object (not copied; the checks restore what they change), a class, or a
            function that makes it.
        prompts: two or more prompts that the policy accepts.
        tolerance: largest rounding difference of velocities that must be equal, relative to the
            largest velocity (about 1e-2 for a network in bfloat16).
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return policy.CONTRACT.as_test(policy_case(part, prompts, tolerance), without)


def probe_contract(
    part: Any, policy: FlowPolicy | None = None, members: int = 4, without: Sequence[str] = ()
) -> TestFunction:
    """A pytest function that checks a probe against the contract of `flowrl.probes.Probe`.

    Args:
        part: the probe: an object (copied for every promise), a class, or a function that makes it.
        policy: the policy for the test; None for a small one that satisfies the probe.
        members: members per group; a `Branching` probe may require another number.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return probe.CONTRACT.as_test(probe_case(part, policy, members), without)


def world_contract(part: Any, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a world against the contract of `World`.

    Args:
        part: the world: an object (not copied), a class, or a function that makes it.
        without: names of promises that the part breaks on purpose.

    Returns:
        The function, with one pytest case per promise.

    Raises:
        ConfigError: pytest is not installed, or an option is not allowed.
    """
    return world.CONTRACT.as_test(world_case(part), without)


def check_credit(rule: Any, decisions: int | None = None, without: Sequence[str] = ()) -> Findings:
    """Check a credit rule against the contract of `CreditAssigner` or `ExperienceCredit`; for
    notebooks and scripts.

    Args:
        rule: as in `credit_contract`.
        decisions: as in `credit_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return credit.CONTRACT.findings(credit_case(rule, decisions), without)


def check_sampler(part: Any, steps: int = 10, without: Sequence[str] = ()) -> Findings:
    """Check a sampler against the contract of `Sampler`; for notebooks and scripts.

    Args:
        part: as in `sampler_contract`.
        steps: as in `sampler_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return sampler.CONTRACT.findings(sampler_case(part, steps), without)


def check_solver(part: Any, steps: int = 10, without: Sequence[str] = ()) -> Findings:
    """Check a solver against the contract of `MultistepSolver`; for notebooks and scripts.

    Args:
        part: as in `solver_contract`.
        steps: as in `solver_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return solver.CONTRACT.findings(solver_case(part, steps), without)


def check_window(part: Any, steps: int = 20, without: Sequence[str] = ()) -> Findings:
    """Check a window against the contract of `Window`; for notebooks and scripts.

    Args:
        part: as in `window_contract`.
        steps: as in `window_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return window.CONTRACT.findings(window_case(part, steps), without)


def check_loss(part: Any, without: Sequence[str] = ()) -> Findings:
    """Check a policy loss against the contract of `PolicyLoss`; for notebooks and scripts.

    Args:
        part: as in `loss_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return loss.CONTRACT.findings(maker(part), without)


def check_probe(
    part: Any, policy: FlowPolicy | None = None, members: int = 4, without: Sequence[str] = ()
) -> Findings:
    """Check a probe against the contract of `flowrl.probes.Probe`; for notebooks and scripts.

    Args:
        part: as in `probe_contract`.
        policy: as in `probe_contract`.
        members: as in `probe_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return probe.CONTRACT.findings(probe_case(part, policy, members), without)


def check_forward_loss(part: Any, without: Sequence[str] = ()) -> Findings:
    """Check a forward-process loss against the contract of `ForwardLoss`; for notebooks and
    scripts.

    Args:
        part: as in `forward_loss_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return forward_loss.CONTRACT.findings(maker(part), without)


def check_reward(
    part: Any,
    examples: Examples | Callable[[], Examples] | None = None,
    without: Sequence[str] = (),
) -> Findings:
    """Check a reward model against the contract of `RewardModel`; for notebooks and scripts.

    Args:
        part: as in `reward_contract`.
        examples: as in `reward_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return reward.CONTRACT.findings(reward_case(part, examples), without)


def check_group_reward(
    part: Any,
    examples: Examples | Callable[[], Examples] | None = None,
    without: Sequence[str] = (),
) -> Findings:
    """Check a group reward against the contract of `GroupReward`; for notebooks and scripts.

    Args:
        part: as in `group_reward_contract`.
        examples: as in `group_reward_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return group_reward.CONTRACT.findings(group_reward_case(part, examples), without)


def check_policy(
    part: Any,
    prompts: Sequence[Prompt | str] = PROMPTS,
    tolerance: float = 1e-4,
    without: Sequence[str] = (),
) -> Findings:
    """Check a policy against the contract of `FlowPolicy`; for notebooks and scripts.

    Args:
        part: as in `policy_contract`.
        prompts: as in `policy_contract`.
        tolerance: as in `policy_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return policy.CONTRACT.findings(policy_case(part, prompts, tolerance), without)


def check_world(part: Any, without: Sequence[str] = ()) -> Findings:
    """Check a world against the contract of `World`, with its policy and its rewards; for notebooks
    and scripts.

    Args:
        part: as in `world_contract`.
        without: names of promises that the part breaks on purpose.

    Returns:
        One finding per promise.

    Raises:
        ConfigError: an option is not allowed.
    """
    return world.CONTRACT.findings(world_case(part), without)
