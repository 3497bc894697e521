"""Multistep solvers of the probability-flow ODE or SDE."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.types import Schedule
from flowrl.samplers.sa_solver import SASolver, sa_schedule

NEAREST_TO_NOISE = 1.0 - 1e-5
"""Largest time of diffusers' solvers, whose half log signal-to-noise ratio is infinite at t = 1.
The network still gets t = 1; the first step treats pure noise as a state at this time. diffusers'
own grids start at 0.999, which leaves an error that no number of steps removes.
"""


@checked_options
@dataclass(frozen=True)
class Multistep:
    """`MultistepSolver` by DPM-Solver++ of order 2, UniPC or SA-Solver.

    The first two are diffusers' schedulers. SA-Solver (`SASolver`) uses the grid `sa_schedule`.

    Sources: arXiv 2211.01095, 2302.04867 and 2309.05019. DiffusionNFT (arXiv 2509.16117) and DGPO
    (arXiv 2510.08425) sample by DPM-Solver++, AWM (arXiv 2509.25050) by SA-Solver.

    Args:
        solver: "dpm++" (DPM-Solver++), "unipc" (UniPC) or "sa" (SA-Solver).
        tau: noise of SA-Solver on steps that end at times in [0.3, 0.9] (AWM's noise_level); 0: the
            ODE, as for the other solvers.

    Raises:
        ConfigError: `tau` is negative or infinite, or above 0 with another solver.
    """

    solver: Literal["dpm++", "unipc", "sa"] = "dpm++"
    tau: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.tau < math.inf, "Multistep.tau", self.tau, "finite and 0 or more")
        allowed = f"0 with solver {self.solver}: only sa has noise"
        require(self.solver == "sa" or self.tau == 0, "Multistep.tau", self.tau, allowed)

    def grid(self, schedule: Schedule) -> Schedule:
        """`sa_schedule` for "sa", otherwise `schedule`."""
        return sa_schedule(schedule) if self.solver == "sa" else schedule

    def solution(
        self, schedule: Schedule, draw: Callable[[Tensor], Tensor] = torch.randn_like
    ) -> Callable[[int, Tensor, Tensor], Tensor]:
        """The steps of one solution on the times of `schedule`, a grid from `grid`."""
        times = schedule.times.cpu()
        if self.solver == "sa":
            return SASolver(times, self.tau, draw).step
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        kind = DPMSolverMultistepScheduler if self.solver == "dpm++" else UniPCMultistepScheduler
        scheduler = kind(
            use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero"
        )
        scheduler.set_timesteps(schedule.steps)
        scheduler.sigmas = times.clamp(max=NEAREST_TO_NOISE)
        return scheduler_steps(scheduler, times[:-1])


def scheduler_steps(scheduler: Any, times: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """The steps of a diffusers scheduler with its own sigmas; `times` [evaluation] name them."""
    # Distinct timesteps and a start at the first; otherwise a scheduler looks steps up by their
    # value.
    scheduler.timesteps = times * 1000.0
    scheduler.set_begin_index(0)

    def step(number: int, velocity: Tensor, x: Tensor) -> Tensor:
        return scheduler.step(velocity, scheduler.timesteps[number], x, return_dict=False)[0]

    return step
