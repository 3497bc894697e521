"""Training times of forward-process losses, drawn for a whole iteration: t in (0, 1], shape
[sample, draw].

Each kind turns uniform numbers into times (`times`), and `draw` takes these numbers from a
generator for all samples of the iteration at once. Results therefore do not depend on micro-batches
or processes. With `shared`, one row is drawn for all samples. Times of the grid are the network's
own, t_i = timesteps_i / 1000. The order of a sample's times has no meaning.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Schedule

Uniforms = Float[Tensor, "row number"]
SMALLEST = 2.0**-24
"""The distance from 0 and 1 that uniform numbers keep before their normal quantile is taken."""


def _draw(
    kind: "PermutedTimes | StratifiedTimes | UniformTimes | LogitNormalTimes | DrawnSteps",
    schedule: Schedule,
    samples: int,
    generator: torch.Generator,
    numbers: int = 0,
) -> Tensor:
    """Times [sample, draw] from `numbers` uniform numbers per row (0: one per draw)."""
    rows, columns = 1 if kind.shared else samples, numbers or kind.draws(schedule)
    uniforms = torch.rand(rows, columns, generator=generator, device=generator.device)
    return kind.times(uniforms, schedule.to(generator.device)).expand(samples, -1).contiguous()


def _grid_times(schedule: Schedule) -> Tensor:
    """The network's time at each step, [step]."""
    return schedule.network_timesteps / 1000.0


def _strata(uniforms: Uniforms) -> Tensor:
    """(i + u_i) / K: one number in each of K equal parts of [0, 1)."""
    return (torch.arange(uniforms.shape[1], device=uniforms.device) + uniforms) / uniforms.shape[1]


def _shifted(times: Tensor, shift: float) -> Tensor:
    """shift t / (1 + (shift - 1) t): towards noise for a shift above 1."""
    return shift * times / (1.0 + (shift - 1.0) * times)


def _require_shift(kind: str, shift: float) -> None:
    require(math.isfinite(shift) and shift > 0, f"{kind}.shift", shift, "finite and above 0")


@checked_options
@dataclass(frozen=True)
class PermutedTimes:
    """The first floor(`fraction` T) of the grid's T times in random order.

    With the default fraction and T = 10 these are all but one. Source: DiffusionNFT's code (arXiv
    2509.16117), a permutation for each sample.

    Args:
        fraction: fraction of the grid's times to use, in (0, 1].
        shared: draw one permutation for all samples.

    Raises:
        ConfigError: `fraction` is out of range.
    """

    fraction: float = 0.99
    shared: bool = False

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1, "PermutedTimes.fraction", self.fraction, "above 0 and at most 1"
        )

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: floor(`fraction` T), at least 1."""
        return max(math.floor(self.fraction * schedule.steps), 1)

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]; the order of T uniform numbers is the permutation."""
        return _grid_times(schedule)[uniforms.argsort(dim=1)[:, : self.draws(schedule)]]

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        return _draw(self, schedule, samples, generator, numbers=schedule.steps)


