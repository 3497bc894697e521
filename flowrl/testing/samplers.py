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
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    expect,
    is_pure,
    maker,
    same,
    treats_samples_separately,
    twice,
    unchanged,
)

LEAST_STD = 1e-6
"""A std above 0 but below this counts as a rounding error of 0."""
SAMPLES, DATA_STD = 4, 0.5
"""Of the batches of solvers, and of their Gaussian data."""
ITERATIONS = 50
Network = Callable[[Tensor, Tensor], Tensor]
"""A velocity from states [sample, *latent] and a time."""


@dataclass(frozen=True)
class Case:
    """A sampler, and the number of steps of the grids."""

    sampler: Any
    steps: int
    repeats = 0.0
    tolerance = 2e-5

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """Latents, velocities and steps of a batch in which every step occurs twice, and a grid."""
        step = torch.arange(self.steps).repeat(2)
        latent, velocity = noise(2, len(step), 3, 4, 4)
        schedule = shifted_schedule(self.steps)
        return {"latent": latent, "velocity": velocity, "schedule": schedule, "step": step}

    def move(self, **changes: Any) -> Gaussian:
        """The transition of the inputs with some changes."""
        return self.sampler.transition(**{**self.inputs, **changes})

    def result(self, rows: Tensor | None = None) -> Tensor:
        """Mean and std of the samples `rows` (None: all) in one table [sample, element + 1]."""
        names = ("latent", "velocity", "step")
        few = {} if rows is None else {name: self.inputs[name][rows] for name in names}
        return table(self.move(**few))


def noise(*shape: int) -> Tensor:
    """Gaussian noise, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def table(gaussian: Gaussian) -> Tensor:
    """The mean's elements and the std [sample, element + 1]."""
    return torch.cat([gaussian.mean.flatten(1), gaussian.std[:, None]], 1)


def returns_a_gaussian_per_sample(case: Case) -> None:
    """It returns a Gaussian: mean [sample, *latent] and std [sample], for latents with any axes."""
    step = case.inputs["step"]
    for axes in ((3, 4, 4), (5,)):
        latent, velocity = noise(2, len(step), *axes)
        moved = case.move(latent=latent, velocity=velocity)
        for name, wanted in (("mean", latent.shape), ("std", step.shape)):
            shape = tuple(getattr(moved, name).shape)
            expect(shape == wanted, f"the {name} is {shape}; {tuple(wanted)} is needed")


def is_finite_at_every_step(case: Case) -> None:
    """Mean and std are finite at every step of any grid, from t = 1 to the data at s = 0, and the
    std is 0 or more.
    """
    hint = "1 - t, t or s below a fraction bar need a case of their own at the ends."
    for steps, shift in ((1, 3.0), (1, 1.0), (10, 3.0), (1, 50.0), (1, 0.05)):
        grid = shifted_schedule(steps * case.steps, shift)
        latent, velocity = noise(2, grid.steps, 3)
        step = torch.arange(grid.steps)
        moved = case.move(latent=latent, velocity=velocity, schedule=grid, step=step)
        bad = (~table(moved).isfinite()).any(1) | (moved.std < 0)
        first = int(bad.int().argmax())
        times = f"t = {grid.times[first]:.4g} to s = {grid.times[first + 1]:.4g}"
        result = f"the mean is {moved.mean[first].tolist()}, the std {float(moved.std[first])}"
        expect(not bad.any(), f"{result} at step {first} of {grid.steps} ({times}). {hint}")


def computes_in_float32(case: Case) -> None:
    """The result is float32, computed in float32 whatever the precision of latent, velocity and
    grid.
    """
    batch, hint = case.inputs, "Convert latent, velocity and times with .float() before all else."
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        low = {name: batch[name].to(dtype) for name in ("latent", "velocity")}
        expected = case.move(**{name: tensor.float() for name, tensor in low.items()})
        for grid in (batch["schedule"], Schedule(batch["schedule"].times.double())):
            moved = case.move(**low, schedule=grid)
            dtypes = {moved.mean.dtype, moved.std.dtype}
            expect(dtypes == {torch.float32}, f"{dtype} input gave {dtypes}, not float32. {hint}")
            what = f"for {dtype} input, mean and std"
            same(table(moved), table(expected), what, hint, case.tolerance)


def has_one_std_per_step(case: Case) -> None:
    """The std depends on the step only: not on the sample, the latent or the velocity."""
    hint = "A window, drawn once per iteration, selects steps; compute the std from times alone."
    std, batch = case.move().std.view(2, -1), case.inputs
    still = case.move(latent=torch.zeros_like(batch["latent"]), velocity=batch["velocity"] * 0.0)
    same(std[1], std[0], "of the second sample at each step, the std", hint, 1e-6)
    same(still.std, std.flatten(), "for latents and velocities of 0, the std", hint, 1e-6)


