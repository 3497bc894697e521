"""The names of axes, and the frozen values that packages exchange.

Axis names (used in every shape annotation of the package):

==========  =====================================================================================
prompt      distinct prompts of one iteration
member      samples of one prompt; together they are the *group* of GRPO
sample      prompt x member, flattened (prompt-major)
node        states of a trajectory, ``node 0`` is pure noise (t=1), ``node T`` the image (t=0)
step        transitions, ``step i`` leads from ``node i`` to ``node i+1``
decision    the transitions that were drawn, the axis of credit (`flowrl.core.experience`)
latent      the latent's own axes (any number)
frame       images of a video, in order; samples of an image model have no such axis
==========  =====================================================================================

Time runs from t=1 (noise) to t=0 (data): x_t = (1-t) x_0 + t eps, velocity v = eps - x_0 = dx/dt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import require
from flowrl.core.prompt import Prompt as Prompt

Batch = TypeVar("Batch", bound="LossRows")

Latents = Float[Tensor, "sample *latent"]
ImagesOrVideos = Float[Tensor, "sample *frame channel height width"]
PerSample = Float[Tensor, " sample"]
RowTerms = Float[Tensor, "sample *term"]
StepIndex = Int[Tensor, " sample"]
"""Annotations of most signatures, compared with the arguments at every call (`core.checks`)."""


def tensor_problem(tensor: Tensor) -> str:
    """Why a tensor has no plain real numbers ("is sparse", "has no values: ..."); "" if it has."""
    if tensor.layout is not torch.strided:
        return "is sparse"
    if tensor.device.type == "meta":
        return "has no values: its device is meta"
    return f"has complex numbers ({tensor.dtype})" if tensor.is_complex() else ""


def whole(evaluations: float) -> float:
    """A number of network evaluations without rounding errors from sums of fractions; an integer if
    possible.
    """
    rounded = round(float(evaluations), 6)
    return int(rounded) if rounded.is_integer() else rounded


def to_main_memory(tensor: Tensor) -> Tensor:
    """`tensor` in main memory. From CUDA it is copied to pinned memory after the queued work: call
    `copies_done` before the host reads it.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def copies_done(device: torch.device) -> None:
    """Wait for this thread's copies from `device`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. A transfer from main memory to CUDA uses pinned memory, which PyTorch
    keeps until the copy is done, so the host does not wait.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@checked
def expand(values: Shaped[Tensor, " sample"], like: Latents) -> Tensor:
    """`values` [sample] viewed as [sample, 1, ..., 1], so that it broadcasts over the latent axes
    of `like`.

    Args:
        values: one value per sample [sample].
        like: latents [sample, *latent]; only the number of their axes is used.

    Returns:
        The view, with as many axes as `like`.
    """
    return values.reshape(-1, *(1,) * (like.ndim - 1))


@checked
@dataclass(frozen=True)
class Schedule:
    """A grid of T+1 node times from noise to data.

    Args:
        times: t_0 = 1 > t_1 > ... > t_T = 0 [node].
        timesteps: the network's time input at each step [step]; None for ``1000 * times[:-1]``, as
            in diffusers.

    Raises:
        ConfigError: the times do not decrease strictly within [0, 1], or a length differs.
    """

    times: Float[Tensor, " node"]
    timesteps: Float[Tensor, " step"] | None = None

    def __post_init__(self) -> None:
        times = self.times.tolist()
        fits = len(times) >= 2 and times[0] <= 1.0 + 1e-6 and times[-1] >= -1e-6
        fits = fits and all(start > end for start, end in pairwise(times))
        require(fits, "schedule.times", times, "2 or more, strictly decreasing, within [0, 1]")
        count = self.steps if self.timesteps is None else len(self.timesteps)
        require(count == self.steps, "schedule.timesteps", count, f"{self.steps} steps")

    def to(self, device: torch.device | str) -> "Schedule":
        """The same grid on `device`."""
        timesteps = None if self.timesteps is None else self.timesteps.to(device)
        return Schedule(self.times.to(device), timesteps)

    @property
    def steps(self) -> int:
        """T, the number of transitions."""
        return len(self.times) - 1

    @property
    def deltas(self) -> Tensor:
        """Delta_i = t_i - t_{i+1} > 0, shape [step]."""
        return self.times[:-1] - self.times[1:]

    @property
    def network_timesteps(self) -> Tensor:
        """The network's time input at each step, shape [step]."""
        return self.times[:-1] * 1000.0 if self.timesteps is None else self.timesteps


