"""The interface of probes: how a rollout scores unfinished states for a credit rule, and the cost
of these scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Experience, FeatureTable
from flowrl.core.options import checked_options
from flowrl.core.types import Condition, Gaussian, Paths, Prompt, Schedule, Trajectories, whole

Key = int | tuple[str, int]
"""The key of an estimate: a node, or (a name, a node) for a further estimate of that node."""
Estimates = Mapping[Any, Tensor]
"""Final latents estimated from unfinished states, to be decoded and scored: by `Key` [row,
*latent], prompt-major. Every group has equally many rows: at a node one per member, or one for a
state that its members share; under a further key also those of its first members only.
"""
Solver = Literal["euler", "heun", "dpm++", "unipc"]


@dataclass(frozen=True)
class Grid:
    """The times of an ODE solver from one node.

    Args:
        times: times [point], descending to 0.
        lengths: lengths of the steps [interval].
        timesteps: the network's time input at the start of each step [interval].
    """

    times: Tensor
    lengths: Tensor
    timesteps: Tensor


@checked_options
@dataclass(frozen=True)
class NetworkUse:
    """How a probe calls the network; the trajectories' own evaluations are never affected.

    Args:
        dtype: "own", or "bfloat16": under autocast; weights keep their precision, and a narrower
            network is not changed.
        guidance: "own", or "off": without classifier-free guidance, which halves an evaluation;
            needs a guidance scale above 1.

    Raises:
        ConfigError: a field is out of range.
    """

    dtype: Literal["own", "bfloat16"] = "own"
    guidance: Literal["own", "off"] = "own"

    @property
    def share(self) -> float:
        """The cost of a call in network evaluations of the policy."""
        return 1 if self.guidance == "own" else 0.5


@dataclass(frozen=True)
class Shape:
    """The quantities that determine the cost of a rollout.

    Args:
        groups: number of groups.
        schedule: the time grid.
        tree: which states the trajectories of a group share.
        nodes: the nodes to be estimated (see `Probing`).
    """

    groups: int
    schedule: Schedule
    tree: Paths
    nodes: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Distinct states of all groups at each node."""
        return [self.groups * count for count in self.tree.counts]

    @property
    def members(self) -> int:
        """Trajectories of a group."""
        return self.tree.members


@dataclass(frozen=True)
class Call:
    """A network call of a probe.

    Args:
        rows: number of latents.
        share: cost per latent, in network evaluations.
        step: the step of the rollout whose call it is part of; None for a separate call.
    """

    rows: int
    share: float = 1.0
    step: int | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of a probe, in addition to the rollout.

    Args:
        calls: the network calls.
        images: number of decoded and scored images.
    """

    calls: Sequence[Call] = ()
    images: int = 0

    @property
    def nfe(self) -> float:
        """Number of network evaluations; an integer unless calls cost less than an evaluation."""
        return whole(sum(call.rows * call.share for call in self.calls))


@checked
@dataclass(frozen=True)
class Scored:
    """The rewards of a rollout's estimates.

    Args:
        rewards: rewards [prompt, row] by key of the estimate.
        final: rewards of the finished trajectories [prompt, member].
        nodes: the nodes to be estimated, in order (see `Probing`).
    """

    rewards: Mapping[Key, Float[Tensor, "prompt row"]]
    final: Float[Tensor, "prompt member"]
    nodes: Sequence[int]

    def at(self, key: Key) -> Float[Tensor, "prompt member"]:
        """The reward of an estimate for every member."""
        return self.rewards[key].expand_as(self.final)


@dataclass(frozen=True)
class Probing(ABC):
    """The input of a probe: the finished trajectories, which it must not change, and the network
    with a count of its evaluations. Rows are prompt-major, equally many for each prompt.

    Args:
        trajectories: states, the rollout's velocities, the time grid, and the tree of the states
            that a group shares.
        final: x_0 of every trajectory [sample, *latent].
        nodes: the nodes to be estimated, in order: those from which the decisions start whose
            values the credit rule reads.
        completed: the ends of the ODE from the nodes in the probe's `ahead` [row, *latent].
        condition: the prompts' embeddings, one row per prompt.
        prompts: the prompts; empty if `flowrl.rollout.rollout` was not given them.
        hidden: for a probe with `reads_hidden`, the policy's last hidden state, a mean over tokens,
            where it was evaluated [prompt, inner, feature] (see `Trajectories.outputs`).
    """

    trajectories: Trajectories
    final: Tensor
    nodes: Sequence[int]
    completed: Mapping[int, Tensor]
    condition: Condition
    prompts: Sequence[Prompt]
    hidden: Tensor | None

    @property
    def groups(self) -> int:
        """Number of prompts."""
        return len(self.trajectories.states)

    def start(self, node: int, members: int | None = None) -> tuple[Tensor, Tensor]:
        """States of a node and the rollout's velocities there [row, *latent]: one row per distinct
        state of a group, or of its first `members`.
        """
        path = self.trajectories
        units = range(path.tree.units)[path.tree.at(node)][:members]
        rows = slice(units.start, units.stop)
        return path.states[:, rows].flatten(0, 1), path.outputs[:, rows].flatten(0, 1)

    @abstractmethod
    def velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The network's output at `latents` [row, *latent], `timestep` = 1000 t [row]; float32.

        The call has the settings of the probe's `network` and is counted.
        """

    @abstractmethod
    def solve(
        self,
        grids: Mapping[int, Grid],
        solver: Solver = "euler",
        members: int | None = None,
    ) -> Mapping[int, Tensor]:
        """The ends of the ODE from the states `start(node, members)`, each node on its own grid, in
        as few calls as possible; the first velocity is the rollout's.
        """

    @abstractmethod
    def continued(self, node: int, count: int) -> Tensor:
        """Final latents [sample x count, *latent] of `count` stochastic continuations of every
        trajectory from `node`.
        """

    @abstractmethod
    def rand(self, *shape: int) -> Tensor:
        """Uniform random numbers [prompt, *shape] that do not depend on which groups share a
        process or a chunk.
        """

    @abstractmethod
    def draw(self, gaussian: Gaussian) -> Tensor:
        """A draw per row of `gaussian`, with the same independence. Neither method changes the
        generator of the trajectories.
        """


