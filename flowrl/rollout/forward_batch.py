"""From finished images to the input of a forward-process loss: micro-batches of (sample, drawn
time) rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.experience import Decisions
from flowrl.core.forward import ForwardBatch, Guidance, WeightCopy
from flowrl.core.protocols import FlowPolicy, ForwardLoss, extras
from flowrl.core.types import Condition, Schedule, to_device
from flowrl.flow.path import expand
from flowrl.rollout.loss_batch import (
    MicroBatch,
    Rows,
    in_units,
    pooled_means,
    unit_key,
    weighted_rows,
)
from flowrl.rollout.rollout import Groups, Rollout


class CopiedWeights(ABC):
    """A copy of the trained weights, as declared by a forward-process loss."""

    copy: WeightCopy
    is_current: bool

    @abstractmethod
    def weights(self) -> AbstractContextManager[None]:
        """Within this context the policy has the copy's weights."""
        ...


def step_of(times: Tensor, schedule: Schedule) -> Tensor:
    """The step i with t_{i+1} < t <= t_i for each of `times`."""
    nodes = schedule.times.to(times.device)
    return ((nodes >= times[..., None] - 1e-6).sum(-1) - 1).clamp(0, schedule.steps - 1)


def credited(times: Tensor, decisions: Decisions) -> Tensor:
    """The decision whose credit a row at each of `times` takes: the last one whose time is not
    below the row's, or the first one if all are below.
    """
    starts = to_device(decisions.time, times.device)
    return ((starts >= times[..., None] - 1e-6).sum(-1) - 1).clamp(min=0)


def training_noise(
    loss: ForwardLoss,
    groups: Groups,
    shape: Sequence[int],
    draws: int,
    seed: int,
    device: torch.device,
) -> Tensor:
    """The noise of every row of `groups` [sample, draw, *latent], shared as the loss declares.

    Every sample or group has its own generator, seeded by its index among all and the iteration's
    `seed`, so its noise does not depend on chunks or processes.
    """
    shared = loss.noise != "each"
    first, count = (
        (groups.first, groups.prompts)
        if shared
        else (groups.first * groups.members, groups.samples)
    )
    columns = 1 if loss.noise == "group-all-times" else draws
    generator, found = torch.Generator(device), []
    for number in range(first, first + count):
        generator.manual_seed((seed + number) % 2**63)
        found.append(torch.randn((columns, *shape), generator=generator, device=device))
    noise = torch.stack(found).expand(-1, draws, *shape)
    return noise.repeat_interleave(groups.members, 0) if shared else noise


