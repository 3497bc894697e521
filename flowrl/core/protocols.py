"""The interfaces between packages, as protocols. Their docstrings are the contract, which
`flowrl.testing` checks.

The protocols of forward-process losses are defined in `flowrl.core.forward`, next to their batches,
and exported here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.core.experience import Actions, Credit, Decisions, Record, ValueTable
from flowrl.core.forward import ForwardLoss as ForwardLoss
from flowrl.core.forward import TimeDraw as TimeDraw
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.probe import Probe
from flowrl.core.types import (
    Condition,
    Gaussian,
    ImagesOrVideos,
    Latents,
    LossBatch,
    LossResult,
    PerSample,
    Prompt,
    Schedule,
    StepIndex,
    Unit,
)

__all__ = [
    "AnyReward",
    "AnySampler",
    "CreditAssigner",
    "Features",
    "FlowPolicy",
    "ForwardLoss",
    "GroupReward",
    "MultistepSolver",
    "Observer",
    "PolicyLoss",
    "RewardModel",
    "Sampler",
    "Stateful",
    "TimeDraw",
    "Window",
    "World",
    "extras",
]


@runtime_checkable
class FlowPolicy(Protocol):
    """A network with its trainable parameters, as a conditional velocity field with a schedule and
    a decoder.

    Optional members, each independent of the others (`extras`): `velocity_network`, the module that
    `velocity` calls, with all trainable parameters; it can be compiled, and its weights can be
    sharded over processes, in place, after which `trainable` returns its new parameters.
    `reference_network`, a frozen copy that `reference` calls, whose weights are then sharded too.
    `hidden_layer`, the layer whose input [row, ..., feature] is the last hidden state, for critics.
    `guidance_scale`, the scale of classifier-free guidance (1: off, one forward pass instead of
    two), and `guided(scale)`, a context with another scale. `warm(prompts, distributed, report)`
    embeds prompts now, so that separate text encoders move to the device only once; the processes
    `distributed` share the work, and `report` is called with its progress (both have defaults).
    `resize(...)` changes how many rows its network calls have, and whether the backward pass
    recomputes activations (`flowrl.policies.PipelinePolicy.resize`).
    `sizes`, the heights and widths of samples in training, and `at_size(height, width)`, a context
    in which `latent_shape`, `schedule`, `velocity` and `decode` are those of this size.
    `save(folder)` writes the trained weights in the format of other programs; an older folder is
    replaced when the new one is complete.
    """

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the sample axis."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        ...

    def schedule(self, steps: int) -> Schedule:
        """The time grid with `steps` transitions (for diffusers models: the scheduler's own)."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """The network's condition on the prompts, one row per prompt."""
        ...

    def velocity(self, latent: Latents, timestep: PerSample, condition: Condition) -> Latents:
        """The network's estimate of v = eps - x_0, with gradients to the trainable parameters.

        Args:
            latent: noisy latents [sample, *latent].
            timestep: the network's timestep [sample], from `Schedule.network_timesteps`.
            condition: embeddings of the prompts, one row per sample.

        Returns:
            Velocities [sample, *latent], float32.
        """
        ...

    def decode(self, latent: Latents) -> ImagesOrVideos:
        """Images in [0, 1]; samples of a video model always have a frame axis before the channels.
        Differentiable with respect to latents that require a gradient, for losses that ascend the
        reward (`flowrl.losses.RewardAscent`).
        """
        ...

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        """Named trainable parameters, in a fixed order."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within this context `velocity` is the frozen base model's (adapters disabled)."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Within this context weights do not change, so a policy may merge its adapters for speed.
        No gradients.
        """
        ...


def extras(policy: FlowPolicy, *members: str) -> Any:
    """The policy if it has some optional members (`FlowPolicy`), else None.

    Args:
        policy: the policy.
        *members: their names.

    Returns:
        The policy, or None if it lacks one of the members.
    """
    return policy if all(hasattr(policy, name) for name in members) else None


@runtime_checkable
class Sampler(Protocol):
    """A transition kernel: a pure function from (node, velocity) to a Gaussian over the next node.

    Contract: computed in float32 whatever the input's precision; `step` may differ per sample; std
    0 means "not a decision" and is returned where the kernel is deterministic; the gradient flows
    through the mean only.
    """

    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """The Gaussian over node ``step + 1`` given the latent at node ``step`` and the velocity
        there.

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
class Window(Protocol):
    """The stochastic steps of an iteration, the same for all groups; the other steps are ODE
    steps.
    """

    def steps(self, count: int, generator: torch.Generator, iteration: int = 0) -> Sequence[int]:
        """The stochastic steps of `iteration`.

        Args:
            count: number of steps of the schedule.
            generator: the only source of randomness.
            iteration: number of the iteration, from 0.

        Returns:
            Step indices in [0, `count`), one or more, in ascending order.

        Raises:
            ConfigError: the window does not fit a schedule of `count` steps.
        """
        ...


@runtime_checkable
class MultistepSolver(Protocol):
    """A sampler whose steps use the velocities of earlier steps, for losses without
    log-probabilities.

    No step is a decision, also if the solver draws noise. The members of a group need different
    initial noise, since they would otherwise be equal unless the solver draws.

    Contract: the number of steps stays; the last time is 0; samples do not influence each other;
    all randomness comes from `draw`. If the network predicts the same clean image everywhere, that
    is, v = (x - x_0) / t, the end is x_0.
    """

    def grid(self, schedule: Schedule) -> Schedule:
        """The solver's grid for the policy's `schedule`, with as many steps; often the same."""
        ...

    def solution(
        self, schedule: Schedule, draw: Callable[[Latents], Latents]
    ) -> Callable[[int, Latents, Latents], Latents]:
        """A new solution, whose history is empty.

        Args:
            schedule: the solver's grid.
            draw: returns standard normal noise of the shape of a state.

        Returns:
            A function `step(number, velocity, x)`, which is called once for each point of the grid
            before the last, in order. It returns the state at point `number` + 1 from the state x
            at point `number` and the network's velocity there [sample, *latent].
        """
        ...


AnySampler = Sampler | MultistepSolver
"""Samplers of a rollout."""


@runtime_checkable
class RewardModel(Protocol):
    """Maps images and prompts to numbers.

    Contract: images are [sample, channel, height, width] in [0, 1]; higher is better; the result is
    finite, one number per sample, in order, and does not depend on the other samples of the batch.
    For a video model they are videos [sample, frame, channel, height, width], all frames in order;
    a reward for images scores them inside `rewards.FrameMean`. A reward that cannot score its input
    raises `RewardError`.

    A model with a true attribute `marks_invalid` may return NaN for a sample that cannot be judged,
    for example after an unusable answer of a judge. Such a sample is left out of credit and
    training, and counted ("invalid" in the metrics). A group with fewer than two valid samples is
    left out completely. An infinite score, or NaN from any other model, is an error.

    A model whose class has a true attribute `on_cpu` needs no GPU, scores images one by one and can
    be pickled. While the policy samples, a pool of processes computes it, on images in float32 in
    main memory.

    Optional methods: `load()` reads the weights, before a run loads the policy. `refuses(prompt)`
    returns why images of a prompt cannot be scored, as a text, and "" if they can; it needs no
    weights. A run calls it for all prompts before it loads anything, and looks for the packages
    that a class attribute `packages` names, as in ``packages = ("rapidocr",)``. Of a reward with
    named components, which are logged and may be credited separately, `parts(images, prompts)`
    returns every component's scores [sample] before weighting, by name, and `total(parts)` the
    reward [sample]. `score` equals ``total(parts(images, prompts))``.
    """

    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Score samples.

        Args:
            images: images [sample, channel, height, width] or videos [sample, frame, channel,
                height, width] in [0, 1].
            prompts: one prompt per sample.

        Returns:
            One score per sample [sample].

        Raises:
            RewardError: the samples cannot be scored.
        """
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Maps the samples of whole groups to numbers by comparing the members of a group with each
    other.

    It replaces a `RewardModel` in training. It compares all members of a prompt: the finished
    images, or the estimates of one unfinished node. Numbers of different nodes are not on one
    scale: a gain is a change of rank within the group. Chunks and processes never split a group.

    Contract: images are [prompt, member, channel, height, width] in [0, 1], or videos [prompt,
    member, frame, ...], with one prompt per group and any number of members from 2; higher is
    better; the result is finite, [prompt, member]. Permuting the members of a group permutes its
    numbers; equal images in a group get equal numbers; a group's numbers do not depend on other
    groups. NaN is allowed as for a `RewardModel` with `marks_invalid`: a sample that cannot be
    judged is then not compared with the others of its group.

    Optional methods: `load` and `refuses` as of a `RewardModel`; of a reward with named components,
    `group_parts(images, prompts)` returns every
    component's scores [prompt, member] before weighting, by name, and `total(parts)` the reward,
    entry by entry, for any shape. `score_groups` equals ``total(group_parts(images, prompts))``.
    """

    @property
    def evaluation(self) -> RewardModel:
        """A reward of single samples for evaluations. The mean of a comparison within groups, such
        as a win rate, does not rise when all samples improve.
        """
        ...

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score the samples of groups.

        Args:
            images: images [prompt, member, channel, height, width] in [0, 1], or videos [prompt,
                member, frame, ...].
            prompts: one prompt per group.

        Returns:
            One score per sample [prompt, member].
        """
        ...


AnyReward = RewardModel | GroupReward
"""Rewards for training."""


Features = Callable[[ImagesOrVideos], Tensor]
"""A feature space for diversity: from images to vectors [sample, feature] with meaningful
distances, finite and in order. With a true attribute `reads_latents` it receives latents instead.
The images of a video model are videos.
"""


@runtime_checkable
class CreditAssigner(Protocol):
    """A function from a value table to a table of advantages.

    `probe` declares how unfinished states are scored. Column k < D of the table is the value of the
    state from which decision k starts, column D the reward of the final image.

    Contract: the result is finite at the entries of `decisions.mask`; every mean, standard
    deviation and count is over these entries; invariant to a constant added to all values;
    equivariant to permuting members; 0 for a group of equal values. The trainer sets advantages
    outside the mask to 0, so a rule may compute with NaN there. `assign` is called once per
    iteration, in every process with the same arguments. A memory that is keyed by prompt uses the
    prompt's text.

    An optional attribute `needs`, as in ``needs = Needs(fields=("log_probs",))``, declares what the
    rule needs besides the table (`flowrl.core.experience.Needs`). If it names fields of the record,
    the call is ``assign(values, decisions, record)``::

        class Surprise:
            probe, needs = NoProbe(), Needs(fields=("log_probs",))

            def assign(self, values, decisions, record):
                weights = (-record.log_probs).exp().where(decisions.mask, 0.0).clamp(max=1.0)
                return Credit(Uniform().assign(values, decisions), weights)
    """

    @property
    def probe(self) -> Probe:
        """How unfinished states are scored."""
        ...

    def assign(self, values: ValueTable, decisions: Decisions) -> Tensor | Credit:
        """Credit every decision of every trajectory.

        Args:
            values: value table [prompt, member, decision+1]; NaN in columns that no probe
                evaluated.
            decisions: the axis of credit, with the mask.

        Returns:
            Advantages [prompt, member, decision], or a `Credit` that has weights too.

        Raises:
            CreditError: the table, the decisions or the record do not fit the rule.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A credit rule or an observer with memory across iterations (for example a running baseline).

    Checkpoints contain its state.
    """

    def state_dict(self) -> Mapping[str, Tensor]:
        """The memory as named tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        ...


@runtime_checkable
class PolicyLoss(Protocol):
    """A pure function of Gaussians, advantages and weights to a scalar: the weighted mean over
    transitions.

    Contract: transitions of weight 0 contribute neither to the loss nor to the gradient; on the
    first update of an iteration (new = behaviour) every ratio is 1 and the gradient is the policy
    gradient of mean(A log pi); the order of rows has no effect. Unless `trains_zero_advantages`,
    units whose advantages are all 0 have no gradient, so the trainer does not evaluate them.

    Optional: `one_advantage` = True refuses credit that differs between the steps of a trajectory.
    A loss that depends on a mean over its `unit` has a method `row_terms(batch)`, which returns
    the terms to be averaged, [row] or [row, term], detached and finite, 0 for rows of weight 0.
    If whole units fit into micro-batches, the trainer calls `loss` with `pooled` = None.
    Otherwise it makes two passes: `row_terms` of all rows without gradient, their
    `types.unit_means` over whole units, and then `loss` on parts of units with these means as
    `pooled`. This costs one more evaluation per row and network. Both give the same gradient.
    """

    @property
    def needs_reference(self) -> bool:
        """Whether `LossBatch.reference` must be filled (costs one more network evaluation per
        transition).
        """
        ...

    @property
    def unit(self) -> Unit:
        """What must be in one batch, unless `LossBatch.pooled` is set."""
        ...

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether transitions of advantage 0 can have a gradient, as a penalty's."""
        ...

    def loss(self, batch: LossBatch) -> LossResult:
        """The loss over one batch of transitions."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Looks at every iteration of a run; it may add metrics, warn, keep a checkpoint, or stop the
    run.

    Contract: it does not change the record. It is built and called in the main process only. An
    exception is a warning, once per observer, unless the setting `strict` is true.

    Credit rules, losses, rewards and samplers may have metrics of their own without an observer: an
    optional method `metrics()` returns numbers by name, the same names in every iteration. It is
    called in the main process after each iteration, and the numbers are called KIND/NAME in
    metrics.jsonl, as in credit/baseline.
    """

    @property
    def fields(self) -> Sequence[str]:
        """The fields of the record that it reads (`flowrl.core.experience.FIELDS`); only these are
        gathered.
        """
        ...

    def observe(self, record: Record) -> Actions | None:
        """Look at an iteration after its update.

        Args:
            record: the iteration.

        Returns:
            Actions; None for none.
        """
        ...


@runtime_checkable
class World(Protocol):
    """Prompts, rewards and a policy that fit together: all that a run needs besides a method.

    Contract: every call returns the same for the same arguments, whatever the state of the global
    generators, since each process of a comparison makes the world anew; nothing is trained on the
    held-out prompts.

    Optional attributes: `defaults`, settings by name that replace the defaults of a run, as in
    ``{"iterations": 40}``; without it, the method's published window and clip apply, the clip
    scaled to `elements`. `qualities`, makers of rewards by name that are only measured
    (`--heldout-rewards NAME`). `imports`, names of modules that the policy needs, which a
    comparison imports once. `points` = True if samples are points [sample, 2, 1, 1] and no images,
    which reports draw. `reads`, the settings of the policy that it reads; without it, all.
    """

    @property
    def name(self) -> str:
        """The world's name in tables and messages."""
        ...

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks, one or more; the first is the default."""
        ...

    @property
    def forms(self) -> Sequence[str]:
        """Names of the forms of the reward, one or more, all of which evaluations measure; the
        first is the default.
        """
        ...

    @property
    def elements(self) -> int:
        """Numbers in a latent, to which published clips are scaled; 0: clips stay as published."""
        ...

    def prompts(self, task: str, part: str) -> Sequence[Prompt]:
        """The prompts of a task.

        Args:
            task: one of `tasks`.
            part: "train" or "heldout".

        Returns:
            One or more prompts, in a fixed order.
        """
        ...

    def parse(self, text: str) -> Prompt:
        """The prompt that a user's text means, with the metadata that the rewards read.

        Args:
            text: the words.

        Returns:
            The prompt, whose text is `text`.

        Raises:
            ConfigError: the world does not understand the text.
        """
        ...

    def reward(self, form: str) -> RewardModel:
        """A reward of single samples.

        Args:
            form: one of `forms`.

        Returns:
            The reward.
        """
        ...

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """A new untrained policy, which shares no parameters with earlier ones.

        Args:
            options: seed, device and LoRA.

        Returns:
            The policy, in whose `latent_shape` there are `elements` numbers.

        Raises:
            ConfigError: an option is not allowed.
            CheckpointError: the weights are missing or damaged.
        """
        ...