@checked
@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian over the next node.

    Args:
        mean: mean [sample, *latent].
        std: one standard deviation per sample [sample]; 0 means "not a decision".
    """

    mean: Latents
    std: PerSample

    def __getitem__(self, index: Tensor | slice) -> "Gaussian":
        """The samples `index`."""
        return Gaussian(self.mean[index], self.std[index])


@dataclass(frozen=True)
class Condition:
    """The network's condition on the prompts.

    Args:
        tensors: named tensors whose first axis is [prompt] or [sample].
        keys: the prompts to which rows may refer (a superset for a selection of rows). With these,
            a policy that stores embeddings elsewhere can look them up without reading a tensor from
            the device.
    """

    tensors: Mapping[str, Tensor]
    keys: frozenset[int] = frozenset()

    def take(self, index: Tensor | slice) -> "Condition":
        """The rows `index` of every tensor."""
        return Condition({name: tensor[index] for name, tensor in self.tensors.items()}, self.keys)

    def repeat(self, times: int) -> "Condition":
        """Every row repeated `times` times, adjacent: [prompt] -> [prompt x member]."""
        return Condition(
            {name: t.repeat_interleave(times, dim=0) for name, t in self.tensors.items()}, self.keys
        )

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @staticmethod
    def cat(conditions: Sequence["Condition"]) -> "Condition":
        """Concatenate along the first axis."""
        if len(conditions) == 1:
            return conditions[0]
        keys = frozenset().union(*(condition.keys for condition in conditions))
        names = conditions[0].tensors
        return Condition(
            {name: torch.cat([c.tensors[name] for c in conditions]) for name in names}, keys
        )


@checked
@dataclass(frozen=True)
class Paths:
    """The states of one group and the way of each member through them; every group of an iteration
    has the same ones.

    A *unit* is a distinct state; units are numbered by node. Members of a plain group share at most
    their first states; those of a branching probe share the states of a tree
    (`flowrl.core.tree.Tree`).

    Args:
        parent: the unit from which each unit was reached [unit]; -1 for initial noise.
        node: node of each unit on the time grid [unit].
        drawn: whether each unit was drawn from the sampler's distribution [unit], so that the edge
            into it is a decision; other edges are ODE steps.
        paths: the units of each member's trajectory [member, node]; at nodes that an ODE step
            skips, the unit before.
    """

    parent: Int[Tensor, " unit"]
    node: Int[Tensor, " unit"]
    drawn: Bool[Tensor, " unit"]
    paths: Int[Tensor, "member node"]
    branched: ClassVar[bool] = False
    """Whether this is the tree of a branching probe."""

    @property
    def steps(self) -> int:
        """T, the number of transitions."""
        return self.paths.shape[1] - 1

    @property
    def members(self) -> int:
        """Number of trajectories of the group."""
        return len(self.paths)

    @property
    def units(self) -> int:
        """Number of distinct states."""
        return len(self.node)

    @cached_property
    def counts(self) -> list[int]:
        """n_i, the number of units at each node. A rollout evaluates the network sum_{i < T} n_i
        times for a group.
        """
        return torch.bincount(self.node, minlength=self.steps + 1).tolist()

    def at(self, node: int) -> slice:
        """The units at a node."""
        start = sum(self.counts[:node])
        return slice(start, start + self.counts[node])

    @cached_property
    def edges(self) -> list[list["Edges"]]:
        """The edges that start at each node, in the order of the units that they lead to."""
        edges: list[list[Edges]] = []
        for start in range(self.steps):
            units = self.at(start)
            children = (self.parent >= units.start) & (self.parent < units.stop)
            kinds = torch.stack([self.node, self.drawn.long()], 1)
            edges.append([])
            for node, drawn in dict.fromkeys(map(tuple, kinds[children].tolist())):
                ends = (children & (self.node == node) & (self.drawn == drawn)).nonzero().flatten()
                edges[start].append(Edges(node, bool(drawn), ends, self.parent[ends] - units.start))
        return edges

    @cached_property
    def passes(self) -> Bool[Tensor, "member unit"]:
        """Mask of the units that a member's trajectory passes."""
        passes = torch.zeros(self.members, self.units, dtype=torch.bool)
        return passes.scatter_(1, self.paths, torch.tensor(True).expand_as(self.paths))

    @cached_property
    def decisions(self) -> Bool[Tensor, "member step"]:
        """Mask of the steps of a member's trajectory that are decisions."""
        following = self.paths[:, 1:]
        arrives = self.node[following] == torch.arange(1, self.steps + 1)
        return self.drawn[following] & arrives

    @cached_property
    def drawn_steps(self) -> list[int]:
        """The steps at which any member's trajectory was drawn, in order: the axis of decisions."""
        return (self.node[self.drawn].unique() - 1).tolist()


