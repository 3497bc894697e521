"""Time grids from noise (t=1) to data (t=0), and broadcasting of per-sample numbers over a latent's axes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require
from flowrl.types import Schedule


def uniform_schedule(steps: int) -> Schedule:
    """The even grid t_j = 1 - j/T with T = `steps` transitions. Raises `ConfigError` for fewer than one step."""
    return shifted_schedule(steps, shift=1.0)


def shifted_schedule(steps: int, shift: float = 3.0) -> Schedule:
    """The even grid pushed towards noise: t <- shift t / (1 + (shift - 1) t), T = `steps` transitions.

    `shift` > 0 (no unit); 1 leaves the grid even, 3 is DanceGRPO's and SD3's value. This is the closed form (Esser et
    al. 2024, arXiv 2403.03206, section 5.3.2); diffusers' schedulers shift a slightly different base grid, so models
    loaded from diffusers must take their grid from their scheduler. Raises `ConfigError` for a bad `steps` or `shift`.
    """
    require(steps >= 1, "steps", steps, "1 or more")
    require(math.isfinite(shift) and shift > 0, "shift", shift, "finite and above 0")
    even = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)
    return Schedule(times=(shift * even / (1.0 + (shift - 1.0) * even)).float())


def expand(values: Float[Tensor, " sample"], like: Float[Tensor, "sample *latent"]) -> Tensor:
    """`values` [sample] viewed as [sample, 1, ..., 1], so that it broadcasts over the latent axes of `like`."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))
