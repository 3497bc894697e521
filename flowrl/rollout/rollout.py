"""Trajectories and the states their unfinished nodes lead to, in as few network calls as possible."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.flow.gaussian import sample as draw
from flowrl.protocols import FlowPolicy, Sampler
from flowrl.rollout.solvers import Usage, ode_step
from flowrl.samplers import transition_stds
from flowrl.types import Completion, Condition, Continuation, Gaussian, NoProbe, Probe, Schedule, Substeps, Trajectories


@dataclass(frozen=True)
class Groups:
    """`prompts` x `members` samples, prompt-major. With `shared_noise` the members of a group start from the same x_T.

    `part` makes some of the groups a rollout of their own: those from number `first` of `of` (None: there are no others). All
    noise is drawn for the whole and sliced, so a group's numbers do not depend on which groups share its process or its chunk.
    """

    prompts: int
    members: int
    shared_noise: bool = False
    first: int = 0
    of: int | None = None

    def __post_init__(self) -> None:
        require(self.prompts >= 1, "prompts", self.prompts, "1 or more")
        require(self.members >= 1, "members", self.members, "1 or more")
        fits = self.first == 0 if self.of is None else 0 <= self.first <= self.of - self.prompts
        require(fits, "first", self.first, f"so that {self.prompts} groups lie within the {self.of or self.prompts} there are")

    def part(self, first: int, count: int) -> "Groups":
        """`count` groups from number `first` of these."""
        return replace(self, prompts=count, first=self.first + first, of=self.of or self.prompts)

    @property
    def samples(self) -> int:
        """prompts x members."""
        return self.prompts * self.members

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """x_T of every sample, [sample, *latent], on the generator's device."""
        rows = 1 if self.shared_noise else self.members
        noise = torch.randn(((self.of or self.prompts) * rows, *shape), generator=generator, device=generator.device)
        noise = noise[self.first * rows : (self.first + self.prompts) * rows]
        return noise.repeat_interleave(self.members, dim=0) if self.shared_noise else noise

    def draw(self, gaussian: Gaussian, generator: torch.Generator, copies: int = 1) -> Tensor:
        """A draw per row of `gaussian`, which has `copies` rows for every sample."""
        rows = self.members * copies
        return draw(gaussian, generator, self.first * rows, (self.of or self.prompts) * rows)


@dataclass(frozen=True)
class Rollout:
    """Trajectories, and per probed node the latent of the estimated final image.

    `estimates[node]` is [sample, *latent], or [prompt, *latent] at nodes that a whole group shares (same x_T, no stochastic step
    before them). Nodes that were not probed are absent; the last node is always there. Nodes with the same final image (they
    are linked by ODE steps) hold the same tensor. `copies[node]` says how many rows of `estimates[node]` belong to one sample,
    in a row, to be averaged (left out: 1).
    """

    trajectories: Trajectories
    estimates: Mapping[int, Tensor]
    groups: Groups
    copies: Mapping[int, int] = field(default_factory=dict)

    def part(self, first: int, count: int) -> "Rollout":
        """`count` of its groups from number `first`."""

        def rows(tensor: Tensor) -> Tensor:
            per_group = len(tensor) // self.groups.prompts
            return tensor[first * per_group : (first + count) * per_group]

        path = self.trajectories
        distinct = {id(tensor): rows(tensor) for tensor in self.estimates.values()}
        estimates = {node: distinct[id(tensor)] for node, tensor in self.estimates.items()}
        part = Trajectories(rows(path.nodes), rows(path.velocities), path.schedule)
        return Rollout(part, estimates, self.groups.part(first, count), self.copies)


def attach_stds(schedule: Schedule, sampler: Sampler) -> Schedule:
    """The schedule with the sampler's standard deviations per step."""
    return replace(schedule, stds=transition_stds(sampler, schedule))


def rollout(
    policy: FlowPolicy,
    sampler: Sampler,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    generator: torch.Generator,
    groups: Groups,
    probe: Probe = NoProbe(),
    usage: Usage | None = None,
    max_batch: int = 1024,
) -> Rollout:
    """Sample one trajectory per row of `noise` [sample, *latent] and estimate final images as `probe` asks.

    `condition` has one row per prompt. Network evaluations per trajectory with T steps and independent noise: T without a
    probe, T T' with `Substeps(T')` in T + T' - 1 calls, T (T + 1) / 2 with `Completion` in T calls. Nodes that a group shares
    (same x_T and only ODE steps so far) are evaluated once per group, and a completion is started only where a stochastic step
    follows: from other nodes the ODE leads to the next one's image. `Continuation(n)` goes on n times at random from every
    decision, with noise drawn after the trajectories', which are thus the same for every probe. Float32, detached.
    `max_batch` bounds how many latents the network sees at once; the results do not depend on it beyond float rounding.
    """
    if not isinstance(probe, NoProbe | Substeps | Completion | Continuation):
        names = "NoProbe(), Tweedie(), Substeps(n), Completion(), Continuation(n)"
        raise ConfigError(f"unknown probe {probe!r}; allowed: {names}")
    require(max_batch >= 1, "max_batch", max_batch, "1 or more")
    require(len(noise) == groups.samples, "noise rows", len(noise), f"prompts x members = {groups.samples}")
    schedule = attach_stds(schedule, sampler)
    walk = _Walk(policy, sampler, schedule, condition, generator, groups, usage or Usage(), max_batch)
    with policy.frozen(), torch.no_grad():
        return walk.run(noise.float(), probe)


