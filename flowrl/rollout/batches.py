"""From trajectories and credit to the input of a loss.

A *row* is a transition or, for a forward-process loss, a finished image at a drawn time. Rows
of a mini-batch are chosen from the weights of all samples, in main memory and equally in all
processes; each process evaluates its own rows in micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.core.calls import part_call
from flowrl.core.errors import ConfigError, TrainingError, require
from flowrl.core.experience import Decisions
from flowrl.core.forward import ForwardBatch, Guidance
from flowrl.core.processes import Assignment, Processes
from flowrl.core.protocols import FlowPolicy, ForwardLoss, PolicyLoss, Sampler, extras
from flowrl.core.tree import Tree
from flowrl.core.types import (
    Condition,
    Gaussian,
    LossBatch,
    LossResult,
    Prompt,
    Unit,
    pooled_units,
    tensor_problem,
    to_device,
    unit_means,
)
from flowrl.flow.path import expand
from flowrl.rollout.collector import Collected
from flowrl.rollout.groups import Groups
from flowrl.rollout.rollout import Rollout


@dataclass(frozen=True)
class Rows:
    """Rows of a mini-batch, in main memory.

    Args:
        sample: indices of the samples [row], among all samples.
        column: indices of the decisions [row]; for forward-process losses, of the drawn times.
        weight: weights in the mean [row].
        unit: rows with the same number are adjacent and stay in one micro-batch if they fit.
        shared: the rows of a unit need one network evaluation together, as they start from one
            state.
        left_out: sum of the weights of further rows that the mean includes, whose gradient is 0.
        zeros: number of these rows.
    """

    sample: Tensor
    column: Tensor
    weight: Tensor
    unit: Tensor
    shared: bool = False
    left_out: float = 0.0
    zeros: int = 0

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
    tree: Tree,
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
        complete: no unit of the mini-batch is spread over micro-batches.
    """

    sample: Tensor
    column: Tensor
    weight: float
    shared: tuple[Tensor, Tensor] | None = None
    complete: bool = True


def micro_batches(
    rows: Rows, size: int, collected: Collected, processes: Processes
) -> list[MicroBatch]:
    """This process's rows of a mini-batch, at most `size` network evaluations at a time."""
    device, first = collected.rollout.trajectories.states.device, collected.samples.start
    complete = rows.shared or max(rows.counts) <= size

    def pieces(assignment: Assignment) -> list[Rows]:
        return rows[collected.owned(rows.sample, assignment)].pieces(size)

    batches = []
    for piece in pieces(collected.assignment):
        shared = None
        if rows.shared:
            place = piece.unit.unique_consecutive(return_inverse=True)[1]
            shared = _first(place).unique().to(device), place.to(device)
        sample, column = (piece.sample - first).to(device), piece.column.to(device)
        share = piece.evaluated / rows.total
        batches.append(MicroBatch(sample, column, share, shared, complete))
    if processes.sharded:
        total, ranks = collected.rollout.groups.all, range(processes.world_size)
        most = max(len(pieces(processes.assign(total, rank))) for rank in ranks)
        zero = torch.zeros(1, dtype=torch.long, device=device)
        padding = MicroBatch(zero, rows.column[:1].to(device), 0.0, complete=complete)
        batches += [padding] * (most - len(batches))
    return batches


