"""Deterministic sampling by solvers of higher order: those of diffusers, on the policy's own time grid."""

from typing import Any

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.protocols import FlowPolicy
from flowrl.rollout.rollout import integrate
from flowrl.rollout.usage import Usage
from flowrl.types import Condition, Schedule

SOLVERS = ("euler", "heun", "dpm++", "unipc")
NEAREST_TO_NOISE = 1.0 - 1e-5
"""Largest time that the multistep solvers know: their half log signal-to-noise ratio is infinite at t = 1. The network is told
t = 1; the first step takes pure noise for a state at this time. diffusers' own grids start at 0.999, which leaves an error that
no number of steps removes."""


def require_solver(name: str) -> None:
    """Raise `ConfigError` for an unknown solver."""
    require(name in SOLVERS, "solver", name, f"one of {', '.join(SOLVERS)}")


def solve(
    solver: str, policy: FlowPolicy, schedule: Schedule, condition: Condition, noise: Tensor, usage: Usage, max_batch: int = 1024
) -> Tensor:
    """The last node of the probability-flow ODE from `noise` [sample, *latent]; `condition` has one row per sample.

    "euler": `integrate`, T evaluations, order 1. "heun" (FlowMatchHeunDiscreteScheduler): 2 T - 1, order 2. "dpm++"
    (DPMSolverMultistepScheduler, arXiv 2211.01095) and "unipc" (UniPCMultistepScheduler, arXiv 2302.04867): T, order 2, exact
    where the clean estimate does not change along the way. Raises `ConfigError` for an unknown solver.
    """
    require_solver(solver)
    if solver == "euler":
        return integrate(policy, schedule, condition, noise, usage, max_batch)
    scheduler, nodes = _heun(schedule) if solver == "heun" else _multistep(solver, schedule)
    x = noise.float()
    with policy.frozen(), torch.no_grad():
        for position, node in enumerate(nodes):
            told = schedule.network_timesteps[node].expand(len(x))
            velocity = usage.velocity(policy, x, told, condition, max_batch)
            x = scheduler.step(velocity, scheduler.timesteps[position], x, return_dict=False)[0]
    return x


def _heun(schedule: Schedule) -> tuple[Any, list[int]]:
    """The scheduler on our grid, and the node at which each of its evaluations is made."""
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler

    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(schedule.steps)
    nodes = [0, *(node for node in range(1, schedule.steps) for _ in range(2))]
    scheduler.sigmas = schedule.times.cpu()[[*nodes, schedule.steps]]
    return _placed(scheduler, schedule, nodes), nodes


def _multistep(solver: str, schedule: Schedule) -> tuple[Any, list[int]]:
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = DPMSolverMultistepScheduler if solver == "dpm++" else UniPCMultistepScheduler
    scheduler = kind(use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero")
    scheduler.set_timesteps(schedule.steps)
    nodes = list(range(schedule.steps))
    scheduler.sigmas = schedule.times.cpu().clamp(max=NEAREST_TO_NOISE)
    return _placed(scheduler, schedule, nodes), nodes


def _placed(scheduler: Any, schedule: Schedule, nodes: list[int]) -> Any:
    """Name the steps by distinct numbers and start at the first: a scheduler looks steps up by their value otherwise."""
    scheduler.timesteps = schedule.times.cpu()[nodes] * 1000.0
    scheduler.set_begin_index(0)
    return scheduler
