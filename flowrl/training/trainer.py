"""The trainer: one iteration from prompts to a weight update, readable from top to bottom.

prompts -> trajectories + estimates -> rewards [prompt, member, node] -> advantages [prompt, member, step] -> update
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import check_advantages
from flowrl.distributed import Distributed
from flowrl.errors import ConfigError
from flowrl.methods import Method
from flowrl.protocols import FlowPolicy, PartsCreditAssigner, RandomSampler, RewardModel, Sampler, Stateful
from flowrl.rollout import Groups, RewardTables, Usage
from flowrl.rollout.collector import Collected, Collector
from flowrl.rollout.masking import valid_credit
from flowrl.training.checkpoint import PER_PARAMETER, Checkpoint, restore_training_state, training_state
from flowrl.training.config import RunConfig
from flowrl.training.metrics import Clock, reward_metrics
from flowrl.training.nonfinite import Scene
from flowrl.training.optim import LossScaler, make_optimizer, prepare_policy, update_average, weights_replaced
from flowrl.training.update import Gradients, Part, add_metrics, parts_of
from flowrl.types import Prompt, Schedule


class PromptStream:
    """Prompts in shuffled passes, reproducible from its generator and position."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ConfigError("the list of training prompts is empty")
        self.prompts = list(prompts)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        while len(self.order) < count:
            self.order += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        chosen, self.order = self.order[:count], self.order[count:]
        return [self.prompts[i] for i in chosen]

    def upcoming(self, count: int) -> list[Prompt]:
        """The distinct ones among the next `count` prompts, in their order; takes none."""
        ahead = PromptStream(self.prompts, 0)
        ahead.generator.set_state(self.generator.get_state())
        ahead.order = list(self.order)
        return list({prompt.text: prompt for prompt in ahead.take(count)}.values())


