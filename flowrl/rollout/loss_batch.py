"""From trajectories to what a policy loss sees: micro-batches of (trajectory, step) pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.distributed import Distributed
from flowrl.errors import TrainingError
from flowrl.protocols import FlowPolicy, PolicyLoss, Sampler
from flowrl.rollout.collector import Collected
from flowrl.rollout.rollout import Rollout
from flowrl.types import Condition, Gaussian, LossBatch, LossResult, inputs_unchanged, tensor_problem


@dataclass(frozen=True)
class MicroBatch:
    """Pairs (`sample`, `step`), with samples numbered among those that this process rolled out.

    `weight` is the number of its pairs / the number of pairs of its mini-batch, over all processes, so that the weighted sum of
    mean losses is the mean over the mini-batch. Weight 0 is padding: sharded weights need equally many network calls everywhere.
    """

    sample: Tensor
    step: Tensor
    weight: float


def micro_batches(samples: Tensor, steps: Tensor, size: int, collected: Collected, distributed: Distributed) -> list[MicroBatch]:
    """This process's pairs of the mini-batch `samples` (numbered among all) x `steps`, at most `size` at a time."""
    sample, step = torch.cartesian_prod(samples, steps).unbind(1)
    own = collected.owned(sample, collected.assignment)
    found = []
    if bool(own.any()):
        rows, columns = (sample[own] - collected.samples.start).split(size), step[own].split(size)
        found = [MicroBatch(s, j, len(s) / len(sample)) for s, j in zip(rows, columns, strict=True)]
    if distributed.sharded:
        groups = collected.rollout.groups
        assigned = [distributed.assign(groups.of or groups.prompts, rank) for rank in range(distributed.world_size)]
        counts = [int(collected.owned(sample, one).sum()) for one in assigned]
        padding = MicroBatch(torch.zeros_like(samples[:1]), steps[:1], 0.0)
        found += [padding] * (-(-max(counts) // size) - len(found))
    return found


@dataclass(frozen=True)
class LossBatches:
    """Makes loss batches from trajectories. `condition` has one row per prompt, `advantages` is [sample, step].

    `of(sample, step)` holds the pairs (`sample[k]`, `step[k]`), in any mixture of steps; the current policy's transitions carry
    the gradient. One network evaluation per pair, two with the reference. Trajectories in main memory are copied to the policy's
    device.
    """

    policy: FlowPolicy
    sampler: Sampler
    rollout: Rollout
    condition: Condition
    advantages: Tensor
    with_reference: bool = False

    def of(self, sample: Tensor, step: Tensor) -> LossBatch:
        """The batch of these pairs; indices of equal length."""
        path = self.rollout.trajectories
        schedule = path.schedule
        node = _rows(path.nodes, sample, step)
        timestep = schedule.network_timesteps[step]
        rows = self.condition.take(sample // self.rollout.groups.members)
        velocity = self.policy.velocity(node, timestep, rows)
        velocity = velocity.view_as(velocity)  # a gradient taken here does not run the hooks of the network's output (FSDP2's)
        new = self.sampler.transition(node, velocity, schedule, step)
        behaviour = self.sampler.transition(node, _rows(path.velocities, sample, step), schedule, step)
        reference: Gaussian | None = None
        if self.with_reference:
            with self.policy.reference():
                reference = self.sampler.transition(node, self.policy.velocity(node, timestep, rows), schedule, step)
        return LossBatch(
            new=new,
            behaviour=behaviour,
            next_node=_rows(path.nodes, sample, step + 1),
            advantages=self.advantages[sample, step],
            mask=schedule.stochastic[step],
            delta=schedule.deltas[step],
            reference=reference,
            velocity=velocity,
        )


def checked_loss(loss: PolicyLoss, batch: LossBatch) -> LossResult:
    """What `loss` makes of the batch. Raises `TrainingError` unless that is a scalar that can be differentiated."""
    call = f"{type(loss).__name__}.loss"
    with inputs_unchanged(call, TrainingError, batch.advantages, batch.next_node, batch.mask):
        result = loss.loss(batch)
    value = getattr(result, "loss", None)
    if not isinstance(result, LossResult) or not isinstance(value, Tensor):
        raise TrainingError(f"{call} returned a {type(result).__name__}; a LossResult with a scalar tensor `loss` is required")
    problem = tensor_problem(value) or ("" if value.numel() == 1 and value.requires_grad else "is no scalar with a gradient")
    if problem:
        raise TrainingError(f"{call} returned a loss that {problem}; shape {tuple(value.shape)}, {value.dtype}, {value.device}")
    return result


def _rows(stored: Tensor, sample: Tensor, step: Tensor) -> Tensor:
    """`stored[sample, step]` on the device of the indices."""
    return stored[sample.to(stored.device), step.to(stored.device)].to(sample.device)
