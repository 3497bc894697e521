"""The plain policy gradient."""

from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, Unit, checked
from flowrl.flow.gaussian import log_prob
from flowrl.losses._terms import KL_FORMS, combine, counted, require_kl


@checked_options
@dataclass(frozen=True)
class PolicyGradientLoss:
    """The plain policy gradient: no ratio, no clip.

    mean of -A log pi(x_next) + beta KL(new || reference).

    Unbiased on policy only, that is for one mini-batch per iteration (`minibatches` = 1). Further
    updates on the same trajectories are biased, and no term limits the distance from the behaviour
    policy. On policy its gradient equals that of `ClippedLoss`.

    Metrics as in `ClippedLoss`, with clip_fraction 0. `loss` raises `ConfigError` if `kl_weight` >
    0 and the batch has no reference. Source: REINFORCE (Williams 1992) on the denoising process, as
    DDPO-SF (arXiv 2305.13301).

    Args:
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"

    def __post_init__(self) -> None:
        require_kl("PolicyGradientLoss", self.kl_weight, self.kl)

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
        density = log_prob(rows.new, rows.next_node)
        ratio = (density.detach() - log_prob(rows.behaviour, rows.next_node)).exp()
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return combine(
            rows, ratio, -rows.advantages * density, never, self.kl_weight, KL_FORMS[self.kl]
        )
