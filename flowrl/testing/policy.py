"""The promises of a policy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.testing.contract import (
    Contract,
    expect,
    is_pure,
    maker,
    same,
    treats_samples_separately,
)

METHODS = ("schedule", "encode", "velocity", "decode", "trainable", "reference", "frozen")
TIMES = (1000.0, 750.0, 400.0, 60.0)
PROMPTS = ("a red fox", "two blue cars", "a house", "the sea at night")


@dataclass(frozen=True)
class Case:
    """A policy with prompts, and a latent and a time for each."""

    policy: Any
    prompts: Sequence[Prompt]
    tolerance: float
    repeats = 0.0

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Noise, and 1000 t, different for every sample."""
        shape = (len(self.prompts), *self.policy.latent_shape)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        times = torch.tensor([TIMES[i % 4] - i // 4 for i in range(len(self.prompts))])
        return {"latents": latents.to(self.policy.device), "times": times.to(self.policy.device)}

    def velocity(self, rows: Tensor | None = None, condition: Condition | None = None) -> Tensor:
        """Velocities of the samples `rows` (None: all), with a condition of as many rows."""
        rows = torch.arange(len(self.prompts)) if rows is None else rows
        if condition is None:
            condition = self.condition().take(rows.to(self.policy.device))
        return self.policy.velocity(*(t[rows] for t in self.inputs.values()), condition)

    def result(self, rows: Tensor | None = None) -> Tensor:
        """Detached velocities."""
        return self.velocity(rows).detach()

    def condition(self) -> Condition:
        """The condition of all prompts."""
        return self.policy.encode(list(self.prompts))

    def same(self, got: Tensor, expected: Tensor, what: str, hint: str) -> None:
        """Check that velocities are equal up to rounding."""
        same(got, expected, f"{what} the velocity", hint, self.tolerance, floor=0.0)


@contextmanager
def moved(policy: Any) -> Iterator[None]:
    """Within this context the trained parameters have other values, as after some updates."""
    parameters, generator = list(policy.trainable().values()), torch.Generator().manual_seed(1)
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)


def has_all_members(case: Case) -> None:
    """It has a latent shape, a device and all methods."""
    missing = [name for name in METHODS if not callable(getattr(case.policy, name, None))]
    expect(not missing, f"these methods are missing: {', '.join(missing)}")
    shape, device = case.policy.latent_shape, case.policy.device
    fits = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
    expect(fits, f"latent_shape is {shape!r}, not a tuple of sizes without the sample axis")
    expect(isinstance(device, torch.device), f"device is {device!r}, not a torch.device")


def has_a_schedule(case: Case) -> str | None:
    """schedule(T) has T steps from noise (t near 1) to data (t = 0)."""
    for steps in (1, 4, 10):
        schedule = case.policy.schedule(steps)
        fits = isinstance(schedule, Schedule) and schedule.steps == steps
        expect(fits, f"schedule({steps}) is {schedule}: T steps join T + 1 times")
        first, last = schedule.times[[0, -1]].tolist()
        expect(first > 0.9 and abs(last) < 1e-6, f"times are from {first:.4g} to {last:.4g}")
        dtype = schedule.times.dtype
        expect(dtype == torch.float32, f"times are {dtype}, not float32")
    return None if first > 0.999 else f"it begins at t = {first:.4g}, but rollouts with pure noise"


def encodes_a_row_per_prompt(case: Case) -> None:
    """encode gives named tensors with one row per prompt."""
    for name, tensor in case.condition().tensors.items():
        fits = tensor.ndim > 0 and len(tensor) == len(case.prompts)
        expect(fits, f"{name!r} has shape {tuple(tensor.shape)} for {len(case.prompts)} prompts")


def gives_velocities(case: Case) -> None:
    """velocity gives [sample, *latent] in float32, finite."""
    velocity, wanted = case.result(), (len(case.prompts), *case.policy.latent_shape)
    expect(velocity.shape == wanted, f"velocity has shape {tuple(velocity.shape)}, not {wanted}")
    expect(velocity.dtype == torch.float32, f"velocities are {velocity.dtype}: use .float()")
    expect(velocity.isfinite().all(), "velocities are not finite")


def conditions_can_be_rearranged(case: Case) -> None:
    """A prompt's condition is its own: encoded alone, or with others, in any order, or repeated."""
    result, rows = case.result(), torch.arange(len(case.prompts))
    early = case.condition()
    for i, prompt in enumerate(case.prompts):
        alone = case.velocity(rows[i : i + 1], case.policy.encode([prompt]))
        hint = "Is there padding to the longest?"
        case.same(alone, result[i : i + 1], f"prompt {i} encoded alone:", hint)
    doubled = rows.repeat_interleave(2)
    got = case.velocity(doubled, case.condition().repeat(2))
    case.same(got, result[doubled], "every row twice:", "Are rows tiled instead?")
    hint = "A condition must remain valid while others are encoded."
    case.same(case.velocity(None, early), result, "with a condition encoded earlier:", hint)


def decodes_images(case: Case) -> str | None:
    """decode gives images [sample, channel, height, width] or videos [sample, frame, ...] in [0, 1]
    without a gradient.
    """
    images = case.policy.decode(case.inputs["latents"])
    fits = images.ndim in (4, 5) and len(images) == len(case.prompts)
    expect(fits, f"decode gave shape {tuple(images.shape)}")
    expect(not images.requires_grad, "images carry a gradient: rewards are constants of the loss")
    low, high = images.min(), images.max()
    outside = f"images reach from {low:.3g} to {high:.3g}; rewards expect [0, 1]"
    return None if low >= 0 and high <= 1 else outside


def names_what_is_trained(case: Case) -> str | None:
    """trainable gives the same named parameters in the same order every time, all of them open to
    gradients.
    """
    first, second = case.policy.trainable(), case.policy.trainable()
    expect(first, "nothing is trained")
    expect(list(first) == list(second), "names or their order differ between two calls")
    other = [name for name in first if first[name] is not second[name]]
    expect(not other, f"other objects in a second call, which no optimizer holds: {other[:3]}")
    closed = [name for name, p in first.items() if not p.requires_grad]
    expect(not closed, f"requires_grad is off for {closed[:3]}")
    narrow = [name for name, p in first.items() if p.dtype != torch.float32]
    lost = f"{narrow[:3]} are stored in less than float32: small updates will be lost"
    return lost if narrow else None


def carries_a_gradient(case: Case) -> None:
    """The gradient of the velocity reaches what is trained."""
    velocity, parameters = case.velocity(), list(case.policy.trainable().values())
    expect(velocity.requires_grad, "the velocity carries no gradient")
    gradients = torch.autograd.grad(velocity.square().mean(), parameters, allow_unused=True)
    expect(any(g is not None and g.any() for g in gradients), "all gradients are zero")


def has_a_reference(case: Case) -> None:
    """What is trained changes the velocity, and does not change the reference's; neither do
    contexts that ended in an error.
    """
    with case.policy.reference():
        base = case.velocity()
    expect(not base.requires_grad, "the reference's velocity carries a gradient")
    with moved(case.policy):
        now = case.result()
        expect(not torch.equal(now, base), "other weights leave the reference's velocity")
        with case.policy.reference():
            hint = "The reference must be the model before training."
            case.same(case.velocity(), base, "after training, within reference():", hint)
        for context in (case.policy.reference, case.policy.frozen):
            raises_within(context)
            what = f"after {context.__name__}() ended by an error:"
            case.same(case.result(), now, what, "Put things back in a `finally`.")


def raises_within(context: Callable[[], Any]) -> None:
    try:
        with context():
            raise InterruptedError
    except InterruptedError:
        pass


def may_be_frozen(case: Case) -> None:
    """Within frozen() velocities are the same, without a gradient, and weights are afterwards what
    they were, to the last bit.
    """
    with moved(case.policy):
        before = {name: p.detach().clone() for name, p in case.policy.trainable().items()}
        now = case.result()
        with case.policy.frozen():
            inside = case.velocity()
        expect(not inside.requires_grad, "velocities carry a gradient within frozen()")
        hint = "The policy that samples must be the one that is trained."
        case.same(inside, now, "within frozen():", hint)
        for name, p in case.policy.trainable().items():
            same(p, before[name], f"after frozen(), the weight {name}")
        same(case.result(), now, "after frozen(), the velocity")


BASIC = (has_all_members, has_a_schedule, encodes_a_row_per_prompt, gives_velocities, is_pure)
OTHERS = (
    treats_samples_separately,
    conditions_can_be_rearranged,
    decodes_images,
    names_what_is_trained,
    carries_a_gradient,
    has_a_reference,
    may_be_frozen,
)


def contract(
    part: Any,
    prompts: Sequence[Prompt | str] = PROMPTS,
    tolerance: float = 1e-4,
    without: Sequence[str] = (),
) -> Contract:
    """The contract of a policy (`FlowPolicy`).

    Args:
        part: the policy: an object (not copied; what is changed is restored), a class, or a
            function that makes it.
        prompts: two or more prompts that the policy accepts.
        tolerance: largest rounding difference of velocities that must be equal, relative to the
            largest velocity (about 1e-2 for a network in bfloat16).
        without: names of promises that the part breaks on purpose.
    """
    require(tolerance > 0, "tolerance", tolerance, "above 0")
    made = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    texts = [prompt.text for prompt in made]
    require(len(set(texts)) == len(texts) >= 2, "prompts", texts, "two or more different prompts")
    make = maker(part, share=True)
    return Contract("policy", BASIC, OTHERS, make, lambda p: Case(p, made, tolerance), without)
