"""The contracts of flowrl's protocols, for anybody's parts.

In a test file, two lines make one pytest case per promise::

    from flowrl.testing import credit_contract
    test_my_rule = credit_contract(MyRule())

In a notebook, ``check_credit(MyRule())`` lists which promises are kept. Give an object (it is copied for every promise), a class,
or a function that makes one. Failures name the promise, what was seen, and the usual cause.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flowrl.testing import credit, loss, reward, sampler
from flowrl.testing.findings import ContractBroken, Finding, Findings, maker
from flowrl.types import Prompt

__all__ = [
    "ContractBroken",
    "Finding",
    "Findings",
    "check_credit",
    "check_loss",
    "check_reward",
    "check_sampler",
    "credit_contract",
    "loss_contract",
    "reward_contract",
    "sampler_contract",
]

Examples = tuple[Tensor, Sequence[Prompt]]


def credit_contract(rule: Any) -> Callable[..., None]:
    """A pytest function that holds a credit rule to `CreditAssigner`'s contract."""
    return credit.CONTRACT.as_test(maker(rule))


def sampler_contract(part: Any) -> Callable[..., None]:
    """A pytest function that holds a sampler to `Sampler`'s (or `RandomSampler`'s) contract."""
    return sampler.CONTRACT.as_test(maker(part))


def loss_contract(part: Any) -> Callable[..., None]:
    """A pytest function that holds a policy loss to `PolicyLoss`'s contract."""
    return loss.CONTRACT.as_test(maker(part))


def reward_contract(part: Any, examples: Examples | None = None) -> Callable[..., None]:
    """A pytest function that holds a reward model to `RewardModel`'s contract.

    `examples`: images [sample, channel, height, width] in [0, 1] and as many prompts, two or more, such as the model can
    score; left out, smooth random pictures of 32x32 with plain prompts.
    """
    return reward.CONTRACT.as_test(_case(part, examples))


def check_credit(rule: Any) -> Findings:
    """Which promises a credit rule keeps."""
    return credit.CONTRACT.findings(maker(rule))


def check_sampler(part: Any) -> Findings:
    """Which promises a sampler keeps."""
    return sampler.CONTRACT.findings(maker(part))


def check_loss(part: Any) -> Findings:
    """Which promises a policy loss keeps."""
    return loss.CONTRACT.findings(maker(part))


def check_reward(part: Any, examples: Examples | None = None) -> Findings:
    """Which promises a reward model keeps; `examples` as in `reward_contract`."""
    return reward.CONTRACT.findings(_case(part, examples))


def _case(part: Any, examples: Examples | None) -> Callable[[], reward.Case]:
    images, prompts = examples or reward.default_examples()
    make = maker(part)
    return lambda: reward.Case(make(), images, tuple(prompts))