@dataclass
class Batches:
    """What the makers of batches have in common. Samples are numbered within this process.

    Args:
        policy: the policy.
        loss: the loss.
        rollout: the rollout with the trajectories.
        condition: the condition, one row per prompt.
        advantages: the credit rule's advantages [sample, decision].
        weights: the weights of the transitions [sample, decision].
        reference: makes contexts in which the policy has the weights of the reference; those of its
            base model unless it is replaced.
        pooled: means over units that are spread over micro-batches; set by `prepare`.
        with_gradient: network evaluations of a row that carry the gradient.
        steps: the step of every row [sample, column]; set by the subclasses.
        decided: the decision whose credit every row takes [sample, column].
    """

    policy: FlowPolicy
    loss: Any
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    weights: Tensor
    reference: Callable[[], AbstractContextManager[None]] = field(init=False)
    pooled: Tensor | None = field(default=None, init=False)
    with_gradient: float = field(default=1, init=False)
    steps: Tensor = field(init=False)
    decided: Tensor = field(init=False)
    of: ClassVar[Callable[..., Any]]
    networks: ClassVar[Callable[..., float]]

    @property
    def passes(self) -> float:
        """Network evaluations of a row, or of a shared state; twice as many if rows of a unit are
        in several micro-batches.
        """
        return self.networks() * (1 if self.pooled is None else 2)

    def origin(self, sample: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The step and the decision of rows."""
        return self.steps[sample, column], self.decided[sample, column]

    def evaluated_steps(self, micro: MicroBatch) -> Tensor:
        """The step of every network evaluation, on the policy's device."""
        step, _ = self.origin(micro.sample, micro.column)
        return self._on_device(step if micro.shared is None else step[micro.shared[0]])

    def _on_device(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.advantages.device)

    def _credit(self, sample: Tensor, column: Tensor, decision: Tensor) -> dict[str, Any]:
        """The fields of a batch that do not depend on the loss."""
        groups = self.rollout.groups
        return {
            "advantages": self.advantages[sample, decision],
            "weight": self.weights[sample, decision],
            "sample": sample + groups.first * groups.members,
            "group": sample // groups.members + groups.first,
            "pooled": None if self.pooled is None else self.pooled[sample, column],
        }

    def prepare(self, minibatch: Sequence[MicroBatch]) -> None:
        """Compute, before a mini-batch, the means of the loss's `row_terms` over units that are
        spread over micro-batches, with the current weights.

        Raises `ConfigError` if units are spread and the loss has no method `row_terms`.
        """
        self.pooled, loss = None, self.loss  # `of` must not use the last mini-batch's means
        if loss.unit == "transition" or all(micro.complete for micro in minibatch):
            return
        if not hasattr(loss, "row_terms"):
            raise ConfigError(
                f"{type(loss).__name__} needs a whole {loss.unit} in a micro-batch: raise"
                " micro_batch, or add a method row_terms(batch) to the loss"
            )
        rows: list[Sequence[Tensor]] = []
        with torch.no_grad():
            for micro in minibatch:
                batch = self.of(micro.sample, micro.column)
                weight = batch.weight if micro.weight > 0 else torch.zeros_like(batch.weight)
                place = self._on_device(micro.sample), self._on_device(micro.column)
                rows.append((*place, loss.row_terms(batch), weight, *pooled_units(loss, batch)))
            sample, column, terms, weight, *units = map(torch.cat, zip(*rows, strict=True))
            means, kept = unit_means(terms, units, weight), weight > 0
        table = torch.zeros(self.steps.shape, device=self.advantages.device)
        self.pooled = table.index_put_((sample[kept], column[kept]), means[kept].to(table))


@dataclass
class LossBatches(Batches):
    """Makes loss batches from trajectories.

    The batch of (`sample[k]`, `column[k]`) has any mixture of decisions; the current policy's
    transitions carry the gradient. One network evaluation per row, or per state of a micro-batch
    whose rows share theirs; two if the loss needs the frozen base model. Trajectories in main
    memory are copied to the policy's device.

    Args:
        sampler: the sampler of the rollout; for the others see `Batches`.
        prompts: the prompts of the whole iteration, for a loss that reads them.
    """

    sampler: Sampler
    prompts: Sequence[Prompt] = ()

    def __post_init__(self) -> None:
        self.reference = self.policy.reference
        tree, device = self.rollout.trajectories.tree, self.rollout.trajectories.states.device
        samples, drawn = self.rollout.groups.samples, torch.tensor(tree.drawn_steps)
        self.paths = to_device(tree.paths, device)
        self.steps = to_device(drawn, device).expand(samples, -1)
        self.decided = torch.arange(len(drawn), device=device).expand(samples, -1)

    def networks(self) -> int:
        """Evaluations of a state: by the current network and, if needed, the base model."""
        return 1 + self.loss.needs_reference

    def of(
        self, sample: Tensor, column: Tensor, shared: tuple[Tensor, Tensor] | None = None
    ) -> LossBatch:
        """The batch of these rows; indices of equal length. `shared`: see `MicroBatch`."""
        path, device = self.rollout.trajectories, self.paths.device
        schedule, members = path.schedule, len(self.paths)
        sample, column = sample.to(device), column.to(device)
        step, group, member = self.steps[sample, column], sample // members, sample % members
        after = path.states[group, self.paths[member, step + 1]]
        # the rows whose states the network evaluates, and every row's place among them
        rows, place = (slice(None), slice(None)) if shared is None else shared
        start_step, prompt = step[rows], group[rows]
        start = prompt, self.paths[member[rows], start_step]
        x, sampled = path.states[start], path.outputs[start]
        after, x, sampled, sample, column, step, start_step, prompt = map(
            self._on_device, (after, x, sampled, sample, column, step, start_step, prompt)
        )
        place = place if isinstance(place, slice) else self._on_device(place)
        timestep, condition = schedule.network_timesteps[start_step], self.condition.take(prompt)

        def transition(velocity: Tensor) -> Gaussian:
            return self.sampler.transition(x, velocity, schedule, start_step)[place]

        reference = None
        if self.loss.needs_reference:  # first: the current network's graph needs its own weights
            with torch.no_grad(), self.reference():
                reference = transition(self.policy.velocity(x, timestep, condition))
        velocity = self.policy.velocity(x, timestep, condition)
        # a gradient taken at this view does not run the hooks of the network's output (FSDP2's)
        velocity = velocity.view_as(velocity)
        new, behaviour = transition(velocity), transition(sampled)
        none = torch.zeros(len(step), 1, device=step.device)
        unit = self.sampler.transition(none, torch.ones_like(none), schedule, step)
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
            prompts=self.prompts,
            **self._credit(sample, column, column),
        )