@checked
@dataclass(frozen=True)
class Edges:
    """Edges from one node to another.

    Args:
        node: the node to which they lead.
        drawn: whether they are decisions.
        units: the units to which they lead [edge].
        parents: the units from which they start [edge], numbered within their node.
    """

    node: int
    drawn: bool
    units: Int[Tensor, " edge"]
    parents: Int[Tensor, " edge"]


@checked
@dataclass(frozen=True)
class Trajectories:
    """A batch of sampled trajectories: every distinct state once, and the network's output there.
    Float32, detached.

    Args:
        states: states of the units of `tree` [prompt, unit, *latent].
        outputs: velocities at all units except the leaves, which come last [prompt, inner,
            *latent].
        schedule: the time grid.
        tree: which states the trajectories of a group share.
        stds: standard deviations of the sampler's transitions [step]; 0 = deterministic.

    Raises:
        ConfigError: states, velocities, tree and schedule do not fit together.
    """

    states: Float[Tensor, "prompt unit *latent"]
    outputs: Float[Tensor, "prompt inner *latent"]
    schedule: Schedule
    tree: Paths
    stds: Float[Tensor, " step"]

    def __post_init__(self) -> None:
        tree, inner = self.tree, self.tree.at(self.tree.steps).start
        lengths = [self.states.shape[1], self.outputs.shape[1], self.schedule.steps, len(self.stds)]
        wanted = [tree.units, inner, tree.steps, tree.steps]
        require(lengths == wanted, "states, velocities, steps and stds", lengths, f"{wanted}")

    def at(self, node: int) -> Latents:
        """The state of every trajectory at `node`, prompt-major."""
        return _along(self.states, self.tree.paths[:, node])

    @property
    def nodes(self) -> Float[Tensor, "sample node *latent"]:
        """The states of every trajectory, copied; `sample` is prompt-major."""
        return _along(self.states, self.tree.paths)

    @property
    def velocities(self) -> Float[Tensor, "sample step *latent"]:
        """The network's outputs along every trajectory, copied."""
        return _along(self.outputs, self.tree.paths[:, :-1])

    @property
    def images_latent(self) -> Latents:
        """The last state of every trajectory."""
        return self.at(self.schedule.steps)


def _along(table: Tensor, units: Tensor) -> Tensor:
    """The rows `units` [member, ...] of `table` [prompt, unit, *latent], prompt-major."""
    return table[:, to_device(units, table.device)].flatten(0, 1)


Unit = Literal["transition", "trajectory", "group"]
"""What a loss needs in one batch: single rows, all rows of a trajectory, or all members of a group
at one time. A row is a transition or, for a forward-process loss, a (trajectory, drawn time).
"""


