"""From finished images to the input of a forward-process loss: micro-batches of (sample, drawn time) rows."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.flow.path import expand
from flowrl.forward import ForwardBatch, Guidance, WeightCopy, unit_means
from flowrl.protocols import FlowPolicy, ForwardLoss, Guided, PooledForwardLoss
from flowrl.rollout.loss_batch import MicroBatch, Pairs, all_pairs, in_units
from flowrl.rollout.rollout import Groups, Rollout
from flowrl.transfer import to_device
from flowrl.types import Condition, Schedule


class CopiedWeights(Protocol):
    """A copy of the trained weights, as a forward-process loss has declared it."""

    copy: WeightCopy
    is_current: bool

    def weights(self) -> AbstractContextManager[None]:
        """Within this context the policy has the copy's weights."""
        ...


def step_of(times: Tensor, schedule: Schedule) -> Tensor:
    """The step i with t_{i+1} < t <= t_i for each of `times`."""
    nodes = schedule.times.to(times.device)
    return ((nodes >= times[..., None] - 1e-6).sum(-1) - 1).clamp(0, schedule.steps - 1)


def training_noise(
    loss: ForwardLoss, groups: Groups, shape: Sequence[int], draws: int, seed: int, device: torch.device
) -> Tensor:
    """The noise of every row of `groups` [sample, draw, *latent], shared as the loss declares.

    Every sample or group has a generator of its own, seeded by its number among all and the iteration's `seed`, so that its noise
    does not depend on chunks or processes.
    """
    shared = loss.noise != "each"
    first, count = (groups.first, groups.prompts) if shared else (groups.first * groups.members, groups.samples)
    columns = 1 if loss.noise == "group-all-times" else draws
    generator, found = torch.Generator(device), []
    for number in range(first, first + count):
        generator.manual_seed((seed + number) % 2**63)
        found.append(torch.randn((columns, *shape), generator=generator, device=device))
    noise = torch.stack(found).expand(-1, draws, *shape)
    return noise.repeat_interleave(groups.members, 0) if shared else noise


