"""The trainer: one iteration, from prompts to a weight update, readable from top to bottom.

prompts -> trajectories + estimates -> rewards [prompt, member, node] -> advantages [prompt, member, step] -> update
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import check_advantages, check_trained
from flowrl.distributed import Distributed
from flowrl.errors import CreditError
from flowrl.forward import Guidance
from flowrl.methods import Method, check_one_advantage
from flowrl.probes import whole
from flowrl.prompts.stream import PromptStream
from flowrl.protocols import (
    AnyReward,
    FlowPolicy,
    ForwardLoss,
    PartsCreditAssigner,
    PromptCreditAssigner,
    RandomSampler,
    Sampler,
    SelectiveCredit,
    Stateful,
)
from flowrl.rewards.contract import is_remote
from flowrl.rollout import Groups, RewardTables, Usage
from flowrl.rollout.collector import Collected, Collector
from flowrl.rollout.forward_batch import ForwardBatches, forward_pairs, step_of
from flowrl.rollout.loss_batch import LossBatches, MicroBatch, Pairs, checked_loss, micro_batches, minibatch_pairs
from flowrl.rollout.masking import valid_credit, with_advantage
from flowrl.rollout.metrics import Clock, LossMetrics, reward_metrics
from flowrl.samplers import trained_steps
from flowrl.training.behaviour import Copies
from flowrl.training.checkpoint import PER_PARAMETER, Checkpoint, restore_training_state, training_state
from flowrl.training.config import RunConfig
from flowrl.training.nonfinite import NonFiniteCheck
from flowrl.training.optim import LossScaler, make_optimizer, prepare_policy, update_average, weights_replaced
from flowrl.types import Prompt, Schedule, inputs_unchanged


def loss_guidance(config: RunConfig) -> Guidance:
    """The guidance of a forward-process loss. Raises `ConfigError` for a scale that is not allowed."""
    return Guidance(config.policy.train_guidance_scale, config.policy.reference_guidance_scale)


def overlaps_rewards(config: RunConfig, reward: AnyReward) -> bool:
    """Whether a chunk is scored during the rollout of the next one; auto: if there are chunks and a server computes the reward.

    Args:
        config: the run.
        reward: the reward.

    Returns:
        Whether rollout and scoring overlap.
    """
    chosen = config.rollout.overlap_rewards
    return chosen == "true" or (chosen == "auto" and config.rollout.chunk >= 1 and is_remote(reward))


class Trainer:
    """Fine-tunes a policy; independent of the method.

    Call `iteration()` once per iteration; it returns the metrics of that iteration as plain values. Within `averaged()` the
    policy has its EMA weights. `state()` and `restore()` make a run resumable bit for bit on the CPU. `iteration` raises
    `NonFiniteError` if a loss or gradient is not finite, and `CreditError` or `RewardError` if a part breaks its contract; the
    weights are then those of the last complete update.

    Args:
        policy: the policy.
        method: sampler, credit rule and loss.
        reward: scores the samples.
        prompts: the training prompts.
        config: the settings.
        distributed: the processes.
    """

    def __init__(
        self, policy: FlowPolicy, method: Method, reward: AnyReward, prompts: Sequence[Prompt], config: RunConfig,
        distributed: Distributed = Distributed(),
    ) -> None:  # fmt: skip
        self.policy, self.method, self.reward, self.config = policy, method, reward, config
        self.distributed = distributed
        rollout, optim = config.rollout, config.optim
        self.prompts = PromptStream(prompts, config.seed)
        self.generator = torch.Generator(policy.device).manual_seed(config.seed + 1)
        self.schedule = policy.schedule(rollout.num_steps)
        self.groups = Groups(rollout.groups, rollout.group_size, method.shared_noise)
        named = prepare_policy(policy, distributed, config.policy.compile)
        self.names, self.parameters = list(named), list(named.values())
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = make_optimizer(optim.optimizer, self.parameters, optim.learning_rate, optim.betas, optim.weight_decay)
        self.scaler = LossScaler(optim.loss_scale if config.policy.dtype == "float16" else 0.0, policy.device)
        self.copies = Copies(method.loss, policy, named)
        self.collector = Collector(
            policy, reward, self.schedule, self.groups, method.credit.probe, distributed, config.batches.max_batch, rollout.chunk,
            overlaps_rewards(config, reward), rollout.offload,
        )  # fmt: skip
        self.done, self.updated = 0, False
        self.on_phase: Callable[[str], None] = lambda phase: None

    def use_batches(self, config: RunConfig) -> None:
        """Use the sizes of `config`, whose other settings must equal those of the trainer as far as they change results."""
        self.config, self.collector.max_batch = config, config.batches.max_batch

    def iteration(self) -> dict[str, Any]:
        """One pass from prompts to updated weights; returns its metrics."""
        usage, clock, self.updated = Usage(), Clock(self.on_phase, "rollout"), False

        # Rollout: trajectories of this process's groups [sample, node, *latent], rewards of all groups [prompt, member, node].
        prompts = self.prompts.take(self.config.rollout.groups)
        condition = self.policy.encode(prompts)
        noise = self.groups.noise(self.policy.latent_shape, self.generator)
        sampler = self.draw_sampler()
        with self.copies.sampling():
            collected = self.collector.collect(prompts, condition, noise, sampler, self.generator, usage, clock.enter)
        rewards = collected.rewards

        # Credit: advantages [prompt, member, step]; `used` [prompt, member] leaves out what the reward marked invalid.
        advantages, used = self.assign_credit(rewards, collected.rollout.trajectories.schedule)

        # Update: one optimizer step per mini-batch. Micro-batches are (trajectory, step) pairs of this process, or (image, drawn
        # time) rows; the weighted sum of their mean losses, over all processes, is the mean over the mini-batch.
        clock.enter("update")
        self.set_learning_rate()
        loss, metrics, train_nfe = self.method.loss, LossMetrics(self.schedule.steps), 0
        batches, pairs, counted = self.loss_batches(sampler, collected, advantages, used)
        check = NonFiniteCheck(self.done + 1, prompts, rewards.total, advantages, loss, batches, collected.samples.start)
        for minibatch, of in self.minibatches(pairs, collected):
            self.optimizer.zero_grad()
            with self.distributed.shared_errors():
                batches.prepare(minibatch)
                train_nfe += of.evaluations * batches.passes
                for micro in minibatch:
                    batch = batches.of(micro.sample, micro.step, micro.shared)
                    result = checked_loss(loss, batch)
                    metrics.add(micro.weight / len(pairs), result, batch, batches.evaluated_steps(micro), len(of) / of.total)
                    self.scaler.scale(result.loss * micro.weight).backward()
                rows = metrics.take()
                check.losses(rows, minibatch)
            metrics.merge(self.distributed.gather(rows))
            self.optimizer_step(minibatch, check, metrics)
        self.copies.after_iteration()
        clock.stop()

        self.done += 1
        return {
            "iteration": self.done,
            **reward_metrics(rewards.total),
            **({"parts": {name: float(t[..., -1].nanmean()) for name, t in rewards.parts.items()}} if rewards.parts else {}),
            "invalid": int((~rewards.valid).sum()),
            **({"dropped": int((used & ~counted).sum())} if self.config.algorithm.drop_zero_advantages else {}),
            "trajectories": self.groups.samples,
            "nfe": usage.nfe,
            "calls": usage.calls,
            "reward_calls": usage.reward_calls,
            "seconds": sum(clock.phases.values()),
            "phases": clock.phases,
            **metrics.means,
            "train_nfe": whole(train_nfe),
            "zero_pairs": sum(one.zeros for one in pairs),
            "abs_advantage": float(advantages[used].abs().mean()),
        }

    def draw_sampler(self) -> Sampler:
        """This iteration's sampler; a random or sliding window is drawn once for all groups."""
        sampler = self.method.sampler
        return sampler.draw(self.schedule, self.generator, self.done) if isinstance(sampler, RandomSampler) else sampler

    def assign_credit(self, rewards: RewardTables, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Advantages [prompt, member, step] and which samples [prompt, member] count (`rollout.masking`)."""
        return valid_credit(rewards, schedule, self._credit)

    def _credit(self, rewards: RewardTables, schedule: Schedule) -> Tensor:
        """The rule's advantages, checked.

        A rule that reads components gets them if the reward has some, and a rule that uses prompts gets those. The schedule is on
        the device of the rewards, in main memory.
        """
        rule, schedule = self.method.credit, schedule.to(rewards.total.device)
        with inputs_unchanged(f"{type(rule).__name__}.assign", CreditError, rewards.total, *rewards.parts.values()):
            if rewards.parts and isinstance(rule, PartsCreditAssigner):
                advantages = rule.assign_parts(rewards.parts, schedule)
            elif isinstance(rule, PromptCreditAssigner):
                advantages = rule.assign_prompts(rewards.total, rewards.prompts, schedule)
            else:
                advantages = rule.assign(rewards.total, schedule)
        return check_advantages(advantages, rewards.total, type(rule).__name__)

    def trained_pairs(self, advantages: Tensor, schedule: Schedule) -> Tensor | None:
        """Mask of the pairs [sample, step] that the rule selects for training; None: all."""
        rule = self.method.credit
        if not isinstance(rule, SelectiveCredit):
            return None
        found = rule.trained(advantages, schedule.to(advantages.device))
        return check_trained(found, advantages, type(rule).__name__).to(self.policy.device).flatten(0, 1)

    def set_learning_rate(self) -> None:
        """Set the learning rate: linear from `learning_rate` to `learning_rate` x `final_learning_rate` over the run."""
        optim, left = self.config.optim, 1 - self.done / self.config.iterations
        factor = optim.final_learning_rate + (1 - optim.final_learning_rate) * left
        self.optimizer.param_groups[0]["lr"] = optim.learning_rate * factor

    def trained_steps(self, schedule: Schedule) -> Tensor:
        """The steps of this iteration's loss (`samplers.trained_steps`); random steps are drawn once for all groups."""
        return trained_steps(self.config.algorithm.trained_steps, schedule, self.generator)

    def loss_batches(
        self, sampler: Sampler, collected: Collected, advantages: Tensor, used: Tensor
    ) -> tuple[LossBatches | ForwardBatches, list[Pairs], Tensor]:
        """A maker of the loss's batches, the pairs of each mini-batch among all processes, and the mask [prompt, member] of their
        samples.

        The used trajectories are split into mini-batches in random order, the same in every process; pairs that belong together,
        such as those of a branched tree, in the order of their indices. None if no trajectory is used. Pairs of
        advantage 0 are not evaluated if the loss declares that they have no gradient.
        """
        rollout, condition, path = collected.rollout, collected.condition, collected.rollout.trajectories
        loss, trained = self.method.loss, self.trained_pairs(advantages, path.schedule)
        own = advantages.to(self.policy.device).flatten(0, 1)[collected.samples]
        if isinstance(loss, ForwardLoss):
            times, seed = self.draw_times(loss)
            parts, counted = self.draw_parts(advantages, used, torch.arange(path.schedule.steps))
            pairs = forward_pairs(parts, loss, step_of(times, path.schedule), self.groups.members, trained)
            mine, copies = times[collected.samples], self.copies.by_name
            guidance = loss_guidance(self.config)
            batches = ForwardBatches(self.policy, loss, rollout, condition, own, mine, seed, copies, guidance)
        else:
            steps = self.trained_steps(path.schedule)
            parts, counted = self.draw_parts(advantages, used, steps)
            check_one_advantage(loss, self.method.credit, advantages.flatten(0, 1), steps)
            pairs = minibatch_pairs(parts, steps, path.tree, trained, loss.unit)
            if not loss.trains_zero_advantages:
                pairs = [one.without_zeros(advantages.flatten(0, 1)) for one in pairs if len(one)]
            batches = LossBatches(self.policy, sampler, rollout, condition, own, loss.needs_reference, loss)
        return batches, [one for one in pairs if len(one)], counted

    def draw_parts(self, advantages: Tensor, used: Tensor, steps: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The samples of each mini-batch, those that count in random order, and the mask [prompt, member] of samples that
        count.
        """
        drop = self.config.algorithm.drop_zero_advantages
        counted = with_advantage(used, advantages, steps) if drop else used
        order = self.draw_order()
        order = order[counted.to(order.device).flatten()[order]]
        return order.chunk(self.config.optim.minibatches) if len(order) else (), counted

    def draw_times(self, loss: ForwardLoss) -> tuple[Tensor, int]:
        """The times [sample, draw] of all samples of this iteration, and the seed of their noise."""
        times = loss.times.draw(self.schedule, self.groups.samples, self.generator)
        return times, int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))

    def minibatches(self, pairs: Sequence[Pairs], collected: Collected) -> Iterator[tuple[list[MicroBatch], Pairs]]:
        """This process's micro-batches of each mini-batch, and the pairs of all processes in it."""
        for one in pairs:
            yield micro_batches(one, self.config.batches.micro_batch, collected, self.distributed), one

    def draw_order(self) -> Tensor:
        """This iteration's order of all samples, a random permutation."""
        return torch.randperm(self.groups.samples, generator=self.generator, device=self.policy.device)

    def optimizer_step(self, minibatch: Sequence[MicroBatch], check: NonFiniteCheck, metrics: LossMetrics) -> None:
        """Sum the gradients over the processes, clip, step and average; a step with overflowed float16 gradients is skipped."""
        self.distributed.all_reduce_gradients(self.parameters)
        norm = self.scaler.clip(self.optimizer, self.config.optim.max_grad_norm)
        if not self.scaler.enabled:
            trained = dict(zip(self.names, self.parameters, strict=True))
            check.gradient(norm, [] if self.distributed.sharded else minibatch, trained)
        taken, self.updated = self.scaler.step(self.optimizer), True
        if self.scaler.enabled:
            metrics.means |= {"loss_scale": self.scaler.value, "skipped_steps": self.scaler.skipped}
        if taken:
            self.copies.after_update()
            metrics.means["grad_norm"] = norm
            update_average(self.average, self.parameters, self.config.optim.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        with weights_replaced(self.policy, self.parameters, self.average):
            yield

    def state(self, copied: bool = True) -> Checkpoint:
        """Weights, averages, optimizer, generators, the prompt order, and the credit rule's memory if it has one, in main memory.

        With `copied` False, tensors that are in main memory already are not copied, and updates
        change them: for a caller that writes them at once. Other processes than the main one get
        an empty checkpoint; with sharded weights all must call this.
        """
        named = dict(zip(self.names, self.parameters, strict=True))
        state = training_state(named, self.average, self.optimizer, copied)
        copies = self.copies.state(copied)
        if not self.distributed.is_main:
            return state
        small = self.small_state()
        return Checkpoint({**state.tensors, **copies.tensors, **small.tensors}, {**state.values, **copies.values, **small.values})

    def small_state(self) -> Checkpoint:
        """The part of `state` whose size does not depend on the model."""
        tensors = {"generator": self.generator.get_state(), "prompts.generator": self.prompts.generator.get_state()}
        if isinstance(self.method.credit, Stateful):
            tensors |= {f"credit.{name}": tensor.clone() for name, tensor in self.method.credit.state_dict().items()}
        values = {"done": self.done, "order": list(self.prompts.order), "loss_scale": self.scaler.state_dict()}
        return Checkpoint(tensors, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from `state()`, on any number of processes. All processes call this; only the main process's checkpoint is
        used.

        Raises `ConfigError` if it belongs to other weights.
        """
        named = dict(zip(self.names, self.parameters, strict=True))
        restore_training_state(checkpoint, named, self.average, self.optimizer, self.distributed)
        self.copies.restore(checkpoint, self.distributed)
        small = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(PER_PARAMETER)}
        tensors, values = self.distributed.gather((small, checkpoint.values))[0]
        if isinstance(self.method.credit, Stateful):
            memory = {name.removeprefix("credit."): t for name, t in tensors.items() if name.startswith("credit.")}
            self.method.credit.load_state_dict(memory)
        self.scaler.load_state_dict(values["loss_scale"])
        self.generator.set_state(tensors["generator"])
        self.prompts.generator.set_state(tensors["prompts.generator"])
        self.done, self.prompts.order = int(values["done"]), list(values["order"])
