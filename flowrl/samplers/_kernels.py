"""Shared code of the kernels: the two forms of a stochastic transition mean (kernels differ in
sigma), and step times.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.protocols import AnySampler, MultistepSolver
from flowrl.core.types import (
    Gaussian,
    Latents,
    PerSample,
    Schedule,
    StepIndex,
    inputs_unchanged,
    tensor_problem,
)
from flowrl.flow import expand, noise_estimate, tweedie


@dataclass(frozen=True)
class StepTimes:
    """The start t and the end s of a transition, delta = t - s > 0; all [sample], float32."""

    t: Tensor
    s: Tensor

    @property
    def delta(self) -> Tensor:
        """Delta = t - s."""
        return self.t - self.s


def step_times(schedule: Schedule, step: StepIndex, device: torch.device) -> StepTimes:
    """The times of node `step` and node `step + 1` for every sample."""
    times = schedule.times.to(device=device, dtype=torch.float32)
    step = step.to(device)
    return StepTimes(t=times[step], s=times[step + 1])


def sde_mean(latent: Latents, velocity: Latents, times: StepTimes, sigma: PerSample) -> Latents:
    """One Euler-Maruyama step of the reverse SDE: x (1 - sigma^2 Delta / (2t)) - v (1 + sigma^2
    (1-t) / (2t)) Delta.

    Equals x - Delta v + (sigma^2 / 2) Delta score with score = -(x + (1-t) v) / t. Source:
    Flow-GRPO (arXiv 2505.05470, section on ODE-to-SDE).
    """
    t, delta = times.t, times.delta
    half_rate = sigma.square() / (2.0 * t)
    keep = expand(1.0 - half_rate * delta, latent)
    drift = expand((1.0 + half_rate * (1.0 - t)) * delta, latent)
    return keep * latent - drift * velocity


def coefficient_preserving_mean(
    latent: Latents, velocity: Latents, times: StepTimes, sigma: PerSample
) -> Latents:
    """(1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat, for 0 <= sigma <= s.

    After adding noise of standard deviation sigma, the noise coefficient is s again, so the sample
    has the interpolant's marginal. Source: CPS (arXiv 2509.05952), after DDIM (arXiv 2010.02502,
    equation 12).
    """
    clean, noise = tweedie(latent, velocity, times.t), noise_estimate(latent, velocity, times.t)
    kept_noise = (times.s.square() - sigma.square()).clamp(min=0.0).sqrt()
    return expand(1.0 - times.s, latent) * clean + expand(kept_noise, latent) * noise


def require_noise_level(kernel: str, noise_level: float, most: float = math.inf) -> None:
    """Raise `ConfigError` unless `noise_level` is finite and within [0, `most`]."""
    allowed = "finite and 0 or more" if most == math.inf else f"within [0, {most:g}]"
    fits = math.isfinite(noise_level) and 0.0 <= noise_level <= most
    require(fits, f"{kernel}.noise_level", noise_level, allowed)


def transition_stds(sampler: AnySampler, schedule: Schedule) -> Float[Tensor, " step"]:
    """The transition's std at every step of `schedule`, shape [step], on the schedule's device; 0 =
    not a decision.

    Evaluates the sampler's `transition` on zeros, so that the formula exists only once; 0 for a
    `MultistepSolver`.

    Args:
        sampler: the sampler; its std must not depend on the latent.
        schedule: the time grid.

    Returns:
        Standard deviations [step], float32.
    """
    if isinstance(sampler, MultistepSolver):
        return torch.zeros_like(schedule.deltas)
    device, call = schedule.times.device, f"{type(sampler).__name__}.transition"
    zeros = torch.zeros(schedule.steps, 1, device=device)
    with inputs_unchanged(call, ConfigError, zeros):
        found = sampler.transition(
            zeros, zeros, schedule, torch.arange(schedule.steps, device=device)
        )
    return checked_gaussian(found, call).std


def checked_gaussian(found: object, call: str) -> Gaussian:
    """What a sampler's `call` returned. Raises `ConfigError` unless it is a Gaussian with
    values.
    """
    if not isinstance(found, Gaussian):
        raise ConfigError(
            f"{call} returned a {type(found).__name__}; a Gaussian(mean, std) is required"
        )
    problem = tensor_problem(found.mean) or tensor_problem(found.std)
    if problem:
        raise ConfigError(f"{call} returned a tensor that {problem}")
    return found
