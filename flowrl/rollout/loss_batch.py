"""From trajectories to the input of a policy loss: micro-batches of transitions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.distributed import Distributed
from flowrl.errors import ConfigError, TrainingError, require
from flowrl.forward import ForwardBatch
from flowrl.protocols import FlowPolicy, ForwardLoss, PolicyLoss, PooledLoss, Sampler
from flowrl.rollout.collector import Collected
from flowrl.rollout.rollout import Rollout
from flowrl.transfer import to_device
from flowrl.tree import Tree
from flowrl.types import Condition, Gaussian, LossBatch, LossResult, Unit, inputs_unchanged, tensor_problem, unit_means


@dataclass(frozen=True)
class Pairs:
    """(trajectory, step) pairs.

    Args:
        sample: indices of the samples [pair], among all samples.
        step: indices of the steps [pair]; for forward-process losses, of the drawn times.
        unit: pairs with the same number are adjacent and stay in one micro-batch if they fit; None: every pair is separate.
        shared: the pairs of a unit need one network evaluation together, as they start from one state.
        zeros: number of further pairs that the mean includes, which are left out because their gradient is 0.
    """

    sample: Tensor
    step: Tensor
    unit: Tensor | None = None
    shared: bool = False
    zeros: int = 0

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: Tensor) -> "Pairs":
        return Pairs(self.sample[rows], self.step[rows], None if self.unit is None else self.unit[rows], self.shared)

    def to(self, device: torch.device) -> "Pairs":
        """The same pairs with their indices on `device`."""
        unit = None if self.unit is None else self.unit.to(device)
        return replace(self, sample=self.sample.to(device), step=self.step.to(device), unit=unit)

    @property
    def total(self) -> int:
        """The number of pairs that the mean is over."""
        return len(self) + self.zeros

    def without_zeros(self, advantages: Tensor) -> "Pairs":
        """The pairs whose advantage [sample, step] is not 0, as part of the same mean; whole units, unless they are only shared
        states.

        The first pair if there are none, because the optimizer also steps on gradients of 0.
        """
        kept = advantages.to(self.sample.device)[self.sample, self.step] != 0
        if self.unit is not None and not self.shared:
            kept = torch.isin(self.unit, self.unit[kept])
        kept[0] |= ~kept.any()
        found = self[kept]
        return replace(found, zeros=len(self) - len(found))

    @property
    def evaluations(self) -> int:
        """Network evaluations that the pairs take."""
        return len(self.unit.unique()) if self.shared and self.unit is not None else len(self)

    @property
    def largest(self) -> int:
        """Network evaluations of the largest unit."""
        if self.unit is None or self.shared:
            return 1
        return int(self.unit.unique_consecutive(return_counts=True)[1].max())

    def pieces(self, size: int) -> Iterator["Pairs"]:
        """The pairs in order, at most `size` network evaluations at a time, with whole units if `size` allows."""
        if self.unit is None:
            for sample, step in zip(self.sample.split(size), self.step.split(size), strict=True):
                yield Pairs(sample, step)
            return
        lengths, filled = [0], 0
        for count in self.unit.unique_consecutive(return_counts=True)[1].tolist():
            cost = 1 if self.shared else count
            parts = [count] if cost <= size else [*[size] * (count // size), *([count % size] if count % size else [])]
            for part in parts:
                taken = 1 if self.shared else part
                if filled + taken > size:
                    lengths, filled = [*lengths, 0], 0
                lengths[-1], filled = lengths[-1] + part, filled + taken
        start = 0
        for length in filter(None, lengths):
            yield self[torch.arange(start, start + length, device=self.sample.device)]
            start += length


def all_pairs(samples: Tensor, steps: Tensor) -> Pairs:
    """Every sample with every step."""
    sample, step = torch.cartesian_prod(samples, steps).unbind(1)
    return Pairs(sample, step)


def unit_key(unit: Unit, members: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The number of the unit of each (sample, step), for `in_units`."""
    if unit == "trajectory":
        return lambda sample, step: sample
    return lambda sample, step: sample // members * (int(step.max()) + 1) + step


