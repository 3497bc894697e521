"""The interface of forward-process losses: batches of (sample, drawn time) rows, and copies of the
weights.

A forward-process loss regresses the velocity at noised finished images: x_t = (1-t) x_0 + t eps
with a training time t and fresh noise eps, target v* = eps - x_0. It needs neither trajectories nor
transition probabilities. The contract is `ForwardLoss`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

from annotated_types import Ge, Lt
from jaxtyping import Int
from torch import Generator, Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import checked_options
from flowrl.core.types import (
    Latents,
    LossResult,
    LossRows,
    PerSample,
    RowTerms,
    Schedule,
    Unit,
)

Noise = Literal["each", "group", "group-all-times", "path", "difference"]
"""Which rows share their noise; "path" and "difference": the states of the sample's own
trajectory.
"""


@checked
@dataclass(frozen=True)
class ForwardBatch(LossRows):
    """The input of a forward-process loss. A row is one (sample, drawn time); rows are the axis
    `sample` in the shapes.

    No latents are needed: the error of the clean estimate is x_0_hat - x_0 = -t (v - target). Rows
    of equal (group, time) are a group, rows of equal `sample` a trajectory.

    Args:
        time: t in (0, 1] [sample].
        target: eps - x_0 of the row's state x_t [sample, *latent], or the target of "difference"
            (see `ForwardLoss`).
        new: the current network's velocity, which carries the gradient.
        advantages: advantages [sample].
        weight: weights of the mean over rows, 0 or more [sample]; rows of weight 0 contribute
            neither value nor gradient.
        group: index of the row's prompt in the whole iteration.
        sample: index of the row's trajectory in the whole iteration.
        old: velocity of the copy `old`; None for a loss that does not declare it.
        average: velocity of the copy `average`; None for a loss that does not declare it.
        reference: the frozen base model's velocity; None for a loss that does not declare it.
        pooled: for a loss whose `unit` is not "transition", the mean of its `row_terms` over the
            unit of each row, if the trainer has computed it; None if the batch contains whole
            units.
        reward: reward of what the row reaches, for a loss that `ascends` it; None for others.
        slope: the gradient of this reward with respect to the row's velocity.
    """

    time: PerSample
    target: Latents
    new: Latents
    advantages: PerSample
    weight: PerSample
    group: Int[Tensor, " sample"]
    sample: Int[Tensor, " sample"]
    old: Latents | None = None
    average: Latents | None = None
    reference: Latents | None = None
    pooled: RowTerms | None = None
    reward: PerSample | None = None
    slope: Latents | None = None

    @property
    def velocity(self) -> Latents:
        """The network's output that carries the gradient."""
        return self.new

    def velocity_of(self, name: Literal["old", "average", "reference"], loss: object) -> Latents:
        """The velocity of the network `name`, without gradient. Raises `ConfigError`, which names
        the `loss`, if the batch has none.
        """
        velocity = getattr(self, name)
        if velocity is None:
            raise ConfigError(f"{type(loss).__name__} needs ForwardBatch.{name}, which is None")
        return velocity.detach()


Finite = Annotated[float, Ge(0), Lt(math.inf)]


@dataclass(frozen=True)
class Guidance:
    """Scales of classifier-free guidance in a forward-process loss; 1: off.

    Args:
        train: scale of the current network and the copies of the weights; None: that of sampling.
        reference: scale of the base model; None: that of `train`.

    Raises:
        ConfigError: a scale is below 1.
    """

    train: float | None = None
    reference: float | None = None

    def __post_init__(self) -> None:
        for name, scale in vars(self).items():
            fits = scale is None or 1 <= scale < math.inf
            need = "1 (off) or more, or left out (as sampled)"
            require(fits, f"{name}_guidance_scale", scale, need)

    def scales(self, own: float) -> tuple[float, float]:
        """Both scales, for a policy that samples with the scale `own`."""
        train = self.train or own
        return train, self.reference or train

    def evaluations(self, networks: int, reference: bool, own: float) -> float:
        """The cost of a row with `networks` networks and the base model if `reference`, in
        evaluations, which are velocities with scale `own`.

        A velocity takes two passes with guidance and one without.
        """
        train, base = map(guidance_passes, self.scales(own))
        return (networks * train + reference * base) / guidance_passes(own)


def guidance_passes(scale: float) -> int:
    """Forward passes of a velocity with this scale of classifier-free guidance."""
    return 1 if scale == 1 else 2


