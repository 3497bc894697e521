"""One iteration's trajectories and rewards: rolled out and scored in chunks, which are then
joined.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.processes import Assignment, Processes
from flowrl.core.protocols import AnyReward, AnySampler, FlowPolicy
from flowrl.core.types import (
    Condition,
    Prompt,
    Schedule,
    Trajectories,
    copies_done,
    to_main_memory,
)
from flowrl.probes import Probe, whole
from flowrl.rollout.groups import Groups
from flowrl.rollout.rollout import Rollout, rollout
from flowrl.rollout.solvers import Usage
from flowrl.rollout.values import Inspect, Values, score_rollout


@dataclass(frozen=True)
class Collected:
    """The trajectories and rewards of an iteration.

    Args:
        rollout: trajectories of the groups that this process rolled out, starting at
            `assignment.first`, without estimates.
        condition: the condition of these groups.
        values: the value tables of all groups of all processes.
        assignment: the groups of this process.
    """

    rollout: Rollout
    condition: Condition
    values: Values
    assignment: Assignment

    def to_gather(self) -> Trajectories:
        """The trajectories of the groups that belong to this process alone."""
        own = self.assignment.own
        return self.rollout.part(own.start - self.assignment.first, len(own)).trajectories

    @property
    def samples(self) -> slice:
        """The samples in `rollout` as a slice of all samples."""
        first, groups = self.assignment.first, self.rollout.groups
        return slice(first * groups.members, first * groups.members + groups.samples)

    def owned(self, sample: Tensor, assignment: Assignment) -> Tensor:
        """Mask of those of `sample` (indices among all samples) that belong to the process with
        this `assignment`.
        """
        group, own = sample // self.rollout.groups.members, assignment.own
        return (group >= own.start) & (group < own.stop)


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
        inspect: called once, with the images, prompts and scores of the next batch.
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
    inspect: Inspect | None = None

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
    ) -> Collected:
        """Roll out and score all groups.

        `noise` [sample, *latent] and `condition` [prompt] are of all groups. `usage` is set to the
        costs of all processes. `enter` is called with "rollout" and "reward" when these phases
        begin. `columns`: see `rollout`. An error of a part is raised in every process.
        """
        assigned, members = self.processes.assign(self.groups.prompts), self.groups.members
        device, start = self.policy.device, generator.get_state()
        beside = self.overlap and device.type == "cuda"
        scored, paths, jobs = Usage(), list[Trajectories](), list[Future[Values]]()
        rewards, size = self._executor(), self.chunk
        if size == "auto":
            count = assigned.count
            size = chunk_size(count, members, self.max_batch) if self.overlap else count
        try:
            with self.processes.shared_errors():
                for first, count in assigned.chunks(size):
                    enter("rollout")
                    for job in jobs:
                        if job.done():
                            job.result()  # raises its error before the next chunk
                    generator.set_state(start)
                    result = rollout(
                        self.policy,
                        sampler,
                        self.schedule,
                        condition.take(torch.arange(first, first + count, device=device)),
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
                    own = assigned.own_within(first, count)
                    if own:
                        enter("rollout" if self.overlap else "reward")
                        part = result.part(own.start - first, len(own))
                        texts = prompts[own.start : own.stop]
                        ready = beside and torch.cuda.current_stream(device).record_event()
                        jobs.append(rewards.submit(self._score, part, texts, scored, ready))
                enter("reward")
                own_tables = [job.result() for job in jobs]
        finally:
            rewards.shutdown(cancel_futures=True)
        gathered = self.processes.gather((own_tables, scored))
        usage.nfe, usage.probe_nfe = (
            whole(count / assigned.count * self.groups.prompts)
            for count in (usage.nfe, usage.probe_nfe)
        )
        usage.decodes += sum(counts.decodes for _, counts in gathered)
        usage.reward_calls += sum(counts.reward_calls for _, counts in gathered)
        copies_done(device)
        path = paths[0]
        if len(paths) > 1:
            states, outputs = (
                torch.cat([getattr(p, n) for p in paths]) for n in ("states", "outputs")
            )
            path = replace(path, states=states, outputs=outputs)
        rows = torch.arange(assigned.first, assigned.first + assigned.count, device=device)
        values = Values.cat([table for tables, _ in gathered for table in tables])
        groups = self.groups.part(assigned.first, assigned.count)
        return Collected(Rollout(path, {}, groups), condition.take(rows), values, assigned)

    def _score(
        self, result: Rollout, prompts: Sequence[Prompt], usage: Usage, ready: Any
    ) -> Values:
        """The values of a chunk, whose latents are complete after the event `ready`."""
        inspect, self.inspect = self.inspect, None
        if not ready:
            return score_rollout(self.policy, self.reward, result, prompts, usage, inspect=inspect)
        ready.wait()
        values = score_rollout(self.policy, self.reward, result, prompts, usage, inspect=inspect)
        # the rollout's stream may use the memory of `result` again as soon as the caller frees it
        torch.cuda.current_stream(self.policy.device).synchronize()
        return values

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
