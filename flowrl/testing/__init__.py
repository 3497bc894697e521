"""The contracts of flowrl's protocols, as tests for parts of any package.

In a test file, two lines make one pytest case per promise::

    from flowrl.testing import credit_contract
    test_my_rule = credit_contract(MyRule())

In a notebook, ``check_credit(MyRule())`` lists which promises are kept. The argument is an object (copied for every promise), a
class, or a function that makes a part. Failures name the promise, what was found, and the usual cause. If a basic promise is
broken (shape, randomness), those that would fail for the same reason are not tried.

`without` names promises that a part breaks on purpose. Only the functions that end in ``_contract`` need pytest; they raise
`ConfigError` if it is not installed. The rest of flowrl does not import this package.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.errors import require
from flowrl.protocols import FlowPolicy
from flowrl.testing import credit, forward_loss, group_reward, loss, policy, probe, reward, sampler
from flowrl.testing.credit import schedule_for
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
from flowrl.types import Prompt

__all__ = [
    "TINY", "TINY_VIDEO", "ContractAdvice", "ContractBroken", "Finding", "Findings", "check_credit", "check_forward_loss",
    "check_group_reward", "check_loss", "check_policy", "check_probe", "check_reward", "check_sampler", "credit_contract",
    "forward_loss_contract", "group_reward_contract", "loss_contract", "policy_contract", "probe_contract",
    "reward_contract", "sampler_contract", "schedule_for", "tiny_flux", "tiny_flux_policy", "tiny_qwen_image",
    "tiny_qwen_image_policy", "tiny_sd3", "tiny_sd3_policy", "tiny_wan", "tiny_wan_policy",
]  # fmt: skip

TestFunction = Callable[..., None]
PROMPTS = ("a red fox", "two blue cars", "a house", "the sea at night")


def credit_contract(rule: Any, steps: int | None = None, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a credit rule against `CreditAssigner`'s contract. `steps`: if it needs that many steps."""
    return credit.CONTRACT.as_test(_credit_case(rule, steps), without)


def sampler_contract(part: Any, steps: int = 10, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a sampler against `Sampler`'s (or `RandomSampler`'s) contract, on grids of `steps` steps."""
    return sampler.CONTRACT.as_test(_sampler_case(part, steps), without)


def loss_contract(part: Any, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a policy loss against `PolicyLoss`'s contract."""
    return loss.CONTRACT.as_test(maker(part), without)


