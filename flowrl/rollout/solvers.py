"""Deterministic samples: the probability-flow ODE by Euler's method or a solver of diffusers, with
counted network calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.core.errors import ProbeError, require
from flowrl.core.protocols import FlowPolicy, MultistepSolver
from flowrl.core.types import Condition, Gaussian, Schedule
from flowrl.probes import Grid, Solver
from flowrl.rollout.walk import Usage
from flowrl.samplers import Multistep
from flowrl.samplers.multistep import scheduler_steps

SOLVERS: tuple[str, ...] = (*get_args(Solver), "sa")
"""The names of the solvers of `solve`."""


@dataclass
class Solution:
    """A solution of the ODE on a grid; `advance` moves it to its end.

    Args:
        x: the current states [row, *latent].
        grid: the times.
        condition: the prompts' embeddings, one row per state.
        solver: name of the solver.
        velocity: the network's output at `x`, if it is known.
    """

    x: Tensor
    grid: Grid
    condition: Condition
    solver: str = "euler"
    velocity: Any = None

    def __post_init__(self) -> None:
        # the points of the grid at which the solver needs velocities, in order, and a function
        # (number, velocity, x) of an evaluation, to the state of the next one or the end
        grid, self.points = self.grid, list(range(len(self.grid.lengths)))
        if self.solver == "euler":
            self.step = lambda number, velocity, x: x - grid.lengths[number] * velocity
        elif self.solver != "heun":
            solver: Any = self.solver
            self.step = Multistep(solver).solution(Schedule(grid.times.cpu()))
        else:
            from diffusers.schedulers.scheduling_flow_match_heun_discrete import (
                FlowMatchHeunDiscreteScheduler,
            )

            times, last = grid.times.cpu(), len(self.points)
            scheduler: Any = FlowMatchHeunDiscreteScheduler()
            scheduler.set_timesteps(last)
            # two evaluations in every step but the last, which is Euler's
            self.points = [0, *(point for point in range(1, last) for _ in range(2))]
            scheduler.sigmas = times[[*self.points, last]]
            self.step = scheduler_steps(scheduler, times[self.points])


def advance(solutions: Sequence[Solution], network: Callable[..., Tensor]) -> None:
    """Move solutions to their ends, all unfinished ones in one call of the `network`, which maps
    (latents, timesteps, condition) to velocities.
    """
    for number in range(max((len(solution.points) for solution in solutions), default=0)):
        left = [solution for solution in solutions if number < len(solution.points)]
        if number > 0 or left[0].velocity is None:
            times = [s.grid.timesteps[s.points[number]].expand(len(s.x)) for s in left]
            condition = Condition.cat([solution.condition for solution in left])
            velocities = network(torch.cat([s.x for s in left]), torch.cat(times), condition)
            parts = velocities.split([len(solution.x) for solution in left])
            for solution, velocity in zip(left, parts, strict=True):
                solution.velocity = velocity
        for solution in left:
            solution.x = solution.step(number, solution.velocity, solution.x)


def solve(
    policy: FlowPolicy,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    usage: Usage,
    max_batch: int = 1024,
    solver: str = "euler",
) -> Tensor:
    """The last node of the probability-flow ODE from `noise`.

    "euler": T evaluations, order 1. "heun" (FlowMatchHeunDiscreteScheduler): 2 T - 1, order 2.
    "dpm++" (DPMSolverMultistepScheduler, arXiv 2211.01095) and "unipc" (UniPCMultistepScheduler,
    arXiv 2302.04867): T, order 2, exact if the clean estimate is constant along the trajectory.
    "sa" (`SASolver` with tau 0, on the grid of `sa_schedule`): the same.

    Args:
        policy: the policy that computes velocities.
        schedule: the policy's schedule with T steps.
        condition: the prompts' embeddings, one row per sample.
        noise: initial latents [sample, *latent].
        usage: counters of network evaluations, which are updated.
        max_batch: largest number of latents per network call.
        solver: "euler", "heun", "dpm++", "unipc" or "sa".

    Returns:
        Final latents [sample, *latent], float32, without gradients.

    Raises:
        ConfigError: the solver is unknown.
    """
    require(solver in SOLVERS, "solver", solver, f"one of {', '.join(SOLVERS)}")
    if solver == "sa":
        schedule = Multistep("sa").grid(schedule)
    grid = Grid(schedule.times, schedule.deltas, schedule.network_timesteps)
    with policy.frozen(), torch.no_grad():
        solution = Solution(noise.float(), grid, condition, solver)
        advance([solution], lambda x, t, c: usage.velocity(policy, x, t, c, max_batch))
    return solution.x


def deterministic(
    solver: MultistepSolver, schedule: Schedule, draw: Callable[[Tensor], Tensor]
) -> tuple[Schedule, "Deterministic"]:
    """The grid of a multistep solver, and a new solution as a sampler (see `MultistepSolver`)."""
    grid, steps = solver.grid(schedule), schedule.steps
    fits = isinstance(grid, Schedule) and grid.steps == steps
    require(fits, f"{type(solver).__name__}.grid", grid, f"a Schedule of {steps} steps")
    return grid, Deterministic(solver.solution(grid, draw))


@dataclass
class Deterministic:
    """The steps of a multistep solver, one call for each in order, as a sampler without noise."""

    step: Callable[[int, Tensor, Tensor], Tensor]
    number: int = 0

    def transition(
        self, latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor
    ) -> Gaussian:
        """The next state, with std 0."""
        if self.number == schedule.steps:
            raise ProbeError("a multistep solver has no continuations; use a probe of the ODE")
        following = self.step(self.number, velocity, latent)
        self.number += 1
        return Gaussian(following, latent.new_zeros(len(latent)))
