"""Flow-GRPO's credit: the whole trajectory's advantage at every decision."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import CreditError, require
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import (
    Clamp,
    centred,
    clamped,
    last_column,
    masked_mean,
    require_columns,
    zscore,
)
from flowrl.probes import NoProbe, Probe


@checked_options
@dataclass(frozen=True)
class Uniform:
    """Credits every decision with the final reward, normalised within the group.

    A_k = (R - mean) / (std + 1e-4), or R - mean, or (R - mean) / mean, the same at every decision
    k, with R the reward of the final image.

    The mean is the group's, so a group of equal rewards gets 0, with one exception (`all_failed`).
    A member counts if one of its decisions is in the mask. `assign` raises `CreditError` if such a
    member's R is not finite, or is negative with `std` "mean". Source: Flow-GRPO (arXiv
    2505.05470) and its public code; MaxRL (arXiv 2602.02710) for "mean", whose abstract and a port
    (prime-rl, commit 0d6738f) were read.

    With "mean" and rewards of 0 and 1, G members of which a share p succeeds, q = 1 - p, the
    expected policy gradient is that of p times (1 - q^n) / p: the first n terms of the series of
    grad log p. The order n is G - 1 with `all_failed` "zero" and G with "keep"; order 1 is the
    gradient of p. A lies between -1 and G - 1, so the default clamp cuts groups of more than 6:
    ``uniform(std=mean, clamp=none)``.

    Args:
        std: "group": over the members of the prompt, as in the paper; "batch": over all samples of
            the table, the public code's default; "mean": divided by the group's mean instead, for
            rewards of 0 or more; None: not divided, in units of the reward, as in EPG (arXiv
            2602.04663).
        clamp: largest absolute advantage c; None for no limit.
        limit: "clamp": A is clamped to +-c; "tanh": c tanh(A / c), as in V-GRPO (arXiv 2604.23380).
        probe: the probe of the rollout, of which only R is used.
        all_failed: with `std` "mean", the advantage in groups whose rewards are all 0: "zero": 0,
            as in prime-rl; "keep": -1, the limit of (R - mean) / mean.

    Raises:
        ConfigError: a field is out of range, or `all_failed` is set without `std` "mean".
    """

    std: Literal["group", "batch", "mean"] | None = "group"
    clamp: Clamp = 5.0
    limit: Literal["clamp", "tanh"] = "clamp"
    probe: Probe = NoProbe()
    all_failed: Literal["zero", "keep"] = "zero"

    def __post_init__(self) -> None:
        fits = self.all_failed == "zero" or self.std == "mean"
        require(fits, "Uniform.all_failed", self.all_failed, "zero, or with std=mean only")

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self, last_column(decisions.mask))
        members, rewards = decisions.mask.any(-1, keepdim=True), values[..., -1:]
        if self.std == "mean":
            scores = self._by_mean(rewards, members)
        elif self.std is None:
            scores = centred(rewards, ("member",), members)
        else:
            std_over = ("member",) if self.std == "group" else ("prompt", "member")
            scores = zscore(rewards, ("member",), std_over, None, members)
        if self.limit == "tanh" and self.clamp is not None:
            scores = self.clamp * (scores / self.clamp).tanh()
        scores = clamped(scores, self.clamp)
        return scores.repeat(1, 1, len(decisions))

    def _by_mean(self, rewards: Tensor, members: Tensor) -> Tensor:
        """(R - mean) / mean of each group [prompt, member, 1]."""
        if bool(((rewards < 0) & members).any()):
            lowest = float(rewards[members].min())
            raise CreditError(
                f"Uniform(std='mean') divides by the mean reward of a group, and a reward is"
                f" {lowest:g}; allowed: rewards of 0 or more"
            )
        mean = masked_mean(rewards, ("member",), members)
        failed = -1.0 if self.all_failed == "keep" else 0.0
        scores = centred(rewards, ("member",), members) / mean.masked_fill(mean == 0, 1.0)
        return torch.where((mean == 0) & members, failed, scores)
