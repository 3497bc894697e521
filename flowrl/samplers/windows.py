"""Which steps are stochastic: any kernel on some of the steps, the ODE on the others.

The steps are the same for every sample of an iteration. Steps drawn per sample would add their own
variance to the rewards of a group, so random windows are drawn once per iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from jaxtyping import Int
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count, Fraction, Whole, checked_options
from flowrl.core.protocols import AnySampler, MultistepSolver, Sampler, Window
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex
from flowrl.flow import expand
from flowrl.samplers.kernels import ODE, checked_transition


@checked_options
@dataclass(frozen=True)
class Windowed:
    """`sampler` on some of the steps, the ODE on the others.

    Source: Flow-GRPO-Fast (public code of arXiv 2505.05470), MixGRPO (arXiv 2507.21802).

    Args:
        sampler: the kernel of the stochastic steps.
        steps: indices of the stochastic steps, from 0; a transition raises `ConfigError` if the
            schedule lacks one of them.

    Raises:
        ConfigError: `steps` is empty, or contains a negative number.
    """

    sampler: Sampler
    steps: Sequence[int]

    def __post_init__(self) -> None:
        fits = len(self.steps) > 0 and min(self.steps) >= 0
        require(fits, "Windowed.steps", self.steps, "one or more step indices, each 0 or more")

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node `step + 1`: the kernel's, or the ODE's with std 0."""
        fits = max(self.steps) < schedule.steps
        require(fits, "Windowed.steps", self.steps, f"within the schedule's {schedule.steps} steps")
        stochastic = checked_transition(self.sampler, latent, velocity, schedule, step)
        deterministic = ODE().transition(latent, velocity, schedule, step)
        # without a tensor of the steps, whose copy to a GPU would wait for it
        first, last = min(self.steps), max(self.steps)
        inside = (step >= first) & (step <= last)
        for left_out in {*range(first, last)} - {*self.steps}:
            inside &= step != left_out
        inside = inside.to(stochastic.std.device)
        mean = torch.where(expand(inside, stochastic.mean), stochastic.mean, deterministic.mean)
        return Gaussian(mean=mean, std=torch.where(inside, stochastic.std, deterministic.std))


def windowed(
    sampler: AnySampler,
    window: Window,
    count: int,
    generator: torch.Generator,
    iteration: int = 0,
) -> AnySampler:
    """The sampler of an iteration: the kernel on the window's steps, the ODE on the others.

    Args:
        sampler: the kernel; a multistep solver, which has no stochastic steps of its own, is
            returned as it is.
        window: the stochastic steps.
        count: number of steps of the schedule.
        generator: the source of the window's draw.
        iteration: number of the iteration, from 0.

    Returns:
        The sampler.

    Raises:
        ConfigError: the window does not fit the schedule.
    """
    if isinstance(sampler, MultistepSolver):
        return sampler
    return Windowed(sampler, window.steps(count, generator, iteration))


@checked_options
@dataclass(frozen=True)
class FixedWindow:
    """The steps [`start`:`stop`], with the meaning of a Python slice; written `START:STOP`.

    `FixedWindow()` has all steps, `FixedWindow(2, 7)` steps 2 to 6. `FixedWindow(stop=-1)` has all
    but the last, as in the public code of Flow-GRPO (arXiv 2505.05470). `steps` raises
    `ConfigError` if the schedule is too short for the window, or if no step is inside.

    Args:
        start: first stochastic step; None for 0. Negative numbers count from the end.
        stop: the step after the last stochastic one; None for the number of steps. Negative numbers
            count from the end.
    """

    start: int | None = None
    stop: int | None = None

    def steps(self, count: int, generator: torch.Generator, iteration: int = 0) -> Sequence[int]:
        """The window's steps among `count`; nothing is drawn from the generator."""
        chosen, ends = range(count)[self.start : self.stop], (self.start, self.stop)
        written = ":".join("" if end is None else str(end) for end in ends)
        fits = all(-count <= (end or 0) <= count for end in ends) and len(chosen) > 0
        require(fits, "window", written, f"one step or more, within the schedule's {count} steps")
        return chosen