@checked_options
@dataclass(frozen=True)
class Decay:
    """The decay of a copy of the weights: copy <- d copy + (1-d) weights, d = min((s - start) rate,
    cap), 0 up to s = start.

    s is the number of optimizer steps, including the current one. `Decay()` is a plain copy;
    `Decay(0, d, d)` has a constant d from the first step on.

    Args:
        start: optimizer steps with d = 0, 0 or more.
        rate: increase of d per step, 0 or more.
        cap: largest d, in [0, 1).

    Raises:
        ConfigError: a field is out of range.
    """

    start: Finite = 0
    rate: Finite = 0.0
    cap: Annotated[float, Ge(0), Lt(1)] = 0.0

    def at(self, steps: int) -> float:
        """d after `steps` optimizer steps."""
        return min(max(steps - self.start, 0) * self.rate, self.cap)


@checked_options
@dataclass(frozen=True)
class WeightCopy:
    """A copy of the trained weights that a forward-process loss declares.

    Args:
        decay: its decay.
        every: update it after every optimizer step ("update"), or after an iteration's last step
            ("iteration").
        sample_from: sample trajectories with this copy after so many optimizer steps; 0: always,
            None: never.
        evaluated: whether batches contain its velocity; False for a copy that only samples.

    Raises:
        ConfigError: `sample_from` is negative.
    """

    decay: Decay = Decay()
    every: Literal["iteration", "update"] = "iteration"
    sample_from: Annotated[int, Ge(0)] | None = None
    evaluated: bool = True


@runtime_checkable
class TimeDraw(Protocol):
    """Draws the training times of a forward-process loss for a whole iteration; `flowrl.flow` has
    the published kinds.

    Contract: times are in (0, 1], float32, on the generator's device; all randomness comes from the
    generator.
    """

    def draws(self, schedule: Schedule) -> int:
        """Number of times per sample on this grid."""
        ...

    def draw(self, schedule: Schedule, samples: int, generator: Generator) -> Tensor:
        """Times for all samples of the iteration.

        Args:
            schedule: the time grid.
            samples: number of samples.
            generator: the source of the draws.

        Returns:
            Times [sample, draw].
        """
        ...


@runtime_checkable
class ForwardLoss(Protocol):
    """A pure function of velocities at noised finished images, advantages and weights to a scalar:
    the weighted mean over rows.

    It needs no transition probabilities, so any sampler can be used, also a deterministic one. It
    declares what the trainer prepares:

    - `times` and `noise`: the training times of every sample, and which rows share the noise eps:
      "each" row has its own, the members of a "group" share it at each time, or at all times
      ("group-all-times"). With "path" there is no fresh noise: a row is the state of the sample's
      own trajectory at the time's step, with eps = (x_t - (1-t) x_0) / t. With "difference" the row
      is that state, too, and v* = v_old - d / (mean(d^2) + 1e-6): v_old is the velocity with which
      the trajectory was sampled, d the difference of x_0 from the mean over the group.
    - `copies`: the copies of the weights, by the field of `ForwardBatch` for their velocity, "old"
      or "average".
    - `needs_reference`: whether the loss needs the frozen base model's velocity.
    - `ascends`, optional: the reward whose gradient the batch contains (`reward`, `slope`). Of the
      run's reward, "image": that of the finished image x_0, whose dependence on the row's velocity
      is taken to be that of the row's own step, so the gradient is computed once per sample; or
      "estimate": that of x_t - t v. With "next": that of the node after the row's step, by the
      loss's `latent_reward`. "image" also needs the attribute `rescale` (`losses.RewardAscent`).
    - `unit`: what one call needs. If not "transition", the loss has a method `row_terms`, as a
      `protocols.PolicyLoss` may have one.

    Contract: rows of weight 0 contribute neither value nor gradient; only `new` takes a gradient;
    the order of rows has no effect. If new, old, average and reference are equal, the gradient of
    each row is its advantage times a positive multiple of the gradient of its error |v - v*|^2,
    which does not depend on the advantages.
    """

    @property
    def times(self) -> TimeDraw:
        """The draw of the training times."""
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
        """Whether `ForwardBatch.reference` must be set (costs one more network evaluation per
        row).
        """
        ...

    @property
    def unit(self) -> Unit:
        """What must be in one batch, unless `ForwardBatch.pooled` is set."""
        ...

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The loss over one batch of (sample, drawn time) rows."""
        ...
