"""Stepwise-Flow-GRPO's credit: the gain of each step, and its generalisation towards reward-to-go."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from flowrl.credit.table import gains, require_clamp, require_nodes, zscore
from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes import Completion, Probe, Substeps
from flowrl.types import NodeTable, Schedule, StepTable, checked


def generalised_gains(rewards: NodeTable, lam: float = 0.0, gamma: float = 1.0) -> StepTable:
    """sum_{k >= 0} (gamma lam)^k g_{i+k} with g_i = R_{i+1} - R_i, not normalised.

    `lam` = 0 gives the gains (Stepwise-Flow-GRPO, arXiv 2603.28718). `lam` = `gamma` = 1 gives the reward-to-go R_T - R_i
    (TP-GRPO's aggregated reward, arXiv 2602.06422). The sum is that of generalised advantage estimation (arXiv 1506.02438,
    equation 16) with R as the value.

    Args:
        rewards: reward table R [prompt, member, node].
        lam: weight of later gains, in [0, 1].
        gamma: discount per step, in [0, 1].

    Returns:
        Generalised gains [prompt, member, step], in units of the reward.
    """
    increments = gains(rewards)
    decay = gamma * lam
    total = torch.zeros_like(increments[..., 0])
    sums = []
    for increment in reversed(increments.unbind(dim=-1)):
        total = increment + decay * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=-1)


@checked_options
@dataclass(frozen=True)
class StepwiseGain:
    """A step gets the gain in estimated reward that it brings.

    A = Z(sum_k (gamma lam)^k g_{i+k}), g_i = R_{i+1} - R_i, Z(y) = (y - mean) / (std + 1e-4), clamped to +-`clamp`.

    The mean is always the group's, so a group of equal rewards gets 0. In the paper all members start from the same noise.
    `assign` raises `CreditError` if a node's reward is not finite. Source: Stepwise-Flow-GRPO (arXiv 2603.28718, gain-based
    advantages; lam = 0, T' = 5).

    Args:
        normalise: "joint": Z over members and steps together, as in the paper (late gains are smaller, and Z step by step would
            amplify them); "step": over members, step by step.
        lam: weight of later gains, in [0, 1].
        gamma: discount per step, in [0, 1].
        pool: Z's std is the group's ("prompt") or that of all prompts of the table ("batch"); the paper does not specify this.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    shared_noise: ClassVar[bool] = True

    normalise: Literal["joint", "step"] = "joint"
    lam: float = 0.0
    gamma: float = 1.0
    pool: Literal["prompt", "batch"] = "prompt"
    clamp: float | None = 5.0
    probe: Probe = Substeps(5)

    def __post_init__(self) -> None:
        require(self.normalise in ("joint", "step"), "StepwiseGain.normalise", self.normalise, "'joint' or 'step'")
        require(0.0 <= self.lam <= 1.0, "StepwiseGain.lam", self.lam, "within [0, 1]")
        require(0.0 <= self.gamma <= 1.0, "StepwiseGain.gamma", self.gamma, "within [0, 1]")
        require(self.pool in ("prompt", "batch"), "StepwiseGain.pool", self.pool, "'prompt' or 'batch'")
        require_clamp("StepwiseGain", self.clamp)

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; the schedule is not used."""
        require_nodes(rewards, list(range(rewards.shape[-1])), "StepwiseGain", self.probe)
        over = ("member", "step") if self.normalise == "joint" else ("member",)
        std_over = over if self.pool == "prompt" else ("prompt", *over)
        return zscore(generalised_gains(rewards, self.lam, self.gamma), over=over, std_over=std_over, clamp=self.clamp)


DenseGain = partial(StepwiseGain, normalise="step", probe=Completion())
"""A step gets its gain, normalised step by step.

`StepwiseGain` of ODE completions, A_i = Z(g_i), DenseGRPO's credit (arXiv 2601.20218).
"""
