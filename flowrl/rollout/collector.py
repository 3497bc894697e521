"""One iteration's trajectories and rewards: rolled out in parts, scored, and put together again."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.distributed import Assignment, Distributed
from flowrl.probes import Probe, whole
from flowrl.protocols import AnyReward, FlowPolicy, Sampler
from flowrl.rollout.groups import Groups
from flowrl.rollout.reward_table import RewardTables, reward_tables
from flowrl.rollout.rollout import Rollout, rollout
from flowrl.rollout.solvers import Usage
from flowrl.transfer import copies_done, to_main_memory
from flowrl.types import Condition, Prompt, Schedule, Trajectories


@dataclass(frozen=True)
class Collected:
    """What an iteration has gathered.

    `rollout` holds the trajectories of the groups that this process has rolled out, number `assignment.first` and following,
    without estimates; `condition` has their rows. `rewards` are those of all groups of all processes.
    """

    rollout: Rollout
    condition: Condition
    rewards: RewardTables
    assignment: Assignment

    @property
    def samples(self) -> slice:
        """Those in `rollout`, among all samples."""
        members = self.rollout.groups.members
        first = self.assignment.first * members
        return slice(first, first + self.assignment.count * members)

    def owned(self, sample: Tensor, assignment: Assignment) -> Tensor:
        """Which of `sample` (numbers among all samples) belong to the process with this `assignment`."""
        own, members = assignment.own, self.rollout.groups.members
        return (sample >= own.start * members) & (sample < own.stop * members)


@dataclass
class Collector:
    """Rolls out this process's groups and scores them, `chunk` groups at a time (0: all at once).

    A chunk draws the noise of the whole iteration from the same generator state and takes its own rows, so neither the chunk
    nor the number of processes changes which noise a group gets; network values may differ in their last bits, as the network
    sees other batches. `overlap`: rewards are computed in a second thread while the next chunk is rolled out; the policy's
    `decode` and the reward then run in parallel with `velocity`, with the same results as in sequence. `offload`:
    trajectories wait in main memory for the update.
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

    def collect(
        self,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: Tensor,
        sampler: Sampler,
        generator: torch.Generator,
        usage: Usage,
        enter: Callable[[str], None],
    ) -> Collected:
        """Roll out and score. `noise` [sample, *latent] and `condition` [prompt] are of all groups; `usage` becomes the costs
        of all processes; `enter` is called with "rollout" and "reward" as they begin. Raises what the parts raise, in every
        process."""
        assigned, members = self.distributed.assign(self.groups.prompts), self.groups.members
        start = generator.get_state()
        scored = Usage()
        done: list[Rollout] = []
        jobs: list[Callable[[], RewardTables]] = []
        with self.distributed.shared_errors(), _Background(self.overlap) as background:
            for first, count in assigned.chunks(self.chunk):
                enter("rollout")
                background.raise_early()
                generator.set_state(start)
                rows = torch.arange(first, first + count, device=self.policy.device)
                part = noise[first * members : (first + count) * members]
                result = rollout(
                    self.policy, sampler, self.schedule, condition.take(rows), part, generator,
                    self.groups.part(first, count), self.probe, usage, self.max_batch,
                )  # fmt: skip
                done.append(self._kept(result))
                own = assigned.own_within(first, count)
                if own:
                    enter("reward" if not self.overlap else "rollout")
                    owned, texts = result.part(own.start - first, len(own)), prompts[own.start : own.stop]
                    jobs.append(background.submit(self._score, owned, texts, scored))
            enter("reward")
            own_tables = [job() for job in jobs]
        gathered = self.distributed.gather((own_tables, scored.reward_calls))
        usage.nfe = whole(usage.nfe / assigned.count * self.groups.prompts)
        usage.reward_calls += sum(calls for _, calls in gathered)
        copies_done(self.policy.device)
        path = _joined([result.trajectories for result in done])
        rows = torch.arange(assigned.first, assigned.first + assigned.count, device=self.policy.device)
        tables = replace(_stacked([table for tables, _ in gathered for table in tables]), prompts=prompts)
        groups = self.groups.part(assigned.first, assigned.count)
        return Collected(Rollout(path, {}, groups), condition.take(rows), tables, assigned)

    def _score(self, result: Rollout, prompts: Sequence[Prompt], usage: Usage) -> RewardTables:
        return reward_tables(self.policy, self.reward, result, prompts, usage)

    def _kept(self, result: Rollout) -> Rollout:
        """Without the estimates, and in main memory if this is enabled."""
        path = result.trajectories
        if self.offload:
            path = Trajectories(to_main_memory(path.states), to_main_memory(path.outputs), path.schedule)
        return Rollout(path, {}, result.groups)


class _Background:
    """Runs jobs one after the other in a second thread with this thread's device and number of threads; or here, at once."""

    def __init__(self, on: bool) -> None:
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if on and torch.cuda.is_available() else None

        def like_here() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)

        self.pool = ThreadPoolExecutor(1, "rewards", like_here) if on else None
        self.futures: list[Future[RewardTables]] = []

    def submit(self, job: Callable[..., RewardTables], *arguments: object) -> Callable[[], RewardTables]:
        """A function that returns (or raises) what the job did."""
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
    """One after the other along the prompts."""
    if len(paths) == 1:
        return paths[0]
    return Trajectories(torch.cat([p.states for p in paths]), torch.cat([p.outputs for p in paths]), paths[0].schedule)


def _stacked(tables: Sequence[RewardTables]) -> RewardTables:
    """One after the other along the prompts."""
    if len(tables) == 1:
        return tables[0]
    parts = {name: torch.cat([table.parts[name] for table in tables]) for name in tables[0].parts}
    log_probs = [table.log_probs for table in tables if table.log_probs is not None]
    valid = torch.cat([table.valid for table in tables])
    return RewardTables(torch.cat([t.total for t in tables]), parts, valid, torch.cat(log_probs) if log_probs else None)
