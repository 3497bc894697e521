"""Flow-DPPO: a trust region on the divergence itself instead of a clip on the ratio."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, Unit, checked
from flowrl.flow.gaussian import kl
from flowrl.losses._terms import KL_FORMS, combine, counted, log_ratio, require_kl


@checked_options
@dataclass(frozen=True)
class FlowDPPO:
    """GRPO's loss without transitions that have moved too far.

    mean of -A ratio + beta KL(new || reference), without transitions that are too far and would
    move further away.

    A transition is dropped (no loss, no gradient; it still counts in the mean) if its KL(behaviour
    || new), a mean over latent elements, exceeds `bound` and the update would move away from the
    behaviour policy: A > 0 and ratio > 1, or A < 0 and ratio < 1. The KL of two Gaussians of equal
    std is exact; the ratio of a single sample has sampling noise.

    The default bound is that of the authors' code (kl_mask_threshold, also a mean over elements,
    for SD3.5-Medium at 512 pixels). At a KL of K, the log-ratio of one sample of d elements has a
    standard deviation of sqrt(2 K / d), so a clip c corresponds to K = c^2 d / 2. That is 3e-4 both
    for c = 1e-4 at SD3.5's latents (d = 65,536) and for c = 2e-3 in the built-in image world (d =
    128). The published bound is tighter than both; small worlds may need `bound` = 3e-4.

    Metrics as in `ClippedLoss`; clip_fraction and mask_fraction are both the fraction of dropped
    rows. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has no reference. Source:
    Flow-DPPO (arXiv 2606.11025, equations 14 and 18) and its public code.

    Args:
        bound: largest KL per latent element, above 0.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    bound: float = 1e-5
    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.bound) and self.bound > 0,
            "FlowDPPO.bound",
            self.bound,
            "finite and above 0",
        )
        require_kl("FlowDPPO", self.kl_weight, self.kl)

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
        """Transitions are independent."""
        return "transition"

    @checked
    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = log_ratio(rows).exp()
        far = kl(rows.behaviour, rows.new).detach() > self.bound
        dropped = far & (rows.advantages * (ratio.detach() - 1.0) > 0)
        terms = torch.where(dropped, torch.zeros_like(ratio), -rows.advantages * ratio)
        result = combine(rows, ratio, terms, dropped, self.kl_weight, KL_FORMS[self.kl])
        return replace(
            result, metrics={**result.metrics, "mask_fraction": result.metrics["clip_fraction"]}
        )
