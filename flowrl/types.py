"""The vocabulary of axes and the small frozen values that travel between rooms.

Axis names (used in every shape annotation of the package):

==========  =====================================================================================
prompt      distinct prompts of one iteration
member      samples of one prompt; together they are the *group* of GRPO
sample      prompt x member, flattened (prompt-major)
node        states of a trajectory, ``node 0`` is pure noise (t=1), ``node T`` the image (t=0)
step        transitions, ``step i`` leads from ``node i`` to ``node i+1``; node = step + 1
latent      the latent's own axes (any number)
==========  =====================================================================================

Time runs from t=1 (noise) to t=0 (data): x_t = (1-t) x_0 + t eps, velocity v = eps - x_0 = dx/dt.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from flowrl.errors import ConfigError, FlowrlError, require

T = TypeVar("T")

Latents = Float[Tensor, "sample *latent"]
PerSample = Float[Tensor, " sample"]
StepIndex = Int[Tensor, " sample"]
NodeTable = Float[Tensor, "prompt member node"]
StepTable = Float[Tensor, "prompt member node-1"]
"""The annotations of most signatures. Functions that are `checked` compare them with their arguments at every call."""

CHECKS_ON = os.environ.get("FLOWRL_TYPECHECK", "1") != "0" and os.environ.get("JAXTYPING_DISABLE", "0") != "1"


def checked(thing: T) -> T:
    """Check the jaxtyping annotations of a function (or data class) at every call.

    Used for the interfaces between rooms only. A call costs about 20 microseconds; ``FLOWRL_TYPECHECK=0`` (or jaxtyping's own
    ``JAXTYPING_DISABLE=1``) in the environment before the import makes it free.
    """
    if not CHECKS_ON:
        return thing
    return jaxtyped(typechecker=beartype)(thing)  # pyright: ignore[reportCallIssue, reportArgumentType]


def tensor_problem(tensor: Tensor) -> str:
    """Why a tensor holds no plain real numbers ("is sparse", "has no values: ..."); "" if it does."""
    if tensor.layout is not torch.strided:
        return "is sparse"
    if tensor.device.type == "meta":
        return "has no values: its device is meta"
    return f"has complex numbers ({tensor.dtype})" if tensor.is_complex() else ""


@contextmanager
def inputs_unchanged(call: str, error: type[FlowrlError], *inputs: Tensor) -> Iterator[None]:
    """Raise `error` if what the part's `call` was given is changed in place while the block runs."""
    counted = [tensor for tensor in inputs if not tensor.is_inference()]
    before = [tensor._version for tensor in counted]
    yield
    if [tensor._version for tensor in counted] != before:
        raise error(f"{call} changed its input in place; work on a copy (tensor.clone())")


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, and the metadata that a verifier needs (for example the requested objects)."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@checked
@dataclass(frozen=True)
class Schedule:
    """A grid of T+1 node times from noise to data.

    `times` are t_0 = 1 > t_1 > ... > t_T = 0. `timesteps` are the network's time input at each step (diffusers: 1000 t),
    by default ``1000 * times[:-1]``. `stds` are the transition's standard deviations per step under the current
    sampler (0 = not a decision), filled in by the rollout for the rules and losses that need them.
    """

    times: Float[Tensor, " node"]
    timesteps: Float[Tensor, " step"] | None = None
    stds: Float[Tensor, " step"] | None = None

    def __post_init__(self) -> None:
        times = self.times
        require(times.ndim == 1 and len(times) >= 2, "schedule.times", tuple(times.shape), "one axis, 2 or more nodes")
        require(bool((times[:-1] > times[1:]).all()), "schedule.times", times.tolist(), "strictly decreasing")
        in_range = float(times[0]) <= 1.0 + 1e-6 and float(times[-1]) >= -1e-6
        require(in_range, "schedule.times", times.tolist(), "within [0, 1]")
        for name in ("timesteps", "stds"):
            value = getattr(self, name)
            if value is not None:
                require(len(value) == len(times) - 1, f"schedule.{name}", len(value), f"{len(times) - 1} steps")

    def to(self, device: torch.device | str) -> "Schedule":
        """The same grid on `device`."""
        timesteps, stds = (None if tensor is None else tensor.to(device) for tensor in (self.timesteps, self.stds))
        return Schedule(self.times.to(device), timesteps, stds)

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

    @property
    def stochastic(self) -> Tensor:
        """Which steps are decisions (std > 0), shape [step], bool."""
        if self.stds is None:
            raise ConfigError("this schedule carries no stds; use rollout.attach_stds(schedule, sampler) first")
        return self.stds > 0

    @cached_property
    def decisions(self) -> list[int]:
        """The numbers of the stochastic steps. Only the first call reads them from the device."""
        return self.stochastic.nonzero().flatten().tolist()


