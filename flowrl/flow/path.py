"""The straight path between data and noise: time grids, the interpolant, and the estimates of its
ends from a velocity.

x_t = (1-t) x_0 + t eps and v = dx/dt = eps - x_0, from t = 1 (noise) to t = 0 (data). Source:
Lipman et al. 2023 (arXiv 2210.02747), Liu et al. 2023 (arXiv 2209.03003). Times are [sample],
latents and velocities [sample, *latent].
"""

import math

import torch

from flowrl.core.checks import checked
from flowrl.core.errors import require
from flowrl.core.types import Latents, PerSample, Schedule, expand


def uniform_schedule(steps: int) -> Schedule:
    """The uniform grid t_j = 1 - j/T with T = `steps` transitions. Raises `ConfigError` for fewer
    than one step.
    """
    return shifted_schedule(steps, shift=1.0)


def shifted_schedule(steps: int, shift: float = 3.0) -> Schedule:
    """The uniform grid shifted towards noise: t <- shift t / (1 + (shift - 1) t), T = `steps`
    transitions.

    This is the closed form (Esser et al. 2024, arXiv 2403.03206, section 5.3.2); diffusers'
    schedulers shift a slightly different base grid, so models loaded from diffusers must take their
    grid from their scheduler.

    Args:
        steps: number of transitions T, 1 or more.
        shift: the shift, above 0 and dimensionless; 1 keeps the grid uniform, 3 is the value of
            DanceGRPO and SD3.

    Returns:
        A schedule with times [step + 1] from 1 to 0, float32.

    Raises:
        ConfigError: `steps` is below 1, or `shift` is not finite and positive.
    """
    require(steps >= 1, "steps", steps, "1 or more")
    require(math.isfinite(shift) and shift > 0, "shift", shift, "finite and above 0")
    even = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)
    return Schedule(times=(shift * even / (1.0 + (shift - 1.0) * even)).float())


@checked
def interpolate(clean: Latents, noise: Latents, time: PerSample) -> Latents:
    """x_t = (1-t) x_0 + t eps.

    Args:
        clean: data x_0 [sample, *latent].
        noise: noise eps [sample, *latent].
        time: t in [0, 1] [sample]; 0 is data, 1 is noise.

    Returns:
        Noisy latents x_t [sample, *latent].
    """
    t = expand(time, clean)
    return (1.0 - t) * clean + t * noise


@checked
def velocity_target(clean: Latents, noise: Latents) -> Latents:
    """v = eps - x_0, the regression target of flow matching.

    Args:
        clean: data x_0 [sample, *latent].
        noise: noise eps [sample, *latent].

    Returns:
        The target velocity [sample, *latent].
    """
    return noise - clean


@checked
def tweedie(latent: Latents, velocity: Latents, time: PerSample) -> Latents:
    """The clean estimate x_t - t v, which is E[x_0 | x_t] for the exact velocity.

    Args:
        latent: noisy latents x_t [sample, *latent].
        velocity: velocity v at `latent` [sample, *latent].
        time: t in [0, 1] [sample].

    Returns:
        The estimate of x_0 [sample, *latent].
    """
    return latent - expand(time, latent) * velocity


@checked
def noise_estimate(latent: Latents, velocity: Latents, time: PerSample) -> Latents:
    """The noise estimate x_t + (1-t) v, which is E[eps | x_t] for the exact velocity.

    Args:
        latent: noisy latents x_t [sample, *latent].
        velocity: velocity v at `latent` [sample, *latent].
        time: t in [0, 1] [sample].

    Returns:
        The estimate of eps [sample, *latent].
    """
    return latent + (1.0 - expand(time, latent)) * velocity
