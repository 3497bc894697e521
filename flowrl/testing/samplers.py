"""The promises of samplers, of multistep solvers and of windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.types import Gaussian, Schedule
from flowrl.flow import expand, shifted_schedule
from flowrl.samplers.kernels import checked_transition
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    Pure,
    Separate,
    basic,
    expect,
    promise,
    same,
    twice,
    unchanged,
)

LEAST_STD = 1e-6
"""A std above 0 but below this counts as a rounding error of 0."""
SAMPLES, DATA_STD = 4, 0.5
"""Of the batches of solvers, and of their Gaussian data."""
SHAPES = ((3, 4, 4), (5,))
"""Axes of latents."""
Network = Callable[[Tensor, Tensor], Tensor]
"""A velocity from states [sample, *latent] and a time."""


@dataclass(frozen=True)
class OnGrids(Contract):
    """A contract on grids of a number of steps."""

    steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, "steps", self.steps, "1 or more")


@dataclass(frozen=True)
class SamplerContract(OnGrids, Pure, Separate):
    """The contract of a sampler (`Sampler`).

    Args:
        part: the sampler: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.
    """

    tolerance = 2e-5

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """Latents, velocities and steps of a batch in which every step occurs twice, and a grid."""
        step = torch.arange(self.steps).repeat(2)
        latent, velocity = noise(2, len(step), *SHAPES[0])
        schedule = shifted_schedule(self.steps)
        return {"latent": latent, "velocity": velocity, "schedule": schedule, "step": step}

    def move(self, **changes: Any) -> Gaussian:
        """The transition of the inputs with some changes."""
        return checked_transition(self.part, **{**self.inputs, **changes})

    def result(self, rows: Tensor | None = None) -> Tensor:
        """Mean and std of the samples `rows` (None: all) in one table [sample, element + 1]."""
        names = ("latent", "velocity", "step")
        few = {} if rows is None else {name: self.inputs[name][rows] for name in names}
        return table(self.move(**few))

    @basic
    def returns_a_gaussian_per_sample(self) -> None:
        """It returns a Gaussian: mean [sample, *latent] and std [sample], for latents with any
        axes.
        """
        step = self.inputs["step"]
        for axes in SHAPES:
            latent, velocity = noise(2, len(step), *axes)
            moved = self.move(latent=latent, velocity=velocity)
            shapes, wanted = (moved.mean.shape, moved.std.shape), (latent.shape, step.shape)
            expect(shapes == wanted, f"mean and std are {shapes}; {wanted} is needed")

    @basic
    def is_finite_at_every_step(self) -> None:
        """Mean and std are finite at every step of any grid, from t = 1 to the data at s = 0, and
        the std is above 0, or exactly 0 for a step without noise.

        1 - t, t or s below a fraction bar need a case of their own at the ends. A std of 0 means
        'not a decision': do not clamp it from below.
        """
        for steps, shift in ((1, 3.0), (1, 1.0), (10, 3.0), (1, 50.0), (1, 0.05)):
            grid = shifted_schedule(steps * self.steps, shift)
            latent, velocity = noise(2, grid.steps, 3)
            step = torch.arange(grid.steps)
            moved = self.move(latent=latent, velocity=velocity, schedule=grid, step=step)
            finite = table(moved).isfinite().all(1)
            bad = ~finite | ((moved.std < LEAST_STD) & (moved.std != 0))
            first = int(bad.int().argmax())
            times = f"t = {grid.times[first]:.4g} to s = {grid.times[first + 1]:.4g}"
            result = f"the mean is {moved.mean[first].tolist()}, the std {float(moved.std[first])}"
            expect(not bad.any(), f"{result} at step {first} of {grid.steps} ({times})")

    @promise
    def computes_in_float32(self) -> None:
        """The result is float32, computed in float32 whatever the precision of latent and velocity.

        Convert both with .float() before all else.
        """
        for dtype in (torch.bfloat16, torch.float64):
            low = {name: self.inputs[name].to(dtype) for name in ("latent", "velocity")}
            expected = self.move(**{name: tensor.float() for name, tensor in low.items()})
            moved = self.move(**low)
            dtypes = {moved.mean.dtype, moved.std.dtype}
            expect(dtypes == {torch.float32}, f"{dtype} input gave {dtypes}, not float32")
            same(table(moved), table(expected), f"for {dtype} input, mean and std", self.tolerance)

    @promise
    def has_one_std_per_step(self) -> None:
        """The std depends on the step only: not on the sample, the latent or the velocity.

        A window, drawn once per iteration, selects steps; compute the std from times alone.
        """
        std, zeros = self.move().std, torch.zeros_like(self.inputs["latent"])
        still = self.move(latent=zeros, velocity=zeros).std
        same(std.roll(self.steps), std, "of another sample at each step, the std", 1e-6)
        same(still, std, "for latents and velocities of 0, the std", 1e-6)

    @promise
    def moves_along_the_path(self) -> None:
        """The mean moves along the path: noise-free latents (1-t) x_0 with v = -x_0 go to (1-s)
        x_0, and where the std is 0 also (1-t) x_0 + t eps with v = eps - x_0 goes to (1-s) x_0 + s
        eps.

        Time falls from t = times[i] to s = times[i + 1]; v = eps - x_0.
        """
        clean, eps, schedule, step = self.inputs.values()
        t, s = (expand(schedule.times[step + i], clean) for i in (0, 1))
        mean = self.move(latent=(1 - t) * clean, velocity=-clean).mean
        same(mean, (1 - s) * clean, "the mean of a noise-free latent", 1e-4)
        moved = self.move(latent=(1 - t) * clean + t * eps, velocity=eps - clean)
        still = expand(moved.std == 0, clean)
        end = torch.where(still, (1 - s) * clean + s * eps, moved.mean)
        same(moved.mean, end, "the mean of a step without noise", 1e-4)

    @promise
    def passes_gradient_through_the_mean(self) -> None:
        """The gradient reaches the velocity through the mean, and only through it.

        Compute the std from times alone; was the mean detached?
        """
        velocity = self.inputs["velocity"].requires_grad_()
        moved = self.move(velocity=velocity)
        expect(not moved.std.requires_grad, "the std carries a gradient")
        (gradient,) = torch.autograd.grad(moved.mean.sum(), velocity)
        size = gradient.flatten(1).abs().amax(1)
        expect((size > 0).all() and size.isfinite().all(), f"the gradients of samples are {size}")

    @promise
    def makes_decisions(self) -> None:
        """Some step is stochastic.

        Its trajectories cannot be trained on; use it only for evaluation.
        """
        expect((self.move().std > 0).any(), f"no step of {self.steps} has a std above 0")


@dataclass(frozen=True)
class SolverContract(OnGrids, Separate):
    """The contract of a multistep solver (`MultistepSolver`).

    Args:
        part: the solver: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.
    """

    tolerance = 1e-5

    def solve(
        self,
        network: Network,
        steps: int = 0,
        rows: Tensor | None = None,
        axes: Sequence[int] = SHAPES[0],
        beside: bool = False,
    ) -> tuple[list[Tensor], int]:
        """The states of a solution from noise, or from the samples `rows` of it, and how often it
        drew. `beside`: another solution of the same solver advances at the same time.
        """
        start, generator = noise(SAMPLES, *axes), torch.Generator().manual_seed(1)
        rows = torch.arange(SAMPLES) if rows is None else rows
        states, draws = [start[rows]], []

        def draw(x: Tensor) -> Tensor:
            draws.append(torch.randn(start.shape, generator=generator)[rows].to(x))
            return draws[-1]

        grid = self.part.grid(shifted_schedule(steps or self.steps))
        advance, other = (self.part.solution(grid, source) for source in (draw, torch.zeros_like))
        for number in range(grid.steps):
            velocity = network(states[-1], grid.times[number])
            with unchanged(x=states[-1], velocity=velocity):
                states.append(advance(number, velocity, states[-1]))
            if beside:
                other(number, -velocity, states[-1])
        return states, len(draws)

    def result(self, rows: Tensor | None = None) -> Tensor:
        """The end of a solution of the samples `rows` (None: all)."""
        return self.solve(curved, rows=rows)[0][-1]

    @basic
    def keeps_the_number_of_steps(self) -> None:
        """`grid` returns a schedule with as many steps, which ends at time 0."""
        for steps in (1, 2, self.steps):
            schedule = shifted_schedule(steps)
            with unchanged(schedule=schedule):
                grid = self.part.grid(schedule)
            fits = isinstance(grid, Schedule) and grid.steps == steps and grid.times[-1] == 0
            expect(fits, f"the grid of {steps} steps is {grid}")

    @basic
    def returns_states(self) -> None:
        """A step returns states like x, float32 and finite, for latents with any axes."""
        for steps in (1, 2, self.steps):
            for axes in SHAPES:
                for number, state in enumerate(self.solve(curved, steps, axes=axes)[0]):
                    fits = state.shape == (SAMPLES, *axes) and state.dtype == torch.float32
                    kind = f"{tuple(state.shape)}, {state.dtype}, or a number that is not finite"
                    what = f"step {number - 1} of {steps} returned {kind}"
                    expect(fits and state.isfinite().all(), what)

    @promise
    def starts_anew(self) -> None:
        """Solutions do not influence each other, and all randomness comes from `draw`.

        Keep the history in the object that `solution` returns, and draw by draw(x) only.
        """
        for end in twice(lambda: self.solve(curved, beside=True)[0][-1]):
            same(end, self.result(), "beside another solution, the end")

    @promise
    def ends_at_the_predicted_image(self) -> None:
        """If the network always predicts the same clean image, v = (x - x_0) / t, the end is x_0.

        Time falls from times[i] to times[i + 1]; v = eps - x_0.
        """
        clean = noise(2 * SAMPLES, *SHAPES[0])[SAMPLES:]
        end = self.solve(lambda x, time: (x - clean) / time)[0][-1]
        same(end, clean, "the end", 1e-3)

    @promise
    def converges(self) -> str | None:
        """Without noise, more steps come closer to the solution of the ODE."""
        errors = []
        for steps in (5, 40):
            states, draws = self.solve(of_gaussian_data, steps)
            errors.append(float((states[-1] - DATA_STD * states[0]).abs().max()))
            if draws:
                return INAPPLICABLE
        few, many = errors
        expect(
            many < max(few / 4, 5e-3), f"the error is {few:.3g} with 5 steps and {many:.3g} with 40"
        )
        return None


@dataclass(frozen=True)
class WindowContract(OnGrids):
    """The contract of a window (`Window`).

    Args:
        part: the window: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids, which the window must fit.
        without: names of promises that the part breaks on purpose.
    """

    steps: int = 20

    def drawn(self) -> list[list[int]]:
        """The steps of some iterations."""
        return [
            list(self.part.steps(self.steps, torch.Generator().manual_seed(i), i))
            for i in range(50)
        ]

    @basic
    def returns_steps(self) -> None:
        """It returns one or more different steps in ascending order, from 0 to the number of steps
        - 1.
        """
        for iteration, steps in enumerate(self.drawn()):
            fits = steps and steps == sorted(set(steps) & set(range(self.steps)))
            expect(fits, f"the steps of iteration {iteration} of {self.steps} are {steps}")

    @promise
    def draws_reproducibly(self) -> None:
        """The same generator state and iteration give the same steps, with no other randomness.

        Draw from the generator that is given, not from torch's global one, and keep no state.
        """
        first, second = twice(self.drawn)
        expect(first == second, f"the steps are {first}, and {second} in a second call")


def noise(*shape: int) -> Tensor:
    """Gaussian noise, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def table(gaussian: Gaussian) -> Tensor:
    """The mean's elements and the std [sample, element + 1]."""
    return torch.cat([gaussian.mean.flatten(1), gaussian.std[:, None]], 1)


def curved(x: Tensor, time: Tensor) -> Tensor:
    """A velocity that is not linear."""
    return torch.tanh(x) * (1 + time)


def of_gaussian_data(x: Tensor, time: Tensor) -> Tensor:
    """v of data N(0, DATA_STD^2); the ODE leads from x to DATA_STD x."""
    share = (1 - time) * DATA_STD**2
    return x * (time - share) / ((1 - time) * share + time**2)
