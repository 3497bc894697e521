"""Deterministic samples: the probability-flow ODE by Euler's method or a solver of diffusers, with
counted network calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Condition, Schedule
from flowrl.probes import Solver
from flowrl.samplers import ODE, Multistep
from flowrl.samplers.multistep import scheduler_steps

SOLVERS: tuple[str, ...] = (*get_args(Solver), "sa")
"""The names of the solvers of `solve`."""


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
        self,
        policy: FlowPolicy,
        latent: Tensor,
        timestep: Tensor,
        condition: Condition,
        max_batch: int,
        share: float = 1,
    ) -> Tensor:
        """`policy.velocity` in chunks of at most `max_batch`, counted as `share` of an evaluation
        per latent.
        """
        self.nfe += len(latent) * share
        self.calls += 1
        if len(latent) <= max_batch:
            return policy.velocity(latent, timestep, condition)
        pieces = torch.arange(len(latent), device=latent.device).split(max_batch)
        parts = zip(latent.split(max_batch), timestep.split(max_batch), pieces, strict=True)
        return torch.cat(
            [policy.velocity(part, time, condition.take(index)) for part, time, index in parts]
        )


def solve(
    solver: str,
    policy: FlowPolicy,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    usage: Usage,
    max_batch: int = 1024,
) -> Tensor:
    """The last node of the probability-flow ODE from `noise`.

    "euler": `integrate`, T evaluations, order 1. "heun" (FlowMatchHeunDiscreteScheduler): 2 T - 1,
    order 2. "dpm++" (DPMSolverMultistepScheduler, arXiv 2211.01095) and "unipc"
    (UniPCMultistepScheduler, arXiv 2302.04867): T, order 2, exact if the clean estimate is constant
    along the trajectory. "sa" (`SASolver` with tau 0, on the grid of `sa_schedule`): the same.

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
    if solver != "heun":
        schedule = Multistep(cast(Any, solver)).grid(schedule)
    steps = solver_steps(solver, schedule)
    x = noise.float()
    with policy.frozen(), torch.no_grad():
        for number, node in enumerate(steps.points):
            timestep = schedule.network_timesteps[node].expand(len(x))
            velocity = usage.velocity(policy, x, timestep, condition, max_batch)
            x = steps.step(number, velocity, x)
    return x


def integrate(
    policy: FlowPolicy,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    usage: Usage,
    max_batch: int = 1024,
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
            velocity = usage.velocity(
                policy, x, schedule.network_timesteps[i].expand(len(x)), condition, max_batch
            )
            x = ode_step(schedule, x, velocity, i)
    return x


def ode_step(schedule: Schedule, x: Tensor, velocity: Tensor, step: int) -> Tensor:
    """Node `step` + 1 from node `step` by Euler's method."""
    index = torch.full((len(x),), step, device=x.device)
    return ODE().transition(x, velocity, schedule, index).mean


@dataclass(frozen=True)
class SolverSteps:
    """A solver on one grid; every solution needs its own.

    `points` [evaluation] are the grid's points at which the solver needs velocities, in order.
    `step(number, velocity, x)` returns the state for the next evaluation (or the end), from
    evaluation `number` at x.
    """

    points: list[int]
    step: Callable[[int, Tensor, Tensor], Tensor]


def solver_steps(solver: str, schedule: Schedule) -> SolverSteps:
    """A solver other than Euler's on a grid: heun, or one of `Multistep`."""
    if solver == "heun":
        return _heun(schedule.times.cpu())
    return SolverSteps(list(range(schedule.steps)), Multistep(cast(Any, solver)).solution(schedule))


def _heun(times: Tensor) -> SolverSteps:
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import (
        FlowMatchHeunDiscreteScheduler,
    )

    steps = len(times) - 1
    scheduler: Any = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(steps)
    points = [0, *(point for point in range(1, steps) for _ in range(2))]
    scheduler.sigmas = times[[*points, steps]]
    return SolverSteps(points, scheduler_steps(scheduler, times[points]))
