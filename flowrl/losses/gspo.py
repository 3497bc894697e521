"""GSPO: one ratio per trajectory."""

from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, PerSample, Unit, checked
from flowrl.losses._terms import (
    KL_FORMS,
    beyond,
    combine,
    counted,
    log_ratio,
    over_units,
    require_clip,
    require_kl,
    surrogate,
)


@checked_options
@dataclass(frozen=True)
class GSPO:
    """Group sequence policy optimisation: GRPO's clipped loss with one ratio per trajectory.

    mean of max(-A s, -A clip(s, 1-c, 1+c)) + beta KL(new || reference), s = exp(mean over the
    trajectory of log ratio).

    s is the geometric mean of the ratios of the trajectory's transitions, with their weights, so
    all of a trajectory's transitions are clipped or none is. On policy the gradient is that of
    `ClippedLoss`. The noise of the mean of n log-ratios is about sqrt(n) times smaller than that of
    one, so the same clip is wider than for single transitions.

    Needs one advantage per trajectory: a rule that credits its steps differently is refused. Needs
    whole trajectories in a micro-batch, or two passes (see `protocols.PolicyLoss`).

    Metrics as in `ClippedLoss`, of s. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch
    has no reference. Source: GSPO (arXiv 2507.18071, equations 5 to 7; published for language
    models with ranges of 3e-4 below and 4e-4 above 1).

    Args:
        clip_range: c in (0, 1).
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: float = 1e-4
    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"

    def __post_init__(self) -> None:
        require_clip("GSPO", self.clip_range)
        require_kl("GSPO", self.kl_weight, self.kl)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Only the divergence from the reference has a gradient at advantage 0."""
        return self.needs_reference

    @property
    def unit(self) -> Unit:
        """Whole trajectories."""
        return "trajectory"

    @property
    def one_advantage(self) -> Literal[True]:
        """The ratio of a trajectory has one advantage."""
        return True

    @torch.no_grad()
    def row_terms(self, batch: LossBatch) -> PerSample:
        """The log-ratio of each transition; its mean over a trajectory is log s."""
        return log_ratio(counted(batch))

    @checked
    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = over_units(log_ratio(rows), rows, self.unit).exp()
        terms = surrogate(ratio, rows.advantages, self.clip_range)
        return combine(
            rows, ratio, terms, beyond(ratio, self.clip_range), self.kl_weight, KL_FORMS[self.kl]
        )
