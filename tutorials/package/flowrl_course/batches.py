"""One batch of trajectories with rewards, the gradients that credit rules give on it, and images
with their rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.bench.gradients import Setting
from flowrl.core.experience import Decisions, Experience
from flowrl.core.protocols import CreditAssigner, FlowPolicy, RewardModel, Sampler
from flowrl.core.types import Condition, Prompt
from flowrl.credit import credit_of
from flowrl.losses import PolicyGradientLoss
from flowrl.probes import NoProbe, Probe
from flowrl.rollout import (
    Groups,
    ImageBatch,
    Rollout,
    Rows,
    TransitionObjective,
    Usage,
    initial_noise,
    sample_images,
    score,
)
from flowrl_course.progress import progress, tick

STEPS = 10
"""Denoising steps during training, in all lessons."""


@dataclass(frozen=True)
class Batch:
    """Groups of trajectories (`rollout`), the record that a credit rule receives, and their cost
    (`usage`).
    """

    policy: FlowPolicy
    sampler: Sampler
    condition: Condition
    rollout: Rollout
    experience: Experience
    usage: Usage

    @property
    def values(self) -> Tensor:
        """The value table [prompt, member, decision+1]; its last column are the rewards."""
        return self.experience.values

    @property
    def decisions(self) -> Decisions:
        """The axis of the table."""
        return self.experience.decisions


def sample_groups(
    policy: FlowPolicy,
    reward: RewardModel,
    prompts: Sequence[Prompt],
    members: int,
    sampler: Sampler,
    probe: Probe = NoProbe(),
    shared_noise: bool = False,
    seed: int = 0,
) -> Batch:
    """`members` trajectories of `STEPS` steps for each prompt, and R_k at every decision that
    `probe` scores.
    """
    setting, usage = Setting(policy, sampler, policy.schedule(STEPS), reward, prompts), Usage()
    groups, generator = Groups(len(prompts), members, shared_noise), torch.Generator()
    tick(f"sampling {groups.samples} trajectories")
    sampled = setting.rollout(groups, generator.manual_seed(seed), probe, usage)
    record = setting.experience(sampled, usage)
    return Batch(policy, sampler, policy.encode(prompts), sampled, record, usage)


def credit_gradients(batch: Batch, rules: Sequence[CreditAssigner]) -> list[Tensor]:
    """The policy gradient [weight] of each rule on `batch`: the mean over all (trajectory,
    decision) pairs.
    """
    samples = batch.rollout.groups.samples
    credits = [credit_of(rule, batch.experience).advantages for rule in rules]
    sample, column = torch.cartesian_prod(
        torch.arange(samples), torch.arange(len(batch.decisions))
    ).unbind(1)
    weights, loss = list(batch.policy.trainable().values()), PolicyGradientLoss()
    credit = credits[0], torch.ones_like(credits[0])
    objective = TransitionObjective(
        batch.policy, loss, batch.rollout, batch.decisions, *credit, batch.sampler
    )
    totals = [torch.zeros(sum(weight.numel() for weight in weights)) for _ in rules]
    for micro in progress(torch.arange(len(sample)).split(256), "gradients, part"):
        chosen, at = sample[micro], column[micro]
        pairs = objective.batch(Rows.of(chosen, at))
        for total, advantages in zip(totals, credits, strict=True):
            pairs = replace(pairs, advantages=advantages.flatten(0, 1)[chosen, at])
            value = loss.loss(pairs).loss * len(micro) / len(sample)
            gradient = torch.autograd.grad(value, weights, retain_graph=True)
            total -= torch.cat([part.flatten() for part in gradient])
    return totals


def pairwise_cosines(gradients: Sequence[Tensor]) -> Tensor:
    """The cosines [pair] between all pairs of gradients, one gradient per independent batch."""
    unit = torch.stack([gradient / gradient.norm() for gradient in gradients])
    row, column = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[row, column]


@dataclass(frozen=True)
class ScoredImages:
    """Images [sample, channel, height, width] and their rewards [sample]."""

    images: Tensor
    rewards: Tensor


def ode_images(
    policy: FlowPolicy,
    reward: RewardModel,
    prompts: Sequence[Prompt],
    steps: int = 20,
    seed: int = 0,
) -> ScoredImages:
    """One ODE sample per prompt; the same seed gives every policy the same noise."""
    images = ImageBatch.cat(
        sample_images(policy, prompts, initial_noise(policy, len(prompts), seed), steps)
    ).images
    return ScoredImages(images, score(reward, images, prompts).total)
