"""From trajectories to the input of a policy loss: micro-batches of transitions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, TrainingError
from flowrl.core.forward import ForwardBatch
from flowrl.core.protocols import FlowPolicy, ForwardLoss, PolicyLoss, Sampler
from flowrl.core.tree import Tree
from flowrl.core.types import (
    Condition,
    Gaussian,
    LossBatch,
    LossResult,
    Unit,
    inputs_unchanged,
    tensor_problem,
    to_device,
    unit_means,
)
from flowrl.distributed import Distributed
from flowrl.rollout.collector import Collected
from flowrl.rollout.rollout import Rollout


@dataclass(frozen=True)
class Rows:
    """Rows of a loss: transitions, or images at drawn times.

    Args:
        sample: indices of the samples [row], among all samples.
        column: indices of the decisions [row]; for forward-process losses, of the drawn times.
        weight: weights in the mean [row].
        unit: rows with the same number are adjacent and stay in one micro-batch if they fit; None:
            every row is separate.
        shared: the rows of a unit need one network evaluation together, as they start from one
            state.
        left_out: sum of the weights of further rows that the mean includes, whose gradient is 0.
        zeros: number of these rows.
    """

    sample: Tensor
    column: Tensor
    weight: Tensor
    unit: Tensor | None = None
    shared: bool = False
    left_out: float = 0.0
    zeros: int = 0

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: Tensor) -> "Rows":
        unit = None if self.unit is None else self.unit[rows]
        return Rows(self.sample[rows], self.column[rows], self.weight[rows], unit, self.shared)

    def to(self, device: torch.device) -> "Rows":
        """The same rows with their numbers on `device`."""
        unit = None if self.unit is None else self.unit.to(device)
        sample, column, weight = (one.to(device) for one in (self.sample, self.column, self.weight))
        return replace(self, sample=sample, column=column, weight=weight, unit=unit)

    @cached_property
    def evaluated(self) -> float:
        """The sum of the weights."""
        return sum(self.weight.tolist())

    @property
    def total(self) -> float:
        """The denominator of the mean."""
        return self.evaluated + self.left_out

    def without_zeros(self, advantages: Tensor) -> "Rows":
        """The rows whose advantage [sample, decision] is not 0, as part of the same mean; whole
        units, unless they are only shared states.

        The first row if there are none, because the optimizer also steps on gradients of 0.
        """
        kept = advantages.to(self.sample.device)[self.sample, self.column] != 0
        if self.unit is not None and not self.shared:
            kept = torch.isin(self.unit, self.unit[kept])
        kept[0] |= ~kept.any()
        found = self[kept]
        return replace(
            found, left_out=self.evaluated - found.evaluated, zeros=len(self) - len(found)
        )

    @property
    def evaluations(self) -> int:
        """Network evaluations that the rows take."""
        return len(self.unit.unique()) if self.shared and self.unit is not None else len(self)

    @property
    def largest(self) -> int:
        """Network evaluations of the largest unit."""
        if self.unit is None or self.shared:
            return 1
        return int(self.unit.unique_consecutive(return_counts=True)[1].max())

    def pieces(self, size: int) -> Iterator["Rows"]:
        """The rows in order, at most `size` network evaluations at a time, with whole units if
        `size` allows.
        """
        lengths, filled = [0], 0
        for count in self._counts():
            cost = 1 if self.shared else count
            rest = [count % size] if count % size else []
            for part in [count] if cost <= size else [*[size] * (count // size), *rest]:
                taken = 1 if self.shared else part
                if filled + taken > size:
                    lengths, filled = [*lengths, 0], 0
                lengths[-1], filled = lengths[-1] + part, filled + taken
        start = 0
        for length in filter(None, lengths):
            yield self[torch.arange(start, start + length, device=self.sample.device)]
            start += length

    def _counts(self) -> list[int]:
        """The numbers of rows of the units."""
        if self.unit is None:
            return [1] * len(self)
        return self.unit.unique_consecutive(return_counts=True)[1].tolist()


def minibatch_rows(
    parts: Sequence[Tensor], weights: Tensor, tree: Tree, unit: Unit = "transition"
) -> list[Rows]:
    """The transitions of each mini-batch: those of weight above 0.

    Without branches these are the decisions of the samples `parts[k]`. In a branched tree all
    transitions from one state are in the same mini-batch. States are ordered by the first
    trajectory that contains them, so that every mini-batch has all depths, and mini-batches have
    about the same number of transitions. With another `unit` than "transition" it is the loss's
    units that stay whole, instead of the states.

    Args:
        parts: sample indices [sample] of each mini-batch.
        weights: weights [sample, decision] of all samples.
        tree: the tree of the rollout.
        unit: what the loss needs in one batch.

    Returns:
        One set of rows per mini-batch.
    """
    every = torch.arange(weights.shape[1], device=weights.device)
    found = [weighted_rows(samples, every, weights) for samples in parts]
    if unit != "transition":
        return in_units(found, unit_key(unit, tree.members))
    if tree.branched:
        return in_units(found, lambda sample, column: _start(sample, column, tree), True)
    return found


def weighted_rows(samples: Tensor, columns: Tensor, weights: Tensor) -> Rows:
    """Every sample with every column, if its weight in `weights` [sample, column] is above 0."""
    samples = samples.to(weights.device)
    sample, column = torch.cartesian_prod(samples, columns).unbind(1)
    weight = weights[sample, column]
    kept = weight > 0
    return Rows(sample[kept], column[kept], weight[kept])


def unit_key(unit: Unit, members: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The number of the unit of each (sample, column), for `in_units`."""
    if unit == "trajectory":
        return lambda sample, column: sample
    return lambda sample, column: sample // members * (int(column.max()) + 1) + column