def knows_no_tiny_noise(case: Case) -> None:
    """Steps without noise have a std of exactly 0."""
    std = case.move().std
    tiny = (std > 0) & (std < LEAST_STD)
    hint = "0 means 'not a decision'. Do not clamp a std from below."
    expect(not tiny.any(), f"the stds {std[tiny].tolist()} are tiny, but not 0. {hint}")


def moves_along_the_path(case: Case) -> None:
    """The mean moves along the path: noise-free latents (1-t) x_0 with v = -x_0 go to (1-s) x_0,
    and where the std is 0 also (1-t) x_0 + t eps with v = eps - x_0 goes to (1-s) x_0 + s eps.
    """
    batch, hint = case.inputs, "Time falls from t = times[i] to s = times[i + 1]; v = eps - x_0."
    clean, eps, times = batch["latent"], batch["velocity"], batch["schedule"].times
    t, s = (expand(times[batch["step"] + i], clean) for i in (0, 1))
    mean = case.move(latent=(1 - t) * clean, velocity=-clean).mean
    same(mean, (1 - s) * clean, "the mean of a noise-free latent", hint, 1e-4)
    moved = case.move(latent=(1 - t) * clean + t * eps, velocity=eps - clean)
    still = expand(moved.std == 0, clean)
    end = torch.where(still, (1 - s) * clean + s * eps, moved.mean)
    same(moved.mean, end, "the mean of a step without noise", hint, 1e-4)


def passes_gradient_through_the_mean(case: Case) -> None:
    """The gradient reaches the velocity through the mean, and only through it."""
    velocity = case.inputs["velocity"].requires_grad_()
    moved = case.move(velocity=velocity)
    expect(not moved.std.requires_grad, "the std carries a gradient: compute it from times alone")
    expect(moved.mean.requires_grad, "the mean carries no gradient. Was it detached?")
    (gradient,) = torch.autograd.grad(moved.mean.sum(), velocity)
    size = gradient.flatten(1).abs().amax(1)
    expect((size > 0).all() and size.isfinite().all(), f"the gradients of samples are {size}")


def makes_decisions(case: Case) -> None:
    """Some step is stochastic."""
    hint = "Its trajectories cannot be trained on; use it only for evaluation."
    expect((case.move().std > 0).any(), f"no step of {case.steps} has a std above 0. {hint}")


@dataclass(frozen=True)
class SolverCase:
    """A multistep solver, and the number of steps of the grids."""

    solver: Any
    steps: int
    tolerance = 1e-5

    def solve(
        self,
        network: Network,
        steps: int = 0,
        rows: Tensor | None = None,
        start: Tensor | None = None,
        beside: bool = False,
    ) -> tuple[list[Tensor], int]:
        """The states of a solution from noise, or from the samples `rows` of it, and how often it
        drew. `beside`: another solution of the same solver advances at the same time.
        """
        whole = noise(SAMPLES, 3, 4, 4) if start is None else start
        rows = torch.arange(SAMPLES) if rows is None else rows
        states, generator = [whole[rows]], torch.Generator().manual_seed(1)
        draws = []

        def draw(x: Tensor) -> Tensor:
            draws.append(torch.randn(whole.shape, generator=generator)[rows].to(x))
            return draws[-1]

        grid = self.solver.grid(shifted_schedule(steps or self.steps))
        advance = self.solver.solution(grid, draw)
        other = self.solver.solution(grid, torch.zeros_like) if beside else None
        for number in range(grid.steps):
            velocity = network(states[-1], grid.times[number])
            with unchanged(x=states[-1], velocity=velocity):
                states.append(advance(number, velocity, states[-1]))
            if other:
                other(number, -velocity, states[-1])
        return states, len(draws)

    def result(self, rows: Tensor | None = None) -> Tensor:
        """The end of a solution of the samples `rows` (None: all)."""
        return self.solve(curved, rows=rows)[0][-1]


def curved(x: Tensor, time: Tensor) -> Tensor:
    """A velocity that is not linear."""
    return torch.tanh(x) * (1 + time)


def of_gaussian_data(x: Tensor, time: Tensor) -> Tensor:
    """v of data N(0, DATA_STD^2); the ODE leads from x to DATA_STD x."""
    share = (1 - time) * DATA_STD**2
    return x * (time - share) / ((1 - time) * share + time**2)


def keeps_the_number_of_steps(case: SolverCase) -> None:
    """`grid` returns a schedule with as many steps, which ends at time 0."""
    for steps in (1, 2, case.steps):
        schedule = shifted_schedule(steps)
        with unchanged(schedule=schedule):
            grid = case.solver.grid(schedule)
        fits = isinstance(grid, Schedule) and grid.steps == steps and grid.times[-1] == 0
        expect(fits, f"the grid of {steps} steps is {grid}")


