"""From trajectories to what a policy loss sees: (trajectory, step) pairs."""

from torch import Tensor

from flowrl.protocols import FlowPolicy, Sampler
from flowrl.rollout import Rollout
from flowrl.types import Condition, Gaussian, LossBatch


def loss_pairs(
    policy: FlowPolicy,
    sampler: Sampler,
    result: Rollout,
    condition: Condition,
    advantages: Tensor,
    sample: Tensor,
    step: Tensor,
    with_reference: bool = False,
) -> LossBatch:
    """The pairs (`sample[k]`, `step[k]`), in any mixture of steps; the current policy's transition carries the gradient.

    `condition` has one row per prompt, `advantages` is [sample, step], `sample` and `step` are indices of equal length. One
    network evaluation per pair, two with the reference. Trajectories in main memory are brought to the policy's device.
    """
    path = result.trajectories
    schedule = path.schedule
    node = _rows(path.nodes, sample, step)
    timestep = schedule.network_timesteps[step]
    rows = condition.take(sample // result.groups.members)
    new = sampler.transition(node, policy.velocity(node, timestep, rows), schedule, step)
    behaviour = sampler.transition(node, _rows(path.velocities, sample, step), schedule, step)
    reference: Gaussian | None = None
    if with_reference:
        with policy.reference():
            reference = sampler.transition(node, policy.velocity(node, timestep, rows), schedule, step)
    return LossBatch(
        new=new,
        behaviour=behaviour,
        next_node=_rows(path.nodes, sample, step + 1),
        advantages=advantages[sample, step],
        mask=schedule.stochastic[step],
        delta=schedule.deltas[step],
        reference=reference,
    )


def _rows(stored: Tensor, sample: Tensor, step: Tensor) -> Tensor:
    """`stored[sample, step]` on the device of the indices."""
    return stored[sample.to(stored.device), step.to(stored.device)].to(sample.device)
