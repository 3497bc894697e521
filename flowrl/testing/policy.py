"""The promises of a policy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.testing.findings import Contract, expect, finite, name_of, same, twice

CONTRACT = Contract("policy")
promise = CONTRACT.promise

METHODS = ("schedule", "encode", "velocity", "decode", "trainable", "reference", "frozen")
TIMES = (1000.0, 750.0, 400.0, 60.0)


@dataclass(frozen=True)
class Case:
    """A policy with test data: prompts, and a latent and a time for each.

    `tolerance` is the largest relative rounding difference of equal velocities.
    """

    policy: Any
    prompts: tuple[Prompt, ...]
    tolerance: float

    def __repr__(self) -> str:
        return name_of(self.policy)

    @property
    def latents(self) -> Tensor:
        """Noise, the same every time."""
        shape = (len(self.prompts), *self.policy.latent_shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.policy.device)

    @property
    def times(self) -> Tensor:
        """A different time for every sample, 1000 t."""
        return torch.tensor(
            [TIMES[i % 4] - i // 4 for i in range(len(self.prompts))], device=self.policy.device
        )

    def condition(self) -> Condition:
        """The condition of all prompts."""
        return self.policy.encode(list(self.prompts))

    def velocity(
        self, index: Sequence[int] | None = None, condition: Condition | None = None
    ) -> Tensor:
        """Detached velocities of the samples at `index` (None: all); `condition` has one row for
        each of them.
        """
        chosen = torch.tensor(
            list(range(len(self.prompts)) if index is None else index), device=self.policy.device
        )
        condition = self.condition().take(chosen) if condition is None else condition
        return self.policy.velocity(self.latents[chosen], self.times[chosen], condition).detach()

    def close(self, got: Tensor, expected: Tensor, what: str, hint: str) -> None:
        """Check that velocities are equal within the case's tolerance, relative to the largest
        expected value.
        """
        same(got, expected, f"{what} the velocity", hint, self.tolerance, floor=0.0)


def prompts_of(given: Sequence[Prompt | str]) -> tuple[Prompt, ...]:
    """Prompts from texts or prompts. Raises `ConfigError` for fewer than two, or twice the same
    text.
    """
    prompts = tuple(Prompt(one) if isinstance(one, str) else one for one in given)
    texts = [prompt.text for prompt in prompts]
    require(len(set(texts)) == len(texts) >= 2, "prompts", texts, "two or more different prompts")
    return prompts


@contextmanager
def moved(policy: Any) -> Iterator[None]:
    """Within this context the trained parameters have other values, as after some updates."""
    parameters = list(policy.trainable().values())
    kept = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)


@promise("it has a latent shape, a device and all methods", basic=True)
def has_all_members(case: Case) -> None:
    missing = [name for name in METHODS if not callable(getattr(case.policy, name, None))]
    expect(not missing, f"these methods are missing: {', '.join(missing)}")
    shape = getattr(case.policy, "latent_shape", None)
    good = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
    expect(good, f"latent_shape is {shape!r}, not a tuple of sizes without the sample axis")
    expect(
        isinstance(case.policy.device, torch.device),
        f"device is {case.policy.device!r}, not a torch.device",
    )


@promise("schedule(T) has T steps from noise (t near 1) to data (t = 0)", basic=True)
def has_a_schedule(case: Case) -> str | None:
    for steps in (1, 4, 10):
        schedule = case.policy.schedule(steps)
        expect(
            isinstance(schedule, Schedule),
            f"schedule({steps}) is a {type(schedule).__name__}, not a Schedule",
        )
        expect(
            schedule.steps == steps,
            f"schedule({steps}) has {schedule.steps} steps; T steps join T + 1 times",
        )
        first, last = float(schedule.times[0]), float(schedule.times[-1])
        expect(
            abs(last) < 1e-6,
            f"schedule({steps}) ends at t = {last:.4g}, not at 0: append the last time",
        )
        expect(
            first > 0.9,
            f"schedule({steps}) begins at t = {first:.4g}: it is the noise that sampling begins"
            " with",
        )
        expect(
            schedule.times.dtype == torch.float32, f"times are {schedule.times.dtype}, not float32"
        )
    return (
        None
        if first > 0.999
        else f"it begins at t = {first:.4g}, but rollouts begin with pure noise"
    )


@promise("encode gives named tensors with one row per prompt", basic=True)
def encodes_a_row_per_prompt(case: Case) -> None:
    condition = case.condition()
    expect(
        isinstance(condition, Condition),
        f"encode returned a {type(condition).__name__}, not a Condition",
    )
    for name, tensor in condition.tensors.items():
        rows = tensor.shape[0] if tensor.ndim else 0
        expect(
            rows == len(case.prompts),
            f"{name!r} has shape {tuple(tensor.shape)} for {len(case.prompts)} prompts",
        )


@promise("velocity gives [sample, *latent] in float32, finite", basic=True)
def gives_velocities(case: Case) -> None:
    velocity = case.velocity()
    wanted = (len(case.prompts), *case.policy.latent_shape)
    expect(
        velocity.shape == wanted, f"velocity has shape {tuple(velocity.shape)} instead of {wanted}"
    )
    hint = "The network may compute in less; convert what leaves `velocity` with .float()."
    expect(velocity.dtype == torch.float32, f"velocities are {velocity.dtype}, not float32. {hint}")
    finite(velocity, "velocities")


@promise("the same inputs give the same velocity, to the last bit", basic=True)
def is_deterministic(case: Case) -> None:
    first, second = twice(case.velocity)
    same(
        second,
        first,
        "in a second call the velocity",
        "Is there dropout, or is the network in training mode?",
    )


@promise(
    "a sample's velocity does not depend on the others of its batch; every sample has its own time"
)
def treats_samples_separately(case: Case) -> None:
    whole, count = case.velocity(), len(case.prompts)
    for i in range(count):
        hint = "Is timestep[0] used for all, or something normalised over the batch?"
        case.close(case.velocity([i]), whole[i : i + 1], f"sample {i} alone:", hint)
    order = list(range(count))[::-1]
    hint = "Are rows of the condition matched to samples by position?"
    case.close(case.velocity(order), whole[order], "in another order:", hint)


@promise(
    "a prompt's condition is its own: encoded alone, or with others, in any order, or repeated"
)
def conditions_can_be_rearranged(case: Case) -> None:
    whole, count = case.velocity(), len(case.prompts)
    early = case.condition()
    for i in range(count):
        alone = case.policy.encode([case.prompts[i]])
        case.close(
            case.velocity([i], alone),
            whole[i : i + 1],
            f"prompt {i} encoded alone:",
            "Is there padding to the longest?",
        )
    twice = [i for i in range(count) for _ in range(2)]
    case.close(
        case.velocity(twice, case.condition().repeat(2)),
        whole[twice],
        "every row twice:",
        "Are rows tiled instead?",
    )
    hint = "A condition must remain valid while others are encoded."
    case.close(case.velocity(None, early), whole, "with a condition encoded earlier:", hint)


@promise(
    "decode gives images [sample, channel, height, width] or videos [sample, frame, ...] in [0, 1]"
    " without a gradient"
)
def decodes_images(case: Case) -> str | None:
    images = case.policy.decode(case.latents)
    expect(
        images.ndim in (4, 5) and len(images) == len(case.prompts),
        f"decode gave shape {tuple(images.shape)}",
    )
    expect(
        not images.requires_grad,
        "images carry a gradient: rewards are constants of the policy loss",
    )
    low, high = float(images.min()), float(images.max())
    return (
        None
        if low >= 0 and high <= 1
        else f"images reach from {low:.3g} to {high:.3g}; rewards expect [0, 1]"
    )


@promise(
    "trainable gives the same named parameters in the same order every time, all of them open to"
    " gradients"
)
def names_what_is_trained(case: Case) -> str | None:
    first, second = case.policy.trainable(), case.policy.trainable()
    expect(isinstance(first, Mapping) and len(first) > 0, "nothing is trained")
    expect(list(first) == list(second), "names or their order differ between two calls")
    other = [name for name in first if first[name] is not second[name]]
    expect(
        not other,
        f"these are other objects in a second call: {', '.join(other[:3])}. The optimizer holds the"
        " first ones.",
    )
    closed = [name for name, p in first.items() if not p.requires_grad]
    expect(not closed, f"requires_grad is off for {', '.join(closed[:3])}")
    narrow = [name for name, p in first.items() if p.dtype != torch.float32]
    return (
        f"{', '.join(narrow[:3])} are stored in less than float32: small updates will be lost"
        if narrow
        else None
    )


@promise("the gradient of the velocity reaches what is trained")
def carries_a_gradient(case: Case) -> None:
    named = case.policy.trainable()
    velocity = case.policy.velocity(case.latents, case.times, case.condition())
    expect(
        velocity.requires_grad,
        "the velocity carries no gradient. Is there a torch.no_grad() too many?",
    )
    found = torch.autograd.grad(velocity.square().mean(), list(named.values()), allow_unused=True)
    reached = [
        name for name, g in zip(named, found, strict=True) if g is not None and bool((g != 0).any())
    ]
    expect(len(reached) > 0, "all gradients are zero")


@promise(
    "what is trained changes the velocity, and does not change the reference's; neither do contexts"
    " that ended in an error"
)
def has_a_reference(case: Case) -> None:
    with case.policy.reference():
        base = case.policy.velocity(case.latents, case.times, case.condition())
    expect(not base.requires_grad, "the reference's velocity carries a gradient")
    with moved(case.policy):
        now = case.velocity()
        expect(
            not torch.equal(now, base),
            "with other values of what is trained the velocity is still the reference's",
        )
        with case.policy.reference():
            then = case.velocity()
        case.close(
            then,
            base,
            "after training, within reference():",
            "The reference must be the model before training.",
        )
        for context in (case.policy.reference, case.policy.frozen):
            try:
                with context():
                    raise InterruptedError
            except InterruptedError:
                pass
            hint = "Put things back in a `finally`."
            case.close(case.velocity(), now, f"after {context.__name__}() ended by an error:", hint)


@promise(
    "within frozen() velocities are the same, without a gradient, and weights are afterwards what"
    " they were, to the last bit"
)
def may_be_frozen(case: Case) -> None:
    with moved(case.policy):
        before = {name: p.detach().clone() for name, p in case.policy.trainable().items()}
        now = case.velocity()
        with case.policy.frozen():
            inside = case.policy.velocity(case.latents, case.times, case.condition())
        expect(not inside.requires_grad, "velocities carry a gradient within frozen()")
        case.close(
            inside,
            now,
            "within frozen():",
            "The policy that samples must be the one that is trained.",
        )
        after = case.velocity()
        changed = [
            name for name, p in case.policy.trainable().items() if not torch.equal(p, before[name])
        ]
        expect(
            not changed and torch.equal(after, now),
            f"weights changed: {', '.join(changed[:3]) or 'frozen ones'}",
        )
