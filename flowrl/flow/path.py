"""The straight path between data and noise: time grids along it, its interpolant, and what a velocity implies about its ends.

x_t = (1-t) x_0 + t eps and v = dx/dt = eps - x_0, from t = 1 (noise) to t = 0 (data). Source: Lipman et al. 2023 (arXiv
2210.02747), Liu et al. 2023 (arXiv 2209.03003). Times are [sample], latents and velocities [sample, *latent].
"""

import math

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.types import Latents, PerSample, Schedule


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


def expand(values: PerSample, like: Latents) -> Tensor:
    """`values` [sample] viewed as [sample, 1, ..., 1], so that it broadcasts over the latent axes of `like`."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def interpolate(clean: Latents, noise: Latents, time: PerSample) -> Latents:
    """x_t = (1-t) x_0 + t eps."""
    t = expand(time, clean)
    return (1.0 - t) * clean + t * noise


def velocity_target(clean: Latents, noise: Latents) -> Latents:
    """v = eps - x_0, the regression target of flow matching."""
    return noise - clean


def tweedie(latent: Latents, velocity: Latents, time: PerSample) -> Latents:
    """The clean estimate x_t - t v, which is E[x_0 | x_t] for the exact velocity."""
    return latent - expand(time, latent) * velocity


def noise_estimate(latent: Latents, velocity: Latents, time: PerSample) -> Latents:
    """The noise estimate x_t + (1-t) v, which is E[eps | x_t] for the exact velocity."""
    return latent + (1.0 - expand(time, latent)) * velocity