@dataclass
class ForwardBatches:
    """Makes the batches of a forward-process loss from the finished latents of `rollout`.

    `condition` has one row per prompt and `advantages` [sample, step] are the credit rule's; a row has that of the step during
    which a trajectory passes its time, so that rules that credit steps weight times. This is a heuristic: the states that are
    regressed are noised images, not those that the steps have led to, unless the loss's `noise` is "path". A rule that credits
    all steps alike gives the papers' losses. `times` [sample, draw] and `seed` are the iteration's, `copies` those that the
    loss declares. Velocities have the `guidance` that is given for the loss. Samples are numbered within this process.
    """

    policy: FlowPolicy
    loss: ForwardLoss
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    times: Tensor
    seed: int
    copies: Mapping[str, CopiedWeights] = field(default_factory=dict)
    guidance: Guidance = Guidance()
    pooled: Tensor | None = None

    def __post_init__(self) -> None:
        path, groups = self.rollout.trajectories, self.rollout.groups
        self.images, self.steps = path.images_latent, step_of(self.times, path.schedule)
        self.sampled = self.policy.guidance_scale if isinstance(self.policy, Guided) else 1.0
        scales = self.guidance.scales(self.sampled)
        fits = isinstance(self.policy, Guided) or scales == (1.0, 1.0)
        require(fits, "guidance of the loss", scales, f"1: {type(self.policy).__name__} has no guidance")
        if self.loss.noise == "path":
            if path.tree.branched:
                raise ConfigError('noise = "path" is not allowed on branched trajectories; allowed: each, group, group-all-times')
            self.times = path.schedule.times[self.steps]
        else:
            draws = self.times.shape[1]
            self.noise = training_noise(self.loss, groups, self.images.shape[1:], draws, self.seed, self.images.device)
        self.steps = self.steps.to(self.images.device)

    def _there(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.advantages.device)

    @property
    def passes(self) -> float:
        """Network evaluations of a row with the present weights: the current network, the reference, copies with other weights;
        twice if rows of a unit are in several micro-batches. With other guidance than the policy samples with, fractions or
        multiples (`Guidance.evaluations`)."""
        copies = sum(one.copy.evaluated and not one.is_current for one in self.copies.values())
        found = self.guidance.evaluations(1 + copies, self.loss.needs_reference, self.sampled)
        return found * (2 if self.pooled is not None else 1)

    def _guided(self, scale: float) -> AbstractContextManager[None]:
        return self.policy.guided(scale) if isinstance(self.policy, Guided) else nullcontext()

    def prepare(self, minibatch: Sequence[MicroBatch]) -> None:
        """Before a mini-batch: the means over units that are spread over micro-batches, with the present weights."""
        self.pooled = None
        if not isinstance(self.loss, PooledForwardLoss) or self.loss.together == "row" or all(one.whole for one in minibatch):
            return
        with torch.no_grad():
            batches = [self.of(micro.sample, micro.step) for micro in minibatch]
            terms = torch.cat([self.loss.row_terms(batch) for batch in batches])
            kept = torch.cat([batch.mask & (micro.weight > 0) for batch, micro in zip(batches, minibatch, strict=True)])
            units = [torch.cat(parts) for parts in zip(*(batch.units(self.loss.together) for batch in batches), strict=True)]
            means = unit_means(terms, units, kept)
        sample, draw = (self._there(torch.cat([getattr(m, name) for m in minibatch]))[kept] for name in ("sample", "step"))
        self.pooled = torch.zeros_like(self.times).index_put_((sample, draw), means[kept].to(self.times))

    def evaluated_steps(self, micro: MicroBatch) -> Tensor:
        """The step whose time every row has, on the policy's device."""
        return self._there(self.steps[micro.sample, micro.step])

    def of(self, sample: Tensor, draw: Tensor, shared: object = None) -> ForwardBatch:
        """The batch of these rows; indices of equal length."""
        path, members, there = self.rollout.trajectories, self.rollout.groups.members, self._there
        sample, draw = sample.to(self.images.device), draw.to(self.images.device)
        image, step = there(self.images[sample]), self.steps[sample, draw]
        if self.loss.noise == "path":
            stored = path.states[sample // members, to_device(path.tree.paths, sample.device)[sample % members, step]]
        else:
            stored = self.noise[sample, draw]
        stored, sample, draw, step = map(there, (stored, sample, draw, step))
        time, group = self.times[sample, draw], sample // members
        spread = expand(time, image)
        if self.loss.noise == "path":
            state, target = stored, (stored - image) / spread
        else:
            state, target = (1 - spread) * image + spread * stored, stored - image
        timestep, rows = 1000.0 * time, self.condition.take(group)
        others: dict[str, Tensor] = {}
        trained, reference = self.guidance.scales(self.sampled)
        with torch.no_grad(), self._guided(trained):  # before the current network: its graph must not contain other weights
            for name, copy in self.copies.items():
                if copy.copy.evaluated and not copy.is_current:
                    with copy.weights():
                        others[name] = self.policy.velocity(state, timestep, rows)
        if self.loss.needs_reference:
            with torch.no_grad(), self._guided(reference), self.policy.reference():
                others["reference"] = self.policy.velocity(state, timestep, rows)
        with self._guided(trained):
            new = self.policy.velocity(state, timestep, rows)
        new = new.view_as(new)  # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        for name, copy in self.copies.items():
            if copy.copy.evaluated and copy.is_current:
                others[name] = new.detach()
        first = self.rollout.groups.first
        return ForwardBatch(
            time=time,
            target=target,
            new=new,
            advantages=self.advantages[sample, step],
            mask=torch.ones_like(sample, dtype=torch.bool),
            group=group + first,
            row_sample=sample + first * members,
            pooled=None if self.pooled is None else self.pooled[sample, draw],
            **others,
        )


def forward_pairs(
    parts: Sequence[Tensor], loss: ForwardLoss, steps: Tensor, members: int, trained: Tensor | None = None
) -> list[Pairs]:
    """The rows of each mini-batch: all drawn times of its samples, `parts[k]`; `steps` [sample, draw] are the times' steps.

    Rows that the loss must receive together follow each other, and are in the mini-batch in which the first of them comes.
    `trained` [sample, step] leaves out rows at the times of further steps.
    """
    draws = torch.arange(steps.shape[1], device=steps.device)
    found = [all_pairs(samples, draws) for samples in parts]
    if trained is not None:
        found = [pairs[trained[pairs.sample, steps[pairs.sample, pairs.step]]] for pairs in found]
    if loss.together == "row":
        return found
    return in_units(found, lambda sample, draw: sample if loss.together == "sample" else sample // members * len(draws) + draw)