def minibatch_pairs(
    parts: Sequence[Tensor], steps: Tensor, tree: Tree, trained: Tensor | None = None, unit: Unit = "transition"
) -> list[Pairs]:
    """The pairs (sample, step) of each mini-batch.

    Without branches these are the samples `parts[k]` with the trained `steps`. In a branched tree they are the decisions, once
    per trajectory or, if the tree's `weight` is "edge", once per distinct edge. All pairs of a parent are in the same
    mini-batch. Parents are ordered by the first trajectory that contains them, so that every mini-batch has all depths, and
    mini-batches have about the same number of pairs. With another `unit` than "transition" it is the loss's units that stay
    whole, instead of the parents.

    Args:
        parts: sample indices [sample] of each mini-batch.
        steps: indices of the trained steps [step].
        tree: the tree of the rollout.
        trained: mask of the pairs that remain [sample, step]; None for all.
        unit: what the loss needs in one batch.

    Returns:
        One set of pairs per mini-batch.

    Raises:
        ConfigError: a trajectory of the tree lacks edges that count for another one, and the loss needs whole units.
    """
    found = [all_pairs(samples, steps) for samples in parts]
    if unit != "transition":
        fits = not tree.branched or tree.weight == "leaf"
        require(fits, "weight of the branching probe", tree.weight, f"'leaf' with a loss that needs a whole {unit}")
        found = in_units(found, unit_key(unit, tree.members), kept=lambda sample, step: _decisions(sample, step, tree))
    elif tree.branched:
        found = in_units(
            found, lambda sample, step: _units(sample, step, tree), True, lambda sample, step: _decisions(sample, step, tree)
        )
    return found if trained is None else [pairs[trained[pairs.sample, pairs.step]] for pairs in found]


def in_units(
    parts: Sequence[Pairs],
    key: Callable[[Tensor, Tensor], Tensor],
    shared: bool = False,
    kept: Callable[[Tensor, Tensor], Tensor] = lambda sample, step: torch.ones_like(sample, dtype=torch.bool),
) -> list[Pairs]:
    """The pairs for which `kept(sample, step)` is true, divided into as many mini-batches of about equally many pairs.

    Units, which `key(sample, step)` identifies, stay whole. They are ordered by their smallest sample index.
    """
    if not parts:
        return []
    device = parts[0].sample.device
    sample, step = (torch.cat([getattr(pairs, name) for pairs in parts]).cpu() for name in ("sample", "step"))
    unit = key(sample, step)
    by_number = sample.argsort(stable=True)
    first = torch.empty_like(by_number)
    first[by_number] = by_number[_first(unit[by_number])]
    order = first.argsort(stable=True)
    order = order[kept(sample, step)[order]]
    place = _first(unit[order]) * len(parts) // max(len(order), 1)
    chosen = [order[place == k] for k in range(len(parts))]
    return [Pairs(sample[rows].to(device), step[rows].to(device), unit[rows].to(device), shared) for rows in chosen]


def _units(sample: Tensor, node: Tensor, tree: Tree) -> Tensor:
    """The index, among all groups, of the state that each trajectory passes at `node`."""
    return sample // tree.members * tree.units + tree.paths[sample % tree.members, node]


def _decisions(sample: Tensor, step: Tensor, tree: Tree) -> Tensor:
    """Mask of the pairs that count: the decisions, each edge once if the tree declares it."""
    kept = tree.decisions[sample % tree.members, step]
    if tree.weight == "edge":
        kept &= _first(_units(sample, step + 1, tree)) == torch.arange(len(sample))
    return kept


def _first(keys: Tensor) -> Tensor:
    """For every row the first one with the same key."""
    distinct, place = keys.unique(return_inverse=True)
    first = torch.full((len(distinct),), len(keys))
    return first.scatter_reduce_(0, place, torch.arange(len(keys)), "amin")[place]


@dataclass(frozen=True)
class MicroBatch:
    """Pairs of one micro-batch.

    Indices are stored where the trajectories are, in main memory if they are offloaded, so the host can read the rows without
    waiting for the device.

    Args:
        sample: indices of the samples [pair], among those that this process rolled out.
        step: indices of the steps [pair].
        weight: number of its pairs / number of pairs of its mini-batch (`Pairs.total`) over all processes, so that the weighted
            sum of mean losses is the mean over the mini-batch. 0 is padding: sharded weights need equally many network calls in
            all processes.
        shared: the first pair of every distinct parent, and the index of its parent for every pair; None if no pair shares one.
        whole: no unit of the mini-batch is spread over micro-batches.
    """

    sample: Tensor
    step: Tensor
    weight: float
    shared: tuple[Tensor, Tensor] | None = None
    whole: bool = True


