"""The input of a probe after the trajectories are complete: their states, the network, and a
separate generator.
"""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ProbeError, require
from flowrl.core.protocols import FlowPolicy, Sampler, extras
from flowrl.core.types import (
    Condition,
    Gaussian,
    Schedule,
    Trajectories,
    inputs_unchanged,
    to_device,
)
from flowrl.probes import Estimate, Grid, Key, NetworkUse, Probe, Solver
from flowrl.rollout.estimates import Walkers, continued
from flowrl.rollout.groups import Groups
from flowrl.rollout.solvers import SolverSteps, Usage, solver_steps


def check_network(use: NetworkUse, policy: FlowPolicy) -> None:
    """Raise `ConfigError` if the policy lacks what a probe requires."""
    name = type(policy).__name__
    if use.guidance == "off":
        guided = extras(policy, "guided", "guidance_scale")
        fits = guided is not None and guided.guidance_scale != 1
        require(
            fits,
            "guidance of the probe",
            use.guidance,
            f"own: not applicable, {name} samples without guidance",
        )


def own_generator(generator: torch.Generator) -> torch.Generator:
    """A generator for the probe, seeded by the state of the trajectories' generator, which does not
    change.
    """
    state = generator.get_state()  # bytes in main memory, whatever the generator's device
    digest = hashlib.sha256(ctypes.string_at(state.data_ptr(), state.numel())).digest()
    return torch.Generator(generator.device).manual_seed(int.from_bytes(digest[:7]))


