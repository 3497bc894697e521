"""The promises of a sampler."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Gaussian, Schedule
from flowrl.flow import expand, shifted_schedule
from flowrl.testing.findings import (
    Contract,
    ContractBroken,
    expect,
    name_of,
    same,
    twice,
    unchanged,
)

CONTRACT = Contract("sampler")
promise = CONTRACT.promise

LEAST_STD = 1e-6
"""A std above 0 but below this counts as a rounding error of 0."""


@dataclass(frozen=True)
class Inputs:
    """Latents, velocities and steps of a mixed batch."""

    latent: Tensor
    velocity: Tensor
    step: Tensor

    def take(self, index: Tensor) -> "Inputs":
        """The samples `index`."""
        return Inputs(self.latent[index], self.velocity[index], self.step[index])


@dataclass(frozen=True)
class Case:
    """A sampler, and the number of steps of the test grids."""

    sampler: Any
    steps: int = 10

    def __repr__(self) -> str:
        return name_of(self.sampler)

    @property
    def schedule(self) -> Schedule:
        """The grid of most checks."""
        return shifted_schedule(self.steps)

    def inputs(
        self,
        repeats: int = 2,
        latent: tuple[int, ...] = (3, 4, 4),
        seed: int = 0,
        steps: int | None = None,
    ) -> Inputs:
        """A batch in which every step occurs `repeats` times."""
        generator = torch.Generator().manual_seed(seed)
        step = torch.arange(steps or self.steps).repeat(repeats)
        x, v = (torch.randn(len(step), *latent, generator=generator) for _ in range(2))
        return Inputs(x, v, step)

    def move(self, batch: Inputs, schedule: Schedule | None = None) -> Gaussian:
        """The transition of every sample of `batch`."""
        schedule = schedule or self.schedule
        return self.sampler.transition(batch.latent, batch.velocity, schedule, batch.step)


def close(
    got: Tensor, expected: Tensor, step: Tensor, what: str, hint: str, tolerance: float = 2e-5
) -> None:
    """Check values for equality up to rounding; `step` is the step of every sample."""
    same(
        got,
        expected,
        what,
        hint,
        tolerance,
        lambda index: f" at sample {index[0]}, step {int(step[index[0]])}",
    )


def close_gaussians(
    got: Gaussian, expected: Gaussian, step: Tensor, what: str, hint: str, tolerance: float = 2e-5
) -> None:
    """Check means and stds for equality up to rounding."""
    close(got.mean, expected.mean, step, f"the mean {what}", hint, tolerance)
    close(got.std, expected.std, step, f"the std {what}", hint, tolerance)


@promise(
    "it returns a Gaussian: mean [sample, *latent] and std [sample], for latents with any axes",
    basic=True,
)
def returns_a_gaussian_per_sample(case: Case) -> None:
    expect(
        callable(getattr(case.sampler, "transition", None)),
        "there is no method transition(latent, velocity, schedule, step)",
    )
    for latent in ((3, 4, 4), (5,)):
        batch = case.inputs(latent=latent)
        got, count = case.move(batch), len(batch.step)
        for name, wanted in (("mean", batch.latent.shape), ("std", (count,))):
            tensor: Any = getattr(got, name, None)
            expect(
                isinstance(tensor, Tensor),
                f"transition returned {type(got).__name__} without tensor {name}",
            )
            found = (
                f"the {name} is {tuple(tensor.shape)} for latents {tuple(batch.latent.shape)};"
                f" {tuple(wanted)} is needed"
            )
            expect(tensor.shape == wanted, found)


@promise(
    "mean and std are finite at every step of any grid, from t = 1 to the data at s = 0, and the"
    " std is 0 or more",
    basic=True,
)
def is_finite_at_every_step(case: Case) -> None:
    grids = {
        "shift 3": case.schedule,
        "even": shifted_schedule(case.steps, 1.0),
        "fine": shifted_schedule(10 * case.steps),
    }
    grids |= {f"shift {shift:g}": shifted_schedule(case.steps, shift) for shift in (50.0, 0.05)}
    for name, grid in grids.items():
        batch = case.inputs(repeats=1, latent=(3,), steps=grid.steps)
        got = case.move(batch, grid)
        for part, good in (
            ("mean", got.mean.isfinite().all(1)),
            ("std", got.std.isfinite() & (got.std >= 0)),
        ):
            if not bool(good.all()):
                step = int((~good).nonzero()[0])
                value = float(got.std[step]) if part == "std" else got.mean[step].tolist()
                times = (
                    f"from t = {float(grid.times[step]):.4g} to s ="
                    f" {float(grid.times[step + 1]):.4g}, grid {name!r}"
                )
                hint = (
                    "Formulas with 1 - t, t or s below a fraction bar need a case of their own at"
                    " the ends."
                )
                raise ContractBroken(f"the {part} is {value} at step {step} ({times}). {hint}")


@promise("the same input gives the same Gaussian, and is not changed", basic=True)
def is_pure(case: Case) -> None:
    batch, schedule = case.inputs(), case.schedule
    with unchanged({**vars(batch), "schedule.times": schedule.times}):
        first, second = twice(
            lambda: case.sampler.transition(batch.latent, batch.velocity, schedule, batch.step)
        )
    close_gaussians(
        second,
        first,
        batch.step,
        "in a second call",
        "Draw no noise: the Gaussian is returned, and sampled elsewhere.",
        0.0,
    )


@promise(
    "the result is float32, computed in float32 whatever the precision of latent, velocity and grid"
)
def computes_in_float32(case: Case) -> None:
    batch, hint = (
        case.inputs(),
        "Convert latent, velocity and times with .float() before anything else.",
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        low = Inputs(batch.latent.to(dtype), batch.velocity.to(dtype), batch.step)
        full = Inputs(low.latent.float(), low.velocity.float(), batch.step)
        for grid in (case.schedule, Schedule(case.schedule.times.double())):
            got = case.move(low, grid)
            for name in ("mean", "std"):
                found = (
                    f"{dtype} input on a {grid.times.dtype} grid gave a {name} in"
                    f" {getattr(got, name).dtype}"
                )
                expect(
                    getattr(got, name).dtype == torch.float32, f"{found}, not torch.float32. {hint}"
                )
            close_gaussians(got, case.move(full), batch.step, f"for {dtype} input", hint)


@promise(
    "samples do not influence each other, and steps may be mixed: a batch equals its samples one"
    " by one"
)
def treats_samples_separately(case: Case) -> None:
    batch = case.inputs()
    whole, hint = (
        case.move(batch),
        "Index the schedule by `step`, sample by sample, and take no statistics over the batch.",
    )
    for i in range(len(batch.step)):
        one = torch.tensor([i])
        alone, expected = case.move(batch.take(one)), Gaussian(whole.mean[one], whole.std[one])
        close_gaussians(
            alone,
            expected,
            batch.step[one],
            f"of sample {i} of a batch of {len(batch.step)}, alone,",
            hint,
        )
    order = torch.randperm(len(batch.step), generator=torch.Generator().manual_seed(0))
    shuffled = Gaussian(whole.mean[order], whole.std[order])
    close_gaussians(
        case.move(batch.take(order)),
        shuffled,
        batch.step[order],
        "of the batch in another order",
        hint,
    )


@promise("the std depends on the step only: not on the sample, the latent or the velocity")
def has_one_std_per_step(case: Case) -> None:
    batch = case.inputs(repeats=6)
    std = case.move(batch).std.reshape(6, case.steps)
    spread = std.amax(0) - std.amin(0)
    worst = int(spread.argmax())
    hint = (
        "Stochastic steps drawn per sample make the members of a group incomparable: use a window,"
        " drawn once per iteration."
    )
    found = (
        f"at step {worst} the stds of 6 samples of one batch are"
        f" {[round(value, 6) for value in std[:, worst].tolist()]}"
    )
    expect(float(spread.max()) <= 1e-6, f"{found}. {hint}")
    still = case.inputs(repeats=1, latent=(2,))
    zeros = Inputs(torch.zeros_like(still.latent), torch.zeros_like(still.velocity), still.step)
    close(
        case.move(zeros).std,
        std[0],
        still.step,
        "the std for latents and velocities of 0",
        "Use times only.",
        1e-6,
    )


@promise("steps without noise have a std of exactly 0")
def knows_no_tiny_noise(case: Case) -> None:
    batch = case.inputs(repeats=1)
    std = case.move(batch).std
    tiny = ((std > 0) & (std < LEAST_STD)).nonzero().flatten()
    if len(tiny):
        step = int(tiny[0])
        hint = (
            "0 means 'not a decision'; a tiny number makes its log-probability explode. Do not"
            " clamp a std from below."
        )
        raise ContractBroken(f"at step {step} the std is {float(std[step]):.3g}. {hint}")


@promise(
    "the mean moves along the path: noise-free latents (1-t) x_0 with v = -x_0 go to (1-s) x_0, and"
    " where the std is 0 also (1-t) x_0 + t eps with v = eps - x_0 goes to (1-s) x_0 + s eps"
)
def moves_along_the_path(case: Case) -> None:
    batch = case.inputs(repeats=1)
    t, s = (expand(case.schedule.times[batch.step + i], batch.latent) for i in (0, 1))
    clean, noise = batch.latent, batch.velocity
    hint = (
        "Step i leads from node i to node i + 1, in time from t = times[i] down to s = times[i +"
        " 1]; v = eps - x_0."
    )
    bare = case.move(Inputs((1 - t) * clean, -clean, batch.step))
    close(bare.mean, (1 - s) * clean, batch.step, "the mean of a noise-free latent", hint, 1e-4)
    full = case.move(Inputs((1 - t) * clean + t * noise, noise - clean, batch.step))
    there = (1 - s) * clean + s * noise
    still = expand(full.std == 0, there)
    close(
        torch.where(still, full.mean, there),
        there,
        batch.step,
        "the mean of a step without noise",
        hint,
        1e-4,
    )


@promise("the gradient reaches the velocity through the mean, and only through it")
def passes_gradient_through_the_mean(case: Case) -> None:
    batch = case.inputs()
    velocity = batch.velocity.clone().requires_grad_()
    got = case.move(Inputs(batch.latent, velocity, batch.step))
    expect(
        not got.std.requires_grad,
        "the std carries a gradient to the velocity. Compute it from times alone.",
    )
    expect(
        got.mean.requires_grad,
        "the mean carries no gradient to the velocity. Was it detached, or made under no_grad?",
    )
    (gradient,) = torch.autograd.grad(got.mean.sum(), velocity)
    for name, bad in (
        ("not finite", ~gradient.isfinite().flatten(1).all(1)),
        ("0", (gradient == 0).flatten(1).all(1)),
    ):
        if bool(bad.any()):
            sample = int(bad.nonzero()[0])
            where = f"at sample {sample}, step {int(batch.step[sample])}"
            raise ContractBroken(f"the mean's gradient to the velocity is {name} {where}")


@promise("some step is stochastic")
def makes_decisions(case: Case) -> None:
    std = case.move(case.inputs(repeats=1)).std
    hint = "Its trajectories cannot be trained on; use it only for evaluation."
    expect(bool((std > 0).any()), f"no step of {case.steps} has a std above 0. {hint}")
