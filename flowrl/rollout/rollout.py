"""Rollouts: of groups (`rollout`), and of an iteration's groups in chunks, which are scored and
joined (`Collector`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import Experience
from flowrl.core.processes import Processes
from flowrl.core.protocols import AnyReward, AnySampler, FlowPolicy, MultistepSolver
from flowrl.core.tree import plain_tree
from flowrl.core.types import (
    Condition,
    Paths,
    Prompt,
    Schedule,
    Trajectories,
    copies_done,
    to_main_memory,
    whole,
)
from flowrl.probes import Branching, NoProbe, Probe
from flowrl.rollout.groups import Groups
from flowrl.rollout.probing import run_probe
from flowrl.rollout.solvers import deterministic
from flowrl.rollout.values import OnImages, score_rollout
from flowrl.rollout.walk import Rollout, Usage, Walk
from flowrl.samplers import transition_stds


@dataclass
class Collector:
    """Rolls out this process's groups and scores them.

    A chunk draws the noise of the whole iteration from the same generator state and takes its rows,
    so neither the chunk size nor the number of processes changes a group's noise. Network outputs
    may differ in their last bits, because the batches differ.

    Args:
        policy: the policy.
        reward: the reward.
        schedule: the schedule.
        groups: all groups of the iteration.
        probe: the probe.
        processes: the processes.
        max_batch: largest number of latents per network call.
        chunk: groups per chunk; 0: all at once; "auto": if `overlap`, `chunk_size`.
        overlap: decode and score in a second thread, on a CUDA stream of its own, while the next
            chunk is rolled out. The policy's `decode` and the reward then run in parallel with
            `velocity`; the results are the same.
        offload: keep trajectories in main memory until the update.
        on_images: called with this process's finished images, batch by batch.
    """

    policy: FlowPolicy
    reward: AnyReward
    schedule: Schedule
    groups: Groups
    probe: Probe
    processes: Processes
    max_batch: int
    chunk: int | Literal["auto"] = 0
    overlap: bool = False
    offload: bool = False
    on_images: OnImages | None = None

    def collect(
        self,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: Tensor,
        sampler: AnySampler,
        generator: torch.Generator,
        usage: Usage,
        enter: Callable[[str], None],
        columns: Tensor | None = None,
    ) -> tuple[Rollout, Experience]:
        """Roll out this process's groups and score them: the trajectories, without estimates, and
        the record of all groups of all processes.

        `noise` [sample, *latent] and `condition` [prompt] are of all groups. `usage` is set to the
        costs of all processes. `enter` is called with "rollout", "decode" and "reward" when these
        phases begin; with `overlap`, decoding and scoring count as "reward" as far as the rollout
        waits for them. `columns`: see `rollout`. An error of a part is raised in every process.
        """
        assigned, members = self.processes.assign(self.groups.prompts), self.groups.members
        device, start = self.policy.device, generator.get_state()
        scored, paths, jobs = Usage(), list[Trajectories](), list[Future[Experience]]()
        rewards = self._executor()
        try:
            with self.processes.shared_errors():
                for first, count in assigned.chunks(self._size(assigned.count)):
                    enter("rollout")
                    for job in jobs:
                        if job.done():
                            job.result()  # raises its error before the next chunk
                    generator.set_state(start)
                    result = rollout(
                        self.policy,
                        sampler,
                        self.schedule,
                        condition.take(slice(first, first + count)),
                        noise[first * members : (first + count) * members],
                        generator,
                        self.groups.part(first, count),
                        self.probe,
                        usage,
                        self.max_batch,
                        columns,
                        prompts[first : first + count],
                    )
                    paths.append(self._kept(result.trajectories))
                    if own := assigned.own_within(first, count):
                        part = result.part(own.start - first, len(own))
                        texts, ready = prompts[own.start : own.stop], self._ready()
                        given = part, texts, scored, ready, _ignored if self.overlap else enter
                        jobs.append(rewards.submit(self._score, *given))
                enter("reward")
                own_records = [job.result() for job in jobs]
        finally:
            rewards.shutdown(cancel_futures=True)
        gathered = self.processes.gather((own_records, scored))
        self._count(usage, assigned.count, [counts for _, counts in gathered])
        copies_done(device)
        scored_groups = Experience.cat([record for records, _ in gathered for record in records])
        groups, own = self.groups.part(assigned.first, assigned.count), assigned.first
        condition = condition.take(slice(own, own + assigned.count))
        return Rollout(_joined(paths), groups, condition), scored_groups

    def _count(self, usage: Usage, count: int, scored: Sequence[Usage]) -> None:
        """Set `usage`, that of the network for `count` groups of this process, to the costs of all
        processes, whose decoded and `scored` images are given.
        """
        usage.nfe, usage.probe_nfe = (
            whole(evaluations / count * self.groups.prompts)
            for evaluations in (usage.nfe, usage.probe_nfe)
        )
        usage.decodes += sum(counts.decodes for counts in scored)
        usage.reward_calls += sum(counts.reward_calls for counts in scored)

    def _size(self, count: int) -> int:
        """Groups per chunk of `count` groups; 0: all."""
        if self.chunk != "auto":
            return self.chunk
        return chunk_size(count, self.groups.members, self.max_batch) if self.overlap else count

    def _ready(self) -> Any:
        """A CUDA event after what this thread has queued, if another one scores; else None."""
        device = self.policy.device
        if not self.overlap or device.type != "cuda":
            return None
        return torch.cuda.current_stream(device).record_event()

    def _score(
        self,
        result: Rollout,
        prompts: Sequence[Prompt],
        usage: Usage,
        ready: Any,
        enter: Callable[[str], None],
    ) -> Experience:
        """The record of a chunk, whose latents are complete after the event `ready`."""
        if ready:
            ready.wait()
        given = self.policy, self.reward, result, prompts, usage
        record = score_rollout(*given, on_images=self.on_images, enter=enter)
        if ready:
            # the rollout's stream may use the memory of `result` as soon as the caller frees it
            torch.cuda.current_stream(self.policy.device).synchronize()
        return record

    def _kept(self, path: Trajectories) -> Trajectories:
        """The trajectories, in main memory if `offload` is set."""
        if not self.offload:
            return path
        states, outputs = to_main_memory(path.states), to_main_memory(path.outputs)
        return replace(path, states=states, outputs=outputs)

    def _executor(self) -> Executor:
        """A second thread, with this thread's device and number of threads and a CUDA stream of
        its own, or this thread.
        """
        if not self.overlap:
            return _Immediate()
        threads, device = torch.get_num_threads(), self.policy.device
        current = torch.cuda.current_device() if torch.cuda.is_available() else None

        def begin() -> None:
            torch.set_num_threads(threads)
            if current is not None:
                torch.cuda.set_device(current)
            if device.type == "cuda":
                torch.cuda.set_stream(torch.cuda.Stream(device))

        return ThreadPoolExecutor(1, "rewards", begin)


def _ignored(phase: str) -> None:
    """No phase: the work runs beside another one."""


def _joined(paths: Sequence[Trajectories]) -> Trajectories:
    """The trajectories of consecutive chunks."""
    if len(paths) == 1:
        return paths[0]
    states, outputs = (torch.cat([getattr(p, n) for p in paths]) for n in ("states", "outputs"))
    return replace(paths[0], states=states, outputs=outputs)


def chunk_size(groups: int, members: int, max_batch: int) -> int:
    """The smallest number of groups per chunk with which all `groups` of `members` samples need as
    many calls of at most `max_batch` samples as without chunks.
    """

    def calls(size: int) -> int:
        whole, rest = divmod(groups, size)
        return whole * -(-size * members // max_batch) + -(-rest * members // max_batch)

    return next(size for size in range(1, groups + 1) if calls(size) <= calls(groups))


class _Immediate(Executor):
    """Runs each job when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The finished job; its error is raised here."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def rollout(
    policy: FlowPolicy,
    sampler: AnySampler,
    schedule: Schedule,
    condition: Condition,
    noise: Tensor,
    generator: torch.Generator,
    groups: Groups,
    probe: Probe = NoProbe(),
    usage: Usage | None = None,
    max_batch: int = 1024,
    columns: Tensor | None = None,
    prompts: Sequence[Prompt] = (),
) -> Rollout:
    """Sample one trajectory per row of `noise`, and estimate final images from the states at which
    decisions start.

    Network evaluations per trajectory with T steps, all decisions, and independent noise: T without
    a probe, T T' with `Substeps(T')` in T + T' - 1 calls, T (T + 1) / 2 with `Completion` in T
    calls. Nodes that a group shares (same z_0 and only ODE steps so far) are evaluated once per
    group. Probes draw from a separate generator, so the trajectories, and all later draws, are the
    same for every probe. A `Branching` probe makes the trajectories of a group branches of trees:
    the number of evaluations is that of the trees' states before the last node, in T calls. A tree
    starts from the noise of its first member.

    Args:
        policy: the policy that computes velocities.
        sampler: the sampler of the trajectories.
        schedule: the time grid.
        condition: the prompts' embeddings, one row per prompt.
        noise: initial latents [sample, *latent], in prompt-major order.
        generator: the source of the sampler's noise.
        groups: number of prompts and of members, and whether members share their initial noise.
        probe: how unfinished states are estimated.
        usage: counters of network evaluations, which are updated; None for new ones.
        max_batch: largest number of latents per network call; results depend on it only by float
            rounding.
        columns: the columns of the value table to be estimated [decision+1], Boolean; None for all.
        prompts: the prompts themselves, for a probe that reads them (`flowrl.probes.LatentReward`).

    Returns:
        Trajectories and estimates, float32 and detached.

    Raises:
        ConfigError: the policy lacks what the probe needs.
        ProbeError: the probe breaks its contract.
    """
    require(max_batch >= 1, "max_batch", max_batch, "1 or more")
    require(len(noise) == groups.samples, "noise rows", len(noise), f"{groups.samples} samples")
    stds = transition_stds(sampler, schedule).cpu()
    if isinstance(sampler, MultistepSolver):
        draw = partial(groups.normal, generator=generator)
        schedule, sampler = deterministic(sampler, schedule, draw)
    tree, usage = group_tree(stds, groups, probe, generator), usage or Usage()
    walk = Walk(policy, sampler, schedule, stds, condition, groups, generator, usage, max_batch)
    with policy.frozen(), torch.no_grad():
        if isinstance(probe, NoProbe):
            path, _ = walk.run(noise, tree, ())
            return Rollout(path, groups, condition)
        nodes = tree.drawn_steps
        if columns is not None:
            nodes = [step for step, asked in zip(nodes, columns.tolist(), strict=False) if asked]
        return run_probe(probe, walk, noise, tree, nodes, prompts)


def group_tree(stds: Tensor, groups: Groups, probe: Probe, generator: torch.Generator) -> Paths:
    """The tree of states that the trajectories of a group share.

    The generator is used only by a probe whose tree is drawn anew every iteration.

    Args:
        stds: standard deviations of the sampler's transitions [step].
        groups: sizes of the groups, and whether members share their initial noise.
        probe: the probe; a `Branching` one determines the tree.
        generator: the source of random trees.

    Returns:
        The tree of one group; the same for all groups.

    Raises:
        ConfigError: the probe's tree does not fit the members or the steps.
    """
    steps, stochastic = len(stds), (stds > 0).nonzero().flatten().tolist()
    if not isinstance(probe, Branching):
        return plain_tree(groups.members, steps, tuple(stochastic), groups.one_start)
    tree = probe.tree(steps, stochastic, groups.members, groups.one_start, generator)
    shape, wanted = (tree.branched, tree.members, tree.steps), (True, groups.members, steps)
    require(shape == wanted, "tree: (branched, leaves, steps)", shape, f"{wanted}")
    return tree
