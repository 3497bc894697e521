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
    """Trajectories by DPM-Solver++ of order 2, UniPC or SA-Solver, for losses that need no transition probabilities.

    No step is a decision. A step uses the velocities of earlier steps, so the rollout samples the trajectory through diffusers'
    scheduler or `rollout.sa_solver`; `transition` is the Euler step with std 0. Members must not share their initial noise.
    SA-Solver uses the grid `sa_schedule` and takes its noise from the rollout's generator.

    Sources: arXiv 2211.01095, 2302.04867 and 2309.05019. DiffusionNFT (arXiv 2509.16117) and DGPO (arXiv 2510.08425) sample by
    DPM-Solver++, AWM (arXiv 2509.25050) by SA-Solver.

    Args:
        solver: "dpm++" (DPM-Solver++), "unipc" (UniPC) or "sa" (SA-Solver).
        tau: noise of SA-Solver on steps that end at times in [0.3, 0.9] (AWM's noise_level); 0: the ODE, as for the other
            solvers.

    Raises:
        ConfigError: `tau` is negative or infinite, or above 0 with another solver.
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
