"""Shared code of the forward-process losses: counted rows, squared errors, the ratio's clip,
penalties, metrics.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.forward import ForwardBatch
from flowrl.core.types import Latents, LossResult, PerSample
from flowrl.flow.path import expand
from flowrl.losses._terms import mean_over

VELOCITIES = ("new", "target", "old", "average", "reference")


def counted_rows(batch: ForwardBatch) -> ForwardBatch:
    """`batch` with advantage 0, time 1 and velocities 0 in rows of weight 0, so that their terms
    and gradients are 0 or constant.

    Selecting the other rows would make the host wait for the device.
    """
    counts = batch.weight > 0
    zeroed = {
        field.name: torch.where(
            expand(counts, value), value if field.name == "new" else value.detach(), 0.0
        )
        for field in fields(batch)
        if field.name in VELOCITIES and (value := getattr(batch, field.name)) is not None
    }
    advantages, time = (
        batch.advantages.detach().masked_fill(~counts, 0.0),
        batch.time.detach().masked_fill(~counts, 1.0),
    )
    return replace(batch, advantages=advantages, time=time, weight=batch.weight.detach(), **zeroed)


def matching(velocity: Latents, target: Latents) -> PerSample:
    """l = mean over latent elements of (v - v*)^2, shape [sample]."""
    return (velocity - target).square().flatten(1).mean(1)


def elbo_weight(time: PerSample) -> PerSample:
    """1 / (2 sigma^2) with Flow-SDE's sigma^2 = 0.49 t / (1 - min(t, 0.99)).

    Turns the squared distance of two velocities into the divergence of the transitions per unit of
    time. Source: AWM's code (arXiv 2509.25050), kl_weight ELBO.
    """
    return (1.0 - time.clamp(max=0.99)) / (2.0 * 0.49 * time)


def ratio_metrics(
    ratio: PerSample, clipped: Bool[Tensor, " sample"], weight: PerSample
) -> dict[str, Tensor]:
    """The usual metrics of a ratio: its mean, the largest and the mean |ratio - 1|, and the
    fraction of clipped rows.
    """
    ratio = torch.where(weight > 0, ratio.detach(), 1.0)
    deviation = (ratio - 1.0).abs()
    return {
        "ratio_mean": mean_over(ratio, weight).masked_fill(~(weight > 0).any(), 1.0),
        "ratio_deviation": deviation.max() if len(ratio) else ratio.sum(),
        "ratio_distance": mean_over(deviation, weight),
        "clip_fraction": mean_over(clipped.to(ratio.dtype), weight),
    }


def combine_rows(
    rows: ForwardBatch,
    policy_terms: PerSample,
    penalties: Mapping[str, tuple[float, PerSample]],
    metrics: Mapping[str, Tensor],
) -> LossResult:
    """Mean of `policy_terms` plus the means of `penalties` (name -> factor, terms) times their
    factors.

    The metrics are policy_loss, matching (the mean squared error of `new`) and one for each
    penalty.
    """
    policy_loss = mean_over(policy_terms, rows.weight)
    loss, found = policy_loss, {"policy_loss": policy_loss.detach()}
    for name, (factor, terms) in penalties.items():
        penalty = mean_over(terms, rows.weight)
        loss, found[name] = loss + factor * penalty, penalty.detach()
    found["matching"] = mean_over(matching(rows.new.detach(), rows.target), rows.weight)
    return LossResult(loss=loss, metrics={**found, **metrics}, policy_term=policy_loss)