def forward_loss_contract(part: Any, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a forward-process loss against `ForwardLoss`'s (and `PooledForwardLoss`'s) contract."""
    return forward_loss.CONTRACT.as_test(maker(part), without)


def reward_contract(
    part: Any, examples: Examples | Callable[[], Examples] | None = None, without: Sequence[str] = ()
) -> TestFunction:
    """A pytest function that checks a reward model against `RewardModel`'s (and `CompositeReward`'s) contract.

    `examples`: images [sample, channel, height, width], or videos [sample, frame, ...], in [0, 1] that the model can score and as
    many prompts, two or more, or a function that makes them; default: smooth random images of 32x32 with plain prompts. Unlike
    other parts a reward model is not copied.
    """
    return reward.CONTRACT.as_test(_reward_case(part, examples), without)


def group_reward_contract(
    part: Any, examples: Examples | Callable[[], Examples] | None = None, without: Sequence[str] = ()
) -> TestFunction:
    """A pytest function that checks a reward against `GroupReward`'s (and `CompositeGroupReward`'s) contract.

    `examples`: images [prompt, member, channel, height, width], or videos, of two or more prompts with three or more members
    each, and the prompts, or a function that makes them; default: smooth random images of 32x32. The model is not copied.
    """
    return group_reward.CONTRACT.as_test(_group_reward_case(part, examples), without)


def policy_contract(
    part: Any, prompts: Sequence[Prompt | str] = PROMPTS, tolerance: float = 1e-4, without: Sequence[str] = ()
) -> TestFunction:
    """A pytest function that checks a policy against `FlowPolicy`'s contract.

    `prompts`: two or more that the policy accepts. `tolerance`: largest rounding difference of velocities that must be equal,
    relative to the largest velocity (about 1e-2 for a network in bfloat16). A policy is not copied; the checks restore what they
    change.
    """
    return policy.CONTRACT.as_test(_policy_case(part, prompts, tolerance), without)


def probe_contract(part: Any, policy: FlowPolicy | None = None, members: int = 4, without: Sequence[str] = ()) -> TestFunction:
    """A pytest function that checks a probe against `flowrl.probes.Probe`'s contract.

    `policy`: to try it with (default: a small one that has what the probe needs). `members` of a group: a `Branching` probe may
    need another number.
    """
    return probe.CONTRACT.as_test(_probe_case(part, policy, members), without)


def check_credit(rule: Any, steps: int | None = None, without: Sequence[str] = ()) -> Findings:
    """Which promises a credit rule keeps; options as in `credit_contract`."""
    return credit.CONTRACT.findings(_credit_case(rule, steps), without)


def check_sampler(part: Any, steps: int = 10, without: Sequence[str] = ()) -> Findings:
    """Which promises a sampler keeps; options as in `sampler_contract`."""
    return sampler.CONTRACT.findings(_sampler_case(part, steps), without)


def check_loss(part: Any, without: Sequence[str] = ()) -> Findings:
    """Which promises a policy loss keeps; options as in `loss_contract`."""
    return loss.CONTRACT.findings(maker(part), without)


def check_probe(part: Any, policy: FlowPolicy | None = None, members: int = 4, without: Sequence[str] = ()) -> Findings:
    """Which promises a probe keeps; options as in `probe_contract`."""
    return probe.CONTRACT.findings(_probe_case(part, policy, members), without)


def check_forward_loss(part: Any, without: Sequence[str] = ()) -> Findings:
    """Which promises a forward-process loss keeps; options as in `forward_loss_contract`."""
    return forward_loss.CONTRACT.findings(maker(part), without)


def check_reward(part: Any, examples: Examples | Callable[[], Examples] | None = None, without: Sequence[str] = ()) -> Findings:
    """Which promises a reward model keeps; options as in `reward_contract`."""
    return reward.CONTRACT.findings(_reward_case(part, examples), without)


def check_group_reward(
    part: Any, examples: Examples | Callable[[], Examples] | None = None, without: Sequence[str] = ()
) -> Findings:
    """Which promises a reward that compares samples keeps; options as in `group_reward_contract`."""
    return group_reward.CONTRACT.findings(_group_reward_case(part, examples), without)


def check_policy(
    part: Any, prompts: Sequence[Prompt | str] = PROMPTS, tolerance: float = 1e-4, without: Sequence[str] = ()
) -> Findings:
    """Which promises a policy keeps; options as in `policy_contract`."""
    return policy.CONTRACT.findings(_policy_case(part, prompts, tolerance), without)


def _credit_case(rule: Any, steps: int | None) -> Callable[[], credit.Case]:
    require(steps is None or steps >= 1, "steps", steps, "1 or more, or None")
    make = maker(rule)
    return lambda: credit.Case(make(), steps)


def _sampler_case(part: Any, steps: int) -> Callable[[], sampler.Case]:
    require(steps >= 1, "steps", steps, "1 or more")
    make = maker(part)
    return lambda: sampler.Case(make(), steps)


def _probe_case(part: Any, policy: FlowPolicy | None, members: int) -> Callable[[], probe.Case]:
    require(members >= 1, "members", members, "1 or more")
    make = maker(part)
    return lambda: probe.Case(make(), policy, members)


def _reward_case(part: Any, examples: Examples | Callable[[], Examples] | None) -> Callable[[], reward.Case]:
    images, prompts = reward.examples_of(examples)
    make = maker(part, share=True)
    return lambda: reward.Case(make(), images, prompts)


def _group_reward_case(part: Any, examples: Examples | Callable[[], Examples] | None) -> Callable[[], group_reward.Case]:
    images, prompts = group_reward.examples_of(examples)
    make = maker(part, share=True)
    return lambda: group_reward.Case(make(), images, prompts)


def _policy_case(part: Any, prompts: Sequence[Prompt | str], tolerance: float) -> Callable[[], policy.Case]:
    require(tolerance > 0, "tolerance", tolerance, "above 0")
    chosen, make = policy.prompts_of(prompts), maker(part, share=True)
    return lambda: policy.Case(make(), chosen, tolerance)
