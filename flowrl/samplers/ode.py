"""The deterministic Euler step of the probability-flow ODE."""

from dataclasses import dataclass

import torch

from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, checked
from flowrl.flow import expand
from flowrl.samplers._kernels import step_times


@dataclass(frozen=True)
class ODE:
    """Deterministic sampling.

    Mean x - Delta v, std 0: no step is a decision. Source: flow matching (arXiv 2210.02747),
    Euler's method.
    """

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std 0 [sample], float32."""
        times = step_times(schedule, step, latent.device)
        mean = latent.float() - expand(times.delta, latent) * velocity.float()
        return Gaussian(mean=mean, std=torch.zeros_like(times.t))
