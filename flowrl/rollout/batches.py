"""From trajectories and credit to the input of a loss.

A *row* is a transition or, for a forward-process loss, a finished image at a drawn time. Rows
of a mini-batch are chosen from the weights of all samples, in main memory and equally in all
processes; each process evaluates its own rows in micro-batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, TrainingError, part_call
from flowrl.core.experience import Decisions
from flowrl.core.forward import Guidance
from flowrl.core.processes import Processes
from flowrl.core.protocols import AnyReward, AnySampler, FlowPolicy, Sampler
from flowrl.core.types import (
    Gaussian,
    LossBatch,
    LossResult,
    Paths,
    Prompt,
    Schedule,
    Unit,
    pooled_units,
    tensor_problem,
    to_device,
    unit_means,
)
from flowrl.rollout.walk import Rollout


@dataclass(frozen=True)
class Rows:
    """Rows of a mini-batch, in main memory, or those of a micro-batch, where the trajectories are.

    Args:
        sample: indices of the samples [row], among all samples.
        column: indices of the decisions [row]; for forward-process losses, of the drawn times.
        weight: weights in the mean [row].
        unit: rows with the same number are adjacent and stay in one micro-batch if they fit.
        shared: the rows of a unit need one network evaluation together, as they start from one
            state.
        left_out: sum of the weights of further rows that the mean includes, whose gradient is 0.
        zeros: number of these rows.
        share: sum of the weights / that of their mini-batch (`total`) over all processes, so that
            the weighted sum of the mean losses of micro-batches is the mean over the mini-batch. 0
            is padding: sharded weights need equally many network calls in all processes.
        states: in a micro-batch with shared states the first row of every state, and the index of
            its state for every row.
        complete: no unit of the mini-batch is spread over micro-batches.
    """

    sample: Tensor
    column: Tensor
    weight: Tensor
    unit: Tensor
    shared: bool = False
    left_out: float = 0.0
    zeros: int = 0
    share: float = 1.0
    states: tuple[Tensor, Tensor] | None = None
    complete: bool = True

    @staticmethod
    def of(sample: Tensor, column: Tensor) -> "Rows":
        """Rows of equal weights without larger units."""
        return Rows(sample, column, torch.ones(len(sample)), torch.arange(len(sample)))

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: Tensor) -> "Rows":
        columns = (table[rows] for table in (self.sample, self.column, self.weight, self.unit))
        return Rows(*columns, shared=self.shared)

    @cached_property
    def evaluated(self) -> float:
        """The sum of the weights."""
        return sum(self.weight.tolist())

    @property
    def total(self) -> float:
        """The denominator of the mean."""
        return self.evaluated + self.left_out

    @property
    def evaluations(self) -> int:
        """Network evaluations that the rows take."""
        return len(self.counts) if self.shared else len(self)

    @cached_property
    def counts(self) -> list[int]:
        """Number of rows of each unit."""
        return self.unit.unique_consecutive(return_counts=True)[1].tolist()

    def without_zeros(self, advantages: Tensor) -> "Rows":
        """The rows whose advantage [sample, decision] is not 0, as part of the same mean; whole
        units, unless they are only shared states.

        The first row if there are none, because the optimizer also steps on gradients of 0.
        """
        kept = advantages[self.sample, self.column] != 0
        if not self.shared:
            kept = torch.isin(self.unit, self.unit[kept])
        kept[0] |= ~kept.any()
        rows = self[kept]
        left_out = self.evaluated - rows.evaluated
        return replace(rows, left_out=left_out, zeros=len(self) - len(rows))

    def to(self, device: torch.device) -> "Rows":
        """The rows with their indices, and those of shared states, on `device`."""
        states = None
        if self.shared:
            place = self.unit.unique_consecutive(return_inverse=True)[1]
            states = _first(place).unique().to(device), place.to(device)
        sample, column = self.sample.to(device), self.column.to(device)
        return replace(self, sample=sample, column=column, states=states)

    def pieces(self, size: int) -> list["Rows"]:
        """The rows in order, at most `size` network evaluations at a time, with whole units if
        `size` allows.
        """
        lengths, filled = [0], 0
        for count in self.counts:
            fits = self.shared or count <= size
            for rows in [count] if fits else [*[size] * (count // size), count % size]:
                cost = 1 if self.shared else rows
                if filled + cost > size:
                    lengths, filled = [*lengths, 0], 0
                lengths[-1], filled = lengths[-1] + rows, filled + cost
        return [self[rows] for rows in torch.arange(len(self)).split(lengths) if len(rows)]


def minibatch_rows(
    parts: Sequence[Tensor],
    weights: Tensor,
    tree: Paths,
    unit: Unit = "transition",
    share_states: bool = True,
) -> list[Rows]:
    """The rows of each mini-batch: those of weight above 0.

    If rows are units, these are the columns of the samples `parts[k]`. Other units are divided into
    as many mini-batches, of about equally many rows, in the order of their first samples. In a
    branched tree all transitions from one state are a unit if states are shared: the network
    evaluates their state once, and every mini-batch has all depths.

    Args:
        parts: sample indices [sample] of each mini-batch.
        weights: weights [sample, column] of all samples: columns are decisions or drawn times.
        tree: the tree of the rollout.
        unit: what the loss needs in one batch.
        share_states: whether a row's network evaluation is that of the state it starts from.

    Returns:
        One set of rows per mini-batch.
    """
    if not parts:
        return []
    samples = torch.cat([*parts])
    row, column = (weights[samples] > 0).nonzero().unbind(1)
    minibatch = torch.cat([torch.full_like(part, k) for k, part in enumerate(parts)])[row]
    sample = samples[row]
    group, number = sample // tree.members, torch.arange(len(row))
    shared = share_states and tree.branched and unit == "transition"
    if shared:
        state = tree.paths[sample % tree.members, torch.tensor(tree.drawn_steps)[column]]
        number = group * tree.units + state
    elif unit != "transition":
        number = sample if unit == "trajectory" else group * weights.shape[1] + column
    if shared or unit != "transition":
        by_sample = sample.argsort(stable=True)
        first = torch.empty_like(by_sample)
        first[by_sample] = by_sample[_first(number[by_sample])]
        order = first.argsort(stable=True)
        sample, column, number = sample[order], column[order], number[order]
        # a unit belongs to the mini-batch of its first row
        minibatch = _first(number) * len(parts) // max(len(order), 1)
    rows = Rows(sample, column, weights[sample, column], number, shared)
    return [rows[(minibatch == k).nonzero().flatten()] for k in range(len(parts))]


def _first(keys: Tensor) -> Tensor:
    """For every row the first one with the same key."""
    _, first, inverse = np.unique(keys.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first[inverse])


@dataclass
class Objective(ABC):
    """A loss with the rows of one iteration, which it selects and evaluates.

    `Method.objective` is the kind that fits a method's loss. A trainer makes one in every iteration
    with all of the fields; each kind uses those that it needs. Trajectories in main memory are
    copied to the policy's device batch by batch.

    Args:
        policy: the policy.
        loss: the loss.
        rollout: the trajectories of this process.
        decisions: the axis of credit.
        advantages: the credit rule's advantages of all groups [prompt, member, decision].
        weights: the weights of the transitions in the loss [prompt, member, decision].
        sampler: the sampler of the rollout.
        schedule: the policy's time grid, for drawn times; None for that of the trajectories.
        generator: the source of drawn times and of their noise.
        prompts: the prompts of the whole iteration, for a loss that ascends a reward.
        reference: makes contexts in which the policy has the weights of the reference; None for
            those of its base model.
        copies: the copies of the weights that the loss declares (`flowrl.weights.Behaviour`).
        guidance: guidance of the velocities of a forward-process loss.
        reward: the reward, for a loss that ascends it.

    Raises:
        ConfigError: the policy does not support the guidance, or the trajectories do not fit the
            loss's noise.
    """

    policy: FlowPolicy
    loss: Any
    rollout: Rollout
    decisions: Decisions
    advantages: Tensor
    weights: Tensor
    sampler: AnySampler
    schedule: Schedule | None = None
    generator: torch.Generator | None = None
    prompts: Sequence[Prompt] = ()
    reference: Callable[[], AbstractContextManager[None]] | None = None
    copies: Mapping[str, Any] = field(default_factory=dict)
    guidance: Guidance = Guidance()
    reward: AnyReward | None = None
    draws_times: ClassVar[bool]
    """Whether rows are drawn times and not transitions: any sampler fits, and rows take the credit
    of all decisions, whatever the trained steps.
    """
    steps: Tensor = field(init=False)
    """The step of every row [sample, column], where the trajectories are; samples of this process.
    """
    decided: Tensor = field(init=False)
    """The decision whose credit every row takes [sample, column]."""
    with_gradient: float = field(default=1, init=False)
    """Network evaluations of a row that carry the gradient."""
    pooled: Tensor | None = field(default=None, init=False)
    """Means over units that are spread over micro-batches [sample, column, *term]; set by
    `prepare`.
    """

    def __post_init__(self) -> None:
        samples, device = self.rollout.samples, self.policy.device
        self.base = self.reference or self.policy.reference
        tables = (self.advantages, self.weights)
        self.own_credit = [table.flatten(0, 1)[samples].to(device) for table in tables]
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Compute what all batches of the iteration share."""

    @abstractmethod
    def rows(self, parts: Sequence[Tensor]) -> list[Rows]:
        """The rows of the mini-batches with the samples `parts`."""

    @abstractmethod
    def batch(self, rows: Rows) -> Any:
        """The loss's batch of these rows of this process."""

    @abstractmethod
    def networks(self) -> float:
        """Network evaluations of a row, or of a shared state."""

    def minibatches(self, order: Tensor, count: int) -> list[Rows]:
        """The rows of at most `count` mini-batches, among all processes.

        Trajectories with a weight above 0 are split into mini-batches in the given order of all
        samples, the same in every process; rows that belong together, such as those of a branched
        tree, are in the order of their indices.
        """
        order = order.cpu()
        order = order[(self.weights.flatten(0, 1) > 0).any(1)[order]]
        rows = self.rows(order.chunk(count) if len(order) else ())
        return [part for part in rows if len(part)]

    def micro_batches(self, rows: Rows, size: int, processes: Processes) -> list[Rows]:
        """This process's rows of a mini-batch, at most `size` network evaluations at a time."""
        groups, device = self.rollout.groups, self.rollout.trajectories.states.device
        complete = rows.shared or max(rows.counts) <= size

        def pieces(rank: int) -> list[Rows]:
            own, group = processes.assign(groups.all, rank).own, rows.sample // groups.members
            return rows[(group >= own.start) & (group < own.stop)].pieces(size)

        batches = [
            replace(piece.to(device), share=piece.evaluated / rows.total, complete=complete)
            for piece in pieces(processes.rank)
        ]
        if processes.sharded:
            most = max(len(pieces(rank)) for rank in range(processes.world_size))
            first = torch.tensor([groups.first * groups.members])
            padding = replace(Rows.of(first, rows.column[:1]), share=0.0, complete=complete)
            batches += [padding.to(device)] * (most - len(batches))
        return batches

    def prepare(self, minibatch: Sequence[Rows]) -> None:
        """Compute, before the micro-batches of a mini-batch, the means of the loss's `row_terms`
        over units that are spread over them, with the current weights.

        Raises `ConfigError` if units are spread and the loss has no method `row_terms`.
        """
        self.pooled, loss = None, self.loss  # `batch` must not use the last mini-batch's means
        if loss.unit == "transition" or all(rows.complete for rows in minibatch):
            return
        if not hasattr(loss, "row_terms"):
            raise ConfigError(
                f"{type(loss).__name__} needs a whole {loss.unit} in a micro-batch: raise"
                " micro_batch, or add a method row_terms(batch) to the loss"
            )
        entries: list[Sequence[Tensor]] = []
        with torch.no_grad():
            for rows in minibatch:
                batch = self.batch(rows)
                weight = batch.weight if rows.share > 0 else torch.zeros_like(batch.weight)
                place = map(self.on_device, self.place(rows.sample, rows.column))
                entries.append((*place, loss.row_terms(batch), weight, *pooled_units(loss, batch)))
            sample, column, terms, weight, *units = map(torch.cat, zip(*entries, strict=True))
            means, kept = unit_means(terms, units, weight), weight > 0
        table = torch.zeros((*self.steps.shape, *means.shape[1:]), device=self.policy.device)
        self.pooled = table.index_put_((sample[kept], column[kept]), means[kept].to(table))

    @property
    def passes(self) -> float:
        """Network evaluations of a row, or of a shared state; twice as many if rows of a unit are
        in several micro-batches.
        """
        return self.networks() * (1 if self.pooled is None else 2)

    def result(self, batch: Any) -> LossResult:
        """The loss of a batch (`checked_loss`)."""
        return checked_loss(self.loss, batch)

    def place(self, sample: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The samples of rows, numbered within this process, and their columns, where the
        trajectories are.
        """
        device = self.steps.device
        return sample.to(device) - self.rollout.samples.start, column.to(device)

    def evaluated_steps(self, rows: Rows) -> Tensor:
        """The step of every network evaluation, on the policy's device."""
        step = self.steps[self.place(rows.sample, rows.column)]
        return self.on_device(step if rows.states is None else step[rows.states[0]])

    def on_device(self, stored: Tensor) -> Tensor:
        """A tensor on the policy's device."""
        return to_device(stored, self.own_credit[0].device)

    def credit(self, sample: Tensor, column: Tensor, decision: Tensor) -> dict[str, Any]:
        """The fields of a batch that do not depend on the loss."""
        advantages, weights = self.own_credit
        groups = self.rollout.groups
        return {
            "advantages": advantages[sample, decision],
            "weight": weights[sample, decision],
            "sample": sample + groups.first * groups.members,
            "group": sample // groups.members + groups.first,
            "pooled": None if self.pooled is None else self.pooled[sample, column],
        }


@dataclass
class TransitionObjective(Objective):
    """A policy loss; its rows are transitions.

    A batch has any mixture of decisions; the current policy's transitions carry the gradient. The
    states of the rollout are evaluated again for it; those of the policy that drew them follow from
    the velocities that the rollout has kept. One network evaluation per row, or per state of a
    micro-batch whose rows share theirs; two if the loss needs the frozen base model.
    """

    draws_times: ClassVar[bool] = False

    def begin(self) -> None:
        """The step of every row, and the units of every trajectory."""
        tree, device = self.rollout.trajectories.tree, self.rollout.trajectories.states.device
        samples, drawn = self.rollout.groups.samples, torch.tensor(tree.drawn_steps)
        self.paths = to_device(tree.paths, device)
        self.steps = to_device(drawn, device).expand(samples, -1)
        self.decided = torch.arange(len(drawn), device=device).expand(samples, -1)

    def rows(self, parts: Sequence[Tensor]) -> list[Rows]:
        """`minibatch_rows`; without rows of advantage 0 if the loss declares that they have no
        gradient.
        """
        advantages, weights = self.advantages.flatten(0, 1), self.weights.flatten(0, 1)
        rows = minibatch_rows(parts, weights, self.rollout.trajectories.tree, self.loss.unit)
        if self.loss.trains_zero_advantages:
            return rows
        return [part.without_zeros(advantages) for part in rows if len(part)]

    def networks(self) -> int:
        """Evaluations of a state: by the current network and, if needed, the base model."""
        return 1 + self.loss.needs_reference

    def batch(self, rows: Rows) -> LossBatch:
        """The transitions of these rows."""
        assert isinstance(self.sampler, Sampler), "log-probabilities need a kernel"
        path, members, sampler = self.rollout.trajectories, len(self.paths), self.sampler
        schedule, (sample, column) = path.schedule, self.place(rows.sample, rows.column)
        step, group, member = self.steps[sample, column], sample // members, sample % members
        after = path.states[group, self.paths[member, step + 1]]
        # the rows whose states the network evaluates, and every row's place among them
        chosen, place = (slice(None), slice(None)) if rows.states is None else rows.states
        start_step, prompt = step[chosen], group[chosen]
        start = prompt, self.paths[member[chosen], start_step]
        x, sampled = path.states[start], path.outputs[start]
        after, x, sampled, sample, column, step, start_step, prompt = map(
            self.on_device, (after, x, sampled, sample, column, step, start_step, prompt)
        )
        place = place if isinstance(place, slice) else self.on_device(place)
        timestep = schedule.network_timesteps[start_step]
        condition = self.rollout.condition.take(prompt)

        def transition(velocity: Tensor) -> Gaussian:
            return sampler.transition(x, velocity, schedule, start_step)[place]

        reference = None
        if self.loss.needs_reference:  # first: the current network's graph needs its own weights
            with torch.no_grad(), self.base():
                reference = transition(self.policy.velocity(x, timestep, condition))
        velocity = self.policy.velocity(x, timestep, condition)
        # a gradient taken at this view does not run the hooks of the network's output (FSDP2's)
        velocity = velocity.view_as(velocity)
        new, behaviour = transition(velocity), transition(sampled)
        none = torch.zeros(len(step), 1, device=step.device)
        unit = sampler.transition(none, torch.ones_like(none), schedule, step)
        return LossBatch(
            new=new,
            behaviour=behaviour,
            next_node=after,
            delta=schedule.deltas[step],
            step=step,
            time=schedule.times[step],
            reference=reference,
            velocity=velocity,
            slope=unit.mean[:, 0].abs(),
            **self.credit(sample, column, column),
        )


def checked_loss(loss: Any, batch: Any) -> LossResult:
    """The result of `loss` for the batch. Raises `TrainingError` unless its loss is a
    differentiable scalar.
    """
    call = f"{type(loss).__name__}.loss"
    with part_call(call):
        result: Any = loss.loss(batch)
    value = result.loss if isinstance(result, LossResult) else None
    if not isinstance(value, Tensor):
        name = type(result).__name__
        raise TrainingError(f"{call} returned a {name}; allowed: a LossResult with a scalar tensor")
    problem = tensor_problem(value)
    if not problem and (value.numel() != 1 or not value.requires_grad):
        problem = f"is not a scalar with a gradient (shape {tuple(value.shape)})"
    if problem:
        raise TrainingError(f"{call} returned a loss that {problem}")
    return result