def in_units(
    parts: Sequence[Rows], key: Callable[[Tensor, Tensor], Tensor], shared: bool = False
) -> list[Rows]:
    """The rows, divided into as many mini-batches of about equally many rows.

    Units, which `key(sample, column)` identifies, stay whole. They are ordered by their smallest
    sample index.
    """
    if not parts or not any(map(len, parts)):
        return list(parts)
    device = parts[0].sample.device
    sample, column, weight = (
        torch.cat([getattr(rows, name) for rows in parts]).cpu()
        for name in ("sample", "column", "weight")
    )
    unit = key(sample, column)
    by_number = sample.argsort(stable=True)
    first = torch.empty_like(by_number)
    first[by_number] = by_number[_first(unit[by_number])]
    order = first.argsort(stable=True)
    place = _first(unit[order]) * len(parts) // len(order)
    rows = Rows(sample[order], column[order], weight[order], unit[order], shared)
    return [rows[place == k].to(device) for k in range(len(parts))]


def _start(sample: Tensor, column: Tensor, tree: Tree) -> Tensor:
    """The index, among all groups, of the state from which each trajectory's decision starts."""
    step = torch.tensor(tree.drawn_steps)[column]
    return sample // tree.members * tree.units + tree.paths[sample % tree.members, step]


def _first(keys: Tensor) -> Tensor:
    """For every row the first one with the same key."""
    distinct, place = keys.unique(return_inverse=True)
    first = torch.full((len(distinct),), len(keys))
    return first.scatter_reduce_(0, place, torch.arange(len(keys)), "amin")[place]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one micro-batch.

    Indices are stored where the trajectories are, in main memory if they are offloaded, so the host
    can read the rows without waiting for the device.

    Args:
        sample: indices of the samples [row], among those that this process rolled out.
        column: indices of the decisions or drawn times [row].
        weight: sum of its rows' weights / that of its mini-batch (`Rows.total`) over all processes,
            so that the weighted sum of mean losses is the mean over the mini-batch. 0 is padding:
            sharded weights need equally many network calls in all processes.
        shared: the first row of every distinct state, and the index of its state for every row;
            None if no row shares one.
        whole: no unit of the mini-batch is spread over micro-batches.
    """

    sample: Tensor
    column: Tensor
    weight: float
    shared: tuple[Tensor, Tensor] | None = None
    whole: bool = True


def micro_batches(
    rows: Rows, size: int, collected: Collected, distributed: Distributed
) -> list[MicroBatch]:
    """This process's rows of a mini-batch, at most `size` network evaluations at a time."""
    own = rows[collected.owned(rows.sample, collected.assignment)]
    device = collected.rollout.trajectories.states.device
    whole = rows.largest <= size
    found = [
        _micro_batch(piece.to(device), collected.samples.start, piece.evaluated / rows.total, whole)
        for piece in (own.pieces(size) if len(own) else ())
    ]
    if distributed.sharded:
        groups = collected.rollout.groups
        assigned = [
            distributed.assign(groups.of or groups.prompts, rank)
            for rank in range(distributed.world_size)
        ]
        counts = [
            len(list(rows[collected.owned(rows.sample, one)].pieces(size))) for one in assigned
        ]
        padding = MicroBatch(
            rows.sample.new_zeros(1).to(device), rows.column[:1].to(device), 0.0, whole=whole
        )
        found += [padding] * (max(counts) - len(found))
    return found