@dataclass
class ForwardBatches:
    """Makes the batches of a forward-process loss from the finished latents of a rollout. Samples
    are numbered within this process.

    A row has the advantage of the decision that `credited` assigns to its time, so rules that
    credit decisions weight times. This is a heuristic: unless the loss's `noise` is "path", the
    regressed states are noised images, not those that the decisions reached. A rule with equal
    credit for all decisions gives the papers' losses.

    Args:
        policy: the policy.
        loss: the forward-process loss.
        rollout: the rollout with the finished latents.
        condition: the condition, one row per prompt.
        advantages: the credit rule's advantages [sample, decision].
        weights: the weights [sample, decision].
        times: training times [sample, draw].
        decisions: the axis of credit.
        seed: the iteration's seed of the noise.
        copies: the copies of the weights that the loss declares.
        guidance: guidance of the velocities.
        pooled: means over units that are spread over micro-batches; set by `prepare`.

    Raises:
        ConfigError: the policy does not support the guidance, or the trajectories do not fit the
            loss's noise.
    """

    policy: FlowPolicy
    loss: ForwardLoss
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    weights: Tensor
    times: Tensor
    decisions: Decisions
    seed: int
    copies: Mapping[str, CopiedWeights] = field(default_factory=dict)
    guidance: Guidance = Guidance()
    pooled: Tensor | None = None

    def __post_init__(self) -> None:
        path, groups = self.rollout.trajectories, self.rollout.groups
        self.images, self.steps = path.images_latent, step_of(self.times, path.schedule)
        self._extras = extras(self.policy, "guided", "guidance_scale")
        self.sampled = 1.0 if self._extras is None else self._extras.guidance_scale
        scales = self.guidance.scales(self.sampled)
        fits = self._extras is not None or scales == (1.0, 1.0)
        require(
            fits, "guidance of the loss", scales, f"1: {type(self.policy).__name__} has no guidance"
        )
        if self.loss.noise == "path":
            if path.tree.branched:
                raise ConfigError(
                    'noise = "path" is not allowed on branched trajectories; allowed: each, group,'
                    " group-all-times"
                )
            self.times = path.schedule.times[self.steps]
        else:
            draws = self.times.shape[1]
            self.noise = training_noise(
                self.loss, groups, self.images.shape[1:], draws, self.seed, self.images.device
            )
        self.steps = self.steps.to(self.images.device)
        self.columns = credited(self.times, self.decisions).to(self.images.device)

    def _there(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.advantages.device)

    @property
    def passes(self) -> float:
        """Network evaluations of a row with the current weights: the current network, the
        reference, and copies with other weights.

        Twice as many if rows of a unit are in several micro-batches. With another guidance than in
        sampling, fractions or multiples (`Guidance.evaluations`).
        """
        copies = sum(one.copy.evaluated and not one.is_current for one in self.copies.values())
        found = self.guidance.evaluations(1 + copies, self.loss.needs_reference, self.sampled)
        return found * (2 if self.pooled is not None else 1)

    def _guided(self, scale: float) -> AbstractContextManager[None]:
        return nullcontext() if self._extras is None else self._extras.guided(scale)

    def prepare(self, minibatch: Sequence[MicroBatch]) -> None:
        """Compute, before a mini-batch, the means over units that are spread over micro-batches,
        with the current weights.
        """
        self.pooled = None  # `of` must not use the means of the last mini-batch
        self.pooled = pooled_means(self.loss, self.of, minibatch, self.times)

    def evaluated_steps(self, micro: MicroBatch) -> Tensor:
        """The step that contains the time of each row, on the policy's device."""
        return self._there(self.steps[micro.sample, micro.column])

    def origin(self, sample: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The step that contains each row's time, and the decision whose credit it takes."""
        return self.steps[sample, column], self.columns[sample, column]

    def of(self, sample: Tensor, draw: Tensor, shared: object = None) -> ForwardBatch:
        """The batch of these rows; indices of equal length."""
        path, members, there = self.rollout.trajectories, self.rollout.groups.members, self._there
        sample, draw = sample.to(self.images.device), draw.to(self.images.device)
        image, step, column = (
            there(self.images[sample]),
            self.steps[sample, draw],
            self.columns[sample, draw],
        )
        if self.loss.noise == "path":
            stored = path.states[
                sample // members, to_device(path.tree.paths, sample.device)[sample % members, step]
            ]
        else:
            stored = self.noise[sample, draw]
        stored, sample, draw, column = map(there, (stored, sample, draw, column))
        time, group = self.times[sample, draw], sample // members
        spread = expand(time, image)
        if self.loss.noise == "path":
            state, target = stored, (stored - image) / spread
        else:
            state, target = (1 - spread) * image + spread * stored, stored - image
        timestep, rows = 1000.0 * time, self.condition.take(group)
        others: dict[str, Tensor] = {}
        trained, reference = self.guidance.scales(self.sampled)
        # before the current network: its graph must not contain other weights
        with torch.no_grad(), self._guided(trained):
            for name, copy in self.copies.items():
                if copy.copy.evaluated and not copy.is_current:
                    with copy.weights():
                        others[name] = self.policy.velocity(state, timestep, rows)
        if self.loss.needs_reference:
            with torch.no_grad(), self._guided(reference), self.policy.reference():
                others["reference"] = self.policy.velocity(state, timestep, rows)
        with self._guided(trained):
            new = self.policy.velocity(state, timestep, rows)
        # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        new = new.view_as(new)
        for name, copy in self.copies.items():
            if copy.copy.evaluated and copy.is_current:
                others[name] = new.detach()
        first = self.rollout.groups.first
        return ForwardBatch(
            time=time,
            target=target,
            new=new,
            advantages=self.advantages[sample, column],
            weight=self.weights[sample, column],
            group=group + first,
            sample=sample + first * members,
            pooled=None if self.pooled is None else self.pooled[sample, draw],
            **others,
        )


def forward_rows(
    parts: Sequence[Tensor], loss: ForwardLoss, weights: Tensor, members: int
) -> list[Rows]:
    """The rows of each mini-batch: all drawn times of its samples `parts[k]` whose weight [sample,
    draw] is above 0.

    Rows of a unit of the loss are adjacent, in the mini-batch of the first of them.
    """
    draws = torch.arange(weights.shape[1], device=weights.device)
    found = [weighted_rows(samples, draws, weights) for samples in parts]
    return found if loss.unit == "transition" else in_units(found, unit_key(loss.unit, members))