@dataclass(frozen=True)
class ProbeRun:
    """`flowrl.probes.Probing`, whose docstrings define each member."""

    policy: FlowPolicy
    sampler: Sampler
    stochastic: Sequence[bool]
    trajectories: Trajectories
    nodes: Sequence[int]
    final: Tensor
    completed: Mapping[int, Tensor]
    condition: Condition
    layout: Groups
    trajectories_generator: torch.Generator
    usage: Usage
    max_batch: int
    network: NetworkUse

    @property
    def groups(self) -> int:
        """Prompts."""
        return self.layout.prompts

    @cached_property
    def generator(self) -> torch.Generator:
        """The probe's generator, created at its first draw."""
        return own_generator(self.trajectories_generator)

    def start(self, node: int, members: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States and velocities of a node."""
        path, tree = self.trajectories, self.trajectories.tree
        at = tree.at(node)
        x, velocity = path.states[:, at], path.outputs[:, at]
        if members is not None:
            units = to_device(tree.paths[:, node] - at.start, x.device)[
                to_device(members, x.device)
            ]
            prompt = torch.arange(len(x), device=x.device)[:, None]
            x, velocity = x[prompt, units], velocity[prompt, units]
        return x.flatten(0, 1), velocity.flatten(0, 1)

    def velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The network, counted."""
        require(
            len(latents) % self.groups == 0,
            "latents",
            len(latents),
            f"equally many for each of {self.groups} prompts",
        )
        condition = self.condition.repeat(len(latents) // self.groups)
        return self._velocity(latents, timestep, condition)

    def _velocity(self, latents: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        with self._precision():
            share = self.network.share
            return self.usage.velocity(
                self.policy, latents, timestep, condition, self.max_batch, share
            ).float()

    def _precision(self) -> Any:
        narrow = self.network.dtype == "bfloat16"
        return torch.autocast(self.policy.device.type, torch.bfloat16) if narrow else nullcontext()

    def solve(
        self,
        grids: Mapping[int, Grid],
        solver: Solver = "euler",
        members: Mapping[int, Tensor | None] | None = None,
    ) -> dict[int, Tensor]:
        """The ends of the ODE, all nodes together."""
        solutions = {
            node: self._solution(node, grid, solver, (members or {}).get(node))
            for node, grid in grids.items()
        }
        self._advance(list(solutions.values()))
        return {node: solution.x for node, solution in solutions.items()}

    def _solution(
        self, node: int, grid: Grid, solver: Solver, members: Tensor | None
    ) -> "Solution":
        x, velocity = self.start(node, members)
        return Solution(x, velocity, grid, solver, self.condition.repeat(len(x) // self.groups))

    def _advance(self, solutions: list["Solution"]) -> None:
        """Advance the solutions to their ends, all unfinished ones in one call."""
        for solution in solutions:
            solution.step(0, solution.velocity)
        for number in range(
            1, max((len(solution.steps.points) for solution in solutions), default=0)
        ):
            left = [solution for solution in solutions if number < len(solution.steps.points)]
            velocity = self._velocity(
                torch.cat([solution.x for solution in left]),
                torch.cat([solution.timestep(number) for solution in left]),
                Condition.cat([solution.condition for solution in left]),
            )
            for solution, part in zip(
                left, velocity.split([len(solution.x) for solution in left]), strict=True
            ):
                solution.step(number, part)

    def continued(self, node: int, count: int) -> Tensor:
        """Stochastic continuations."""
        condition = self.condition.repeat(self.layout.members)
        return continued(self._walkers, self.trajectories.at(node), node, condition, count)

    @cached_property
    def _walkers(self) -> Walkers:
        path = self.trajectories
        return Walkers(
            self.policy,
            self.sampler,
            path.schedule,
            self.stochastic,
            self.draw,
            self.usage,
            self.max_batch,
        )

    def rand(self, *shape: int) -> Tensor:
        """Uniform random numbers."""
        return self.layout.rand(shape, self.generator)

    def draw(self, gaussian: Gaussian) -> Tensor:
        """Draws of Gaussians."""
        return self.layout.draw(gaussian, self.generator)


@dataclass
class Solution:
    """An ODE solution from the states of one node; `x` [row, *latent] is the current state."""

    x: Tensor
    velocity: Tensor
    grid: Grid
    solver: Solver
    condition: Condition
    steps: SolverSteps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = (
            _euler(self.grid)
            if self.solver == "euler"
            else solver_steps(self.solver, Schedule(self.grid.times.cpu()))
        )

    def timestep(self, number: int) -> Tensor:
        """The network's time input of evaluation `number` [row]."""
        return self.grid.timesteps[self.steps.points[number]].expand(len(self.x))

    def step(self, number: int, velocity: Tensor) -> None:
        """Advance with the velocity of evaluation `number`."""
        self.x = self.steps.step(number, velocity, self.x)


def _euler(grid: Grid) -> SolverSteps:
    """Euler's method, whose state is x alone."""
    return SolverSteps(
        list(range(len(grid.lengths))),
        lambda number, velocity, x: x - grid.lengths[number] * velocity,
    )


def _guidance(use: NetworkUse, policy: FlowPolicy) -> AbstractContextManager[None]:
    """The policy's guidance as a probe uses it."""
    guided = extras(policy, "guided") if use.guidance == "off" else None
    return nullcontext() if guided is None else guided.guided(1.0)


def estimates(
    probe: Probe,
    policy: FlowPolicy,
    sampler: Sampler,
    stochastic: Sequence[bool],
    trajectories: Trajectories,
    nodes: Sequence[int],
    completed: Mapping[int, Tensor],
    condition: Condition,
    layout: Groups,
    generator: torch.Generator,
    usage: Usage,
    max_batch: int,
) -> dict[Key, Estimate]:
    """The probe's estimates, checked.

    Raises `ProbeError` if the probe changes its input or returns anything but latents of `nodes`.
    """
    name = f"{type(probe).__name__}.estimate"
    final = trajectories.images_latent
    given = [
        trajectories.states,
        trajectories.outputs,
        final,
        *condition.tensors.values(),
        *completed.values(),
    ]
    with _guidance(probe.network, policy):
        run = ProbeRun(
            policy,
            sampler,
            stochastic,
            trajectories,
            nodes,
            final,
            completed,
            condition,
            layout,
            generator,
            usage,
            max_batch,
            probe.network,
        )
        with inputs_unchanged(name, ProbeError, *given):
            found = dict(probe.estimate(run))
    for key, estimate in found.items():
        _check(name, key, estimate, run)
    return found


def _check(name: str, key: Any, estimate: Any, run: ProbeRun) -> None:
    node = key[1] if isinstance(key, tuple) and len(key) == 2 else key
    layout, states = run.layout, run.trajectories.states
    if not (isinstance(node, int) and node in run.nodes):
        allowed = f"its nodes, from which decisions start: {list(run.nodes)}"
        raise ProbeError(f"{name} returned an estimate of {key!r}; allowed: {allowed}")
    if not isinstance(estimate, Estimate) or not isinstance(estimate.latents, Tensor):
        found = f"{name} returned a {type(estimate).__name__} for node {node}"
        raise ProbeError(f"{found}; allowed: Estimate(latents)")
    latent, rows = tuple(states.shape[2:]), len(estimate.latents)
    each = {1, layout.members} if estimate.members is None else {estimate.members.shape[1]}
    allowed = sorted(layout.prompts * estimate.copies * count for count in each)
    if rows not in allowed or tuple(estimate.latents.shape[1:]) != latent:
        raise ProbeError(
            f"{name} returned latents of shape {tuple(estimate.latents.shape)} for node {node};"
            f" allowed: {' or '.join(map(str, allowed))} rows of {latent}"
        )
