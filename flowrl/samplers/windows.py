"""Which steps are stochastic: any kernel on a subset of the steps, the ODE on the others.

The subset is the same for every sample of a call. One drawn per sample would add its own variance to the rewards of a
group, so random windows are drawn once per iteration.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.flow import expand
from flowrl.options import checked_options
from flowrl.protocols import RandomSampler, Sampler
from flowrl.samplers._kernels import checked_gaussian
from flowrl.samplers.ode import ODE
from flowrl.types import Gaussian, Latents, Schedule, StepIndex, checked, inputs_unchanged


@checked_options
@dataclass(frozen=True)
class Window:
    """`sampler` on the `size` steps from `start`, the ODE elsewhere.

    Source: Flow-GRPO-Fast (public code of arXiv 2505.05470), MixGRPO (arXiv 2507.21802). The first transition raises
    `ConfigError` if the schedule is too short for the window.

    Args:
        sampler: the kernel inside the window.
        start: first stochastic step, 0 or more.
        size: number of stochastic steps, 1 or more.

    Raises:
        ConfigError: a field is out of range.
    """

    sampler: Sampler
    start: int
    size: int

    def __post_init__(self) -> None:
        require_kernel("Window", self.sampler)
        require(self.start >= 0, "Window.start", self.start, "0 or more")
        require(self.size >= 1, "Window.size", self.size, "1 or more steps")

    @checked
    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Gaussian over node `step + 1`, with std 0 outside the window."""
        end = self.start + self.size
        window = f"start {self.start}, size {self.size}"
        require(end <= schedule.steps, "Window", window, f"within the schedule's {schedule.steps} steps")
        return _inside_only(self.sampler, (step >= self.start) & (step < end), latent, velocity, schedule, step)


@checked_options
@dataclass(frozen=True)
class AllButLast:
    """`sampler` on every step but the last, which is an ODE step. Source: Flow-GRPO (arXiv 2505.05470), public code.

    Raises `ConfigError` on a schedule of one step, because no step would be stochastic.
    """

    sampler: Sampler

    def __post_init__(self) -> None:
        require_kernel("AllButLast", self.sampler)

    @checked
    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Gaussian over node `step + 1`, with std 0 at the last step."""
        require(schedule.steps >= 2, "schedule.steps", schedule.steps, "2 or more for AllButLast")
        return _inside_only(self.sampler, step < schedule.steps - 1, latent, velocity, schedule, step)


@checked_options
@dataclass(frozen=True)
class RandomWindow:
    """A `Window` of `size` steps within steps [`low`, `high`), whose start is drawn anew every iteration.

    `draw` returns the iteration's `Window`, which all groups share; an undrawn `RandomWindow` has no transition. `draw` raises
    `ConfigError` if the window does not fit the schedule. Sources: Flow-GRPO-Fast (public code of arXiv 2505.05470), uniform;
    TreeGRPO (arXiv 2512.08153), geometric with r = 0.5.

    Args:
        sampler: the kernel inside the window.
        size: number of stochastic steps, 1 or more.
        low: first possible start, 0 or more.
        high: end of the range of steps; None for the schedule's number of steps.
        geometric: r in (0, 1): the start `low` + i has a probability proportional to r^i; None: all starts are equally likely.

    Raises:
        ConfigError: a field is out of range.
    """

    sampler: Sampler
    size: int
    low: int = 0
    high: int | None = None
    geometric: float | None = None

    def __post_init__(self) -> None:
        require_kernel("RandomWindow", self.sampler)
        fits = self.geometric is None or 0 < self.geometric < 1
        require(fits, "RandomWindow.geometric", self.geometric, "in (0, 1), or None for equally likely starts")
        require(self.size >= 1, "RandomWindow.size", self.size, "1 or more steps")
        require(self.low >= 0, "RandomWindow.low", self.low, "0 or more")
        if self.high is not None:
            least = self.low + self.size
            require(self.high >= least, "RandomWindow.high", self.high, f"low + size = {least} or more, or None")

    def draw(self, schedule: Schedule, generator: torch.Generator, iteration: int = 0) -> Window:
        """This iteration's window; the same generator state gives the same window."""
        high = schedule.steps if self.high is None else self.high
        require(high <= schedule.steps, "RandomWindow.high", high, f"at most the schedule's {schedule.steps} steps")
        room = f"a window of {self.size} steps within steps [{self.low}, {high})"
        require(self.low + self.size <= high, "RandomWindow.size", self.size, room)
        last_start = high - self.size
        if self.geometric is None:
            start = torch.randint(self.low, last_start + 1, (), generator=generator, device=generator.device)
        else:
            chances = self.geometric ** torch.arange(last_start - self.low + 1, device=generator.device)
            start = self.low + torch.multinomial(chances, 1, generator=generator)
        return Window(self.sampler, start=int(start), size=self.size)

    def transition(self, latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor) -> Gaussian:
        """Always raises `ConfigError`: a random window must be drawn first."""
        raise ConfigError("RandomWindow has not been drawn: call .draw(schedule, generator) once per iteration, use its result")


def require_kernel(where: str, sampler: object) -> None:
    """Raise `ConfigError` unless `sampler` has a transition, which an undrawn window lacks."""
    fits = isinstance(sampler, Sampler) and not isinstance(sampler, RandomSampler)
    require(fits, f"{where}.sampler", sampler, "a kernel such as FlowSDE() or CPS(), not a random window")


