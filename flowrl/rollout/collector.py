"""One iteration's trajectories and rewards: rolled out and scored in chunks, which are then
joined.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.protocols import AnyReward, AnySampler, FlowPolicy
from flowrl.core.types import Condition, Prompt, Schedule, Trajectories, copies_done, to_main_memory
from flowrl.distributed import Assignment, Distributed
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

    def own(self) -> Trajectories:
        """The trajectories of the groups that belong to this process alone, to be gathered."""
        own, first, path = self.assignment.own, self.assignment.first, self.rollout.trajectories
        chosen = slice(own.start - first, own.stop - first)
        return replace(path, states=path.states[chosen], outputs=path.outputs[chosen])

    @property
    def samples(self) -> slice:
        """The samples in `rollout` as a slice of all samples."""
        members = self.rollout.groups.members
        first = self.assignment.first * members
        return slice(first, first + self.assignment.count * members)

    def owned(self, sample: Tensor, assignment: Assignment) -> Tensor:
        """Mask of those of `sample` (indices among all samples) that belong to the process with
        this `assignment`.
        """
        own, members = assignment.own, self.rollout.groups.members
        return (sample >= own.start * members) & (sample < own.stop * members)


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
        distributed: the processes.
        max_batch: largest number of latents per network call.
        chunk: groups per chunk; 0: all at once.
        overlap: compute rewards in a second thread while the next chunk is rolled out. The policy's
            `decode` and the reward then run in parallel with `velocity`; the results are the same.
        offload: keep trajectories in main memory until the update.
        inspect: called once, with the images, prompts and scores of the next batch.
    """

    policy: FlowPolicy
    reward: AnyReward
    schedule: Schedule
    groups: Groups
    probe: Probe
    distributed: Distributed
    max_batch: int
    chunk: int = 0
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
        assigned, members = self.distributed.assign(self.groups.prompts), self.groups.members
        start = generator.get_state()
        scored = Usage()
        done: list[Rollout] = []
        jobs: list[Callable[[], Values]] = []
        with self.distributed.shared_errors(), _Background(self.overlap) as background:
            for first, count in assigned.chunks(self.chunk):
                enter("rollout")
                background.raise_early()
                generator.set_state(start)
                rows = torch.arange(first, first + count, device=self.policy.device)
                part = noise[first * members : (first + count) * members]
                result = rollout(
                    self.policy,
                    sampler,
                    self.schedule,
                    condition.take(rows),
                    part,
                    generator,
                    self.groups.part(first, count),
                    self.probe,
                    usage,
                    self.max_batch,
                    columns,
                )
                done.append(self._kept(result))
                own = assigned.own_within(first, count)
                if own:
                    enter("reward" if not self.overlap else "rollout")
                    owned, texts = (
                        result.part(own.start - first, len(own)),
                        prompts[own.start : own.stop],
                    )
                    jobs.append(background.submit(self._score, owned, texts, scored))
            enter("reward")
            own_tables = [job() for job in jobs]
        gathered = self.distributed.gather((own_tables, scored.reward_calls))
        usage.nfe = whole(usage.nfe / assigned.count * self.groups.prompts)
        usage.reward_calls += sum(calls for _, calls in gathered)
        copies_done(self.policy.device)
        path = _joined([result.trajectories for result in done])
        rows = torch.arange(
            assigned.first, assigned.first + assigned.count, device=self.policy.device
        )
        values = Values.cat([table for tables, _ in gathered for table in tables])
        groups = self.groups.part(assigned.first, assigned.count)
        return Collected(Rollout(path, {}, groups), condition.take(rows), values, assigned)

    def _score(self, result: Rollout, prompts: Sequence[Prompt], usage: Usage) -> Values:
        inspect, self.inspect = self.inspect, None
        return score_rollout(self.policy, self.reward, result, prompts, usage, inspect=inspect)

    def _kept(self, result: Rollout) -> Rollout:
        """`result` without the estimates, in main memory if `offload` is set."""
        path = result.trajectories
        if self.offload:
            path = replace(
                path, states=to_main_memory(path.states), outputs=to_main_memory(path.outputs)
            )
        return Rollout(path, {}, result.groups)


class _Background:
    """Runs jobs in order in a second thread, with this thread's device and number of threads; or
    immediately in this thread.
    """

    def __init__(self, on: bool) -> None:
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if on and torch.cuda.is_available() else None

        def like_here() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)

        self.pool = ThreadPoolExecutor(1, "rewards", like_here) if on else None
        self.futures: list[Future[Values]] = []

    def submit(self, job: Callable[..., Values], *arguments: object) -> Callable[[], Values]:
        """Run a job; returns a function that returns its result or raises its error."""
        if self.pool is None:
            result = job(*arguments)
            return lambda: result
        future = self.pool.submit(job, *arguments)
        self.futures.append(future)
        return future.result

    def raise_early(self) -> None:
        """Raise the error of a job that has failed already."""
        for future in self.futures:
            if future.done():
                future.result()

    def __enter__(self) -> "_Background":
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _joined(paths: Sequence[Trajectories]) -> Trajectories:
    """The trajectories concatenated along the prompts."""
    if len(paths) == 1:
        return paths[0]
    states, outputs = (
        torch.cat([getattr(path, name) for path in paths]) for name in ("states", "outputs")
    )
    return replace(paths[0], states=states, outputs=outputs)
