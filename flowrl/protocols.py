"""The interfaces between packages, as protocols. Their docstrings are the contract, which `flowrl.testing` checks.

The protocols of forward-process losses are defined in `flowrl.forward`, next to their batches, and exported here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl._policy_protocols import BlockCache as BlockCache
from flowrl._policy_protocols import Exportable as Exportable
from flowrl._policy_protocols import FlowPolicy as FlowPolicy
from flowrl._policy_protocols import Guided as Guided
from flowrl._policy_protocols import OneNetwork as OneNetwork
from flowrl._policy_protocols import PromptEmbedding as PromptEmbedding
from flowrl.forward import ForwardLoss as ForwardLoss
from flowrl.forward import TimeDraw as TimeDraw
from flowrl.probes import Probe
from flowrl.types import (
    Gaussian,
    ImagesOrVideos,
    Latents,
    LossBatch,
    LossResult,
    NodeTable,
    PerSample,
    Prompt,
    Schedule,
    StepIndex,
    StepTable,
    Unit,
)

__all__ = [
    "BlockCache", "CompositeGroupReward", "CompositeReward", "CreditAssigner", "Exportable", "Features", "FlowPolicy",
    "GroupReward", "Guided", "OneAdvantage", "OneNetwork", "PartsCreditAssigner", "PolicyLoss", "PooledLoss",
    "PromptCreditAssigner", "PromptEmbedding", "RandomSampler", "RewardModel", "Sampler", "SelectiveCredit", "Stateful",
]  # fmt: skip


@runtime_checkable
class Sampler(Protocol):
    """A transition kernel: a pure function from (node, velocity) to a Gaussian over the next node.

    Contract: computed in float32 whatever the input's precision; `step` may differ per sample; std 0 means "not a decision"
    and is returned where the kernel is deterministic; the gradient flows through the mean only.
    """

    def transition(self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex) -> Gaussian:
        """The Gaussian over node ``step + 1`` given the latent at node ``step`` and the velocity there.

        Args:
            latent: node `step` [sample, *latent].
            velocity: velocity at this node [sample, *latent].
            schedule: the time grid.
            step: index of the step [sample].

        Returns:
            Mean [sample, *latent] and std [sample], float32.
        """
        ...


@runtime_checkable
class RandomSampler(Protocol):
    """A sampler that changes every iteration (for example a random or a sliding window), the same for all groups."""

    def draw(self, schedule: Schedule, generator: torch.Generator, iteration: int = 0) -> Sampler:
        """The sampler of `iteration` (counted from 0).

        Args:
            schedule: the time grid.
            generator: the source of the draw.
            iteration: number of the iteration, from 0.

        Returns:
            The sampler, shared by all groups.
        """
        ...


@runtime_checkable
class RewardModel(Protocol):
    """Maps images and prompts to numbers.

    Contract: images are [sample, channel, height, width] in [0, 1]; higher is better; the result is finite, one number per
    sample, in order, and does not depend on the other samples of the batch. For a video model they are videos [sample, frame,
    channel, height, width], all frames in order; a reward for images scores them inside `rewards.FrameMean`. A reward that cannot
    score its input raises `RewardError`.

    A model with a true attribute `marks_invalid` may return NaN for a sample that cannot be judged, for example after an unusable
    answer of a judge. Such a sample is left out of credit and training, and counted ("invalid" in the metrics). A group with
    fewer than two valid samples is left out completely. An infinite score, or NaN from any other model, is an error.
    """

    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Score samples.

        Args:
            images: images [sample, channel, height, width] or videos [sample, frame, channel, height, width] in [0, 1].
            prompts: one prompt per sample.

        Returns:
            One score per sample [sample].

        Raises:
            RewardError: the samples cannot be scored.
        """
        ...


