"""Multistep solvers of the probability-flow ODE as samplers of a rollout, through diffusers' schedulers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from flowrl.options import checked_options
from flowrl.samplers.ode import ODE
from flowrl.types import Gaussian, Latents, Schedule, StepIndex

NEAREST_TO_NOISE = 1.0 - 1e-5
"""Largest time of the multistep solvers, whose half log signal-to-noise ratio is infinite at t = 1. The network still gets t = 1;
the first step treats pure noise as a state at this time. diffusers' own grids start at 0.999, which leaves an error that no
number of steps removes."""

Stepper = Callable[[Tensor, Tensor, int], Tensor]
"""From velocity and state at a step to the next state; called once for every step in order."""


@checked_options
@dataclass(frozen=True)
class Multistep:
    """Deterministic trajectories by DPM-Solver++ of order 2 ("dpm++") or UniPC ("unipc"): no step is a decision.

    For losses that need no transition probabilities. A step uses the velocities of the steps before, so a trajectory is
    sampled as a whole by `stepper`; `transition` is the Euler step, which tells that every std is 0. Members need noise of
    their own. Source: arXiv 2211.01095 and 2302.04867; DiffusionNFT (arXiv 2509.16117) and DGPO (arXiv 2510.08425) sample by
    DPM-Solver++.
    """

    solver: Literal["dpm++", "unipc"] = "dpm++"

    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Euler step, with std 0."""
        return ODE().transition(latent, velocity, schedule, step)

    def stepper(self, schedule: Schedule) -> Stepper:
        """One pass over the grid of `schedule`."""
        scheduler, _ = multistep_scheduler(self.solver, schedule)

        def advance(velocity: Tensor, x: Tensor, step: int) -> Tensor:
            return scheduler.step(velocity, scheduler.timesteps[step], x, return_dict=False)[0]

        return advance


def multistep_scheduler(solver: str, schedule: Schedule) -> tuple[Any, list[int]]:
    """diffusers' scheduler on the grid of `schedule`, and the node of each of its evaluations."""
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = DPMSolverMultistepScheduler if solver == "dpm++" else UniPCMultistepScheduler
    scheduler = kind(use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero")
    scheduler.set_timesteps(schedule.steps)
    nodes = list(range(schedule.steps))
    scheduler.sigmas = schedule.times.cpu().clamp(max=NEAREST_TO_NOISE)
    return placed(scheduler, schedule, nodes), nodes


def placed(scheduler: Any, schedule: Schedule, nodes: list[int]) -> Any:
    """Give the steps distinct timesteps and start at the first; otherwise a scheduler looks steps up by their value."""
    scheduler.timesteps = schedule.times.cpu()[nodes] * 1000.0
    scheduler.set_begin_index(0)
    return scheduler
