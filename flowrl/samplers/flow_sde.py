"""Flow-GRPO's stochastic sampler."""

from dataclasses import dataclass

import torch

from flowrl.core.options import checked_options
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, checked
from flowrl.samplers._kernels import require_noise_level, sde_mean, step_times

_NOISE_END = 1.0 - 1e-6  # times above this count as t = 1


@checked_options
@dataclass(frozen=True)
class FlowSDE:
    """Flow-GRPO's SDE: much noise early, little late.

    Euler-Maruyama step with sigma = a sqrt(t / (1-t)), a = `noise_level` >= 0, and std = sigma
    sqrt(Delta).

    At t = 1, where sigma is infinite, the denominator uses the grid's next time t_1 in place of t,
    as in the public code. The last step has a finite std, too; Flow-GRPO replaces it by an ODE step
    (window `:-1`).

    At finite Delta the step adds variance to the true marginal, visible as grain; `CPS` does not.
    The step from pure noise adds a^4/4 + a^2 Delta to a marginal variance of about 1, so a finer
    grid does not remove this error at that step. Later steps remove it: from t < 1 the kernel has
    weak order 1. Source: Flow-GRPO (arXiv 2505.05470) and its public code. Raises `ConfigError` for
    a negative or infinite noise level.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        require_noise_level("FlowSDE", self.noise_level)

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        times = step_times(schedule, step, latent.device)
        below_one = torch.where(times.t > _NOISE_END, times.s, times.t)
        sigma = self.noise_level * (times.t / (1.0 - below_one)).sqrt()
        mean = sde_mean(latent.float(), velocity.float(), times, sigma)
        return Gaussian(mean=mean, std=sigma * times.delta.sqrt())
