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
from flowrl.distributed import Team
from flowrl.errors import ConfigError
from flowrl.methods import Method
from flowrl.protocols import FlowPolicy, PartsCreditAssigner, RandomSampler, RewardModel, Sampler, Stateful
from flowrl.rollout import Groups, RewardTables, Usage
from flowrl.rollout.collector import Collected, Collector
from flowrl.rollout.masking import valid_credit
from flowrl.sharding import whole
from flowrl.training.checkpoint import Checkpoint, optimiser_tensors, restore_optimiser
from flowrl.training.config import RunConfig
from flowrl.training.engine import Engine, divided, exchanged, prepared
from flowrl.training.metrics import Clock, reward_metrics
from flowrl.training.nonfinite import Scene
from flowrl.training.optim import LossScale, make_optimiser
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
        team: Team = Team(),
    ) -> None:  # fmt: skip
        self.policy, self.method, self.reward, self.config, self.team = policy, method, reward, config, team
        self.prompts = PromptStream(prompts, config.seed)
        self.generator = torch.Generator(policy.device).manual_seed(config.seed + 1)
        self.schedule = policy.schedule(config.rollout.num_steps)
        self.groups = Groups(config.rollout.groups, config.rollout.group_size, method.shared_noise)
        named = prepared(policy, team, config.policy.compile)
        self.names, self.parameters = list(named), list(named.values())
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimiser = make_optimiser(
            config.optim.optimizer, self.parameters, config.optim.learning_rate, config.optim.weight_decay
        )
        self.scale = LossScale(config.optim.loss_scale if config.policy.dtype == "float16" else 0.0)
        self.engine = Engine(self.parameters, self.optimiser, self.scale, team)
        self.collector = Collector(
            policy, reward, self.schedule, self.groups, method.credit.probe, team, config.rollout.max_batch, config.rollout.chunk,
            config.rollout.overlap_rewards, config.rollout.offload,
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
        self.optimiser.param_groups[0]["lr"] = config.optim.learning_rate * (
            config.optim.final_learning_rate + (1 - config.optim.final_learning_rate) * left
        )
        local = advantages.to(device).reshape(self.groups.samples, -1)[found.samples]
        gradients = Gradients(self.policy, sampler, self.method.loss, found, local)
        totals: dict[str, float] = {}
        for share in shares:
            parts = parts_of(share, steps, config.optim.micro_batch, found, self.team, self.engine.padded)
            self.engine.zero_grad()
            for metrics in chain.from_iterable(self.team.gather(lambda some=parts: self._gradients(gradients, some, scene))):
                add_metrics(totals, metrics, len(shares))
                if share is shares[0] and "ratio_deviation" in metrics:  # still on policy: only rounding moves a ratio from 1
                    totals["ratio_noise"] = max(totals.get("ratio_noise", 0.0), metrics["ratio_deviation"])
            self._step(totals, scene, gradients, parts)
        train_nfe = len(order) * len(steps) * (1 + self.method.loss.needs_reference)
        return {**totals, "train_nfe": train_nfe, "abs_advantage": float(advantages[used].abs().mean())}

    def _gradients(self, gradients: Gradients, parts: list[Part], scene: Scene) -> list[dict[str, float]]:
        """This process's part of a share's gradient, and its metrics."""
        rows = gradients.of(parts, self.engine.backward)
        scene.require_finite_losses(rows, gradients, parts)
        return rows

    def _step(self, totals: dict[str, float], scene: Scene, gradients: Gradients, parts: list[Part]) -> None:
        """Move the weights and their average, unless the loss's scale was too large for this gradient."""
        norm = self.engine.norm(self.config.optim.max_grad_norm)
        taken = self.scale.accepts(norm)
        if self.scale.on:
            totals["loss_scale"], totals["skipped_steps"] = self.scale.value, self.scale.skipped
        if not taken:
            return
        trained = dict(zip(self.names, self.parameters, strict=True))
        scene.require_finite_gradient(float(norm), gradients, [] if self.engine.padded else parts, trained)
        totals["grad_norm"] = float(norm)
        self.engine.step()
        with torch.no_grad():
            for mean, parameter in zip(self.average, self.parameters, strict=True):
                mean.lerp_(parameter, 1 - self.config.optim.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        kept = exchanged(self.parameters, self.average, self.team.sharded)
        try:
            yield
        finally:
            exchanged(self.parameters, kept, self.team.sharded)

    def state(self) -> Checkpoint:
        """Weights, averages, optimiser, generators, the prompt order, and the credit rule's memory if it has one."""
        tensors = {f"weight.{n}": p for n, p in zip(self.names, self.parameters, strict=True)}
        tensors |= {f"average.{n}": p for n, p in zip(self.names, self.average, strict=True)}
        tensors |= optimiser_tensors(self.optimiser, self.names)
        tensors |= {"generator": self.generator.get_state(), "prompts.generator": self.prompts.generator.get_state()}
        if self.scale.on:
            tensors["loss_scale"] = self.scale.state()
        if isinstance(self.method.credit, Stateful):
            tensors |= {f"credit.{name}": tensor for name, tensor in self.method.credit.state_dict().items()}
        return Checkpoint(
            {name: whole(tensor.detach()) for name, tensor in tensors.items()}, {"done": self.done, "order": self.prompts.order}
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`. Raises `ConfigError` where the checkpoint belongs to other weights."""
        named = dict(zip(self.names, self.parameters, strict=True))
        tensors, values = divided(checkpoint.tensors, named, self.team.sharded), checkpoint.values
        for name, parameter in zip(self.names, self.parameters, strict=True):
            found = tensors.get(f"weight.{name}")
            if found is None or found.shape != parameter.shape:
                raise ConfigError(f"checkpoint: no weight {name} of shape {tuple(parameter.shape)}; it belongs to another run")
        with torch.no_grad():
            for name, parameter, average in zip(self.names, self.parameters, self.average, strict=True):
                parameter.copy_(tensors[f"weight.{name}"])
                average.copy_(tensors[f"average.{name}"])
        restore_optimiser(self.optimiser, self.names, tensors)
        if isinstance(self.method.credit, Stateful):
            memory = {name.removeprefix("credit."): t for name, t in tensors.items() if name.startswith("credit.")}
            self.method.credit.load_state_dict(memory)
        if self.scale.on and "loss_scale" in tensors:
            self.scale.restore(tensors["loss_scale"])
        self.generator.set_state(tensors["generator"])
        self.prompts.generator.set_state(tensors["prompts.generator"])
        self.done, self.prompts.order = int(values["done"]), list(values["order"])