@runtime_checkable
class CompositeReward(RewardModel, Protocol):
    """A reward model with named components, which are logged and may be credited separately.

    Contract: ``score`` equals ``total(parts(images, prompts))``.
    """

    def parts(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Every component's scores before weighting.

        Args:
            images: images [sample, channel, height, width] in [0, 1], or videos [sample, frame, ...].
            prompts: one prompt per sample.

        Returns:
            Scores [sample] by name of the component.
        """
        ...

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The reward [sample], from its components."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Maps the samples of whole groups to numbers by comparing the members of a group with each other.

    It replaces a `RewardModel` in training. It compares all members of a prompt: the finished images, or the estimates of one
    unfinished node. Numbers of different nodes are not on one scale: a gain is a change of rank within the group. Chunks and
    processes never split a group.

    Contract: images are [prompt, member, channel, height, width] in [0, 1], or videos [prompt, member, frame, ...], with one
    prompt per group and any number of members from 2; higher is better; the result is finite, [prompt, member]. Permuting the
    members of a group permutes its numbers; equal images in a group get equal numbers; a group's numbers do not depend on other
    groups. NaN is allowed as for a `RewardModel` with `marks_invalid`: a sample that cannot be judged is then not compared with
    the others of its group.
    """

    @property
    def evaluation(self) -> RewardModel:
        """A reward of single samples for evaluations. The mean of a comparison within groups, such as a win rate, does not rise
        when all samples improve."""
        ...

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score the samples of groups.

        Args:
            images: images [prompt, member, channel, height, width] in [0, 1], or videos [prompt, member, frame, ...].
            prompts: one prompt per group.

        Returns:
            One score per sample [prompt, member].
        """
        ...


@runtime_checkable
class CompositeGroupReward(GroupReward, Protocol):
    """A group reward with named components, as a `CompositeReward` has them.

    Contract: ``score_groups`` equals ``total(group_parts(images, prompts))``.
    """

    def group_parts(self, images: Tensor, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Every component's scores before weighting.

        Args:
            images: images [prompt, member, channel, height, width] in [0, 1], or videos [prompt, member, frame, ...].
            prompts: one prompt per group.

        Returns:
            Scores [prompt, member] by name of the component.
        """
        ...

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The reward from its components, entry by entry, for any shape."""
        ...


AnyReward = RewardModel | GroupReward
"""Rewards for training."""


@runtime_checkable
class Features(Protocol):
    """A feature space for diversity: any callable from images to vectors with meaningful distances.

    With a true attribute `reads_latents` it receives latents instead. The images of a video model are videos. Contract: finite,
    one row per sample, in order.
    """

    def __call__(self, images: ImagesOrVideos, /) -> Tensor:
        """Feature vectors, shape [sample, feature]."""
        ...


@runtime_checkable
class CreditAssigner(Protocol):
    """A pure function from a reward table to an advantage table.

    `probe` declares which nodes the rule reads; the rewards at all others are NaN.
    Contract: the result is finite, [prompt, member, step]; invariant to a constant added to all rewards; equivariant to
    permuting members; 0 for a group of equal rewards. Rules that do not need the schedule accept None.
    """

    @property
    def probe(self) -> Probe:
        """The scores of unfinished states that this rule needs."""
        ...

    def assign(self, rewards: NodeTable, schedule: Schedule | None) -> Tensor:
        """Credit every step of every trajectory.

        Args:
            rewards: reward table [prompt, member, node]; NaN at nodes that the probe does not fill.
            schedule: the schedule of the rollout, or None.

        Returns:
            Advantages [prompt, member, step].

        Raises:
            CreditError: the table or the schedule does not fit the rule.
        """
        ...


@runtime_checkable
class PartsCreditAssigner(CreditAssigner, Protocol):
    """A credit rule that reads the components of a `CompositeReward` separately."""

    def assign_parts(self, parts: Mapping[str, Tensor], schedule: Schedule | None) -> Tensor:
        """As `assign`, from the components of a reward.

        Args:
            parts: one reward table [prompt, member, node] per name.
            schedule: the schedule of the rollout, or None.

        Returns:
            Advantages [prompt, member, step].
        """
        ...


@runtime_checkable
class PromptCreditAssigner(CreditAssigner, Protocol):
    """A credit rule that gets the prompt of each row of the table, for example to keep a baseline per prompt.

    The memory is keyed by the prompt's text, so permuting the prompts permutes the advantages. The contract of a `CreditAssigner`
    holds at a prompt's first visit. Later visits are relative to the memory, so a group of equal rewards may get credit.
    ``assign`` treats every row as a new prompt and does not change the memory.
    """

    def assign_prompts(self, rewards: NodeTable, prompts: Sequence[Prompt], schedule: Schedule | None) -> Tensor:
        """As `assign`, for known prompts; this updates the memory.

        Args:
            rewards: reward table [prompt, member, node].
            prompts: one prompt per row; equal prompts may occur.
            schedule: the schedule of the rollout, or None.

        Returns:
            Advantages [prompt, member, step].
        """
        ...


@runtime_checkable
class SelectiveCredit(CreditAssigner, Protocol):
    """A credit rule that excludes some pairs from training after crediting all of them.

    These pairs are not evaluated in the update, and the loss is the mean over the others.
    """

    def trained(self, advantages: StepTable, schedule: Schedule) -> Tensor:
        """Select the trained pairs; called once per iteration.

        Args:
            advantages: result of `assign` [prompt, member, step].
            schedule: the schedule of the rollout.

        Returns:
            A Boolean mask [prompt, member, step].
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A part with memory across iterations (for example a running baseline); checkpoints contain its state."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """The memory as named tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        ...


@runtime_checkable
class PolicyLoss(Protocol):
    """A pure function of Gaussians, advantages and weights to a scalar: the weighted mean over transitions.

    Contract: transitions of weight 0 contribute neither to the loss nor to the gradient; on the first update of an iteration (new
    = behaviour) every ratio is 1 and the gradient is the policy gradient of mean(A log pi); the order of rows has no effect.
    Unless `trains_zero_advantages`, units whose advantages are all 0 have no gradient, so the trainer does not evaluate them.
    """

    @property
    def needs_reference(self) -> bool:
        """Whether `LossBatch.reference` must be filled (costs one more network evaluation per transition)."""
        ...

    @property
    def unit(self) -> Unit:
        """What must be in one batch, unless `LossBatch.pooled` is set. If not "transition", the loss is a `PooledLoss`."""
        ...

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether transitions of advantage 0 can have a gradient, as a penalty's."""
        ...

    def loss(self, batch: LossBatch) -> LossResult:
        """The loss over one batch of transitions."""
        ...


@runtime_checkable
class PooledLoss(Protocol):
    """A policy or forward-process loss that depends on a mean over a unit: a trajectory, or a group at one time.

    If whole units fit into micro-batches, the trainer calls `loss` with `pooled` = None. Otherwise it makes two passes:
    `row_terms` of all rows without gradient, their `types.unit_means` over whole units, and then `loss` on parts of units with
    these means as `pooled`. This costs one more evaluation per row and network. Contract: both give the same gradient.
    """

    @property
    def unit(self) -> Unit:
        """The unit of the means."""
        ...

    def row_terms(self, batch: Any) -> PerSample:
        """The terms to be averaged over a unit, one per row, detached and finite; 0 for rows of weight 0."""
        ...


@runtime_checkable
class OneAdvantage(Protocol):
    """A policy loss that needs one advantage per trajectory, so it refuses rules that credit steps differently."""

    @property
    def one_advantage(self) -> Literal[True]:
        """Marks the loss."""
        ...
