"""Shared code of the policy losses: counted transitions, the clipped surrogate, the reference
penalty, metrics.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.forward import ForwardBatch
from flowrl.core.types import Gaussian, LossBatch, LossResult, PerSample, Unit, unit_means
from flowrl.flow.gaussian import kl, kl_without_delta, log_prob

Divergence = Callable[[Gaussian, Gaussian, Tensor], Tensor]


def exact_kl(new: Gaussian, reference: Gaussian, delta: PerSample) -> PerSample:
    """KL(new || reference) of the transition; `delta` is not used."""
    return kl(new, reference)


KL_FORMS: dict[str, Divergence] = {"exact": exact_kl, "without_delta": kl_without_delta}
"""How the divergence from the reference is computed: exactly, or without the step length (parity
with released code).
"""


def counted(batch: LossBatch) -> LossBatch:
    """`batch` with weight 0 for deterministic transitions (behaviour std 0), too.

    Rows of weight 0 get std 0 and advantage 0, so their densities, divergences and policy terms are
    exactly 0, with zero gradients. Selecting the rows would make the host wait for the device in
    every micro-batch.
    """
    counts = (batch.weight > 0) & (batch.behaviour.std > 0)
    behaviour, reference = (
        _only(batch.behaviour, counts),
        batch.reference and _only(batch.reference, counts),
    )
    return replace(
        batch,
        new=_only(batch.new, counts),
        behaviour=Gaussian(behaviour.mean.detach(), behaviour.std),
        next_node=batch.next_node.detach(),
        advantages=batch.advantages.masked_fill(~counts, 0.0),
        weight=batch.weight.detach().masked_fill(~counts, 0.0),
        delta=batch.delta.masked_fill(~counts, 1.0),
        reference=reference and Gaussian(reference.mean.detach(), reference.std),
    )


def log_ratio(rows: LossBatch) -> PerSample:
    """log pi(next_node) - log pi_old(next_node) of each row, means over latent elements."""
    return log_prob(rows.new, rows.next_node) - log_prob(rows.behaviour, rows.next_node)


def over_units(values: PerSample, rows: LossBatch | ForwardBatch, unit: Unit) -> PerSample:
    """The mean of `values` over each row's unit, or `pooled`, with the row's share of its
    gradient.
    """
    each = values.detach()
    pooled = (
        unit_means(each, rows.units(unit), rows.weight)
        if rows.pooled is None
        else rows.pooled.detach()
    )
    return pooled + (values - each)


def surrogate(ratio: PerSample, advantages: PerSample, clip_range: float) -> PerSample:
    """max(-A ratio, -A clip(ratio, 1 - c, 1 + c)). Source: PPO (arXiv 1707.06347, equation 7)."""
    return torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    )


def beyond(ratio: PerSample, clip_range: float) -> Bool[Tensor, " sample"]:
    """Where |ratio - 1| > `clip_range`."""
    return (ratio.detach() - 1.0).abs() > clip_range


def combine(
    rows: LossBatch,
    ratio: PerSample,
    policy_terms: PerSample,
    clipped: Bool[Tensor, " sample"],
    kl_weight: float,
    divergence: Divergence = exact_kl,
) -> LossResult:
    """Weighted mean of `policy_terms` plus `kl_weight` times that of the divergence from the
    reference, with the usual metrics.

    `clipped`: rows at the border of the trust region; their fraction is the metric clip_fraction.
    """
    weight = rows.weight
    policy_loss = mean_over(policy_terms, weight)
    loss = policy_loss
    deviation = (ratio.detach() - 1.0).abs()
    metrics = {
        "policy_loss": policy_loss.detach(),
        "ratio_mean": mean_over(ratio.detach(), weight).masked_fill(~(weight > 0).any(), 1.0),
        "ratio_deviation": deviation.max() if len(ratio) else torch.zeros_like(policy_loss),
        "ratio_distance": mean_over(deviation, weight),
        "clip_fraction": mean_over(clipped.float(), weight),
        "approx_kl": mean_over(kl(rows.new, rows.behaviour), weight).detach(),
    }
    if rows.reference is not None:
        penalty = mean_over(divergence(rows.new, rows.reference, rows.delta), weight)
        metrics["kl"] = penalty.detach()
        loss = loss + kl_weight * penalty if kl_weight > 0 else loss
    elif kl_weight > 0:
        raise ConfigError(
            f"kl_weight = {kl_weight!r} needs LossBatch.reference, which is None: fill it, or set"
            " kl_weight = 0"
        )
    return LossResult(loss=loss, metrics=metrics, policy_term=policy_loss)


def require_clip(loss: str, clip_range: float) -> None:
    """Raise `ConfigError` unless `clip_range` is in (0, 1)."""
    require(0.0 < clip_range < 1.0, f"{loss}.clip_range", clip_range, "above 0 and below 1")


def require_kl(loss: str, kl_weight: float, form: str) -> None:
    """Raise `ConfigError` unless `kl_weight` is finite and 0 or more and `form` is a known one."""
    require_weight(loss, "kl_weight", kl_weight)
    require(form in KL_FORMS, f"{loss}.kl", form, " or ".join(map(repr, KL_FORMS)))


def require_weight(loss: str, option: str, weight: float) -> None:
    """Raise `ConfigError` unless the `weight` of a penalty is finite and 0 or more."""
    require(
        math.isfinite(weight) and weight >= 0, f"{loss}.{option}", weight, "finite and 0 or more"
    )


def require_positive(loss: str, option: str, value: float) -> None:
    """Raise `ConfigError` unless `value` is finite and above 0."""
    require(math.isfinite(value) and value > 0, f"{loss}.{option}", value, "finite and above 0")


def mean_over(values: PerSample, weight: PerSample) -> Tensor:
    """sum(weight x values) / sum(weight); 0 if the weights are 0. `values` must be finite."""
    total = weight.sum()
    return (weight * values).sum() / total.masked_fill(total == 0, 1.0)


def _only(gaussian: Gaussian, counts: Bool[Tensor, " sample"]) -> Gaussian:
    """`gaussian` with std 0 where `counts` is False; the std is a constant of the sampler and takes
    no gradient.
    """
    return Gaussian(mean=gaussian.mean, std=gaussian.std.detach().masked_fill(~counts, 0.0))