def _micro_batch(rows: Rows, first: int, weight: float, whole: bool = True) -> MicroBatch:
    if rows.unit is None or not rows.shared:
        return MicroBatch(rows.sample - first, rows.column, weight, whole=whole)
    place = rows.unit.unique_consecutive(return_inverse=True)[1]
    starts = torch.cat([place.new_zeros(1), place.diff().nonzero().flatten() + 1])
    return MicroBatch(rows.sample - first, rows.column, weight, (starts, place))


@dataclass
class LossBatches:
    """Makes loss batches from trajectories.

    The batch of (`sample[k]`, `column[k]`) has any mixture of decisions; the current policy's
    transitions carry the gradient. One network evaluation per row, or per state of a micro-batch
    whose rows share theirs; two with the reference. Trajectories in main memory are copied to the
    policy's device.

    Args:
        policy: the policy.
        sampler: the sampler of the rollout.
        rollout: the rollout with the trajectories.
        condition: the condition, one row per prompt.
        advantages: the credit rule's advantages [sample, decision].
        weights: the weights of the transitions [sample, decision].
        with_reference: also evaluate the frozen base model.
        loss: the loss; needed by `prepare` only.
        pooled: means over units that are spread over micro-batches; set by `prepare`.
    """

    policy: FlowPolicy
    sampler: Sampler
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    weights: Tensor
    with_reference: bool = False
    loss: PolicyLoss | None = None
    pooled: Tensor | None = None

    @property
    def passes(self) -> int:
        """Network evaluations of a state: by the current network and, with the reference, by the
        base model.

        Twice as many if rows of a unit are in several micro-batches.
        """
        return (1 + self.with_reference) * (2 if self.pooled is not None else 1)

    def prepare(self, minibatch: Sequence[MicroBatch]) -> None:
        """Compute, before a mini-batch, the means over units that are spread over micro-batches,
        with the current weights.
        """
        self.pooled = None
        if self.loss is not None:
            self.pooled = pooled_means(self.loss, self.of, minibatch, self.advantages)

    def evaluated_steps(self, micro: MicroBatch) -> Tensor:
        """The step of every network evaluation, on the policy's device."""
        column = micro.column if micro.shared is None else micro.column[micro.shared[0]]
        return self._there(self._steps[column])

    def origin(self, sample: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The step and the decision of rows."""
        return self._steps[column.to(self._steps.device)], column

    @cached_property
    def _paths(self) -> Tensor:
        return to_device(
            self.rollout.trajectories.tree.paths, self.rollout.trajectories.states.device
        )

    def __post_init__(self) -> None:
        path = self.rollout.trajectories
        self._steps = to_device(torch.tensor(path.tree.drawn_steps), path.states.device)

    def _there(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.advantages.device)

    def of(
        self, sample: Tensor, column: Tensor, shared: tuple[Tensor, Tensor] | None = None
    ) -> LossBatch:
        """The batch of these rows; indices of equal length. `shared`: see `MicroBatch`."""
        path, schedule, paths, there = (
            self.rollout.trajectories,
            self.rollout.trajectories.schedule,
            self._paths,
            self._there,
        )
        sample, column = sample.to(path.states.device), column.to(path.states.device)
        step = self._steps[column]
        group, member = sample // len(paths), sample % len(paths)
        following = there(path.states[group, paths[member, step + 1]])
        rows, place = (
            (slice(None), slice(None)) if shared is None else (shared[0], there(shared[1]))
        )
        of, at = group[rows], step[rows]
        unit = paths[member[rows], at]
        node, sampled = there(path.states[of, unit]), there(path.outputs[of, unit])
        sample, group, step, column, of, at = map(there, (sample, group, step, column, of, at))
        timestep, condition = schedule.network_timesteps[at], self.condition.take(of)

        def distributions(velocity: Tensor) -> Gaussian:
            gaussian = self.sampler.transition(node, velocity, schedule, at)
            return (
                gaussian if shared is None else Gaussian(gaussian.mean[place], gaussian.std[place])
            )

        velocity = self.policy.velocity(node, timestep, condition)
        # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        velocity = velocity.view_as(velocity)
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
            advantages=self.advantages[sample, column],
            weight=self.weights[sample, column],
            delta=schedule.deltas[step],
            sample=sample + first * len(paths),
            group=group + first,
            step=step,
            time=schedule.times[step],
            reference=reference,
            velocity=velocity,
            pooled=None if self.pooled is None else self.pooled[sample, column],
        )


def pooled_means(
    loss: PolicyLoss | ForwardLoss,
    of: Callable[[Tensor, Tensor], LossBatch | ForwardBatch],
    minibatch: Sequence[MicroBatch],
    table: Tensor,
) -> Tensor | None:
    """The means of the loss's `row_terms` over the unit of every row of a mini-batch, in a table
    like `table` [sample, column].

    None if the loss's units are rows, or if no unit is spread over micro-batches. `of` makes the
    batch of (sample, column) rows. Raises `ConfigError` if units are spread and the loss has no
    method `row_terms`.
    """
    if loss.unit == "transition" or all(micro.whole for micro in minibatch):
        return None
    row_terms = getattr(loss, "row_terms", None)
    if row_terms is None:
        found = (
            f"{type(loss).__name__} needs a whole {loss.unit} in a micro-batch, and some have more"
            " rows"
        )
        raise ConfigError(
            f"{found}: raise micro_batch, or give the loss a method row_terms(batch)"
            " (protocols.PolicyLoss)"
        )
    rows: list[Sequence[Tensor]] = []
    with torch.no_grad():
        for micro in minibatch:
            batch = of(micro.sample, micro.column)
            weight = batch.weight if micro.weight > 0 else torch.zeros_like(batch.weight)
            places = [to_device(index, table.device) for index in (micro.sample, micro.column)]
            rows.append((*places, row_terms(batch), weight, *batch.units(loss.unit)))
        sample, column, terms, weight, *units = (
            torch.cat(column) for column in zip(*rows, strict=True)
        )
        means, kept = unit_means(terms, units, weight), weight > 0
    return torch.zeros_like(table).index_put_((sample[kept], column[kept]), means[kept].to(table))


def checked_loss(loss: PolicyLoss | ForwardLoss, batch: LossBatch | ForwardBatch) -> LossResult:
    """The result of `loss` for the batch. Raises `TrainingError` unless its loss is a
    differentiable scalar.
    """
    call = f"{type(loss).__name__}.loss"
    given = batch.target if isinstance(batch, ForwardBatch) else batch.next_node
    with inputs_unchanged(call, TrainingError, batch.advantages, given, batch.weight):
        result = cast(Any, loss).loss(batch)
    value = getattr(result, "loss", None)
    if not isinstance(result, LossResult) or not isinstance(value, Tensor):
        raise TrainingError(
            f"{call} returned a {type(result).__name__}; a LossResult with a scalar tensor `loss`"
            " is required"
        )
    problem = tensor_problem(value) or (
        "" if value.numel() == 1 and value.requires_grad else "is no scalar with a gradient"
    )
    if problem:
        raise TrainingError(
            f"{call} returned a loss that {problem}; shape {tuple(value.shape)}, {value.dtype},"
            f" {value.device}"
        )
    return result
