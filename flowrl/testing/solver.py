"""The promises of a multistep solver."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Schedule
from flowrl.flow import shifted_schedule
from flowrl.testing.findings import INAPPLICABLE, Contract, expect, name_of, same, unchanged

CONTRACT = Contract("multistep solver")
promise = CONTRACT.promise

SAMPLES, STD = 4, 0.5
"""Samples of a batch, and the standard deviation of Gaussian data."""
Network = Callable[[Tensor, Tensor], Tensor]
"""A velocity from states [sample, *latent] and a time."""


@dataclass(frozen=True)
class Case:
    """A multistep solver, and the number of steps of the test grids."""

    solver: Any
    steps: int = 10

    def __repr__(self) -> str:
        return name_of(self.solver)

    def start(self, latent: tuple[int, ...] = (3, 4, 4)) -> Tensor:
        """Noise [sample, *latent]."""
        return torch.randn(SAMPLES, *latent, generator=torch.Generator().manual_seed(0))

    def solution(
        self, x: Tensor, network: Network, rows: slice = slice(None), steps: int = 0
    ) -> "Solution":
        """A solution from the samples `rows` of the initial noise x."""
        return Solution(self.solver, shifted_schedule(steps or self.steps), x, network, rows)


class Solution:
    """States [point, sample, *latent] of a solution, one more for every call of `advance`."""

    def __init__(
        self, solver: Any, schedule: Schedule, x: Tensor, network: Network, rows: slice
    ) -> None:
        self.whole, self.rows, self.network, self.draws = x, rows, network, 0
        self.grid = solver.grid(schedule)
        self.states = [x[rows]]
        self._step = solver.solution(self.grid, self._draw)

    def _draw(self, x: Tensor) -> Tensor:
        self.draws += 1
        generator = torch.Generator().manual_seed(self.draws)
        return torch.randn(self.whole.shape, generator=generator)[self.rows].to(x)

    def advance(self) -> None:
        """The next step; the solver must not change its input."""
        number, x = len(self.states) - 1, self.states[-1]
        velocity = self.network(x, self.grid.times[number])
        with unchanged({"x": x, "velocity": velocity}):
            self.states.append(self._step(number, velocity, x))

    def finish(self) -> Tensor:
        """The state at the end."""
        while len(self.states) <= self.grid.steps:
            self.advance()
        return self.states[-1]


def curved(x: Tensor, time: Tensor) -> Tensor:
    """A velocity that is not linear."""
    return torch.tanh(x) * (1 + time)


def of_gaussian_data(x: Tensor, time: Tensor) -> Tensor:
    """v of data N(0, STD^2); the ODE leads from x to STD x."""
    share = (1 - time) * STD**2
    return x * (time - share) / ((1 - time) * share + time**2)


@promise("`grid` returns a schedule with as many steps, which ends at time 0", basic=True)
def keeps_the_number_of_steps(case: Case) -> None:
    for steps in (1, 2, case.steps):
        schedule = shifted_schedule(steps)
        with unchanged({"schedule.times": schedule.times}):
            grid = case.solver.grid(schedule)
        expect(isinstance(grid, Schedule), f"grid returned a {type(grid).__name__}, not a Schedule")
        expect(grid.steps == steps, f"the grid of {steps} steps has {grid.steps}")
        expect(
            float(grid.times[-1]) == 0, f"the grid ends at time {float(grid.times[-1]):.3g}, not 0"
        )


@promise("a step returns states like x, float32 and finite, for latents with any axes", basic=True)
def returns_states(case: Case) -> None:
    for steps in (1, 2, case.steps):
        for latent in ((3, 4, 4), (5,)):
            found = case.solution(case.start(latent), curved, steps=steps)
            found.finish()
            for number, state in enumerate(found.states[1:]):
                what = f"step {number} of {steps} returned"
                expect(isinstance(state, Tensor), f"{what} a {type(state).__name__}, not a tensor")
                expect(state.shape == found.whole.shape, f"{what} shape {tuple(state.shape)}")
                expect(state.dtype == torch.float32, f"{what} {state.dtype}, not torch.float32")
                expect(bool(state.isfinite().all()), f"{what} values that are not finite")


@promise("solutions do not influence each other, and all randomness comes from `draw`")
def starts_anew(case: Case) -> None:
    x = case.start()
    first = case.solution(x, curved)
    first.finish()
    torch.rand(1)  # a part that draws from the global generator gets other numbers
    second, other = case.solution(x, curved), case.solution(2 * x, curved)
    for _ in range(second.grid.steps):
        second.advance()
        other.advance()
    hint = "Keep the history in the object that `solution` returns, and draw by draw(x) only."
    same(second.states[-1], first.states[-1], "in a second solution, the end", hint)


@promise(
    "if the network predicts the same clean image everywhere, v = (x - x_0) / t, the end is x_0"
)
def ends_at_the_predicted_image(case: Case) -> None:
    clean = torch.rand(SAMPLES, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found = case.solution(case.start(), lambda x, time: (x - clean) / time).finish()
    hint = "Time falls from times[i] to times[i + 1]; v = eps - x_0."
    same(found, clean, "the end", hint, 1e-3)


@promise("samples do not influence each other: a batch equals its samples one by one")
def treats_samples_separately(case: Case) -> None:
    whole = case.solution(case.start(), curved).finish()
    for i in range(SAMPLES):
        alone = case.solution(case.start(), curved, slice(i, i + 1)).finish()
        hint = "Take no statistics over the batch."
        same(alone, whole[i : i + 1], f"of sample {i} alone, the end", hint, 1e-5)


@promise("without noise, more steps come closer to the solution of the ODE")
def converges(case: Case) -> str | None:
    x, errors = case.start(), []
    for steps in (5, 40):
        found = case.solution(x, of_gaussian_data, steps=steps)
        errors.append(float((found.finish() - STD * x).abs().max()))
        if found.draws:
            return INAPPLICABLE
    few, many = errors
    expect(many < max(few / 4, 5e-3), f"the error is {few:.3g} with 5 steps and {many:.3g} with 40")
    return None
