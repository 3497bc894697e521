"""The regulated clipping of GRPO-Guard."""

from dataclasses import dataclass
from typing import Literal

from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, Unit, checked
from flowrl.flow.gaussian import kl
from flowrl.losses._terms import (
    KL_FORMS,
    beyond,
    combine,
    counted,
    log_ratio,
    require_clip,
    require_kl,
    surrogate,
)


@checked_options
@dataclass(frozen=True)
class GRPOGuard:
    """Clipped loss with a normalised ratio and equally weighted steps.

    log ratio = std (logp - logp_old + |mu - mu_old|^2 / (2 std^2)), means over latent elements,
    with the transition's std. The added term cancels the negative mean of the plain log-ratio, and
    the factor std equalises its spread over the steps. Each clipped term max(-A ratio, -A
    clip(ratio, 1-c, 1+c)) is divided by its step length Delta. On policy the gradient is therefore
    the policy gradient with step weights std / Delta. The KL to the reference is not divided by
    Delta.

    Metrics as in `ClippedLoss`, of the normalised ratio; policy_loss includes the division by
    Delta. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has no reference. Source:
    GRPO-Guard (arXiv 2510.22319).

    Args:
        clip_range: c in (0, 1).
        kl_weight: weight of the KL to the reference, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: float = 1e-4
    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"

    def __post_init__(self) -> None:
        require_clip("GRPOGuard", self.clip_range)
        require_kl("GRPOGuard", self.kl_weight, self.kl)

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
        ratio = (rows.behaviour.std * (log_ratio(rows) + kl(rows.new, rows.behaviour))).exp()
        terms = surrogate(ratio, rows.advantages, self.clip_range) / rows.delta
        return combine(
            rows, ratio, terms, beyond(ratio, self.clip_range), self.kl_weight, KL_FORMS[self.kl]
        )
