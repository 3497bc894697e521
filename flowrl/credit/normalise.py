"""Z-scores of credit tables, over named axes."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require

AXES = ("prompt", "member", "step")
STD_EPSILON = 1e-4


def zscore(
    values: Float[Tensor, "prompt member step"],
    over: Sequence[str],
    std_over: Sequence[str] | None = None,
    clamp: float | None = 5.0,
) -> Float[Tensor, "prompt member step"]:
    """(y - mean) / (std + 1e-4), then clamped to [-`clamp`, `clamp`] (None: not clamped).

    The mean runs over the axes named in `over`, the population standard deviation over `std_over` (default: the same
    axes). Equal values along `over` give exactly 0 whatever their size: one of them is subtracted before the mean, so a
    large common offset costs no precision. A single member has nobody to be compared with and gets exactly 0. Source:
    the advantage normalisation of Flow-GRPO (arXiv 2505.05470), public code. Raises `ConfigError` for an unknown axis.
    """
    if values.shape[AXES.index("member")] == 1:
        return torch.zeros_like(values)
    deviations = _centred(values, over)
    spread = deviations if std_over is None else _centred(values, std_over)
    std = spread.square().mean(dim=_dims(over if std_over is None else std_over), keepdim=True).sqrt()
    scores = deviations / (std + STD_EPSILON)
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def require_clamp(rule: str, clamp: float | None) -> None:
    """Raise `ConfigError` unless `clamp` is None or finite and above 0."""
    fits = clamp is None or (math.isfinite(clamp) and clamp > 0)
    require(fits, f"{rule}.clamp", clamp, "None, or finite and above 0")


def _dims(axes: Sequence[str]) -> tuple[int, ...]:
    for axis in axes:
        require(axis in AXES, "zscore axis", axis, f"one of {', '.join(AXES)}")
    require(len(axes) > 0, "zscore axes", tuple(axes), "one or more axes")
    return tuple(AXES.index(axis) for axis in axes)


def _centred(values: Tensor, axes: Sequence[str]) -> Tensor:
    """`values` minus their mean over `axes`; exactly 0 where they are all equal."""
    dims = _dims(axes)
    first = values
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    shifted = values - first
    return shifted - shifted.mean(dim=dims, keepdim=True)
