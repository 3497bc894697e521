"""Contract tests: the contracts of flowrl's protocols as tests for parts of any package.

In a test file, two lines make one pytest case per promise::

    from flowrl.testing import credit_contract
    test_my_rule = credit_contract(MyRule())

In a notebook, ``check_credit(MyRule())`` lists which promises are kept. The argument is an object
(copied for every promise), a class, or a function that makes a part. A failure names the promise,
the observed value, and the usual cause. If a basic promise is broken (shape, randomness), promises
that would fail for the same reason are not tried.

`without` names promises that a part breaks on purpose. Only the functions that end in ``_contract``
need pytest. Before a run, `flowrl.testing.trial` checks the user's own parts with this package.
"""

from flowrl.testing.contract import (
    ContractAdvice,
    ContractBroken,
    Finding,
    Findings,
    entry_points,
)
from flowrl.testing.credit import CreditContract
from flowrl.testing.losses import ForwardLossContract, PolicyLossContract
from flowrl.testing.policy import PolicyContract
from flowrl.testing.probe import ProbeContract
from flowrl.testing.rewards import GroupRewardContract, RewardContract
from flowrl.testing.samplers import SamplerContract, SolverContract, WindowContract
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
from flowrl.testing.world import WorldContract

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

check_credit, credit_contract = entry_points(CreditContract)
check_sampler, sampler_contract = entry_points(SamplerContract)
check_solver, solver_contract = entry_points(SolverContract)
check_window, window_contract = entry_points(WindowContract)
check_loss, loss_contract = entry_points(PolicyLossContract)
check_forward_loss, forward_loss_contract = entry_points(ForwardLossContract)
check_reward, reward_contract = entry_points(RewardContract)
check_group_reward, group_reward_contract = entry_points(GroupRewardContract)
check_policy, policy_contract = entry_points(PolicyContract)
check_probe, probe_contract = entry_points(ProbeContract)
check_world, world_contract = entry_points(WorldContract)
