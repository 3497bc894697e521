"""What a probe is: how a rollout scores unfinished states for a credit rule, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.errors import require
from flowrl.types import Gaussian, Schedule, Trajectories

Key = int | tuple[str, int]
"""What an estimate belongs to: a node, or (a name, a node) for a further estimate of that node."""
Solver = Literal["euler", "heun", "dpm++", "unipc"]


@dataclass(frozen=True)
class Estimate:
    """Final latents [row, *latent] estimated from one node, to be decoded and scored; prompt-major.

    Every group has equally many rows: one (a state that its members share), one per member, or one for each of its `members`
    [prompt, chosen]. With `copies` each of these is that many rows, in a row, whose rewards are averaged.
    """

    latents: Tensor
    copies: int = 1
    members: Int[Tensor, "prompt chosen"] | None = None


@dataclass(frozen=True)
class Grid:
    """The times of an ODE solver from one node: `times` [point] down to 0, `lengths` [interval] of the steps, `timesteps`
    [interval] the network's time input at the start of each."""

    times: Tensor
    lengths: Tensor
    timesteps: Tensor


@dataclass(frozen=True)
class NetworkUse:
    """How a probe calls the network; the trajectories' own evaluations are never affected.

    `dtype` "bfloat16": under autocast; the weights stay as they are, and a network that is narrower already is not changed.
    `guidance` "off": without classifier-free guidance, half of an evaluation; the policy needs a guidance scale above 1.
    `cache` c > 1: of every c consecutive evaluations of one solution, the first computes all blocks of the transformer, and the
    others only the first block, to whose output they add what the remaining blocks added then; 1 / blocks of an evaluation. Each
    start node then has calls of its own. Source of the last: first-block cache as in diffusers' `apply_first_block_cache`, there
    with a threshold on the change of the first block's output over the whole batch, here at fixed evaluations, so that cost and
    result do not depend on the batch.
    """

    dtype: Literal["own", "bfloat16"] = "own"
    guidance: Literal["own", "off"] = "own"
    cache: int = 1

    def __post_init__(self) -> None:
        require(self.dtype in ("own", "bfloat16"), "dtype", self.dtype, "'own' or 'bfloat16'")
        require(self.guidance in ("own", "off"), "guidance", self.guidance, "'own' or 'off'")
        require(self.cache >= 1, "cache", self.cache, "1 (off) or more evaluations")

    def share(self, blocks: int | None, reuse: bool = False) -> float:
        """What a call counts, in network evaluations of the policy; `reuse`: it computes the first of `blocks` blocks only."""
        passes = 1 if self.guidance == "own" else 0.5
        if not reuse:
            return passes
        require(blocks is not None, "cache", self.cache, "1 (off) for a network whose number of blocks is not known")
        return passes / (blocks or 1)

    def reuses(self, evaluation: int) -> bool:
        """Whether evaluation number `evaluation` (from 1; number 0 is the rollout's own) computes the first block only."""
        return (evaluation - 1) % self.cache > 0


@dataclass(frozen=True)
class Shape:
    """What the cost of a rollout depends on: `groups`, the `schedule` with its stds and tree, and the number of the network's
    `blocks` (None: unknown)."""

    groups: int
    schedule: Schedule
    blocks: int | None = None

    @property
    def rows(self) -> list[int]:
        """Distinct states of all groups at each node."""
        tree = self.schedule.tree
        assert tree is not None, "a schedule as `rollout` fills it in"
        return [self.groups * count for count in tree.counts]

    @property
    def members(self) -> int:
        """Trajectories of a group."""
        tree = self.schedule.tree
        assert tree is not None
        return tree.members


@dataclass(frozen=True)
class Call:
    """A network call of a probe: `rows` latents, each `share` of an evaluation. It is part of the rollout's own call at `step`,
    or (None) one by itself."""

    rows: int
    share: float = 1.0
    step: int | None = None


@dataclass(frozen=True)
class Cost:
    """The network calls of a probe, and how many `images` it has decoded and scored; without the rollout's own."""

    calls: Sequence[Call] = ()
    images: int = 0

    @property
    def nfe(self) -> float:
        """Network evaluations; a whole number unless calls are cheaper than an evaluation."""
        return whole(sum(call.rows * call.share for call in self.calls))


def whole(evaluations: float) -> float:
    """A number of network evaluations without the rounding of sums of fractions, as a whole number if it is one."""
    found = round(float(evaluations), 6)
    return int(found) if found == int(found) else found


