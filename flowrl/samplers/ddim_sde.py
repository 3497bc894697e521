"""The DDIM-inspired stochastic sampler of Stepwise-Flow-GRPO."""

from dataclasses import dataclass

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, checked
from flowrl.samplers._kernels import coefficient_preserving_mean, require_noise_level, step_times


@checked_options
@dataclass(frozen=True)
class DDIMSDE:
    """Stepwise-Flow-GRPO's DDIM-inspired SDE: the noise level of every node is exact.

    Mean (1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat and std = sigma = a s sqrt(1-t), a =
    `noise_level` >= 0.

    s is the next time. Both ends are deterministic: the step from t = 1 and the step to s = 0 have
    std 0 and are not decisions. sigma is capped at s, at which all noise is fresh (reached only for
    a > 1). Source: Stepwise-Flow-GRPO (arXiv 2603.28718). Raises `ConfigError` for a negative or
    infinite noise level.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        require_noise_level("DDIMSDE", self.noise_level)

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        times = step_times(schedule, step, latent.device)
        sigma = self.noise_level * times.s * (1.0 - times.t).clamp(min=0.0).sqrt()
        sigma = torch.minimum(sigma, times.s)
        return Gaussian(
            mean=coefficient_preserving_mean(latent.float(), velocity.float(), times, sigma),
            std=sigma,
        )
