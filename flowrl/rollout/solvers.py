"""Deterministic samples: the probability-flow ODE by Euler's method or a solver of diffusers, with counted network calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.probes import Solver
from flowrl.protocols import FlowPolicy
from flowrl.rollout.sa_solver import SASolver, sa_schedule
from flowrl.samplers import ODE
from flowrl.types import Condition, Schedule

SOLVERS: tuple[str, ...] = (*get_args(Solver), "sa")
NEAREST_TO_NOISE = 1.0 - 1e-5
"""Largest time of the multistep solvers, whose half log signal-to-noise ratio is infinite at t = 1. The network still gets t = 1;
the first step treats pure noise as a state at this time. diffusers' own grids start at 0.999, which leaves an error that no
number of steps removes."""


@dataclass
class Usage:
    """Costs of one iteration.

    Args:
        nfe: network evaluations, one per latent; a fraction for calls that compute less.
        calls: sequential network calls; a call that is split to respect `max_batch` counts once.
        reward_calls: scored images.
    """

    nfe: float = 0
    calls: int = 0
    reward_calls: int = 0

    def velocity(
        self, policy: FlowPolicy, latent: Tensor, timestep: Tensor, condition: Condition, max_batch: int, share: float = 1
    ) -> Tensor:
        """`policy.velocity` in chunks of at most `max_batch`, counted as `share` of an evaluation per latent."""
        self.nfe += len(latent) * share
        self.calls += 1
        if len(latent) <= max_batch:
            return policy.velocity(latent, timestep, condition)
        pieces = torch.arange(len(latent), device=latent.device).split(max_batch)
        parts = zip(latent.split(max_batch), timestep.split(max_batch), pieces, strict=True)
        return torch.cat([policy.velocity(part, time, condition.take(index)) for part, time, index in parts])


def solve(
    solver: str, policy: FlowPolicy, schedule: Schedule, condition: Condition, noise: Tensor, usage: Usage, max_batch: int = 1024
) -> Tensor:
    """The last node of the probability-flow ODE from `noise`.

    "euler": `integrate`, T evaluations, order 1. "heun" (FlowMatchHeunDiscreteScheduler): 2 T - 1, order 2. "dpm++"
    (DPMSolverMultistepScheduler, arXiv 2211.01095) and "unipc" (UniPCMultistepScheduler, arXiv 2302.04867): T, order 2, exact if
    the clean estimate is constant along the trajectory. "sa" (`SASolver` with tau 0, on the grid of `sa_schedule`): the same.

    Args:
        solver: "euler", "heun", "dpm++", "unipc" or "sa".
        policy: the policy that computes velocities.
        schedule: the policy's schedule with T steps.
        condition: the prompts' embeddings, one row per sample.
        noise: initial latents [sample, *latent].
        usage: counters of network evaluations, which are updated.
        max_batch: largest number of latents per network call.

    Returns:
        Final latents [sample, *latent], float32, without gradients.

    Raises:
        ConfigError: the solver is unknown.
    """
    require(solver in SOLVERS, "solver", solver, f"one of {', '.join(SOLVERS)}")
    if solver == "euler":
        return integrate(policy, schedule, condition, noise, usage, max_batch)
    schedule = solver_schedule(solver, schedule)
    steps = solver_steps(solver, schedule.times)
    x = noise.float()
    with policy.frozen(), torch.no_grad():
        for number, node in enumerate(steps.points):
            timestep = schedule.network_timesteps[node].expand(len(x))
            velocity = usage.velocity(policy, x, timestep, condition, max_batch)
            x = steps.step(number, velocity, x)
    return x


def integrate(
    policy: FlowPolicy, schedule: Schedule, condition: Condition, noise: Tensor, usage: Usage, max_batch: int = 1024
) -> Tensor:
    """The last node of Euler's method on the policy's schedule. T network evaluations per sample.

    Args:
        policy: the policy that computes velocities.
        schedule: the policy's schedule with T steps.
        condition: the prompts' embeddings, one row per sample.
        noise: initial latents [sample, *latent].
        usage: counters of network evaluations, which are updated.
        max_batch: largest number of latents per network call.

    Returns:
        Final latents [sample, *latent], float32, without gradients.
    """
    x = noise.float()
    with policy.frozen(), torch.no_grad():
        for i in range(schedule.steps):
            velocity = usage.velocity(policy, x, schedule.network_timesteps[i].expand(len(x)), condition, max_batch)
            x = ode_step(schedule, x, velocity, i)
    return x


def ode_step(schedule: Schedule, x: Tensor, velocity: Tensor, step: int) -> Tensor:
    """Node `step` + 1 from node `step` by Euler's method."""
    index = torch.full((len(x),), step, device=x.device)
    return ODE().transition(x, velocity, schedule, index).mean


@dataclass(frozen=True)
class SolverSteps:
    """A solver on one grid; every solution needs its own.

    `points` [evaluation] are the grid's points at which the solver needs velocities, in order. `step(number, velocity, x)`
    returns the state for the next evaluation (or the end), from evaluation `number` at x.
    """

    points: list[int]
    step: Callable[[int, Tensor, Tensor], Tensor]


def solver_schedule(solver: str, schedule: Schedule) -> Schedule:
    """The grid of a solver for a policy's `schedule`: the same, except for "sa"."""
    return sa_schedule(schedule) if solver == "sa" else schedule


def solver_steps(
    solver: str, times: Tensor, tau: float = 0.0, draw: Callable[[Tensor], Tensor] = torch.randn_like
) -> SolverSteps:
    """A solver other than Euler's on the grid `times` [point], descending to 0: heun, dpm++ or unipc by diffusers' schedulers, or
    sa, whose noise `tau` > 0 comes from `draw`."""
    grid = times.cpu()
    if solver == "sa":
        return SolverSteps(list(range(len(grid) - 1)), SASolver(grid, tau, draw).step)
    scheduler, points = _heun(grid) if solver == "heun" else _multistep(solver, grid)
    # Distinct timesteps and a start at the first; otherwise a scheduler looks steps up by their value.
    scheduler.timesteps = grid[points] * 1000.0
    scheduler.set_begin_index(0)

    def step(number: int, velocity: Tensor, x: Tensor) -> Tensor:
        return scheduler.step(velocity, scheduler.timesteps[number], x, return_dict=False)[0]

    return SolverSteps(points, step)


def _heun(times: Tensor) -> tuple[Any, list[int]]:
    """The scheduler on a grid, and the grid's point of each of its evaluations."""
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler

    steps = len(times) - 1
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(steps)
    points = [0, *(point for point in range(1, steps) for _ in range(2))]
    scheduler.sigmas = times[[*points, steps]]
    return scheduler, points


def _multistep(solver: str, times: Tensor) -> tuple[Any, list[int]]:
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = DPMSolverMultistepScheduler if solver == "dpm++" else UniPCMultistepScheduler
    scheduler = kind(use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero")
    scheduler.set_timesteps(len(times) - 1)
    scheduler.sigmas = times.clamp(max=NEAREST_TO_NOISE)
    return scheduler, list(range(len(times) - 1))