def returns_states(case: SolverCase) -> None:
    """A step returns states like x, float32 and finite, for latents with any axes."""
    for steps in (1, 2, case.steps):
        for axes in ((3, 4, 4), (5,)):
            states, _ = case.solve(curved, steps, start=noise(SAMPLES, *axes))
            for number, state in enumerate(states):
                kind = (tuple(state.shape), state.dtype)
                what = f"step {number - 1} of {steps} returned"
                expect(kind == ((SAMPLES, *axes), torch.float32), f"{what} {kind}")
                expect(state.isfinite().all(), f"{what} values that are not finite")


def starts_anew(case: SolverCase) -> None:
    """Solutions do not influence each other, and all randomness comes from `draw`."""
    hint = "Keep the history in the object that `solution` returns, and draw by draw(x) only."
    for end in twice(lambda: case.solve(curved, beside=True)[0][-1]):
        same(end, case.result(), "beside another solution, the end", hint)


def ends_at_the_predicted_image(case: SolverCase) -> None:
    """If the network always predicts the same clean image, v = (x - x_0) / t, the end is x_0."""
    clean = noise(2 * SAMPLES, 3, 4, 4)[SAMPLES:]
    end = case.solve(lambda x, time: (x - clean) / time)[0][-1]
    same(end, clean, "the end", "Time falls from times[i] to times[i + 1]; v = eps - x_0.", 1e-3)


def converges(case: SolverCase) -> str | None:
    """Without noise, more steps come closer to the solution of the ODE."""
    errors = []
    for steps in (5, 40):
        states, draws = case.solve(of_gaussian_data, steps)
        errors.append(float((states[-1] - DATA_STD * states[0]).abs().max()))
        if draws:
            return INAPPLICABLE
    few, many = errors
    expect(many < max(few / 4, 5e-3), f"the error is {few:.3g} with 5 steps and {many:.3g} with 40")
    return None


@dataclass(frozen=True)
class WindowCase:
    """A window, and the number of steps of the grids."""

    window: Any
    steps: int

    def drawn(self, iteration: int) -> list[int]:
        """The steps of an iteration."""
        generator = torch.Generator().manual_seed(iteration)
        return list(self.window.steps(self.steps, generator, iteration))


def returns_steps(case: WindowCase) -> None:
    """It returns one or more different steps in ascending order, from 0 to the number of steps -
    1.
    """
    for iteration in range(ITERATIONS):
        steps = case.drawn(iteration)
        fits = steps and steps == sorted(set(steps) & set(range(case.steps)))
        whole = all(type(step) is int for step in steps)
        expect(fits and whole, f"the steps of iteration {iteration} of {case.steps} are {steps}")


def draws_reproducibly(case: WindowCase) -> None:
    """The same generator state and iteration give the same steps, with no other randomness."""
    hint = "Draw from the generator that is given, not from torch's global one, and keep no state."
    for iteration in (0, 1, ITERATIONS):
        first, second = twice(lambda i=iteration: case.drawn(i))
        expect(first == second, f"the steps are {first}, and {second} in a second call. {hint}")


SAMPLER = (
    computes_in_float32,
    treats_samples_separately,
    has_one_std_per_step,
    knows_no_tiny_noise,
    moves_along_the_path,
    passes_gradient_through_the_mean,
    makes_decisions,
)
SOLVER = (starts_anew, ends_at_the_predicted_image, treats_samples_separately, converges)


def sampler(part: Any, steps: int = 10, without: Sequence[str] = ()) -> Contract:
    """The contract of a sampler (`Sampler`).

    Args:
        part: the sampler: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.
    """
    basic = (returns_a_gaussian_per_sample, is_finite_at_every_step, is_pure)
    return _contract("sampler", basic, SAMPLER, part, Case, steps, without)


def solver(part: Any, steps: int = 10, without: Sequence[str] = ()) -> Contract:
    """The contract of a multistep solver (`MultistepSolver`).

    Args:
        part: the solver: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids.
        without: names of promises that the part breaks on purpose.
    """
    basic = (keeps_the_number_of_steps, returns_states)
    return _contract("multistep solver", basic, SOLVER, part, SolverCase, steps, without)


def window(part: Any, steps: int = 20, without: Sequence[str] = ()) -> Contract:
    """The contract of a window (`Window`).

    Args:
        part: the window: an object (copied for every promise), a class, or a function that makes
            it.
        steps: number of steps of the grids, which the window must fit.
        without: names of promises that the part breaks on purpose.
    """
    basic = (returns_steps,)
    return _contract("window", basic, (draws_reproducibly,), part, WindowCase, steps, without)


def _contract(
    kind: str, basic: Any, others: Any, part: Any, case: Any, steps: int, without: Sequence[str]
) -> Contract:
    require(steps >= 1, "steps", steps, "1 or more")
    return Contract(kind, basic, others, maker(part), lambda made: case(made, steps), without)
