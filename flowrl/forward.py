"""What forward-process losses exchange with the trainer: rows of (sample, drawn time), and copies of the weights.

A forward-process loss regresses the velocity at noised finished images: x_t = (1-t) x_0 + t eps with a training time t and
fresh noise eps, target v* = eps - x_0. It needs neither trajectories nor transition probabilities. The contract is `ForwardLoss`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.options import checked_options
from flowrl.types import Latents, LossResult, PerSample, Schedule, checked

Noise = Literal["each", "group", "group-all-times", "path"]
"""Which rows share their noise; "path": the states that the sample's own trajectory has passed."""
Together = Literal["row", "sample", "group"]
"""Which rows a loss must receive together: none, all times of a sample, or all members of a group at one time."""


@checked
@dataclass(frozen=True)
class ForwardBatch:
    """The input of a forward-process loss. One row is one (sample, drawn time); rows are the axis called `sample` in the shapes.

    `time` = t in (0, 1] and `target` = eps - x_0 belong to the row's state x_t. `new` is the current network's velocity there
    and carries the gradient. `reference` is the frozen base model's, `old` and `average` those of the copies of the weights
    that the loss declares; each is None for a loss that does not declare it. No latents are needed: the error of the clean
    estimate is x_0_hat - x_0 = -t (v - target).

    `mask` is False where the row does not count. `group` is the number of the row's prompt and `row_sample` that of its sample,
    both counted in the whole iteration: rows of equal (group, time) are a group, rows of equal row_sample a sample.
    `pooled`: for a loss that needs rows together, the mean of its `row_terms` over the whole unit of each row, if the trainer
    has computed it before; None if the batch contains whole units.
    """

    time: PerSample
    target: Latents
    new: Latents
    advantages: PerSample
    mask: Bool[Tensor, " sample"]
    group: Int[Tensor, " sample"]
    row_sample: Int[Tensor, " sample"]
    old: Latents | None = None
    average: Latents | None = None
    reference: Latents | None = None
    pooled: PerSample | None = None

    @property
    def velocity(self) -> Latents:
        """The network's output that carries the gradient."""
        return self.new

    def rows(self, index: Tensor | slice) -> "ForwardBatch":
        """The rows `index` of every field; their gradients reach this batch's `new`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[index] for name, value in values.items() if value is not None})

    def units(self, together: Together) -> tuple[Tensor, ...]:
        """The numbers by which `unit_means` recognises the rows of one unit."""
        row = torch.arange(len(self.time), device=self.time.device)
        return {"row": (row,), "sample": (self.row_sample,), "group": (self.group, self.time)}[together]

    def velocity_of(self, name: Literal["old", "average", "reference"], loss: object) -> Latents:
        """The velocity of that network, without gradient. Raises `ConfigError` that names the `loss` if the batch has none."""
        velocity = getattr(self, name)
        if velocity is None:
            raise ConfigError(f"{type(loss).__name__} needs ForwardBatch.{name}, which is None: fill it")
        return velocity.detach()


def unit_means(values: PerSample, units: Sequence[Tensor], mask: Bool[Tensor, " sample"]) -> PerSample:
    """For each row, the mean of `values` over the unmasked rows that agree with it in all of `units`; 0 if there is none.

    Compares all pairs of rows, so that the host need not wait for the device; meant for up to a few thousand rows. A trainer
    whose units are spread over micro-batches calls it on their rows together.
    """
    same = mask[None, :].expand(len(values), -1)
    for number in units:
        same = same & (number[:, None] == number[None, :])
    total = torch.where(same, values[None, :], 0.0).sum(1)
    return total / same.sum(1).clamp(min=1)


@dataclass(frozen=True)
class Guidance:
    """Scales of classifier-free guidance in a forward-process loss: `train` of the current network and the copies of the
    weights (0: the policy's own, with which it samples), `reference` of the base model (0: that of `train`); 1: none.
    Raises `ConfigError` for another one below 1."""

    train: float = 0.0
    reference: float = 0.0

    def __post_init__(self) -> None:
        for name in ("train", "reference"):
            scale = getattr(self, name)
            require(scale == 0 or 1 <= scale < math.inf, f"{name}_guidance_scale", scale, "1 (off) or more, or 0 (as sampled)")

    def scales(self, own: float) -> tuple[float, float]:
        """Both scales, for a policy that samples with scale `own`."""
        train = self.train or own
        return train, self.reference or train

    def evaluations(self, networks: int, reference: bool, own: float) -> float:
        """What a row costs, of `networks` without the base model: an evaluation is a velocity with scale `own`, and a velocity
        takes two passes with guidance and one without."""
        train, base = map(guidance_passes, self.scales(own))
        return (networks * train + reference * base) / guidance_passes(own)


def guidance_passes(scale: float) -> int:
    """Forward passes of a velocity with this scale of classifier-free guidance."""
    return 1 if scale == 1 else 2


@checked_options
@dataclass(frozen=True)
class Decay:
    """How fast a copy follows the weights: copy <- d copy + (1-d) weights, d = min((s - start) rate, cap), 0 up to s = start.

    s is the number of optimizer steps taken so far, with the present one. `start` is in optimizer steps, `rate` per step, `cap`
    in [0, 1). `Decay()` is a plain copy; `Decay(0, d, d)` is a constant d from the first step on. Raises `ConfigError` for a
    value out of range.
    """

    start: float = 0
    rate: float = 0.0
    cap: float = 0.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.start) and self.start >= 0, "Decay.start", self.start, "0 or more optimizer steps")
        require(math.isfinite(self.rate) and self.rate >= 0, "Decay.rate", self.rate, "finite and 0 or more")
        require(0 <= self.cap < 1, "Decay.cap", self.cap, "0 or more and below 1")

    def at(self, steps: int) -> float:
        """d after `steps` optimizer steps."""
        return min(max(steps - self.start, 0) * self.rate, self.cap)


@checked_options
@dataclass(frozen=True)
class WeightCopy:
    """A copy of the trained weights that a forward-process loss declares.

    `decay`: how fast it follows the weights, once per optimizer step (`every` = "update") or once per iteration, after its last
    step. `sample_from`: trajectories are sampled with this copy after that many optimizer steps (0: always, None: never).
    `evaluated` is False for a copy that is only sampled with: its velocity is not put into the batches.
    """

    decay: Decay = Decay()
    every: Literal["iteration", "update"] = "iteration"
    sample_from: int | None = None
    evaluated: bool = True

    def __post_init__(self) -> None:
        begin = self.sample_from
        require(begin is None or begin >= 0, "WeightCopy.sample_from", begin, "0 or more optimizer steps, or None")


@runtime_checkable
class TimeDraw(Protocol):
    """Draws the training times of a forward-process loss for a whole iteration; `flowrl.flow` has the published kinds.

    Contract: times are in (0, 1], float32, on the generator's device; everything random comes from the generator.
    """

    def draws(self, schedule: Schedule) -> int:
        """How many times each sample gets on this grid."""
        ...

    def draw(self, schedule: Schedule, samples: int, generator: torch.Generator) -> Tensor:
        """Times [sample, draw] for all `samples` of the iteration."""
        ...


@runtime_checkable
class ForwardLoss(Protocol):
    """A pure function of velocities at noised finished images, advantages and a mask to a scalar: the mean over unmasked rows.

    It needs no transition probabilities: any sampler serves, a deterministic one too. It declares what the trainer prepares:

    - `times` and `noise`: the training times of every sample, and which rows share the noise eps: "each" row has its own, the
      members of a "group" share it at each time, or at all times ("group-all-times"). With "path" there is no fresh noise: a
      row is the state that the sample's own trajectory passed at the time's step, with eps = (x_t - (1-t) x_0) / t.
    - `copies`: the copies of the weights to keep, by the field of `ForwardBatch` that their velocity fills, "old" or "average".
    - `needs_reference`: whether the frozen base model's velocity must be there, too.
    - `together`: which rows one call needs. If not "row", the loss is a `PooledForwardLoss`.

    Contract: masked rows contribute neither to the loss nor to the gradient; only `new` takes a gradient; the order of rows has
    no effect. If new, old, average and reference are equal, the gradient of each row is its advantage times a positive multiple
    of the gradient of its error |v - v*|^2, which does not depend on the advantages. With `together` = "group" and advantages
    that sum to 0 over a group, the weights of its errors in the gradient sum to 0, too.
    """

    @property
    def times(self) -> TimeDraw:
        """How training times are drawn."""
        ...

    @property
    def noise(self) -> Noise:
        """Which rows share their noise."""
        ...

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The copies of the weights that the loss needs, "old" or "average"; may be empty."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether `ForwardBatch.reference` must be filled (costs one more network evaluation per row)."""
        ...

    @property
    def together(self) -> Together:
        """Which rows must be in one batch, unless `ForwardBatch.pooled` is filled."""
        ...

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The loss over one batch of (sample, drawn time) rows."""
        ...


@runtime_checkable
class PooledForwardLoss(ForwardLoss, Protocol):
    """A forward-process loss that depends on the mean of something over a unit: the times of a sample, or a group at one time.

    The trainer may put whole units into a batch and leave `pooled` empty. This costs nothing and is recommended where the rows
    of a unit fit into memory. Or it makes two passes: `row_terms` of all rows without gradient, their `forward.unit_means` over
    whole units, and then `loss` on parts of units with these means as `pooled`. This costs one more evaluation per row and
    network. Contract: both give the same gradient.
    """

    def row_terms(self, batch: ForwardBatch) -> PerSample:
        """What is averaged over a unit, row by row, detached; 0 for masked rows."""
        ...