class Probe:
    """How a rollout scores unfinished states for a credit rule. To write a probe, derive a class
    with `estimate`.

    A probe may be approximate: its results enter only the value table's columns before the last.
    Trajectories, the rewards of finished images and the evaluations of the update are computed
    without it, and are bit for bit the same with any probe. (Nodes in `ahead` are the exception:
    they make the rollout's calls larger, which may change the last bits.)
    `flowrl.testing.check_probe` checks this contract. Options are the fields of a data class.
    """

    @property
    def network(self) -> NetworkUse:
        """How the network is called; the rollout raises `ConfigError` before its first call if the
        policy does not support it.
        """
        return NetworkUse()

    def ahead(self, nodes: Sequence[int]) -> Sequence[int]:
        """Those of the `nodes` to be estimated from which the rollout follows the ODE within its
        own calls.
        """
        return ()

    def estimate(self, run: Probing) -> Estimates:
        """Final latents by node (or by further keys, for `rewards`), estimated from the finished
        trajectories in `run`.
        """
        return {}

    def rewards(self, scored: Scored) -> Mapping[int, Float[Tensor, "prompt member"]]:
        """Values by node, from the rewards of the estimates; by default those of the estimates
        whose key is a node.
        """
        return {key: scored.at(key) for key in scored.rewards if isinstance(key, int)}

    def fills(self, decisions: int) -> Sequence[int]:
        """The columns of a value table of `decisions` decisions for which `rewards` has values; by
        default all but the last.
        """
        return range(decisions)

    def cost(self, shape: Shape) -> Cost | None:
        """The calls of `estimate` and the number of scored images, for `flowrl train --plan`; None
        if unknown.
        """
        return None


class ValueProbe(Probe, ABC):
    """A probe that computes values from features of unfinished states, by itself or as a correction
    of rewards of estimates, and may learn from every iteration.

    `features` is called in every chunk of a rollout. All else is called in main memory and in every
    process, once per iteration and with the numbers of all processes: `predict`, then, once the
    credit of the iteration is formed, `fit`. A value therefore never depends on the reward that it
    is compared with, nor on chunks and processes. A probe that learns has `state_dict` and
    `load_state_dict` (`flowrl.core.protocols.Stateful`), too; its numbers are the same in every
    process only if all randomness of `fit` is its own.
    """

    @property
    def reads_hidden(self) -> bool:
        """Whether `Probing.hidden` is recorded, which needs a policy with a `hidden_layer`."""
        return False

    @abstractmethod
    def features(self, run: Probing) -> Float[Tensor, "prompt member node feature"]:
        """Features of the nodes `run.nodes`, without gradient."""

    @abstractmethod
    def predict(self, features: FeatureTable, estimates: CreditTable) -> CreditTable:
        """The values of all columns but the last.

        Args:
            features: their features; NaN in columns that were not asked for.
            estimates: rewards of the probe's estimates; NaN without one.

        Returns:
            The values, which count in the columns that have features.
        """

    def fit(self, features: FeatureTable, estimates: CreditTable, experience: Experience) -> None:
        """Learn from an iteration: its record, and the arguments of `predict`."""


@dataclass(frozen=True)
class NoProbe(Probe):
    """Only the finished image is scored; all other columns are NaN. 0 extra network evaluations."""

    def fills(self, decisions: int) -> Sequence[int]:
        """None."""
        return ()

    def cost(self, shape: Shape) -> Cost:
        """Nothing."""
        return Cost()
