"""What every sampler promises."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.flow.time import shifted_schedule
from flowrl.protocols import RandomSampler, Sampler
from flowrl.testing.findings import Contract, ContractBroken, expect
from flowrl.types import Gaussian

CONTRACT = Contract("sampler")
promise = CONTRACT.promise

STEPS = 10
SCHEDULE = shifted_schedule(STEPS)


@dataclass(frozen=True)
class Inputs:
    """Latents, velocities and steps of a mixed batch."""

    latent: Tensor
    velocity: Tensor
    step: Tensor


def inputs(count: int = 20, seed: int = 0) -> Inputs:
    """A batch in which every step occurs."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.arange(count) % STEPS
    return Inputs(torch.randn(count, 3, 4, 4, generator=generator), torch.randn(count, 3, 4, 4, generator=generator), step)


def drawn(sampler: Any, seed: int = 0) -> Sampler:
    """The sampler itself, or one draw of a sampler that is drawn every iteration."""
    if isinstance(sampler, RandomSampler):
        return sampler.draw(SCHEDULE, torch.Generator().manual_seed(seed))
    return sampler


def move(sampler: Any, batch: Inputs) -> Gaussian:
    return drawn(sampler).transition(batch.latent, batch.velocity, SCHEDULE, batch.step)


def close(got: Tensor, expected: Tensor, what: str, hint: str = "") -> None:
    """Equal but for float rounding, or `ContractBroken` with the first sample that differs."""
    gap = (got - expected).abs().flatten(1).amax(1) if got.ndim > 1 else (got - expected).abs()
    bad = (gap > 2e-5 * (1 + float(expected.abs().max()))).nonzero().flatten()
    if len(bad):
        raise ContractBroken(f"{what}: sample {int(bad[0])} differs by {float(gap[bad[0]]):.3g}. {hint}".strip())


@promise("mean is [sample, *latent], std is [sample]; both float32 and finite at every step, std >= 0")
def returns_a_gaussian_per_sample(sampler: Any) -> None:
    batch = inputs()
    got = move(sampler, batch)
    expect(got.mean.shape == batch.latent.shape, f"the mean is {tuple(got.mean.shape)} for latents {tuple(batch.latent.shape)}")
    expect(got.std.shape == (20,), f"the std is {tuple(got.std.shape)} for 20 samples; one number per sample is needed")
    for name, value in (("mean", got.mean), ("std", got.std)):
        expect(value.dtype == torch.float32, f"the {name} is {value.dtype}, not float32")
        bad = ~torch.isfinite(value.flatten(1).sum(1) if value.ndim > 1 else value)
        if bool(bad.any()):
            step = int(batch.step[bad.nonzero()[0, 0]])
            raise ContractBroken(f"the {name} is not finite at step {step} (t = {float(SCHEDULE.times[step]):.3f})")
    expect(bool((got.std >= 0).all()), f"a std is negative: {float(got.std.min()):.3g}")


@promise("the transition is computed in float32 whatever the input's precision")
def computes_in_float32(sampler: Any) -> None:
    batch = inputs()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        low = Inputs(batch.latent.to(dtype), batch.velocity.to(dtype), batch.step)
        full = Inputs(low.latent.float(), low.velocity.float(), batch.step)
        got, expected = move(sampler, low), move(sampler, full)
        hint = "Convert latent and velocity with .float() first."
        expect(got.mean.dtype == torch.float32, f"{dtype} latents gave a mean in {got.mean.dtype}. {hint}")
        close(got.mean, expected.mean, f"the mean for {dtype} input", hint)
        close(got.std, expected.std, f"the std for {dtype} input", hint)


@promise("samples do not influence each other: a mixed batch equals its samples one by one")
def treats_samples_separately(sampler: Any) -> None:
    batch = inputs()
    got = move(sampler, batch)
    for i in range(len(batch.step)):
        one = Inputs(batch.latent[i : i + 1], batch.velocity[i : i + 1], batch.step[i : i + 1])
        alone = move(sampler, one)
        close(
            got.mean[i : i + 1],
            alone.mean,
            f"the mean at step {int(batch.step[i])}, alone or in a batch",
            "Index the schedule by `step`.",
        )
        close(
            got.std[i : i + 1],
            alone.std,
            f"the std at step {int(batch.step[i])}, alone or in a batch",
            "Index the schedule by `step`.",
        )


@promise("all samples at the same step have the same std: which steps are stochastic is not drawn per sample")
def has_one_std_per_step(sampler: Any) -> None:
    batch = inputs(60)
    std = move(sampler, batch).std
    for step in range(STEPS):
        values = std[batch.step == step]
        spread = float(values.max() - values.min())
        expect(spread <= 1e-6, f"at step {step} stds differ by {spread:.3g} within one batch")


@promise("the same input gives the same Gaussian, and is not changed")
def is_pure(sampler: Any) -> None:
    batch = inputs()
    before = (batch.latent.clone(), batch.velocity.clone(), batch.step.clone())
    chosen = drawn(sampler)
    torch.manual_seed(1)
    first = chosen.transition(batch.latent, batch.velocity, SCHEDULE, batch.step)
    torch.manual_seed(2)
    second = chosen.transition(batch.latent, batch.velocity, SCHEDULE, batch.step)
    expect(torch.equal(first.mean, second.mean) and torch.equal(first.std, second.std), "a second call differs")
    unchanged = all(torch.equal(a, b) for a, b in zip(before, (batch.latent, batch.velocity, batch.step), strict=True))
    expect(unchanged, "latent, velocity or step was modified in place")


@promise("the gradient reaches the velocity through the mean, and only through it")
def passes_gradient_through_the_mean(sampler: Any) -> None:
    batch = inputs()
    velocity = batch.velocity.clone().requires_grad_()
    got = move(sampler, Inputs(batch.latent, velocity, batch.step))
    expect(not got.std.requires_grad, "the std depends on the velocity")
    expect(got.mean.requires_grad, "the mean does not carry a gradient to the velocity; was it detached?")
    (gradient,) = torch.autograd.grad(got.mean.sum(), velocity)
    silent = (gradient.flatten(1).abs().amax(1) == 0).nonzero().flatten()
    expect(bool(torch.isfinite(gradient).all()), "the gradient is not finite")
    if len(silent):
        raise ContractBroken(f"at step {int(batch.step[silent[0]])} the mean does not depend on the velocity")


@promise("some step is stochastic; where the std is 0 the mean is where the trajectory goes")
def makes_decisions(sampler: Any) -> None:
    batch = inputs()
    std = move(sampler, batch).std
    expect(bool((std > 0).any()), "no step has a std above 0: nothing can be learned from its trajectories")


@promise("a sampler that is drawn every iteration gives the same draw for the same generator state and iteration")
def draws_reproducibly(sampler: Any) -> None:
    if not isinstance(sampler, RandomSampler):
        return
    batch = inputs()
    for seed in range(3):
        first, second = (drawn(sampler, seed) for _ in range(2))
        expect(isinstance(first, Sampler), f"draw returned {first!r}, which has no transition(latent, velocity, schedule, step)")
        a, b = (s.transition(batch.latent, batch.velocity, SCHEDULE, batch.step).std for s in (first, second))
        expect(torch.equal(a, b), f"two draws from a generator seeded with {seed} differ. Draw from the generator given.")