@checked_options
@dataclass(frozen=True)
class StratifiedTimes:
    """`count` times of the grid, one from each of `count` equal parts of the steps before step
    floor(`fraction` T).

    Source: AWM's code (arXiv 2509.25050), time types discrete, discrete_wo_init (published) and
    discrete_with_init; there the times are drawn once per micro-batch. `draw` raises `ConfigError`
    if a part contains no step.

    Args:
        count: times per sample.
        first: first step of the parts: 0 ("drawn") or 1 ("without"); "with" always takes step 0 and
            draws the other count - 1.
        fraction: fraction of the steps to draw from, in (0, 1].
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 6
    first: Literal["drawn", "without", "with"] = "without"
    fraction: float = 0.9
    shared: bool = False

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1,
            "StratifiedTimes.fraction",
            self.fraction,
            "above 0 and at most 1",
        )

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: `count`."""
        return self.count

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from one uniform number per draw; the first is not used if step 0 is
        always taken.
        """
        always, begin = self.first == "with", int(self.first != "drawn")
        parts, steps = self.count - always, math.floor(self.fraction * schedule.steps) - begin
        most = f"{steps + always} or fewer for a grid of {schedule.steps} steps"
        require(parts <= steps, "StratifiedTimes.count", self.count, most)
        edges = begin + torch.arange(parts + 1, device=uniforms.device) * steps // max(parts, 1)
        uniforms = uniforms[:, always:]
        index = edges[:-1] + (uniforms * (edges[1:] - edges[:-1])).long()
        index = torch.cat([index.new_zeros(len(index), int(always)), index], dim=1)
        return _grid_times(schedule)[index]

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        return _draw(self, schedule, samples, generator)


@checked_options
@dataclass(frozen=True)
class UniformTimes:
    """`count` stratified times, uniform in [`low`, `high`], then shifted: shift t / (1 + (shift -
    1) t).

    Source: AWM's code (arXiv 2509.25050), time type uniform.

    Args:
        count: times per sample.
        low: smallest time before the shift, in (0, 1).
        high: largest time before the shift, in (`low`, 1].
        shift: above 0; a shift above 1 moves times towards noise.
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 6
    low: float = 0.2
    high: float = 1.0
    shift: float = 3.0
    shared: bool = False

    def __post_init__(self) -> None:
        require(0 < self.low < 1, "UniformTimes.low", self.low, "above 0 and below 1")
        require(
            self.low < self.high <= 1,
            "UniformTimes.high",
            self.high,
            f"above low = {self.low} and at most 1",
        )
        _require_shift("UniformTimes", self.shift)

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: `count`."""
        return self.count

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from one uniform number per draw."""
        return _shifted(self.low + (self.high - self.low) * _strata(uniforms), self.shift)

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        return _draw(self, schedule, samples, generator)


@checked_options
@dataclass(frozen=True)
class LogitNormalTimes:
    """`count` stratified times with a normally distributed logit, then shifted as in
    `UniformTimes`.

    Source: AWM's code (arXiv 2509.25050), time type logit_normal; there the times are drawn once
    per micro-batch.

    Args:
        count: times per sample.
        mean: mean of the logit.
        std: standard deviation of the logit, above 0.
        shift: above 0; a shift above 1 moves times towards noise.
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 6
    mean: float = 0.0
    std: float = 1.0
    shift: float = 3.0
    shared: bool = False

    def __post_init__(self) -> None:
        require(math.isfinite(self.mean), "LogitNormalTimes.mean", self.mean, "finite")
        require(
            math.isfinite(self.std) and self.std > 0,
            "LogitNormalTimes.std",
            self.std,
            "finite and above 0",
        )
        _require_shift("LogitNormalTimes", self.shift)

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: `count`."""
        return self.count

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from one uniform number per draw."""
        quantile = torch.special.ndtri(_strata(uniforms).clamp(SMALLEST, 1 - SMALLEST))
        return _shifted(torch.sigmoid(self.mean + self.std * quantile), self.shift)

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        return _draw(self, schedule, samples, generator)


@checked_options
@dataclass(frozen=True)
class DrawnSteps:
    """`count` times of the grid's first `steps` steps, drawn without replacement.

    Late times are left out because few-step samples have artefacts there, which training would
    reproduce. Source: DGPO (arXiv 2510.08425) and its code: 4 of the first 7 of 10 steps; for
    GenEval, 4 of the first 5. `draw` raises `ConfigError` if the grid has fewer than `steps` steps.

    Args:
        count: times per sample, at most `steps`.
        steps: number of steps to draw from, counted from step 0.
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 4
    steps: Count = 7
    shared: bool = True

    def __post_init__(self) -> None:
        require(
            self.count <= self.steps,
            "DrawnSteps.count",
            self.count,
            f"at most steps = {self.steps}",
        )

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: `count`."""
        return self.count

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]; the order of `steps` uniform numbers selects the steps."""
        require(
            self.steps <= schedule.steps,
            "DrawnSteps.steps",
            self.steps,
            f"at most the grid's {schedule.steps} steps",
        )
        return _grid_times(schedule)[uniforms.argsort(dim=1)[:, : self.count]]

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        return _draw(self, schedule, samples, generator, numbers=self.steps)