class LossRows:
    """What `LossBatch` and `forward.ForwardBatch` have in common: one entry per row in every field,
    except in `velocity`.
    """

    def units(self, unit: Unit) -> tuple[Tensor, ...]:
        """The numbers that identify the unit of each row in `unit_means`."""
        batch: Any = self
        if unit == "transition":
            return (torch.arange(len(batch.time), device=batch.time.device),)
        return (batch.sample,) if unit == "trajectory" else (batch.group, batch.time)

    def rows(self: Batch, index: Tensor | slice) -> Batch:
        """The rows `index` of every field; gradients reach this batch's tensors."""
        given = {name: value for name, value in vars(self).items() if name != "velocity"}
        return type(self)(**{k: v[index] for k, v in given.items() if v is not None})


def pooled_units(loss: Any, rows: LossRows) -> tuple[Tensor, ...]:
    """The numbers that identify the rows over which the means of `row_terms` run: the units of the
    `loss`, or smaller ones that its method `pooled_units` returns.
    """
    smaller = getattr(loss, "pooled_units", None)
    return smaller(rows) if smaller else rows.units(loss.unit)


@checked
def unit_means(values: RowTerms, units: Sequence[Tensor], weight: PerSample) -> RowTerms:
    """For each row, the weighted mean of `values` over the rows that agree with it in all of
    `units`; 0 if their weights are 0.

    Compares every row with every other, so the host does not wait for the device; meant for up to a
    few thousand rows. A trainer whose units are spread over micro-batches calls it on all their
    rows at once.

    Args:
        values: the values, one or several of each row [sample] or [sample, term]; those of weight 0
            may be NaN.
        units: the numbers that identify each row's unit, as from `LossRows.units`.
        weight: the weights [sample].

    Returns:
        The means, in the shape of `values`.
    """
    if values.ndim > 1:
        return torch.stack([unit_means(term, units, weight) for term in values.unbind(1)], 1)
    same = (weight > 0)[None, :].expand(len(values), -1)
    for number in units:
        same = same & (number[:, None] == number[None, :])
    weight = torch.where(same, weight[None, :], 0.0)
    total, weights = torch.where(same, weight * values[None, :], 0.0).sum(1), weight.sum(1)
    return total / weights.masked_fill(weights == 0, 1.0)


@checked
@dataclass(frozen=True)
class LossBatch(LossRows):
    """The input of a policy loss. A row is a transition, that is a trajectory at a step; rows are
    the axis `sample` in the shapes.

    Args:
        new: the current policy's transition, whose mean carries the gradient.
        behaviour: the transition from which `next_node` was sampled.
        next_node: the sampled latents [sample, *latent].
        advantages: advantages [sample].
        weight: weights of the mean over rows, 0 or more [sample]. Rows of weight 0 contribute
            neither value nor gradient; their other fields may be NaN.
        delta: the step's Delta = t_i - t_{i+1} [sample].
        sample: index of the row's trajectory in the whole iteration.
        group: index of the row's prompt in the whole iteration.
        step: index of the step on the schedule [sample].
        time: t_i, at which the transition starts [sample].
        reference: the frozen base model's transition; None unless the loss needs it.
        velocity: the network's outputs behind `new`, one per distinct state, if known; losses do
            not need them.
        slope: |d mean / d velocity| of the step's transition [sample]; None if unknown.
        pooled: as in `forward.ForwardBatch`, for a loss whose `unit` is not "transition".

    Raises:
        ConfigError: the means have another shape than `next_node`.
    """

    new: Gaussian
    behaviour: Gaussian
    next_node: Latents
    advantages: PerSample
    weight: PerSample
    delta: PerSample
    sample: Int[Tensor, " sample"]
    group: Int[Tensor, " sample"]
    step: StepIndex
    time: PerSample
    reference: Gaussian | None = None
    velocity: Float[Tensor, "evaluation *latent"] | None = None
    slope: PerSample | None = None
    pooled: RowTerms | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.next_node.shape)
        for gaussian in filter(None, (self.new, self.behaviour, self.reference)):
            mean = tuple(gaussian.mean.shape)
            require(mean == shape, "loss batch: mean", mean, f"{shape}, as next_node")


@dataclass(frozen=True)
class LossResult:
    """The result of a loss.

    Args:
        loss: a scalar to differentiate.
        metrics: detached weighted means over the rows.
        policy_term: `loss` without the penalty, with its graph, for a loss with both; step shares
            are measured on it.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    policy_term: Tensor | None = None
