"""Deterministic samples: the probability-flow ODE by Euler's method or a solver of diffusers, with counted network calls."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.protocols import FlowPolicy
from flowrl.samplers import ODE
from flowrl.samplers.multistep import multistep_scheduler, placed
from flowrl.types import Condition, Schedule

SOLVERS = ("euler", "heun", "dpm++", "unipc")


@dataclass
class Usage:
    """Counts of one iteration: network evaluations (`nfe`, one per latent), sequential network `calls` (a call that is split to
    respect `max_batch` still counts once) and scored images (`reward_calls`)."""

    nfe: int = 0
    calls: int = 0
    reward_calls: int = 0

    def velocity(self, policy: FlowPolicy, latent: Tensor, timestep: Tensor, condition: Condition, max_batch: int) -> Tensor:
        """`policy.velocity` in chunks of at most `max_batch`, counted."""
        self.nfe += len(latent)
        self.calls += 1
        if len(latent) <= max_batch:
            return policy.velocity(latent, timestep, condition)
        pieces = torch.arange(len(latent), device=latent.device).split(max_batch)
        parts = zip(latent.split(max_batch), timestep.split(max_batch), pieces, strict=True)
        return torch.cat([policy.velocity(part, time, condition.take(index)) for part, time, index in parts])


def solve(
    solver: str, policy: FlowPolicy, schedule: Schedule, condition: Condition, noise: Tensor, usage: Usage, max_batch: int = 1024
) -> Tensor:
    """The last node of the probability-flow ODE from `noise` [sample, *latent]; `condition` has one row per sample.

    "euler": `integrate`, T evaluations, order 1. "heun" (FlowMatchHeunDiscreteScheduler): 2 T - 1, order 2. "dpm++"
    (DPMSolverMultistepScheduler, arXiv 2211.01095) and "unipc" (UniPCMultistepScheduler, arXiv 2302.04867): T, order 2, exact
    where the clean estimate does not change along the way. Raises `ConfigError` for an unknown solver.
    """
    require(solver in SOLVERS, "solver", solver, f"one of {', '.join(SOLVERS)}")
    if solver == "euler":
        return integrate(policy, schedule, condition, noise, usage, max_batch)
    scheduler, nodes = _heun(schedule) if solver == "heun" else multistep_scheduler(solver, schedule)
    x = noise.float()
    with policy.frozen(), torch.no_grad():
        for position, node in enumerate(nodes):
            timestep = schedule.network_timesteps[node].expand(len(x))
            velocity = usage.velocity(policy, x, timestep, condition, max_batch)
            x = scheduler.step(velocity, scheduler.timesteps[position], x, return_dict=False)[0]
    return x


def integrate(
    policy: FlowPolicy, schedule: Schedule, condition: Condition, noise: Tensor, usage: Usage, max_batch: int = 1024
) -> Tensor:
    """The last node of Euler's method on the policy's schedule; `condition` has one row per row of `noise`."""
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


def _heun(schedule: Schedule) -> tuple[Any, list[int]]:
    """The scheduler on the policy's grid, and the node of each of its evaluations."""
    from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler

    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(schedule.steps)
    nodes = [0, *(node for node in range(1, schedule.steps) for _ in range(2))]
    scheduler.sigmas = schedule.times.cpu()[[*nodes, schedule.steps]]
    return placed(scheduler, schedule, nodes), nodes