class Trainer:
    """Fine-tunes `policy` by `method` on `prompts` scored by `reward`; knows no paper by name.

    Call `iteration()` once per iteration; it returns the metrics of that iteration as plain values. `averaged()` is the
    context in which the policy has its EMA weights. `state()` and `restore()` make a run resumable bit for bit on the CPU.
    Raises `NonFiniteError` when a loss or gradient is not finite, `CreditError` and `RewardError` when a part breaks its
    contract; the weights are then those of the last complete update.
    """

    def __init__(
        self, policy: FlowPolicy, method: Method, reward: RewardModel, prompts: Sequence[Prompt], config: RunConfig,
        distributed: Distributed = Distributed(),
    ) -> None:  # fmt: skip
        self.policy, self.method, self.reward, self.config = policy, method, reward, config
        self.distributed = distributed
        self.prompts = PromptStream(prompts, config.seed)
        self.generator = torch.Generator(policy.device).manual_seed(config.seed + 1)
        self.schedule = policy.schedule(config.rollout.num_steps)
        self.groups = Groups(config.rollout.groups, config.rollout.group_size, method.shared_noise)
        named = prepare_policy(policy, distributed, config.policy.compile)
        self.names, self.parameters = list(named), list(named.values())
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = make_optimizer(
            config.optim.optimizer, self.parameters, config.optim.learning_rate, config.optim.weight_decay
        )
        scale = config.optim.loss_scale if config.policy.dtype == "float16" else 0.0
        self.scaler = LossScaler(scale, policy.device)
        self.collector = Collector(
            policy, reward, self.schedule, self.groups, method.credit.probe, distributed, config.rollout.max_batch,
            config.rollout.chunk, config.rollout.overlap_rewards, config.rollout.offload,
        )  # fmt: skip
        self.done = 0
        self.on_phase: Callable[[str], None] = lambda phase: None

    def iteration(self) -> dict[str, Any]:
        """One pass from prompts to updated weights; returns its metrics."""
        usage, clock = Usage(), Clock(self.on_phase, "rollout")
        prompts = self.prompts.take(self.config.rollout.groups)
        condition = self.policy.encode(prompts)
        noise = self.groups.noise(self.policy.latent_shape, self.generator)
        sampler = self.draw_sampler()
        found = self.collector.collect(prompts, condition, noise, sampler, self.generator, usage, clock.enter)
        tables, schedule = found.tables, found.result.trajectories.schedule
        advantages, used = valid_credit(tables, lambda some: self._credit(some, schedule))
        clock.enter("update")
        metrics = self._update(sampler, found, advantages, used, Scene(self.done + 1, prompts, tables.total, advantages))
        clock.stop()
        self.done += 1
        return {
            "iteration": self.done,
            **reward_metrics(tables.total),
            **({"parts": {name: float(t[..., -1].nanmean()) for name, t in tables.parts.items()}} if tables.parts else {}),
            "invalid": int((~tables.valid).sum()),
            "trajectories": self.groups.samples,
            "nfe": usage.nfe,
            "calls": usage.calls,
            "reward_calls": usage.reward_calls,
            "seconds": sum(clock.phases.values()),
            "phases": clock.phases,
            **metrics,
        }

    def _credit(self, tables: RewardTables, schedule: Schedule) -> Tensor:
        """The rule's advantages, checked; a rule that reads components gets them where the reward has some. It sees the schedule
        where the rewards are, in main memory."""
        rule, schedule = self.method.credit, schedule.to(tables.total.device)
        if tables.parts and isinstance(rule, PartsCreditAssigner):
            advantages = rule.assign_parts(tables.parts, schedule)
        else:
            advantages = rule.assign(tables.total, schedule)
        return check_advantages(advantages, tables.total, type(rule).__name__)

    def draw_sampler(self) -> Sampler:
        """This iteration's sampler: a random or sliding window is drawn here, once for all groups."""
        sampler = self.method.sampler
        return sampler.draw(self.schedule, self.generator, self.done) if isinstance(sampler, RandomSampler) else sampler

    def _update(self, sampler: Sampler, found: Collected, advantages: Tensor, used: Tensor, scene: Scene) -> dict[str, Any]:
        """`updates` optimiser steps, each on its share of the `used` trajectories and all their stochastic steps.

        Every process knows the shares and differentiates the pairs of its own trajectories, each micro-batch weighted by its part
        of the share, so that the sum of their gradients is that of the share's mean.
        """
        config, device = self.config, self.policy.device
        steps = found.result.trajectories.schedule.stochastic.nonzero().flatten()
        if len(steps) == 0:
            raise ConfigError(f"{sampler} has no stochastic step on this schedule: there is no log-probability to train on")
        order = torch.randperm(self.groups.samples, generator=self.generator, device=device)
        order = order[used.to(device).flatten()[order]]
        shares = order.chunk(config.optim.minibatches)
        left = 1 - self.done / config.iterations
        self.optimizer.param_groups[0]["lr"] = config.optim.learning_rate * (
            config.optim.final_learning_rate + (1 - config.optim.final_learning_rate) * left
        )
        local = advantages.to(device).reshape(self.groups.samples, -1)[found.samples]
        gradients = Gradients(self.policy, sampler, self.method.loss, found, local)
        totals: dict[str, float] = {}
        for share in shares:
            parts = parts_of(share, steps, config.optim.micro_batch, found, self.distributed)
            self.optimizer.zero_grad()
            with self.distributed.shared_errors():
                rows = gradients.of(parts, self._backward)
                scene.require_finite_losses(rows, gradients, parts)
            for metrics in chain.from_iterable(self.distributed.gather(rows)):
                add_metrics(totals, metrics, len(shares))
                if share is shares[0] and "ratio_deviation" in metrics:  # still on policy: only rounding moves a ratio from 1
                    totals["ratio_noise"] = max(totals.get("ratio_noise", 0.0), metrics["ratio_deviation"])
            self._step(totals, scene, gradients, parts)
        train_nfe = len(order) * len(steps) * (1 + self.method.loss.needs_reference)
        return {**totals, "train_nfe": train_nfe, "abs_advantage": float(advantages[used].abs().mean())}

    def _backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _step(self, totals: dict[str, float], scene: Scene, gradients: Gradients, parts: list[Part]) -> None:
        """Move the weights and their average, unless the loss's scale was too large for this gradient."""
        self.distributed.all_reduce_gradients(self.parameters)
        norm = self.scaler.clip(self.optimizer, self.config.optim.max_grad_norm)
        if not self.scaler.enabled:
            trained = dict(zip(self.names, self.parameters, strict=True))
            scene.require_finite_gradient(norm, gradients, [] if self.distributed.sharded else parts, trained)
        taken = self.scaler.step(self.optimizer)
        if self.scaler.enabled:
            totals["loss_scale"], totals["skipped_steps"] = self.scaler.value, self.scaler.skipped
        if taken:
            totals["grad_norm"] = norm
            update_average(self.average, self.parameters, self.config.optim.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        with weights_replaced(self.policy, self.parameters, self.average):
            yield

    def state(self) -> Checkpoint:
        """Weights, averages, optimizer, generators, the prompt order, and the credit rule's memory if it has one.

        The main process gets it in main memory. Other processes get an empty checkpoint, and with sharded weights must call this
        too.
        """
        state = training_state(dict(zip(self.names, self.parameters, strict=True)), self.average, self.optimizer)
        if not self.distributed.is_main:
            return state
        tensors = {"generator": self.generator.get_state(), "prompts.generator": self.prompts.generator.get_state()}
        if isinstance(self.method.credit, Stateful):
            tensors |= {f"credit.{name}": tensor for name, tensor in self.method.credit.state_dict().items()}
        values = {"done": self.done, "order": self.prompts.order, "loss_scale": self.scaler.state_dict()}
        return Checkpoint({**state.tensors, **tensors}, {**state.values, **values})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`, on any number of processes; all of them call this, and the main one's checkpoint counts. Raises
        `ConfigError` if it belongs to other weights."""
        named = dict(zip(self.names, self.parameters, strict=True))
        restore_training_state(checkpoint, named, self.average, self.optimizer, self.distributed)
        small = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(PER_PARAMETER)}
        tensors, values = self.distributed.gather((small, checkpoint.values))[0]
        if isinstance(self.method.credit, Stateful):
            memory = {name.removeprefix("credit."): t for name, t in tensors.items() if name.startswith("credit.")}
            self.method.credit.load_state_dict(memory)
        self.scaler.load_state_dict(values["loss_scale"])
        self.generator.set_state(tensors["generator"])
        self.prompts.generator.set_state(tensors["prompts.generator"])
        self.done, self.prompts.order = int(values["done"]), list(values["order"])
