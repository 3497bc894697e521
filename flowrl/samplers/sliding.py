"""A window of stochastic steps that moves along the trajectory as training goes on."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.protocols import Sampler
from flowrl.samplers.windowed import Window, require_kernel
from flowrl.types import Gaussian, Schedule


@dataclass(frozen=True)
class SlidingWindow:
    """A `Window` of `size` steps that starts at step 0 and moves by `stride` every `every` iterations.

    The last position ends with the schedule (also where the stride does not divide the way). After it the window starts over
    at step 0 (`at_end` = "wrap") or remains there ("stay"). Early steps, which decide the layout, are trained first. One
    window per iteration, shared by all groups. Source: MixGRPO (arXiv 2507.21802), progressive sliding window; published
    with size 4, stride 1 and every 25 on 25 steps. Its public code stays unless told to roll back, and lets the window shrink
    as it runs out of the schedule, which ours never does. Raises `ConfigError` for a bad field, and in `draw` where the
    window does not fit the schedule.
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
        """The positions that the window takes in turn on a schedule of `steps` steps."""
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
        """Always raises `ConfigError`: the window of an iteration must be taken first."""
        raise ConfigError("SlidingWindow has no place of its own: call .draw(schedule, generator, iteration), use its result")
