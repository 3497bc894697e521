"""Multistep solvers of the probability-flow ODE as samplers of a rollout."""

from dataclasses import dataclass
from typing import Literal

from flowrl.options import checked_options
from flowrl.samplers.ode import ODE
from flowrl.types import Gaussian, Latents, Schedule, StepIndex


@checked_options
@dataclass(frozen=True)
class Multistep:
    """Deterministic trajectories by DPM-Solver++ of order 2 ("dpm++") or UniPC ("unipc"): no step is a decision.

    For losses that need no transition probabilities. A step uses the velocities of the steps before, so a trajectory is
    sampled by the rollout, through diffusers' scheduler; `transition` is the Euler step, which tells that every std is 0.
    Members need noise of their own. Source: arXiv 2211.01095 and 2302.04867; DiffusionNFT (arXiv 2509.16117) and DGPO (arXiv
    2510.08425) sample by DPM-Solver++.
    """

    solver: Literal["dpm++", "unipc"] = "dpm++"

    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Euler step, with std 0."""
        return ODE().transition(latent, velocity, schedule, step)
