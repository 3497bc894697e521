"""Advantages multiplied by a weight per step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.table import require_clamp
from flowrl.credit.uniform import Uniform
from flowrl.errors import CreditError, require
from flowrl.options import checked_options
from flowrl.probes import NoProbe, Probe
from flowrl.protocols import CreditAssigner, PartsCreditAssigner, SelectiveCredit, Stateful
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class Weighted:
    """The advantages of another rule, times a weight per step.

    A_i = w_i A_i', with A' the advantages of `rule`; None: A' = A of `Uniform(std, clamp, probe)`.

    The steps are the sampler's, also for a probe that branches at some of them only. For a reward with components use
    `GDPO(rule=Weighted(rule=...))`. `assign` raises `CreditError` if the number of weights is not the number of steps, or the
    schedule or its stds are missing. Source: TempFlow-GRPO (arXiv 2508.04324, ICLR 2026), noise-aware weighting.

    Args:
        weights: one finite number per step, or "noise": w_i proportional to the transition's std (sigma sqrt(Delta)), with mean 1
            over the stochastic steps and 0 at the others; needs a schedule with stds.
        std: as in `Uniform`, without `rule` only.
        clamp: as in `Uniform`, without `rule` only; applied before the weights.
        probe: as in `Uniform`, without `rule` only.
        rule: the rule for A'; it may neither have memory, read components nor select steps.

    Raises:
        ConfigError: a field is out of range, `rule` is not allowed, or `std`, `clamp` or `probe` is given together with `rule`.
    """

    weights: tuple[float, ...] | Literal["noise"] = "noise"
    std: Literal["group", "batch"] = "group"
    clamp: float | None = 5.0
    probe: Probe = NoProbe()
    rule: CreditAssigner | None = None

    def __post_init__(self) -> None:
        allowed = "'noise', or a tuple of one finite number per step"
        numbers = isinstance(self.weights, tuple) and len(self.weights) > 0 and all(map(math.isfinite, self.weights))
        require(self.weights == "noise" or numbers, "Weighted.weights", self.weights, allowed)
        require(self.std in ("group", "batch"), "Weighted.std", self.std, "'group' or 'batch'")
        require_clamp("Weighted", self.clamp)
        if self.rule is not None:
            plain = isinstance(self.rule, CreditAssigner)
            plain = plain and not isinstance(self.rule, PartsCreditAssigner | SelectiveCredit | Stateful)
            require(plain, "Weighted.rule", self.rule, "a credit rule that has no memory, reads no components, selects no steps")
            own = (self.std, self.clamp, self.probe)
            require(own in (("group", 5.0, NoProbe()), ("group", 5.0, self.rule.probe)), "Weighted.std, clamp, probe", own,
                    "left out if a rule is given: set them there")  # fmt: skip
            object.__setattr__(self, "probe", self.rule.probe)

    @property
    def shared_noise(self) -> bool:
        """Whether the members of a group start from the same noise under `rule`."""
        return bool(getattr(self.rule, "shared_noise", False))

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; the clamp applies before the weights."""
        rule = self.rule or Uniform(std=self.std, clamp=self.clamp, probe=self.probe)
        advantages = rule.assign(rewards, schedule)
        return advantages * self._step_weights(advantages, schedule)

    def _step_weights(self, like: Tensor, schedule: Schedule | None) -> Tensor:
        """The weights, shape [step]."""
        steps = like.shape[-1]
        if isinstance(self.weights, tuple):
            if len(self.weights) != steps:
                raise CreditError(f"Weighted has {len(self.weights)} weights, but the table has {steps} steps")
            return torch.tensor(self.weights, dtype=like.dtype, device=like.device)
        if schedule is None or schedule.stds is None:
            raise CreditError("Weighted(weights='noise') needs a schedule with stds: Schedule(times, stds=transition_stds(...))")
        if schedule.steps != steps:
            raise CreditError(f"Weighted got a schedule of {schedule.steps} steps, but the table has {steps} steps")
        stds = schedule.stds.to(like)
        stochastic = int((stds > 0).sum())
        if stochastic == 0:
            raise CreditError("Weighted(weights='noise') needs a stochastic step: every std of the schedule is 0")
        return stds * (stochastic / stds.sum())