def micro_batches(pairs: Pairs, size: int, collected: Collected, distributed: Distributed) -> list[MicroBatch]:
    """This process's pairs of a mini-batch, at most `size` network evaluations at a time."""
    own = pairs[collected.owned(pairs.sample, collected.assignment)].to(collected.rollout.trajectories.states.device)
    whole = pairs.largest <= size
    found = [
        _micro_batch(piece, collected.samples.start, len(piece) / pairs.total, whole)
        for piece in (own.pieces(size) if len(own) else ())
    ]
    if distributed.sharded:
        groups = collected.rollout.groups
        assigned = [distributed.assign(groups.of or groups.prompts, rank) for rank in range(distributed.world_size)]
        counts = [len(list(pairs[collected.owned(pairs.sample, one)].pieces(size))) for one in assigned]
        padding = MicroBatch(own.sample.new_zeros(1), pairs.step[:1].to(own.step), 0.0, whole=whole)
        found += [padding] * (max(counts) - len(found))
    return found


def _micro_batch(pairs: Pairs, first: int, weight: float, whole: bool = True) -> MicroBatch:
    if pairs.unit is None or not pairs.shared:
        return MicroBatch(pairs.sample - first, pairs.step, weight, whole=whole)
    place = pairs.unit.unique_consecutive(return_inverse=True)[1]
    rows = torch.cat([place.new_zeros(1), place.diff().nonzero().flatten() + 1])
    return MicroBatch(pairs.sample - first, pairs.step, weight, (rows, place))


