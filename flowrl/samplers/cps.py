"""Coefficients-Preserving Sampling."""

import math
from dataclasses import dataclass

from flowrl.core.options import checked_options
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, checked
from flowrl.samplers._kernels import coefficient_preserving_mean, require_noise_level, step_times


@checked_options
@dataclass(frozen=True)
class CPS:
    """Coefficients-preserving sampling: the noise level of every node is exact.

    Mean (1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat and std = sigma = s sin(eta pi/2), eta =
    `noise_level` in [0, 1].

    s is the next time. Noise level 0 is the ODE; 1 replaces all the noise at every step. The last
    step (s = 0) has std 0 and is not a decision. Source: Wang & Yu 2025 (arXiv 2509.05952). Raises
    `ConfigError` for a noise level outside [0, 1].
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        require_noise_level("CPS", self.noise_level, most=1.0)

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        times = step_times(schedule, step, latent.device)
        sigma = times.s * math.sin(self.noise_level * math.pi / 2.0)
        return Gaussian(
            mean=coefficient_preserving_mean(latent.float(), velocity.float(), times, sigma),
            std=sigma,
        )
