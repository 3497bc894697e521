"""Multistep solvers of the probability-flow ODE or SDE as samplers of a rollout."""

import math
from dataclasses import dataclass
from typing import Literal

from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.samplers.ode import ODE
from flowrl.types import Gaussian, Latents, Schedule, StepIndex


@checked_options
@dataclass(frozen=True)
class Multistep:
    """Trajectories by DPM-Solver++ of order 2 ("dpm++"), UniPC ("unipc") or SA-Solver ("sa"): no step is a decision.

    For losses that need no transition probabilities. A step uses the velocities of the steps before, so a trajectory is
    sampled by the rollout, through diffusers' scheduler or `rollout.sa_solver`; `transition` is the Euler step, with
    std 0 everywhere. Members need noise of their own.

    `tau` >= 0 is the noise of SA-Solver on steps that end at times in [0.3, 0.9] (AWM's noise_level); 0: the ODE. It comes from
    the rollout's generator. SA-Solver has a grid of its own, `sa_schedule`. Source: arXiv 2211.01095, 2302.04867 and 2309.05019;
    DiffusionNFT (arXiv 2509.16117) and DGPO (arXiv 2510.08425) sample by DPM-Solver++, AWM (arXiv 2509.25050) by SA-Solver.
    Raises `ConfigError` for a `tau` below 0 or of another solver.
    """

    solver: Literal["dpm++", "unipc", "sa"] = "dpm++"
    tau: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.tau < math.inf, "Multistep.tau", self.tau, "finite and 0 or more")
        allowed = f"0 with solver {self.solver}: only sa has noise"
        require(self.solver == "sa" or self.tau == 0, "Multistep.tau", self.tau, allowed)

    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Euler step, with std 0."""
        return ODE().transition(latent, velocity, schedule, step)
