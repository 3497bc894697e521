"""What policy and forward-process losses share: weighted means, the clipped surrogate, and the
metrics of a ratio.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.forward import ForwardBatch
from flowrl.core.types import LossBatch, PerSample, pooled_units, unit_means


@checked
def mean_over(values: PerSample, weight: PerSample) -> Tensor:
    """sum(weight x values) / sum(weight); 0 if the weights are 0. `values` must be finite."""
    total = weight.sum()
    return (weight * values).sum() / total.masked_fill(total == 0, 1.0)


@checked
def over_units(values: PerSample, rows: LossBatch | ForwardBatch, loss: Any) -> PerSample:
    """The mean of `values` over each row's unit of the `loss`, or `pooled`, with the row's share of
    its gradient.
    """
    pooled, each = rows.pooled, values.detach()
    if pooled is None:
        pooled = unit_means(each, pooled_units(loss, rows), rows.weight)
    return pooled.detach() + (values - each)


@checked
def surrogate(ratio: PerSample, advantages: PerSample, clip_range: float) -> PerSample:
    """max(-A ratio, -A clip(ratio, 1 - c, 1 + c)). Source: PPO (arXiv 1707.06347, equation 7)."""
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


@checked
def quadratic(ratio: PerSample, advantages: PerSample, clip_range: float) -> PerSample:
    """-A ratio + |A| (ratio - 1)^2 / (2 c), which is least at ratio 1 + sign(A) c.

    Source: simple policy optimisation (arXiv 2401.16025).
    """
    return -advantages * ratio + advantages.abs() * (ratio - 1.0).square() / (2.0 * clip_range)


@checked
def beyond(ratio: PerSample, clip_range: float) -> Bool[Tensor, " sample"]:
    """Where |ratio - 1| > `clip_range`."""
    return (ratio.detach() - 1.0).abs() > clip_range


@checked
def ratio_metrics(
    ratio: PerSample, clipped: Bool[Tensor, " sample"], weight: PerSample
) -> dict[str, Tensor]:
    """The mean of a ratio, the largest and the mean |ratio - 1|, and the fraction of clipped
    rows.
    """
    ratio = torch.where(weight > 0, ratio.detach(), 1.0)
    deviation = (ratio - 1.0).abs()
    return {
        "ratio_mean": mean_over(ratio, weight).masked_fill(~(weight > 0).any(), 1.0),
        "ratio_deviation": deviation.max() if len(ratio) else ratio.sum(),
        "ratio_distance": mean_over(deviation, weight),
        "clip_fraction": mean_over(clipped.to(ratio.dtype), weight),
    }
