"""One batch of trajectories with rewards, the gradients that credit rules give on it, and images with their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.losses import PolicyGradientLoss
from flowrl.probes import NoProbe, Probe
from flowrl.protocols import CreditAssigner, FlowPolicy, RewardModel, Sampler
from flowrl.rollout import Groups, ImageBatch, Rollout, Usage, initial_noise, reward_table, rollout, sample_images, score
from flowrl.rollout.loss_batch import LossBatches
from flowrl.types import Condition, Prompt

STEPS = 10
"""Denoising steps during training, in all lessons."""


@dataclass(frozen=True)
class Batch:
    """Groups of trajectories (`rollout`), the reward table [prompt, member, node], and their cost (`usage`)."""

    policy: FlowPolicy
    sampler: Sampler
    condition: Condition
    rollout: Rollout
    rewards: Tensor
    usage: Usage


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
    """`members` trajectories of `STEPS` steps for each prompt, and R_j at every node that `probe` scores."""
    generator = torch.Generator().manual_seed(seed)
    groups, usage = Groups(len(prompts), members, shared_noise), Usage()
    noise = groups.noise(policy.latent_shape, generator)
    condition = policy.encode(prompts)
    sampled = rollout(policy, sampler, policy.schedule(STEPS), condition, noise, generator, groups, probe, usage)
    return Batch(policy, sampler, condition, sampled, reward_table(policy, reward, sampled, prompts, usage), usage)


def credit_gradients(batch: Batch, rules: Sequence[CreditAssigner]) -> list[Tensor]:
    """The policy gradient [weight] of each rule on `batch`: the mean over all (trajectory, stochastic step) pairs."""
    schedule, samples = batch.rollout.trajectories.schedule, batch.rollout.groups.samples
    credits = [rule.assign(batch.rewards, schedule).reshape(samples, -1) for rule in rules]
    steps = schedule.stochastic.nonzero().flatten()
    sample, step = torch.cartesian_prod(torch.arange(samples), steps).unbind(1)
    weights = list(batch.policy.trainable().values())
    batches = LossBatches(batch.policy, batch.sampler, batch.rollout, batch.condition, credits[0])
    totals = [torch.zeros(sum(weight.numel() for weight in weights)) for _ in rules]
    for micro in torch.arange(len(sample)).split(256):
        chosen, at = sample[micro], step[micro]
        pairs = batches.of(chosen, at)
        for total, advantages in zip(totals, credits, strict=True):
            loss = PolicyGradientLoss().loss(replace(pairs, advantages=advantages[chosen, at])).loss * len(micro) / len(sample)
            total -= torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])
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
    policy: FlowPolicy, reward: RewardModel, prompts: Sequence[Prompt], steps: int = 20, seed: int = 0
) -> ScoredImages:
    """One ODE sample per prompt; the same seed gives every policy the same noise."""
    images = ImageBatch.cat(sample_images(policy, prompts, initial_noise(policy, len(prompts), seed), steps)).images
    return ScoredImages(images, score(reward, images, prompts))