@checked
@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian over the next node with one standard deviation per sample; std 0 means "not a decision"."""

    mean: Latents
    std: PerSample


@dataclass(frozen=True)
class Condition:
    """The network's condition on the prompts: named tensors whose first axis is [prompt] or [sample].

    `keys` may list what the rows refer to (a superset, for a selection of rows). A policy that keeps embeddings elsewhere can
    then look them up without reading a tensor back from the device."""

    tensors: Mapping[str, Tensor]
    keys: frozenset[int] = frozenset()

    def take(self, index: Tensor) -> "Condition":
        """The rows `index` of every tensor."""
        return Condition({name: tensor[index] for name, tensor in self.tensors.items()}, self.keys)

    def repeat(self, times: int) -> "Condition":
        """Every row `times` times in a row: [prompt] -> [prompt x member]."""
        return Condition({name: t.repeat_interleave(times, dim=0) for name, t in self.tensors.items()}, self.keys)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @staticmethod
    def cat(conditions: Sequence["Condition"]) -> "Condition":
        """Concatenate along the first axis."""
        names = conditions[0].tensors
        keys = frozenset().union(*(c.keys for c in conditions))
        return Condition({name: torch.cat([c.tensors[name] for c in conditions]) for name in names}, keys)


class Probe:
    """How a rollout scores unfinished states for a credit rule. One of the classes below."""


@dataclass(frozen=True)
class NoProbe(Probe):
    """Only the finished image is scored; R at every other node is NaN. 0 extra network evaluations."""


@dataclass(frozen=True)
class Substeps(Probe):
    """R_j scores the image after `count` Euler steps on an even grid over [t_j, 0], the first with the rollout's own v_j.

    `count` = 1 is the Tweedie estimate x_j - t_j v_j. Source: Stepwise-Flow-GRPO (arXiv 2603.28718), T' = `count`.
    """

    count: int = 5

    def __post_init__(self) -> None:
        require(self.count >= 1, "Substeps.count", self.count, "1 or more")


def Tweedie() -> Substeps:
    """The one-step clean estimate x_j - t_j v_j: `Substeps(1)`."""
    return Substeps(1)


@dataclass(frozen=True)
class Completion(Probe):
    """R_j scores the image reached by the remaining ODE steps on the sampler's own grid. TP-GRPO (arXiv 2602.06422)."""


@dataclass(frozen=True)
class Continuation(Probe):
    """R_j is the mean reward of `count` stochastic continuations from node j: a Monte Carlo estimate of the value V(x_j).

    Gains of such rewards estimate the true advantages V(x_{i+1}) - V(x_i) of the steps taken, the ideal credit if evaluations
    were free. Takes T (T + 1) / 2 times `count` evaluations, in addition to the rollout's own."""

    count: int = 16

    def __post_init__(self) -> None:
        require(self.count >= 1, "Continuation.count", self.count, "1 or more")


@checked
@dataclass(frozen=True)
class Trajectories:
    """A batch of sampled trajectories. Float32; detached; `sample` is prompt-major."""

    nodes: Float[Tensor, "sample node *latent"]
    velocities: Float[Tensor, "sample step *latent"]
    schedule: Schedule

    def __post_init__(self) -> None:
        steps = self.schedule.steps
        found = f"{self.nodes.shape[1]} nodes and {self.velocities.shape[1]} steps"
        fits = self.nodes.shape[1] == steps + 1 and self.velocities.shape[1] == steps
        require(fits, "trajectories", found, f"node = step + 1: the schedule has {steps} steps and {steps + 1} nodes")

    @property
    def images_latent(self) -> Tensor:
        """The last node, shape [sample, *latent]."""
        return self.nodes[:, -1]


@checked
@dataclass(frozen=True)
class LossBatch:
    """The input of a policy loss: (trajectory, step) pairs, flattened into `sample`.

    `new` is the current policy's transition (its mean carries the gradient), `behaviour` the one that sampled
    `next_node`, `reference` the frozen base model's (None unless the loss needs it). `mask` is False where the pair does
    not count; `delta` is the step's Delta = t_i - t_{i+1}. `velocity` is the network's output that `new` was made from, if it is
    known; losses do not need it.
    """

    new: Gaussian
    behaviour: Gaussian
    next_node: Latents
    advantages: PerSample
    mask: Bool[Tensor, " sample"]
    delta: PerSample
    reference: Gaussian | None = None
    velocity: Latents | None = None

    def __post_init__(self) -> None:
        for name in ("new", "behaviour", "reference"):
            gaussian = getattr(self, name)
            if gaussian is not None:
                shape, wanted = tuple(gaussian.mean.shape), tuple(self.next_node.shape)
                require(shape == wanted, f"loss batch: {name}.mean", shape, f"[sample, *latent] = {wanted}, as next_node")


@dataclass(frozen=True)
class LossResult:
    """A scalar to differentiate, and detached metrics (means over the unmasked pairs).

    `policy_term` is `loss` without the penalty, with its graph, for a loss that has both; step shares are measured on it."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    policy_term: Tensor | None = None
