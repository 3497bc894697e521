"""From trajectories to what a policy loss sees: micro-batches of (trajectory, step) pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flowrl.distributed import Distributed
from flowrl.errors import TrainingError
from flowrl.protocols import FlowPolicy, PolicyLoss, Sampler
from flowrl.rollout.collector import Collected
from flowrl.rollout.rollout import Rollout
from flowrl.tree import Tree
from flowrl.types import Condition, Gaussian, LossBatch, LossResult, inputs_unchanged, tensor_problem


@dataclass(frozen=True)
class Pairs:
    """(trajectory, step) pairs: `sample`, numbered among all samples, and `step`. In a branched tree, pairs of one parent
    follow each other and have the same number in `parent`; otherwise `parent` is None, as every pair has its own."""

    sample: Tensor
    step: Tensor
    parent: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: Tensor) -> "Pairs":
        return Pairs(self.sample[rows], self.step[rows], None if self.parent is None else self.parent[rows])

    @property
    def evaluations(self) -> int:
        """Network evaluations that they take: one per parent."""
        return len(self) if self.parent is None else len(self.parent.unique())

    def pieces(self, size: int) -> Iterator["Pairs"]:
        """In order, at most `size` network evaluations at a time."""
        if self.parent is None:
            for sample, step in zip(self.sample.split(size), self.step.split(size), strict=True):
                yield Pairs(sample, step)
        elif len(self):
            place = self.parent.unique_consecutive(return_inverse=True)[1]
            for piece in range(int(place[-1]) // size + 1):
                yield self[place // size == piece]


def minibatch_pairs(parts: Sequence[Tensor], steps: Tensor, tree: Tree, trained: Tensor | None = None) -> list[Pairs]:
    """The pairs of each mini-batch: those of its samples, `parts[k]`, with the trained `steps`.

    In a branched tree: those that are decisions, once per trajectory or, with the tree's `weight` "edge", once per distinct edge.
    All pairs of a parent are in one mini-batch. Parents come in the order of the trajectories that pass them first by number, so
    that every mini-batch has all depths, and are divided into mini-batches of about equally many pairs. `trained` [sample, step]
    leaves out further pairs.
    """
    found = [Pairs(*torch.cartesian_prod(samples, steps).unbind(1)) for samples in parts]
    if tree.branched:
        found = _by_parent(found, tree)
    return found if trained is None else [pairs[trained[pairs.sample, pairs.step]] for pairs in found]


def _by_parent(parts: Sequence[Pairs], tree: Tree) -> list[Pairs]:
    """The decisions among the pairs, sorted by their parents."""
    if not parts:
        return []
    device = parts[0].sample.device
    sample, step = (torch.cat([getattr(pairs, name) for pairs in parts]).cpu() for name in ("sample", "step"))
    group, member = sample // tree.members, sample % tree.members
    parent = group * tree.units + tree.paths[member, step]
    kept = tree.decisions[member, step]
    if tree.weight == "edge":
        kept &= _first(group * tree.units + tree.paths[member, step + 1]) == torch.arange(len(sample))
    by_number = sample.argsort(stable=True)
    first = torch.empty_like(by_number)
    first[by_number] = by_number[_first(parent[by_number])]
    order = first.argsort(stable=True)
    order = order[kept[order]]
    start = _first(parent[order])  # mini-batches are cut between parents
    place = start * len(parts) // max(len(order), 1)
    chosen = [order[place == k] for k in range(len(parts))]
    return [Pairs(sample[rows].to(device), step[rows].to(device), parent[rows].to(device)) for rows in chosen]


def _first(keys: Tensor) -> Tensor:
    """For every row the first one with the same key."""
    distinct, place = keys.unique(return_inverse=True)
    first = torch.full((len(distinct),), len(keys))
    return first.scatter_reduce_(0, place, torch.arange(len(keys)), "amin")[place]


@dataclass(frozen=True)
class MicroBatch:
    """Pairs (`sample`, `step`), with samples numbered among those that this process rolled out.

    `weight` is the number of its pairs / the number of pairs of its mini-batch, over all processes, so that the weighted sum of
    mean losses is the mean over the mini-batch. Weight 0 is padding: sharded weights need equally many network calls everywhere.
    `shared`: the first pair of every distinct parent, and the number of its parent for every pair; None if no pair shares one.
    """

    sample: Tensor
    step: Tensor
    weight: float
    shared: tuple[Tensor, Tensor] | None = None

    @property
    def evaluated_step(self) -> Tensor:
        """The step of every network evaluation."""
        return self.step if self.shared is None else self.step[self.shared[0]]


def micro_batches(pairs: Pairs, size: int, collected: Collected, distributed: Distributed) -> list[MicroBatch]:
    """This process's pairs of a mini-batch, at most `size` network evaluations at a time."""
    own = pairs[collected.owned(pairs.sample, collected.assignment)]
    found = (
        [_micro_batch(piece, collected.samples.start, len(piece) / len(pairs)) for piece in own.pieces(size)] if len(own) else []
    )
    if distributed.sharded:
        groups = collected.rollout.groups
        assigned = [distributed.assign(groups.of or groups.prompts, rank) for rank in range(distributed.world_size)]
        counts = [pairs[collected.owned(pairs.sample, one)].evaluations for one in assigned]
        padding = MicroBatch(torch.zeros_like(pairs.sample[:1]), pairs.step[:1], 0.0)
        found += [padding] * (-(-max(counts) // size) - len(found))
    return found


def _micro_batch(pairs: Pairs, first: int, weight: float) -> MicroBatch:
    if pairs.parent is None:
        return MicroBatch(pairs.sample - first, pairs.step, weight)
    place = pairs.parent.unique_consecutive(return_inverse=True)[1]
    rows = torch.cat([place.new_zeros(1), place.diff().nonzero().flatten() + 1])
    return MicroBatch(pairs.sample - first, pairs.step, weight, (rows, place))


@dataclass(frozen=True)
class LossBatches:
    """Makes loss batches from trajectories. `condition` has one row per prompt, `advantages` is [sample, step].

    The batch of (`sample[k]`, `step[k]`) has any mixture of steps; the current policy's transitions carry the gradient. One
    network evaluation per pair, or per parent of a micro-batch whose pairs share theirs; two with the reference. Trajectories
    in main memory are copied to the policy's device.
    """

    policy: FlowPolicy
    sampler: Sampler
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    with_reference: bool = False

    @cached_property
    def _paths(self) -> Tensor:
        return self.rollout.trajectories.tree.paths.to(self.policy.device)

    @cached_property
    def _decisions(self) -> Tensor:
        return self.rollout.trajectories.tree.decisions.to(self.policy.device)

    def of(self, sample: Tensor, step: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> LossBatch:
        """The batch of these pairs; indices of equal length. `shared`: see `MicroBatch`."""
        path = self.rollout.trajectories
        schedule, paths = path.schedule, self._paths
        group, member = sample // len(paths), sample % len(paths)
        following = _rows(path.states, group, paths[member, step + 1])
        rows, place = (slice(None), slice(None)) if shared is None else shared
        of, at = group[rows], step[rows]
        unit = paths[member[rows], at]
        node, timestep, condition = _rows(path.states, of, unit), schedule.network_timesteps[at], self.condition.take(of)

        def distributions(velocity: Tensor) -> Gaussian:
            gaussian = self.sampler.transition(node, velocity, schedule, at)
            return gaussian if shared is None else Gaussian(gaussian.mean[place], gaussian.std[place])

        velocity = self.policy.velocity(node, timestep, condition)
        velocity = velocity.view_as(velocity)  # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        new = distributions(velocity)
        behaviour = distributions(_rows(path.outputs, of, unit))
        reference: Gaussian | None = None
        if self.with_reference:
            with self.policy.reference():
                reference = distributions(self.policy.velocity(node, timestep, condition))
        return LossBatch(
            new=new,
            behaviour=behaviour,
            next_node=following,
            advantages=self.advantages[sample, step],
            mask=self._decisions[member, step],
            delta=schedule.deltas[step],
            reference=reference,
            velocity=velocity,
        )


def checked_loss(loss: PolicyLoss, batch: LossBatch) -> LossResult:
    """What `loss` makes of the batch. Raises `TrainingError` unless that is a scalar that can be differentiated."""
    call = f"{type(loss).__name__}.loss"
    with inputs_unchanged(call, TrainingError, batch.advantages, batch.next_node, batch.mask):
        result = loss.loss(batch)
    value = getattr(result, "loss", None)
    if not isinstance(result, LossResult) or not isinstance(value, Tensor):
        raise TrainingError(f"{call} returned a {type(result).__name__}; a LossResult with a scalar tensor `loss` is required")
    problem = tensor_problem(value) or ("" if value.numel() == 1 and value.requires_grad else "is no scalar with a gradient")
    if problem:
        raise TrainingError(f"{call} returned a loss that {problem}; shape {tuple(value.shape)}, {value.dtype}, {value.device}")
    return result


def _rows(stored: Tensor, group: Tensor, unit: Tensor) -> Tensor:
    """`stored[group, unit]` on the device of the indices."""
    return stored[group.to(stored.device), unit.to(stored.device)].to(group.device)
