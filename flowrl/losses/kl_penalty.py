"""PPO's penalty: a divergence from the behaviour policy instead of a clip."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, Unit, checked
from flowrl.flow.gaussian import kl
from flowrl.losses._terms import (
    KL_FORMS,
    combine,
    counted,
    log_ratio,
    mean_over,
    require_kl,
    require_positive,
)


@checked_options
@dataclass(frozen=True)
class KLPenalty:
    """The policy gradient's surrogate with a penalty on the distance from the behaviour policy, and
    no clip.

    mean of -A ratio + coefficient KL(new || behaviour) + beta KL(new || reference), ratio =
    exp(logp - logp_old).

    The KL of two Gaussians of equal std is exact and symmetric, so this is PPO's KL(old || new). It
    pulls back every transition, also those of advantage 0; at the first update of an iteration it
    is 0 with gradient 0. Alone, a transition of advantage A moves its mean by A / `coefficient`
    standard deviations per element, at any resolution.

    Metrics as in `ClippedLoss`, with clip_fraction 0; approx_kl is the penalty without its
    coefficient. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has no reference.
    Source: PPO (arXiv 1707.06347, equation 8, fixed beta).

    Args:
        coefficient: weight of the divergence from the behaviour policy, above 0.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    coefficient: float = 1.0
    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"

    def __post_init__(self) -> None:
        require_positive("KLPenalty", "coefficient", self.coefficient)
        require_kl("KLPenalty", self.kl_weight, self.kl)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """The penalty has a gradient at advantage 0."""
        return True

    @property
    def unit(self) -> Unit:
        """Transitions are independent."""
        return "transition"

    @checked
    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = log_ratio(rows).exp()
        never = torch.zeros_like(ratio, dtype=torch.bool)
        result = combine(
            rows, ratio, -rows.advantages * ratio, never, self.kl_weight, KL_FORMS[self.kl]
        )
        divergence = mean_over(kl(rows.new, rows.behaviour), rows.weight)
        return replace(result, loss=result.loss + self.coefficient * divergence)