@checked_options
@dataclass(frozen=True)
class RandomWindow:
    """`size` neighbouring steps within steps [`low`, `high`), whose start is drawn anew every
    iteration.

    `steps` raises `ConfigError` if the window does not fit the schedule. Sources: Flow-GRPO-Fast
    (public code of arXiv 2505.05470), uniform; TreeGRPO (arXiv 2512.08153), geometric with r = 0.5.

    Args:
        size: number of stochastic steps, 1 or more.
        low: first possible start, 0 or more.
        high: end of the range of steps; None for the schedule's number of steps.
        geometric: r in (0, 1): the start `low` + i has a probability proportional to r^i; None: all
            starts are equally likely.

    Raises:
        ConfigError: a field is out of range.
    """

    size: Count
    low: Whole = 0
    high: int | None = None
    geometric: Annotated[float, Gt(0), Lt(1)] | None = None

    def steps(self, count: int, generator: torch.Generator, iteration: int = 0) -> Sequence[int]:
        """This iteration's steps; the same generator state gives the same steps."""
        high = count if self.high is None else self.high
        fits, allowed = self.low + self.size <= high <= count, f"within the {count} steps"
        require(fits, "RandomWindow", self, f"{allowed} of the schedule, with high >= low + size")
        starts, device = high - self.size - self.low + 1, generator.device
        if self.geometric is None:
            place = torch.randint(starts, (), generator=generator, device=device)
        else:
            chances = self.geometric ** torch.arange(starts, device=device)
            place = torch.multinomial(chances, 1, generator=generator)
        start = self.low + int(place)
        return range(start, start + self.size)


@checked_options
@dataclass(frozen=True)
class SlidingWindow:
    """`size` neighbouring steps, the first from step 0, which move by `stride` every `every`
    iterations.

    The last position ends with the schedule, even if the stride does not divide the distance; the
    window then restarts at step 0. Early steps, which determine the layout, are trained first.
    `steps` raises `ConfigError` if the window does not fit the schedule.

    Source: MixGRPO (arXiv 2507.21802), progressive sliding window, published with size 4, stride 1
    and every 25 on 25 steps. By default its public code stops at the end, and its window shrinks
    there; this window keeps its size.

    Args:
        size: number of stochastic steps, 1 or more.
        stride: steps by which the window moves, 1 or more.
        every: iterations between two moves, 1 or more.

    Raises:
        ConfigError: a field is out of range.
    """

    size: Count
    stride: Count = 1
    every: Count = 1

    def starts(self, count: int) -> list[int]:
        """The positions of the window, in order, on a schedule of `count` steps."""
        most = f"at most the schedule's {count} steps"
        require(self.size <= count, "SlidingWindow.size", self.size, most)
        last = count - self.size
        return [*range(0, last, self.stride), last]

    def steps(self, count: int, generator: torch.Generator, iteration: int = 0) -> Sequence[int]:
        """The steps of `iteration` (counted from 0); nothing is drawn from the generator."""
        starts = self.starts(count)
        start = starts[iteration // self.every % len(starts)]
        return range(start, start + self.size)


@checked_options
@dataclass(frozen=True)
class RandomSteps:
    """A share of the stochastic steps, drawn anew every iteration; see `trained_steps`.

    Args:
        fraction: the share, in (0, 1].
    """

    fraction: Fraction


def trained_steps(
    chosen: slice | RandomSteps, stds: Tensor, generator: torch.Generator
) -> Int[Tensor, " step"]:
    """Indices of the stochastic steps that enter the loss, in order.

    `RandomSteps(f)` draws floor(f n) of the n stochastic steps, at least one, uniformly. One draw
    serves all samples of an iteration; DanceGRPO (arXiv 2505.07818, public code:
    `timestep_fraction` 0.6) draws separately for each sample. Flow-GRPO's code samples with noise
    at all steps and trains all but the last.

    Args:
        chosen: a slice of the schedule's steps, or a random share.
        stds: standard deviations of the sampler's transitions [step].
        generator: the source of a random draw; a slice leaves it unchanged.

    Returns:
        Sorted step indices [step].

    Raises:
        ConfigError: a slice ends outside the schedule, or no stochastic step remains.
    """
    noisy = (stds > 0).nonzero().flatten()
    if len(noisy) == 0:
        raise ConfigError(
            "the sampler has no stochastic step on this schedule, so there is nothing to train"
        )
    if isinstance(chosen, slice):
        ends = chosen.start, chosen.stop
        written = ":".join("" if end is None else str(end) for end in ends)
        start, stop, _ = chosen.indices(len(stds))
        inside = all(abs(end or 0) <= len(stds) for end in ends)
        require(inside, "trained_steps", written, f"within the schedule's {len(stds)} steps")
        steps = noisy[(noisy >= start) & (noisy < stop)]
        allowed = f"at least one of the stochastic steps {noisy.tolist()}"
        require(len(steps) > 0, "trained_steps", written, allowed)
        return steps
    order = torch.randperm(len(noisy), generator=generator, device=generator.device)
    order = order[: max(1, int(chosen.fraction * len(noisy)))].to(noisy.device)
    return noisy[order].sort().values
