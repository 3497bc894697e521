"""Training times of forward-process losses, drawn for a whole iteration: t in (0, 1], shape
[sample, draw].

Each kind turns uniform numbers into times (`times`), and `draw` takes these numbers from a
generator for all samples of the iteration at once. Results therefore do not depend on micro-batches
or processes. Times of the grid are the network's own, t_i = timesteps_i / 1000. The order of a
sample's times has no meaning.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, Fraction, NonNegative, Positive, checked_options
from flowrl.core.types import Schedule

Uniforms = Float[Tensor, "row number"]


@dataclass(frozen=True, kw_only=True)
class _Times(ABC):
    """A kind of times; with `shared`, one row of times serves all samples."""

    shared: bool = False

    def draws(self, schedule: Schedule) -> int:
        """Times per sample: the option `count`, unless the grid determines them."""
        return self.count  # pyright: ignore[reportAttributeAccessIssue]

    def numbers(self, schedule: Schedule) -> int:
        """Uniform numbers per row; one per time, unless a kind orders more numbers than that."""
        return self.draws(schedule)

    @abstractmethod
    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from uniform numbers."""

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw]."""
        rows, device = 1 if self.shared else samples, generator.device
        uniforms = torch.rand(rows, self.numbers(schedule), generator=generator, device=device)
        return self.times(uniforms, schedule.to(device)).expand(samples, -1).contiguous()


def _grid_times(schedule: Schedule) -> Tensor:
    """The network's time at each step, [step]."""
    return schedule.network_timesteps / 1000.0


def _strata(uniforms: Uniforms) -> Tensor:
    """(i + u_i) / K: one number in each of K equal parts of [0, 1)."""
    return (torch.arange(uniforms.shape[1], device=uniforms.device) + uniforms) / uniforms.shape[1]


def _shifted(times: Tensor, shift: float) -> Tensor:
    """shift t / (1 + (shift - 1) t): towards noise for a shift above 1."""
    return shift * times / (1.0 + (shift - 1.0) * times)


@checked_options
@dataclass(frozen=True)
class PermutedTimes(_Times):
    """The first floor(`fraction` T) of the grid's T times in random order.

    With the default fraction and T = 10 these are all but one. Source: DiffusionNFT's code (arXiv
    2509.16117), a permutation for each sample.

    Args:
        fraction: fraction of the grid's times to use, in (0, 1].
        shared: draw one permutation for all samples.

    Raises:
        ConfigError: `fraction` is out of range.
    """

    fraction: Fraction = 0.99

    def draws(self, schedule: Schedule) -> int:
        """floor(`fraction` T), at least 1."""
        return max(math.floor(self.fraction * schedule.steps), 1)

    def numbers(self, schedule: Schedule) -> int:
        """T: their order is the permutation."""
        return schedule.steps

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]."""
        return _grid_times(schedule)[uniforms.argsort(dim=1)[:, : self.draws(schedule)]]


@checked_options
@dataclass(frozen=True)
class StratifiedTimes(_Times):
    """`count` times of the grid, one from each of `count` equal parts of the steps from step 1 to
    before step floor(`fraction` T).

    Source: AWM's code (arXiv 2509.25050), the published time type discrete_wo_init; there the times
    are drawn once per micro-batch. `draw` raises `ConfigError` if a part contains no step.

    Args:
        count: times per sample.
        fraction: fraction of the steps to draw from, in (0, 1].
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 6
    fraction: Fraction = 0.9

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]."""
        steps = math.floor(self.fraction * schedule.steps) - 1
        most = f"{steps} or fewer for a grid of {schedule.steps} steps"
        require(self.count <= steps, "StratifiedTimes.count", self.count, most)
        # integer edges, so a step belongs to one part only
        edges = 1 + torch.arange(self.count + 1, device=uniforms.device) * steps // self.count
        index = edges[:-1] + (uniforms * (edges[1:] - edges[:-1])).long()
        return _grid_times(schedule)[index]


@checked_options
@dataclass(frozen=True)
class UniformTimes(_Times):
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
    low: Annotated[float, Gt(0), Lt(1)] = 0.2
    high: Fraction = 1.0
    shift: Positive = 3.0

    def __post_init__(self) -> None:
        require(self.low < self.high, "UniformTimes.high", self.high, f"above low = {self.low}")

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from one uniform number per draw."""
        return _shifted(self.low + (self.high - self.low) * _strata(uniforms), self.shift)


@checked_options
@dataclass(frozen=True)
class LogitNormalTimes(_Times):
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
    mean: Annotated[float, Gt(-math.inf), Lt(math.inf)] = 0.0
    std: Positive = 1.0
    shift: Positive = 3.0

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw] from one uniform number per draw."""
        edge = 2.0**-24  # the quantiles of 0 and 1 are infinite
        quantile = torch.special.ndtri(_strata(uniforms).clamp(edge, 1 - edge))
        return _shifted(torch.sigmoid(self.mean + self.std * quantile), self.shift)


@checked_options
@dataclass(frozen=True)
class DrawnSteps(_Times):
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
    shared: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        most = f"at most steps = {self.steps}"
        require(self.count <= self.steps, "DrawnSteps.count", self.count, most)

    def numbers(self, schedule: Schedule) -> int:
        """`steps`: their order selects the times."""
        return self.steps

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]."""
        most = f"at most the grid's {schedule.steps} steps"
        require(self.steps <= schedule.steps, "DrawnSteps.steps", self.steps, most)
        return _grid_times(schedule)[uniforms.argsort(dim=1)[:, : self.count]]


@checked_options
@dataclass(frozen=True)
class LateSteps(_Times):
    """`count` times of the grid's last `last` steps, drawn without replacement; step k with a
    weight (k + 1)^`power`.

    For losses on a sample's own states (noise "path" or "difference"), whose steps these are: the
    last one (``last=1``, DRaFT-1, arXiv 2309.17400), a random late one (``last=11``, ReFL, arXiv
    2304.05977), three of all (``count=3, power=2``, FlowBP-Sparse, arXiv 2606.11075, its code at
    34c93f9). `draw` raises `ConfigError` if the grid has too few steps.

    Args:
        count: times per sample, at most `last`.
        last: number of steps to draw from, counted from the end; None: all.
        power: how much late steps are preferred, 0 or more; 0: not at all.
        shared: draw the times once for all samples.

    Raises:
        ConfigError: a field is out of range.
    """

    count: Count = 1
    last: Count | None = None
    power: NonNegative = 0.0

    def __post_init__(self) -> None:
        fits = self.last is None or self.count <= self.last
        require(fits, "LateSteps.count", self.count, f"at most last = {self.last}")

    def numbers(self, schedule: Schedule) -> int:
        """The number of steps to draw from: their order selects the times."""
        name, steps = ("count", self.count) if self.last is None else ("last", self.last)
        most = f"at most the grid's {schedule.steps} steps"
        require(steps <= schedule.steps, f"LateSteps.{name}", steps, most)
        return self.last or schedule.steps

    def times(self, uniforms: Uniforms, schedule: Schedule) -> Tensor:
        """Times [row, draw]."""
        late = _grid_times(schedule)[-self.numbers(schedule) :]
        step = torch.arange(schedule.steps, device=uniforms.device)[-len(late) :]
        # the smallest of exponential variables with these rates: arXiv 1012.0256
        waiting = -torch.log1p(-uniforms) / (step + 1.0).pow(self.power)
        return late[waiting.argsort(dim=1)[:, : self.count]]