def credited(times: Tensor, starts: Tensor) -> Tensor:
    """For each of `times` the last of the descending `starts` that is not below it, or the first
    one if all are below: the step that contains the time, or the decision whose credit a row takes.
    """
    starts = to_device(starts, times.device)
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
    each = groups.members if loss.noise == "each" else 1
    columns = 1 if loss.noise == "group-all-times" else draws
    generator, noise = torch.Generator(device), []
    for number in range(groups.first * each, (groups.first + groups.prompts) * each):
        generator.manual_seed((seed + number) % 2**63)
        noise.append(torch.randn((columns, *shape), generator=generator, device=device))
    expanded = torch.stack(noise).expand(-1, draws, *shape)
    return expanded.repeat_interleave(groups.members // each, 0)


def finite_difference(images: Tensor, counts: Tensor, members: int) -> Tensor:
    """d / (mean(d^2) + 1e-6) of every finished latent, d its difference from its group's mean.

    Of two members, d is half their difference. A step along it changes the latent by d per unit of
    mean(d^2). Source: FDFO's code (arXiv 2603.12893, commit 740e22f), for pairs.

    Args:
        images: finished latents [sample, *latent], prompt-major.
        counts: the samples that the mean includes [sample].
        members: samples per group.

    Returns:
        The shifts [sample, *latent].
    """
    grouped = images.unflatten(0, (-1, members))
    counted = expand(counts.to(images), images).unflatten(0, (-1, members))
    mean = (counted * grouped).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    difference = (grouped - mean).flatten(0, 1)
    return difference / expand(difference.square().flatten(1).mean(1) + 1e-6, difference)


@dataclass
class ForwardBatches(Batches):
    """Makes the batches of a forward-process loss from the finished latents of a rollout.

    A row has the advantage of the decision that `credited` assigns to its time, so rules that
    credit decisions weight times. This is a heuristic: unless the loss's `noise` is "path", the
    regressed states are noised images, not those that the decisions reached. A rule with equal
    credit for all decisions gives the papers' losses.

    Args:
        times: training times [sample, draw]; for the first arguments see `Batches`.
        decisions: the axis of credit.
        seed: the iteration's seed of the noise.
        copies: the copies of the weights that the loss declares (`flowrl.weights.Behaviour`).
        guidance: guidance of the velocities.

    Raises:
        ConfigError: the policy does not support the guidance, or the trajectories do not fit the
            loss's noise.
    """

    times: Tensor
    decisions: Decisions
    seed: int
    copies: Mapping[str, Any] = field(default_factory=dict)
    guidance: Guidance = Guidance()

    def __post_init__(self) -> None:
        self.reference = self.policy.reference
        path, noise = self.rollout.trajectories, self.loss.noise
        self.images = path.images_latent
        device, shape = self.images.device, self.images.shape[1:]
        guided = extras(self.policy, "guided", "guidance_scale")
        self.sampled = 1.0 if guided is None else guided.guidance_scale
        self.guided = (lambda scale: nullcontext()) if guided is None else guided.guided
        self.scales = self.guidance.scales(self.sampled)
        self.with_gradient = self.guidance.evaluations(1, False, self.sampled)
        fits = guided is not None or self.scales == (1.0, 1.0)
        require(fits, "guidance of the loss", self.scales, "1: the policy has no guidance")
        steps = credited(self.times, path.schedule.times[:-1])
        if noise in ("path", "difference"):
            require(not path.tree.branched, "noise", noise, "each or group, on branches")
            self.times = path.schedule.times[steps]
            if noise == "difference":
                counts = to_device((self.weights > 0).any(-1), device)
                self.shift = finite_difference(self.images, counts, self.rollout.groups.members)
        else:
            groups, draws = self.rollout.groups, self.times.shape[1]
            self.noise = training_noise(self.loss, groups, shape, draws, self.seed, device)
        self.steps = steps.to(device)
        self.decided = credited(self.times, self.decisions.time).to(device)

    def networks(self) -> float:
        """Evaluations of a row with the current weights: the current network, the reference, and
        copies with other weights; another guidance than in sampling counts fractions or multiples
        (`Guidance.evaluations`).
        """
        copies = sum(copy.copy.evaluated and not copy.is_current for copy in self.copies.values())
        return self.guidance.evaluations(1 + copies, self.loss.needs_reference, self.sampled)

    def of(self, sample: Tensor, column: Tensor, shared: object = None) -> ForwardBatch:
        """The batch of these rows; indices of equal length."""
        path, members = self.rollout.trajectories, self.rollout.groups.members
        device, noise = self.images.device, self.loss.noise
        sample, column = sample.to(device), column.to(device)
        step, decision = self.origin(sample, column)
        image = self.images[sample]
        if noise in ("path", "difference"):
            unit = to_device(path.tree.paths, device)[sample % members, step]
            stored = path.states[sample // members, unit]
            if noise == "difference":
                image = path.outputs[sample // members, unit] - self.shift[sample]
        else:
            stored = self.noise[sample, column]
        image, stored, sample, column, decision = map(
            self._on_device, (image, stored, sample, column, decision)
        )
        time = self.times[sample, column]
        spread = expand(time, image)
        if noise == "difference":
            state, target = stored, image
        elif noise == "path":
            state, target = stored, (stored - image) / spread
        else:
            state, target = (1 - spread) * image + spread * stored, stored - image
        inputs = state, 1000.0 * time, self.condition.take(sample // members)
        copies = {name: copy for name, copy in self.copies.items() if copy.copy.evaluated}
        others: dict[str, Tensor] = {}
        trained, reference = self.scales

        def velocity(scale: float) -> Tensor:
            with self.guided(scale):
                return self.policy.velocity(*inputs)

        with torch.no_grad():  # before the current network: its graph must not have other weights
            for name, copy in copies.items():
                if not copy.is_current:
                    with copy.weights():
                        others[name] = velocity(trained)
            if self.loss.needs_reference:
                with self.reference():
                    others["reference"] = velocity(reference)
        new = velocity(trained)
        new = new.view_as(new)  # as in `LossBatches.of`
        others |= {name: new.detach() for name, copy in copies.items() if copy.is_current}
        credit = self._credit(sample, column, decision)
        return ForwardBatch(time=time, target=target, new=new, **credit, **others)


def checked_loss(loss: PolicyLoss | ForwardLoss, batch: LossBatch | ForwardBatch) -> LossResult:
    """The result of `loss` for the batch. Raises `TrainingError` unless its loss is a
    differentiable scalar.
    """
    call, part = f"{type(loss).__name__}.loss", loss
    with part_call(call):
        result: Any = part.loss(batch)  # pyright: ignore[reportArgumentType]
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