def _inside_only(
    sampler: Sampler, inside: Bool[Tensor, " sample"], latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor
) -> Gaussian:
    """`sampler`'s transition where `inside`, the ODE's elsewhere."""
    call = f"{type(sampler).__name__}.transition"
    with inputs_unchanged(call, ConfigError, latent, velocity):
        stochastic = checked_gaussian(sampler.transition(latent, velocity, schedule, step), call)
    deterministic = ODE().transition(latent, velocity, schedule, step)
    inside = inside.to(stochastic.std.device)
    mean = torch.where(expand(inside, stochastic.mean), stochastic.mean, deterministic.mean)
    return Gaussian(mean=mean, std=torch.where(inside, stochastic.std, deterministic.std))


@checked_options
@dataclass(frozen=True)
class SlidingWindow:
    """A `Window` of `size` steps that starts at step 0 and moves by `stride` every `every` iterations.

    The last position ends with the schedule, even if the stride does not divide the distance. Early steps, which determine the
    layout, are trained first. All groups share the iteration's window. `draw` raises `ConfigError` if the window does not fit the
    schedule.

    Source: MixGRPO (arXiv 2507.21802), progressive sliding window, published with size 4, stride 1 and every 25 on 25 steps. By
    default its public code stops at the end, and its window shrinks there; this window keeps its size.

    Args:
        sampler: the kernel inside the window.
        size: number of stochastic steps, 1 or more.
        stride: steps by which the window moves, 1 or more.
        every: iterations between two moves, 1 or more.
        at_end: after the last position, restart at step 0 ("wrap") or remain ("stay").

    Raises:
        ConfigError: a field is out of range.
    """

    sampler: Sampler
    size: int
    stride: int = 1
    every: int = 1
    at_end: Literal["wrap", "stay"] = "wrap"

    def __post_init__(self) -> None:
        require_kernel("SlidingWindow", self.sampler)
        for name in ("size", "stride", "every"):
            require(getattr(self, name) >= 1, f"SlidingWindow.{name}", getattr(self, name), "1 or more")
        require(self.at_end in ("wrap", "stay"), "SlidingWindow.at_end", self.at_end, "'wrap' or 'stay'")

    def starts(self, steps: int) -> list[int]:
        """The positions of the window, in order, on a schedule of `steps` steps."""
        require(self.size <= steps, "SlidingWindow.size", self.size, f"at most the schedule's {steps} steps")
        last = steps - self.size
        return [*range(0, last, self.stride), last]

    def draw(self, schedule: Schedule, generator: torch.Generator, iteration: int = 0) -> Window:
        """The window of `iteration` (counted from 0); nothing is drawn from the generator."""
        starts = self.starts(schedule.steps)
        moves = iteration // self.every
        position = moves % len(starts) if self.at_end == "wrap" else min(moves, len(starts) - 1)
        return Window(self.sampler, start=starts[position], size=self.size)

    def transition(self, latent: Tensor, velocity: Tensor, schedule: Schedule, step: Tensor) -> Gaussian:
        """Always raises `ConfigError`: the window of an iteration must be drawn first."""
        raise ConfigError("SlidingWindow has not been drawn: call .draw(schedule, generator, iteration), use its result")


TRAINED_STEPS = "all, all-but-last, START:SIZE (fixed) or random:FRACTION (drawn every iteration), with a FRACTION in (0, 1]"


def trained_steps(spec: str, schedule: Schedule, generator: torch.Generator) -> Int[Tensor, " step"]:
    """Indices of the stochastic steps of `schedule` that enter the loss, in order, selected by `spec`.

    random:FRACTION draws floor(FRACTION n) of the n stochastic steps, at least one, uniformly. One draw serves all samples of an
    iteration; DanceGRPO (arXiv 2505.07818, public code: `timestep_fraction` 0.6) draws separately for each sample. Flow-GRPO's
    code samples with noise at all steps and trains all but the last.

    Args:
        spec: all, all-but-last, START:SIZE or random:FRACTION (see `TRAINED_STEPS`).
        schedule: the schedule, with the sampler's standard deviations.
        generator: the source of the draw of random:FRACTION; the other kinds leave it unchanged.

    Returns:
        Sorted step indices [step].

    Raises:
        ConfigError: `spec` is not allowed, or no stochastic step remains.
    """
    noisy = schedule.stochastic.nonzero().flatten()
    if len(noisy) == 0:
        raise ConfigError("the sampler has no stochastic step on this schedule: there is no log-probability to train on")
    kind, _, number = spec.partition(":")
    fraction, start, end = 1.0, 0, schedule.steps
    try:
        if kind == "random":
            fraction = float(number)
        elif number:
            start, end = int(kind), int(kind) + int(number)
        else:
            end = {"all": end, "all-but-last": end - 1}[kind]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"trained_steps = {spec!r} is not allowed; allowed: {TRAINED_STEPS}") from error
    require(0 < fraction <= 1 and start >= 0, "trained_steps", spec, TRAINED_STEPS)
    steps = noisy[(noisy >= start) & (noisy < end)]
    require(len(steps) > 0, "trained_steps", spec, f"at least one of the stochastic steps {noisy.tolist()}")
    if kind == "random":
        order = torch.randperm(len(steps), generator=generator, device=generator.device).to(steps.device)
        steps = steps[order[: max(1, int(fraction * len(steps)))]].sort().values
    return steps