@dataclass(frozen=True)
class Scored:
    """The rewards of a rollout's estimates [prompt, row], by key; of the finished trajectories (`final` [prompt, member]); and of
    which members the rows are, where it is not all (`members`)."""

    rewards: Mapping[Key, Float[Tensor, "prompt row"]]
    final: Float[Tensor, "prompt member"]
    schedule: Schedule
    members: Mapping[Key, Int[Tensor, "prompt chosen"]] = field(default_factory=dict)

    def at(self, key: Key) -> Float[Tensor, "prompt member"]:
        """The reward of an estimate for every member; NaN for members without one."""
        rows = self.rewards[key]
        if key not in self.members:
            return rows.expand_as(self.final)
        chosen = self.members[key].to(rows.device)
        return torch.full_like(self.final, float("nan")).scatter(1, chosen, rows)


class Probing(Protocol):
    """What a probe gets: the finished trajectories, which it must not change, and the network, whose use is counted."""

    @property
    def trajectories(self) -> Trajectories:
        """States, the rollout's own velocities, the schedule with stds, and the tree: which states a group shares."""
        ...

    @property
    def final(self) -> Tensor:
        """x_0 of every trajectory [sample, *latent]. For a node whose state leads there, return this tensor, not a copy: it is
        then scored once."""
        ...

    @property
    def completed(self) -> Mapping[int, Tensor]:
        """The ends of the ODE from the nodes in the probe's `ahead` [row, *latent]."""
        ...

    @property
    def groups(self) -> int:
        """Prompts; rows are prompt-major, equally many for each."""
        ...

    def start(self, node: int, members: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States of a node and the rollout's own velocities there [row, *latent]: one row per distinct state, or for each of
        `members` [prompt, chosen]."""
        ...

    def velocity(self, latents: Tensor, timestep: Tensor, reuse: bool = False) -> Tensor:
        """The network's output at `latents` [row, *latent], `timestep` = 1000 t [row]; float32. The call has the settings of the
        probe's `network` and is counted. With `reuse` only the first block is computed; the last call without `reuse` had the
        same rows."""
        ...

    def solve(
        self, grids: Mapping[int, Grid], solver: Solver = "euler", members: Mapping[int, Tensor | None] | None = None
    ) -> Mapping[int, Tensor]:
        """The ends of the ODE from nodes, each on its own grid, in as few calls as possible; the first velocity is the rollout's.

        `members` by node: as in `start`."""
        ...

    def continued(self, node: int, count: int) -> Tensor:
        """Final latents [sample x count, *latent] of `count` stochastic continuations of every trajectory from `node`."""
        ...

    def rand(self, *shape: int) -> Tensor:
        """Uniform random numbers [prompt, *shape] that do not depend on which groups share a process or a chunk."""
        ...

    def draw(self, gaussian: Gaussian) -> Tensor:
        """A draw per row of `gaussian`, in the same way. Neither moves the generator of the trajectories."""
        ...


class Probe:
    """How a rollout scores unfinished states for a credit rule. A probe of your own is a sub-class with `estimate`.

    A probe may be approximate: what it returns enters only the rewards R[., node] of nodes before the last. Trajectories, the
    rewards R[., T] of finished images and the evaluations of the update are computed without it, bit for bit the same with any
    probe. (Nodes in `ahead` are the exception: they make the rollout's own calls larger, which may move its last bits.)
    `flowrl.testing.check_probe` checks all that follows. Options are the fields of a data class.
    """

    @property
    def network(self) -> NetworkUse:
        """How the network is called; what the policy does not offer raises `ConfigError` before the rollout's first call."""
        return NetworkUse()

    def ahead(self, schedule: Schedule) -> Sequence[int]:
        """The stochastic steps from whose nodes the rollout follows the ODE in its own calls, at no further call."""
        return ()

    def estimate(self, run: Probing) -> Mapping[Key, Estimate]:
        """Final latents by node (or by further keys, for `rewards`), estimated from the finished trajectories in `run`."""
        return {}

    def rewards(self, scored: Scored) -> Mapping[int, Float[Tensor, "prompt member"]]:
        """R[., node] by node, from the rewards of the estimates: by default those of the estimates whose key is a node."""
        return {key: scored.at(key) for key in scored.rewards if isinstance(key, int)}

    def fills(self, steps: int) -> Sequence[int]:
        """The nodes of `steps` steps for which `rewards` has values: by default all but the last."""
        return range(steps)

    def cost(self, shape: Shape) -> Cost | None:
        """The calls of `estimate` and the images that are scored, for `flowrl train --plan`; None if they are not known."""
        return None


@dataclass(frozen=True)
class NoProbe(Probe):
    """Only the finished image is scored; R at every other node is NaN. 0 extra network evaluations."""

    def fills(self, steps: int) -> Sequence[int]:
        """None."""
        return ()

    def cost(self, shape: Shape) -> Cost:
        """Nothing."""
        return Cost()
