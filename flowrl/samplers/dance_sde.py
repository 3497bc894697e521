"""DanceGRPO's stochastic sampler."""

from dataclasses import dataclass

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, checked
from flowrl.samplers._kernels import require_noise_level, sde_mean, step_times


@checked_options
@dataclass(frozen=True)
class DanceSDE:
    """DanceGRPO's SDE: the same noise at every step.

    Euler-Maruyama step with a constant sigma = eta = `noise_level` >= 0 and std = eta sqrt(Delta).

    Source: DanceGRPO (arXiv 2505.07818) and its public code. Raises `ConfigError` for a negative or
    infinite noise level.
    """

    noise_level: float = 0.3

    def __post_init__(self) -> None:
        require_noise_level("DanceSDE", self.noise_level)

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        times = step_times(schedule, step, latent.device)
        sigma = torch.full_like(times.t, self.noise_level)
        mean = sde_mean(latent.float(), velocity.float(), times, sigma)
        return Gaussian(mean=mean, std=sigma * times.delta.sqrt())
