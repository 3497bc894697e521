"""The clipped policy loss of GRPO."""

from dataclasses import dataclass
from typing import Literal

from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.types import LossBatch, LossResult, Unit, checked
from flowrl.flow.gaussian import log_prob, log_prob_without_constants
from flowrl.losses._terms import (
    KL_FORMS,
    beyond,
    combine,
    counted,
    require_clip,
    require_kl,
    surrogate,
)


@checked_options
@dataclass(frozen=True)
class ClippedLoss:
    """GRPO's clipped loss.

    mean of max(-A ratio, -A clip(ratio, 1-c, 1+c)) + beta KL(new || reference), ratio = exp(logp -
    logp_old).

    Means are weighted and run over the stochastic transitions; if their weights are 0 the loss is
    exactly 0 with zero gradients. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has
    no reference.

    Metrics: policy_loss, ratio_mean, ratio_deviation and ratio_distance (max and mean |ratio - 1|),
    clip_fraction (|ratio - 1| > c), approx_kl (KL of new from behaviour), and kl if the batch has a
    reference. Source: Flow-GRPO (arXiv 2505.05470) and its public code.

    Args:
        clip_range: c in (0, 1); tiny (1e-4 in Flow-GRPO, 1e-5 in TP-GRPO) because logp is a *mean*
            over latent elements.
        kl_weight: beta, 0 or more.
        kl: "exact": the transition's KL per element; "without_delta": this KL times Delta, as the
            public Flow-GRPO code computes it.
        log_prob: "exact": the Gaussian log-density; "released_cps": without 1/(2 std^2) and
            constants, as in the public CPS code, which scales each step's log-ratio by 2 std^2.

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: float = 1e-4
    kl_weight: float = 0.0
    kl: Literal["exact", "without_delta"] = "exact"
    log_prob: Literal["exact", "released_cps"] = "exact"

    def __post_init__(self) -> None:
        require_clip("ClippedLoss", self.clip_range)
        require_kl("ClippedLoss", self.kl_weight, self.kl)
        densities = ("exact", "released_cps")
        require(
            self.log_prob in densities,
            "ClippedLoss.log_prob",
            self.log_prob,
            "'exact' or 'released_cps'",
        )

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
        density = log_prob if self.log_prob == "exact" else log_prob_without_constants
        ratio = (density(rows.new, rows.next_node) - density(rows.behaviour, rows.next_node)).exp()
        terms = surrogate(ratio, rows.advantages, self.clip_range)
        return combine(
            rows, ratio, terms, beyond(ratio, self.clip_range), self.kl_weight, KL_FORMS[self.kl]
        )
