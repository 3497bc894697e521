"""What the lessons on pictures share: one batch of trajectories with rewards, its gradient, a short training, galleries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.losses import PolicyGradientLoss
from flowrl.protocols import CreditAssigner, FlowPolicy, RewardModel, Sampler
from flowrl.rollout import Groups, Rollout, Usage, integrate, reward_table, rollout, score
from flowrl.rollout.loss_batch import LossBatches
from flowrl.training.build import make_method, make_reward, policy_options
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import Evaluation, evaluate
from flowrl.training.trainer import Trainer
from flowrl.types import Condition, NoProbe, Probe, Prompt
from flowrl.worlds.base import World
from flowrl_course.figures import INK

STEPS = 10
"""Denoising steps while training, in all lessons."""


@dataclass(frozen=True)
class Batch:
    """One batch of groups: trajectories (`result`), the reward table [prompt, member, node], and what they cost (`usage`)."""

    policy: FlowPolicy
    sampler: Sampler
    prompts: Sequence[Prompt]
    condition: Condition
    result: Rollout
    rewards: Tensor
    usage: Usage


def roll(
    policy: FlowPolicy,
    reward: RewardModel,
    prompts: Sequence[Prompt],
    members: int,
    sampler: Sampler,
    probe: Probe = NoProbe(),
    shared_noise: bool = False,
    seed: int = 0,
) -> Batch:
    """`members` trajectories of each prompt in `STEPS` steps, and R_j at every node that `probe` asks for."""
    generator = torch.Generator().manual_seed(seed)
    groups, usage = Groups(len(prompts), members, shared_noise), Usage()
    noise = groups.noise(policy.latent_shape, generator)
    condition = policy.encode(prompts)
    result = rollout(policy, sampler, policy.schedule(STEPS), condition, noise, generator, groups, probe, usage)
    return Batch(policy, sampler, prompts, condition, result, reward_table(policy, reward, result, prompts, usage), usage)


def gradients(batch: Batch, rules: Sequence[CreditAssigner]) -> list[Tensor]:
    """The policy gradient that each rule gives on `batch`, over all stochastic steps: one vector over the trainable weights."""
    schedule, samples = batch.result.trajectories.schedule, batch.result.groups.samples
    credits = [rule.assign(batch.rewards, schedule).reshape(samples, -1) for rule in rules]
    steps = schedule.stochastic.nonzero().flatten()
    sample, step = torch.cartesian_prod(torch.arange(samples), steps).unbind(1)
    weights = list(batch.policy.trainable().values())
    totals = [torch.zeros(sum(weight.numel() for weight in weights)) for _ in rules]
    batches = LossBatches(batch.policy, batch.sampler, batch.result, batch.condition, credits[0])
    for part in torch.arange(len(sample)).split(256):
        pairs = batches.of(sample[part], step[part])
        for total, advantages in zip(totals, credits, strict=True):
            here = replace(pairs, advantages=advantages[sample[part], step[part]])
            loss = PolicyGradientLoss().loss(here).loss * len(part) / len(sample)
            total -= torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])
    return totals


def agreement(batches: Sequence[Tensor]) -> tuple[float, float]:
    """Mean and standard deviation of the cosines between all pairs of gradients, one per independent batch."""
    unit = torch.stack([g / g.norm() for g in batches])
    row, column = torch.triu_indices(len(unit), len(unit), offset=1)
    cosines = (unit @ unit.T)[row, column]
    return float(cosines.mean()), float(cosines.std())


@dataclass(frozen=True)
class Trained:
    """A policy after a short training (its averaged weights), the metrics of every iteration, and its evaluation."""

    policy: FlowPolicy
    rows: list[dict[str, Any]]
    evaluation: Evaluation

    def curve(self, metric: str) -> list[float]:
        """One metric, iteration by iteration."""
        return [row[metric] for row in self.rows]


def train(config: RunConfig, world: World, samples: int = 96, steps: int = STEPS) -> Trained:
    """`config.iterations` iterations; then held-out evaluation on `samples` ODE samples of `steps` steps."""
    policy = world.policy(policy_options(config))
    trainer = Trainer(policy, make_method(config), make_reward(config), world.prompts(config.environment.task, "train"), config)
    rows = [trainer.iteration() for _ in range(config.iterations)]
    with torch.no_grad():
        for weight, average in zip(trainer.parameters, trainer.average, strict=True):
            weight.copy_(average)
    return Trained(policy, rows, evaluate(policy, world, config.environment.task, config.environment.reward_form, samples, steps))


@dataclass(frozen=True)
class Drawn:
    """Pictures [sample, channel, height, width] and their soft rewards [sample]."""

    images: Tensor
    rewards: Tensor


def draw(policy: FlowPolicy, world: World, prompts: Sequence[Prompt], steps: int = 20, seed: int = 0) -> Drawn:
    """One ODE sample per prompt; the same seed gives every policy the same noise."""
    noise = torch.randn(len(prompts), *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    images = policy.decode(integrate(policy, policy.schedule(steps), policy.encode(prompts), noise, Usage()))
    return Drawn(images, score(world.reward("soft"), images, prompts))


def gallery(
    rows: Sequence[tuple[str, Tensor, Sequence[str]]], heads: Sequence[str] = (), size: float = 1.25, title: str = ""
) -> Figure:
    """Rows of pictures: (name of the row, images, one caption under each); `heads` stand above the columns."""
    columns = max(len(images) for _, images, _ in rows)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(size * columns + 0.3, (size + 0.3) * len(rows) + 0.3), layout="constrained", squeeze=False
    )
    for cells, (name, images, captions) in zip(axes, rows, strict=True):
        for column, cell in enumerate(cells):
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_visible(False)
            if column < len(images):
                cell.imshow(images[column].detach().permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
            if column < len(captions):
                cell.set_xlabel(captions[column], fontsize=8, color=INK, labelpad=2)
        cells[0].set_ylabel(name, fontsize=9, color=INK)
    for cell, head in zip(axes[0], heads, strict=False):
        cell.set_title(_two_lines(head), fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _two_lines(text: str) -> str:
    words = text.split()
    half = (len(words) + 1) // 2 if len(words) > 2 else len(words)
    return "\n".join(filter(None, (" ".join(words[:half]), " ".join(words[half:]))))
