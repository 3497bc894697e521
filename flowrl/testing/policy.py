"""The promises of a policy."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Condition, Prompt
from flowrl.policies.pipeline import PipelinePolicy, computing_in
from flowrl.testing.contract import INAPPLICABLE, Pure, Separate, basic, expect, promise, same

PROMPTS = ("a red fox", "two blue cars", "a house", "the sea at night")


@dataclass(frozen=True)
class PolicyContract(Pure, Separate):
    """The contract of a policy (`FlowPolicy`).

    Args:
        part: the policy: an object (not copied; what is changed is restored), a class, or a
            function that makes it.
        prompts: two or more prompts that the policy accepts.
        tolerance: largest rounding difference of velocities that must be equal, relative to the
            largest velocity (about 1e-2 for a network in bfloat16).
        call: further arguments of the pipeline's call, for a policy over a diffusers pipeline.
        without: names of promises that the part breaks on purpose.
    """

    prompts: Sequence[Prompt | str] = PROMPTS
    tolerance: float = 1e-4
    call: Mapping[str, Any] = field(default_factory=dict)
    shared = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tolerance > 0, "tolerance", self.tolerance, "above 0")
        texts = {prompt.text for prompt in self.asked}
        fits = len(texts) == len(self.prompts) >= 2
        require(fits, "prompts", self.prompts, "two or more different prompts")

    @property
    def asked(self) -> list[Prompt]:
        """The prompts."""
        return [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in self.prompts]

    @cached_property
    def inputs(self) -> Mapping[str, Tensor]:
        """Noise, and 1000 t, different for every sample."""
        shape = (len(self.prompts), *self.part.latent_shape)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        times = torch.linspace(1000.0, 60.0, len(latents))
        return {"latents": latents.to(self.part.device), "times": times.to(self.part.device)}

    def velocity(self, rows: Tensor | None = None, condition: Condition | None = None) -> Tensor:
        """Velocities of the samples `rows` (None: all), with a condition of as many rows."""
        rows = torch.arange(len(self.prompts)) if rows is None else rows
        if condition is None:
            condition = self.part.encode(self.asked).take(rows.to(self.part.device))
        return self.part.velocity(*(t[rows] for t in self.inputs.values()), condition)

    def result(self, rows: Tensor | None = None) -> Tensor:
        """Detached velocities."""
        return self.velocity(rows).detach()

    def same(self, got: Tensor, expected: Tensor, what: str) -> None:
        """Check that velocities are equal up to rounding."""
        same(got, expected, f"{what} the velocity", self.tolerance, floor=0.0)

    @basic
    def has_all_members(self) -> None:
        """It has a latent shape, a device and all methods."""
        members = [name for name in vars(FlowPolicy) if not name.startswith("_")]
        missing = [name for name in members if getattr(self.part, name, None) is None]
        expect(not missing, f"these members are missing: {', '.join(missing)}")

    @basic
    def has_a_schedule(self) -> None:
        """schedule(T) has T steps from noise (t near 1) to data (t = 0), in float32."""
        for steps in (1, 4, 10):
            schedule = self.part.schedule(steps)
            first, last = schedule.times[[0, -1]].tolist()
            fits = schedule.steps == steps and first > 0.9 and abs(last) < 1e-6
            fits = fits and schedule.times.dtype == torch.float32
            expect(fits, f"schedule({steps}) is {schedule}: T steps join T + 1 times")

    @basic
    def gives_velocities(self) -> None:
        """encode gives named tensors with one row per prompt, velocity [sample, *latent] in
        float32, finite.
        """
        for name, tensor in self.part.encode(self.asked).tensors.items():
            shape, count = tuple(tensor.shape), len(self.prompts)
            expect(shape[:1] == (count,), f"encode: {name!r} has shape {shape} for {count} prompts")
        velocity, wanted = self.result(), (len(self.prompts), *self.part.latent_shape)
        fits = velocity.shape == wanted and velocity.dtype == torch.float32
        kind = f"{tuple(velocity.shape)}, {velocity.dtype}"
        expect(fits, f"velocity is {kind}, not {wanted}, float32: use .float()")
        expect(velocity.isfinite().all(), "velocities are not finite")

    @promise
    def conditions_can_be_rearranged(self) -> str | None:
        """A prompt's condition is its own: encoded alone, or with others, in any order, or
        repeated, and valid while others are encoded.

        Is there padding to the longest, or are rows tiled instead of repeated?
        """
        result, rows = self.result(), torch.arange(len(self.prompts))
        early = self.part.encode(self.asked)
        for i, prompt in enumerate(self.asked):
            alone = self.velocity(rows[i : i + 1], self.part.encode([prompt]))
            self.same(alone, result[i : i + 1], f"prompt {i} encoded alone:")
        doubled = rows.repeat_interleave(2)
        self.same(self.velocity(doubled, early.repeat(2)), result[doubled], "every row twice:")
        self.same(self.velocity(None, early), result, "with a condition encoded earlier:")
        one = self.velocity(None, early.take(torch.zeros_like(rows).to(self.part.device)))
        change = float((one - result).abs().max() / result.abs().max())
        small = f"other prompts change the velocity by {change:.2g} of its largest value only"
        reacts = change == 0 or change > 2 * self.tolerance  # 0: an untrained part reads prompts
        return None if reacts else f"{small}: this promise is hardly tried"

    @promise
    def decodes_images(self) -> str | None:
        """decode gives images [sample, channel, height, width] or videos [sample, frame, ...] in
        [0, 1] without a gradient.
        """
        images = self.part.decode(self.inputs["latents"])
        fits = images.ndim in (4, 5) and len(images) == len(self.prompts)
        expect(fits, f"decode gave shape {tuple(images.shape)}")
        expect(
            not images.requires_grad, "images carry a gradient: rewards are constants of the loss"
        )
        low, high = images.min(), images.max()
        outside = f"images range from {low:.3g} to {high:.3g}; rewards expect [0, 1]"
        return None if low >= 0 and high <= 1 else outside

    @promise
    def names_what_is_trained(self) -> str | None:
        """trainable gives the same named parameters in the same order every time."""
        first, second = self.part.trainable(), self.part.trainable()
        expect(first, "nothing is trained")
        names = [[(name, id(p)) for name, p in made.items()] for made in (first, second)]
        expect(names[0] == names[1], "a second call has other names, order or objects")
        narrow = [name for name, p in first.items() if p.dtype != torch.float32]
        lost = f"{narrow[:3]} have less than float32 precision: small updates will be lost"
        return lost if narrow else None

    @promise
    def carries_a_gradient(self) -> None:
        """The gradient of the velocity reaches what is trained; all of it is open to gradients."""
        velocity, parameters = self.velocity(), list(self.part.trainable().values())
        expect(velocity.requires_grad, "the velocity carries no gradient")
        gradients = torch.autograd.grad(velocity.square().mean(), parameters, allow_unused=True)
        expect(any(g is not None and g.any() for g in gradients), "all gradients are zero")

    @promise
    def has_a_reference(self) -> None:
        """What is trained changes the velocity, and does not change the reference's, which is that
        of the model before training; neither do contexts that ended in an error.

        Put things back in a `finally`.
        """
        with self.part.reference():
            base = self.velocity()
        expect(not base.requires_grad, "the reference's velocity carries a gradient")
        with moved(self.part):
            now = self.result()
            expect(not torch.equal(now, base), "other weights leave the reference's velocity")
            with self.part.reference():
                self.same(self.velocity(), base, "after training, within reference():")
            for context in (self.part.reference, self.part.frozen):
                with suppress(InterruptedError), context():
                    raise InterruptedError
                self.same(self.result(), now, f"after {context.__name__}() ended by an error:")

    @promise
    def may_be_frozen(self) -> None:
        """Within frozen() velocities are the same, without a gradient, and weights are afterwards
        what they were, to the last bit.
        """
        with moved(self.part):
            before = {name: p.detach().clone() for name, p in self.part.trainable().items()}
            now = self.result()
            with self.part.frozen():
                inside = self.velocity()
            expect(not inside.requires_grad, "velocities carry a gradient within frozen()")
            self.same(inside, now, "within frozen():")
            for name, p in self.part.trainable().items():
                same(p, before[name], f"after frozen(), the weight {name}")
            same(self.result(), now, "after frozen(), the velocity")

    @promise
    def agrees_with_its_pipeline(self) -> str | None:
        """Over a diffusers pipeline: the velocities, times and images of the pipeline's own call.

        The call gets a prompt and its images, its latent, the numbers of steps and frames, height,
        width, the negative prompt, the scale of guidance and the output type, each if it has such
        an argument; `call` adds others. Is the sign of v, the unit of t (1000 t), an embedding or
        the scale of latents another one, or `tolerance` too small for the network's precision?
        """
        if not isinstance(self.part, PipelinePolicy):
            return INAPPLICABLE
        policy, scheduler = self.part, self.part.pipe.scheduler
        steps, images = own_call(policy, self.asked, self.inputs["latents"], self.call)
        condition, what = policy.encode(self.asked), "in the pipeline's own call,"
        expect(steps, "the pipeline's own call made no step of its scheduler")
        for number, (latent, time, theirs) in enumerate(steps):
            ours = policy.velocity(latent, time.expand(len(latent)), condition)
            self.same(ours, theirs, f"{what} step {number}:")
        if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":
            grid = policy.schedule(len(steps))
            same(grid.times, scheduler.sigmas, f"{what} a time", 1e-6)
            same(grid.network_timesteps, scheduler.timesteps, f"{what} 1000 t", 1e-6)
            if images is not None:
                latent, _, theirs = steps[-1]
                last = latent + (grid.times[-1] - grid.times[-2]) * theirs
                same(policy.decode(last), images, f"{what} a pixel", self.tolerance)
        return None


STEPS = 3
"""Steps of the call of a pipeline."""
Step = tuple[Tensor, Tensor, Tensor]
"""Latents, 1000 t and velocities, after guidance."""


def own_call(
    policy: PipelinePolicy, prompts: Sequence[Prompt], noise: Tensor, more: Mapping[str, Any]
) -> tuple[list[Step], Tensor | None]:
    """The steps of the pipeline's own calls, one per prompt, and the images if everything is in
    float32.
    """
    pipe, family, options, guidance = (
        policy.pipe,
        policy.family,
        policy.options,
        policy.guidance_scale,
    )
    known, taken = inspect.signature(pipe.__call__).parameters, list[Step]()
    exact = {options.dtype, options.decode_dtype} == {"float32"}
    negative = options.negative_prompt if guidance > 1 else None
    given: dict[str, Any] = {
        **family.guidance_arguments(guidance, negative),
        "num_inference_steps": STEPS,
        **family.size_arguments(*options.size),
        "num_frames": options.num_frames,
        "output_type": "pt" if exact else "latent",
    }
    if family.cuts_prompts:
        given["max_sequence_length"] = options.max_sequence_length or family.text_tokens
    given = {name: value for name, value in given.items() if name in known} | dict(more)
    step, bars = pipe.scheduler.step, getattr(pipe, "_progress_bar_config", {})

    def watched(model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **named: Any):
        time = torch.as_tensor(timestep).to(policy.device).float()
        latent, velocity = (
            family.from_loop(x.float().clone(), policy.latent_shape) for x in (sample, model_output)
        )
        taken.append((latent, time, velocity))
        return step(model_output, timestep, sample, *rest, **named)

    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.step = watched
    made = []
    try:
        with policy.text_encoders(), computing_in(policy.dtype, policy.device):
            for number, prompt in enumerate(prompts):
                own: dict[str, Any] = {"latents": noise[number : number + 1]}
                if prompt.images:
                    pictures = [image.pillow() for image in prompt.images]
                    own["image"] = pictures if len(pictures) > 1 else pictures[0]
                made.append(pipe(prompt=prompt.text, **given, **own)[0])
    finally:
        del pipe.scheduler.step
        pipe.set_progress_bar_config(**bars)
    count = len(taken) // len(prompts)
    steps = [taken[number::count] for number in range(count)]
    joined = [
        (torch.cat([x for x, _, _ in one]), one[0][1], torch.cat([v for _, _, v in one]))
        for one in steps
    ]
    return joined, torch.cat(made) if exact else None


@contextmanager
def moved(policy: Any) -> Iterator[None]:
    """Within this context the trained parameters have other values, as after some updates."""
    generator = torch.Generator().manual_seed(1)
    kept = {p: p.detach().clone() for p in policy.trainable().values()}
    with torch.no_grad():
        for p in kept:
            p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)