@dataclass(frozen=True)
class Walkers:
    """Settings of `continued`: policy, sampler, a schedule with stds, how the next node is drawn, counters."""

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    draw: Callable[[Gaussian], Tensor]
    usage: Usage
    max_batch: int = 1024


def continued(walkers: Walkers, nodes: Tensor, start: int, condition: Condition, count: int) -> Tensor:
    """Final latents of `count` independent continuations from each of `nodes` [sample, *latent] at node `start`.

    Returns [sample x count, *latent], those of one sample in a row; `condition` has one row per sample. `count` (T - `start`)
    network evaluations per sample. Gradients as the caller has them switched; float32.
    """
    x, rows = nodes.repeat_interleave(count, dim=0), condition.repeat(count)
    schedule = walkers.schedule
    for i in range(start, schedule.steps):
        timestep = schedule.network_timesteps[i].expand(len(x))
        velocity = walkers.usage.velocity(walkers.policy, x, timestep, rows, walkers.max_batch)
        gaussian = walkers.sampler.transition(x, velocity, schedule, torch.full((len(x),), i, device=x.device))
        x = walkers.draw(gaussian) if i in schedule.decisions else gaussian.mean
    return x


@dataclass
class _Walk:
    """One rollout in progress: the arguments of `rollout`, bundled."""

    policy: FlowPolicy
    sampler: Sampler
    schedule: Schedule
    condition: Condition
    generator: torch.Generator
    groups: Groups
    usage: Usage
    max_batch: int

    def run(self, x: Tensor, probe: Probe) -> Rollout:
        """The wavefront: at every step one batched call serves the trajectories and all completions under way."""
        steps, decisions = self.schedule.steps, self.schedule.decisions
        per_sample = self.condition.repeat(self.groups.members)
        nodes, velocities = [x], []
        running: dict[int, Tensor] = {}
        for i in range(steps):
            velocity, ahead = self._velocities(x, i, running, per_sample)
            running = {j: ode_step(self.schedule, running[j], ahead[j], i) for j in running}
            following = ode_step(self.schedule, x, velocity, i)
            if isinstance(probe, Completion) and i in decisions:
                running[i] = following[:: self.groups.members] if self._is_shared(i) else following
            index = torch.full((len(x),), i, device=x.device)
            gaussian = self.sampler.transition(x, velocity, self.schedule, index)
            x = self.groups.draw(gaussian, self.generator) if i in decisions else gaussian.mean
            nodes.append(x)
            velocities.append(velocity)
        trajectories = Trajectories(torch.stack(nodes, 1), torch.stack(velocities, 1), self.schedule)
        estimates = self._substeps(trajectories, probe.count, per_sample) if isinstance(probe, Substeps) else running
        estimates, copies = {**estimates, steps: x}, {}
        if isinstance(probe, Continuation):
            next_nodes = partial(self.groups.draw, generator=self.generator, copies=probe.count)
            walkers = Walkers(self.policy, self.sampler, self.schedule, next_nodes, self.usage, self.max_batch)
            estimates |= {j: continued(walkers, trajectories.nodes[:, j], j, per_sample, probe.count) for j in decisions}
            copies = dict.fromkeys(decisions, probe.count)
        if isinstance(probe, Completion | Continuation):
            for node in reversed(range(steps)):
                estimates.setdefault(node, estimates[node + 1])
                copies.setdefault(node, copies.get(node + 1, 1))
        return Rollout(trajectories, estimates, self.groups, copies)

    def _is_shared(self, node: int) -> bool:
        """Whether all members of a group are in the same state at `node`."""
        return self.groups.shared_noise and node <= min(self.schedule.decisions, default=self.schedule.steps)

    def _velocities(
        self, x: Tensor, step: int, running: Mapping[int, Tensor], per_sample: Condition
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Velocities at node `step` of the trajectories and, in the same call, of the completions started before it."""
        rows = x[:: self.groups.members] if self._is_shared(step) else x
        latents = [rows, *running.values()]
        conditions = [self.condition if len(part) != self.groups.samples else per_sample for part in latents]
        batch = torch.cat(latents)
        timestep = self.schedule.network_timesteps[step].expand(len(batch))
        velocity = self.usage.velocity(self.policy, batch, timestep, Condition.cat(conditions), self.max_batch)
        first, *others = velocity.split([len(part) for part in latents])
        if self._is_shared(step):
            first = first.repeat_interleave(self.groups.members, dim=0)
        return first, dict(zip(running, others, strict=True))

    def _substeps(self, trajectories: Trajectories, count: int, per_sample: Condition) -> dict[int, Tensor]:
        """Euler on an even grid over [t_j, 0] for all nodes j < T at once; the first velocity is the rollout's own."""
        steps = self.schedule.steps
        device = trajectories.nodes.device
        everyone = torch.arange(self.groups.samples, device=device)
        rows = [everyone[:: self.groups.members] if self._is_shared(j) else everyone for j in range(steps)]
        conditions = Condition.cat([per_sample.take(r) for r in rows])
        x = torch.cat([trajectories.nodes[r, j] for j, r in enumerate(rows)])
        velocity = torch.cat([trajectories.velocities[r, j] for j, r in enumerate(rows)])
        start = torch.cat([self.schedule.times[j].expand(len(r)) for j, r in enumerate(rows)])
        length = (start / count).view(-1, *(1,) * (x.ndim - 1))
        for k in range(count):
            if k > 0:
                timestep = 1000.0 * start * (1 - k / count)
                velocity = self.usage.velocity(self.policy, x, timestep, conditions, self.max_batch)
            x = x - length * velocity
        return dict(enumerate(x.split([len(r) for r in rows])))