@dataclass
class LossBatches:
    """Makes loss batches from trajectories.

    The batch of (`sample[k]`, `step[k]`) has any mixture of steps; the current policy's transitions carry the gradient. One
    network evaluation per pair, or per parent of a micro-batch whose pairs share theirs; two with the reference. Trajectories
    in main memory are copied to the policy's device.

    Args:
        policy: the policy.
        sampler: the sampler of the rollout.
        rollout: the rollout with the trajectories.
        condition: the condition, one row per prompt.
        advantages: the credit rule's advantages [sample, step].
        with_reference: also evaluate the frozen base model.
        loss: the loss; needed by `prepare` only.
        pooled: means over units that are spread over micro-batches; set by `prepare`.
    """

    policy: FlowPolicy
    sampler: Sampler
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    with_reference: bool = False
    loss: PolicyLoss | None = None
    pooled: Tensor | None = None

    @property
    def passes(self) -> int:
        """Network evaluations of a state: by the current network and, with the reference, by the base model.

        Twice as many if rows of a unit are in several micro-batches.
        """
        return (1 + self.with_reference) * (2 if self.pooled is not None else 1)

    def prepare(self, minibatch: Sequence[MicroBatch]) -> None:
        """Compute, before a mini-batch, the means over units that are spread over micro-batches, with the current weights."""
        self.pooled = None
        if self.loss is not None:
            self.pooled = pooled_means(self.loss, self.of, minibatch, self.advantages)

    def evaluated_steps(self, micro: MicroBatch) -> Tensor:
        """The step of every network evaluation, on the policy's device."""
        return self._there(micro.step if micro.shared is None else micro.step[micro.shared[0]])

    @cached_property
    def _paths(self) -> Tensor:
        return to_device(self.rollout.trajectories.tree.paths, self.rollout.trajectories.states.device)

    @cached_property
    def _decisions(self) -> Tensor:
        return to_device(self.rollout.trajectories.tree.decisions, self.rollout.trajectories.states.device)

    def _there(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.advantages.device)

    def of(self, sample: Tensor, step: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> LossBatch:
        """The batch of these pairs; indices of equal length. `shared`: see `MicroBatch`."""
        path, schedule, paths, there = self.rollout.trajectories, self.rollout.trajectories.schedule, self._paths, self._there
        sample, step = sample.to(path.states.device), step.to(path.states.device)
        group, member = sample // len(paths), sample % len(paths)
        following = there(path.states[group, paths[member, step + 1]])
        weight = there(self._decisions[member, step]).to(self.advantages)
        rows, place = (slice(None), slice(None)) if shared is None else (shared[0], there(shared[1]))
        of, at = group[rows], step[rows]
        unit = paths[member[rows], at]
        node, sampled = there(path.states[of, unit]), there(path.outputs[of, unit])
        sample, group, step, of, at = map(there, (sample, group, step, of, at))
        timestep, condition = schedule.network_timesteps[at], self.condition.take(of)

        def distributions(velocity: Tensor) -> Gaussian:
            gaussian = self.sampler.transition(node, velocity, schedule, at)
            return gaussian if shared is None else Gaussian(gaussian.mean[place], gaussian.std[place])

        velocity = self.policy.velocity(node, timestep, condition)
        velocity = velocity.view_as(velocity)  # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        new = distributions(velocity)
        behaviour = distributions(sampled)
        reference: Gaussian | None = None
        if self.with_reference:
            with self.policy.reference():
                reference = distributions(self.policy.velocity(node, timestep, condition))
        first = self.rollout.groups.first
        return LossBatch(
            new=new,
            behaviour=behaviour,
            next_node=following,
            advantages=self.advantages[sample, step],
            weight=weight,
            delta=schedule.deltas[step],
            sample=sample + first * len(paths),
            group=group + first,
            step=step,
            time=schedule.times[step],
            reference=reference,
            velocity=velocity,
            pooled=None if self.pooled is None else self.pooled[sample, step],
        )


def pooled_means(
    loss: PolicyLoss | ForwardLoss,
    of: Callable[[Tensor, Tensor], LossBatch | ForwardBatch],
    minibatch: Sequence[MicroBatch],
    table: Tensor,
) -> Tensor | None:
    """The means of the loss's `row_terms` over the unit of every row of a mini-batch, in a table like `table` [sample, step].

    None if the loss's units are rows, or if no unit is spread over micro-batches. `of` makes the batch of (sample, step) rows.
    Raises `ConfigError` if units are spread and the loss is not a `PooledLoss`.
    """
    if loss.unit == "transition" or all(micro.whole for micro in minibatch):
        return None
    if not isinstance(loss, PooledLoss):
        found = f"{type(loss).__name__} needs a whole {loss.unit} in a micro-batch, and some have more rows"
        raise ConfigError(f"{found}: raise micro_batch, or give the loss a method row_terms(batch) (protocols.PooledLoss)")
    rows: list[Sequence[Tensor]] = []
    with torch.no_grad():
        for micro in minibatch:
            batch = of(micro.sample, micro.step)
            weight = batch.weight if micro.weight > 0 else torch.zeros_like(batch.weight)
            places = [to_device(index, table.device) for index in (micro.sample, micro.step)]
            rows.append((*places, loss.row_terms(batch), weight, *batch.units(loss.unit)))
        sample, step, terms, weight, *units = (torch.cat(column) for column in zip(*rows, strict=True))
        means, kept = unit_means(terms, units, weight), weight > 0
    return torch.zeros_like(table).index_put_((sample[kept], step[kept]), means[kept].to(table))


def checked_loss(loss: PolicyLoss | ForwardLoss, batch: LossBatch | ForwardBatch) -> LossResult:
    """The result of `loss` for the batch. Raises `TrainingError` unless its loss is a differentiable scalar."""
    call = f"{type(loss).__name__}.loss"
    given = batch.target if isinstance(batch, ForwardBatch) else batch.next_node
    with inputs_unchanged(call, TrainingError, batch.advantages, given, batch.weight):
        result = cast(Any, loss).loss(batch)
    value = getattr(result, "loss", None)
    if not isinstance(result, LossResult) or not isinstance(value, Tensor):
        raise TrainingError(f"{call} returned a {type(result).__name__}; a LossResult with a scalar tensor `loss` is required")
    problem = tensor_problem(value) or ("" if value.numel() == 1 and value.requires_grad else "is no scalar with a gradient")
    if problem:
        raise TrainingError(f"{call} returned a loss that {problem}; shape {tuple(value.shape)}, {value.dtype}, {value.device}")
    return result
