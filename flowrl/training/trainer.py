"""The trainer: one iteration from prompts to a weight update, readable from top to bottom.

prompts -> trajectories + estimates -> rewards [prompt, member, node] -> advantages [prompt, member, step] -> update
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import check_advantages
from flowrl.errors import ConfigError, TrainingError
from flowrl.methods import Method
from flowrl.protocols import FlowPolicy, PartsCreditAssigner, RandomSampler, RewardModel, Sampler, Stateful
from flowrl.rollout import Groups, RewardTables, Rollout, Usage, reward_tables, rollout
from flowrl.training.checkpoint import Checkpoint, optimiser_tensors, restore_optimiser
from flowrl.training.config import RunConfig
from flowrl.training.invalid import valid_credit
from flowrl.training.pairs import loss_pairs
from flowrl.types import Condition, Prompt, Schedule


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


class Trainer:
    """Fine-tunes `policy` by `method` on `prompts` scored by `reward`; knows no paper by name.

    Call `iteration()` once per iteration; it returns the metrics of that iteration as plain values. `averaged()` is the
    context in which the policy has its EMA weights. `state()` and `restore()` make a run resumable bit for bit on the CPU.
    Raises `TrainingError` when a loss or gradient is not finite, `CreditError` and `RewardError` when a part breaks its
    contract; the weights are then those of the last complete update.
    """

    def __init__(
        self, policy: FlowPolicy, method: Method, reward: RewardModel, prompts: Sequence[Prompt], config: RunConfig
    ) -> None:
        self.policy, self.method, self.reward, self.config = policy, method, reward, config
        self.prompts = PromptStream(prompts, config.seed)
        self.generator = torch.Generator(policy.device).manual_seed(config.seed + 1)
        self.schedule = policy.schedule(config.steps)
        self.groups = Groups(config.prompts, config.members, method.shared_noise)
        named = policy.trainable()
        self.names, self.parameters = list(named), list(named.values())
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay)
        self.done = 0
        self.on_phase: Callable[[str], None] = lambda phase: None

    def iteration(self) -> dict[str, Any]:
        """One pass from prompts to updated weights; returns its metrics."""
        usage, clock = Usage(), _Clock()
        prompts = self.prompts.take(self.config.prompts)
        condition = self.policy.encode(prompts)
        noise = self.groups.noise(self.policy.latent_shape, self.generator)
        sampler = self.draw_sampler()
        self.on_phase("rollout")
        result = rollout(
            self.policy, sampler, self.schedule, condition, noise, self.generator, self.groups,
            self.method.credit.probe, usage, self.config.max_batch,
        )  # fmt: skip
        clock.lap("rollout")
        self.on_phase("reward")
        tables = reward_tables(self.policy, self.reward, result, prompts, usage)
        clock.lap("reward")
        advantages, used = valid_credit(tables, lambda some: self._credit(some, result.trajectories.schedule))
        self.on_phase("update")
        metrics = self._update(sampler, result, condition, advantages, used, prompts)
        clock.lap("update")
        self.done += 1
        return {
            "iteration": self.done,
            **_reward_metrics(tables.total),
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
        """The rule's advantages, checked; a rule that reads components gets them where the reward has some."""
        rule = self.method.credit
        if tables.parts and isinstance(rule, PartsCreditAssigner):
            advantages = rule.assign_parts(tables.parts, schedule)
        else:
            advantages = rule.assign(tables.total, schedule)
        return check_advantages(advantages, tables.total, type(rule).__name__)

    def draw_sampler(self) -> Sampler:
        """This iteration's sampler: a random or sliding window is drawn here, once for all groups."""
        sampler = self.method.sampler
        return sampler.draw(self.schedule, self.generator, self.done) if isinstance(sampler, RandomSampler) else sampler

    def _update(
        self, sampler: Sampler, result: Rollout, condition: Condition, advantages: Tensor, used: Tensor, prompts: Sequence[Prompt]
    ) -> dict[str, Any]:
        """`updates` optimiser steps, each on its share of the `used` trajectories and all their stochastic steps."""
        config, device = self.config, self.policy.device
        steps = result.trajectories.schedule.stochastic.nonzero().flatten()
        if len(steps) == 0:
            raise ConfigError(f"{sampler} has no stochastic step on this schedule: there is no log-probability to train on")
        flat = advantages.to(device).reshape(self.groups.samples, -1)
        order = torch.randperm(self.groups.samples, generator=self.generator, device=device)
        order = order[used.to(device).flatten()[order]]
        shares = order.chunk(config.updates)
        left = 1 - self.done / config.iterations
        self.optimiser.param_groups[0]["lr"] = config.lr * (config.final_lr + (1 - config.final_lr) * left)
        totals: dict[str, float] = {}
        train_nfe = 0
        for share in shares:
            sample, step = torch.cartesian_prod(share, steps).unbind(1)
            self.optimiser.zero_grad()
            for part in torch.arange(len(sample), device=device).split(config.micro_batch):
                weight = len(part) / len(sample)
                needs = self.method.loss.needs_reference
                batch = loss_pairs(self.policy, sampler, result, condition, flat, sample[part], step[part], needs)
                outcome = self.method.loss.loss(batch)
                self._require_finite(outcome.loss, "loss", prompts)
                (outcome.loss * weight).backward()
                train_nfe += len(part) * (1 + self.method.loss.needs_reference)
                scale = weight / len(shares)
                for key, value in {"loss": outcome.loss.detach(), **outcome.metrics}.items():
                    largest = key == "ratio_deviation"
                    totals[key] = (
                        max(totals.get(key, 0.0), float(value)) if largest else totals.get(key, 0.0) + float(value) * scale
                    )
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip)
            self._require_finite(norm, "gradient norm", prompts)
            self.optimiser.step()
            totals["grad_norm"] = float(norm)
            with torch.no_grad():
                for mean, parameter in zip(self.average, self.parameters, strict=True):
                    mean.lerp_(parameter, 1 - config.ema)
        return {**totals, "train_nfe": train_nfe, "abs_advantage": float(advantages[used].abs().mean())}

    def _require_finite(self, value: Tensor, what: str, prompts: Sequence[Prompt]) -> None:
        if not bool(torch.isfinite(value).all()):
            texts = ", ".join(sorted({repr(prompt.text) for prompt in prompts})[:8])
            raise TrainingError(
                f"iteration {self.done + 1}: the {what} is {value.item()}; the weights are those of the last update. "
                f"Prompts of this iteration: {texts}. Lower lr ({self.config.lr}) or raise the noise level."
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        kept = [p.data for p in self.parameters]
        for parameter, value in zip(self.parameters, self.average, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, kept, strict=True):
                parameter.data = value

    def state(self) -> Checkpoint:
        """Weights, averages, optimiser, generators, the prompt order, and the credit rule's memory if it has one."""
        tensors = {f"weight.{n}": p for n, p in zip(self.names, self.parameters, strict=True)}
        tensors |= {f"average.{n}": p for n, p in zip(self.names, self.average, strict=True)}
        tensors |= optimiser_tensors(self.optimiser, self.names)
        tensors |= {"generator": self.generator.get_state(), "prompts.generator": self.prompts.generator.get_state()}
        if isinstance(self.method.credit, Stateful):
            tensors |= {f"credit.{name}": tensor for name, tensor in self.method.credit.state_dict().items()}
        return Checkpoint(dict(tensors), {"done": self.done, "order": self.prompts.order})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`. Raises `ConfigError` where the checkpoint belongs to other weights."""
        tensors, values = checkpoint.tensors, checkpoint.values
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
        self.generator.set_state(tensors["generator"])
        self.prompts.generator.set_state(tensors["prompts.generator"])
        self.done, self.prompts.order = int(values["done"]), list(values["order"])


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.last = now


def _reward_metrics(rewards: Tensor) -> dict[str, Any]:
    """Statistics of the finished images' rewards, and of the gains where every node was scored; invalid samples left out."""
    valid = rewards[..., -1].isfinite()
    rewards, groups = rewards[valid], [group[kept] for group, kept in zip(rewards[..., -1], valid, strict=True) if kept.any()]
    final = rewards[..., -1]
    spread = torch.stack([group.std(unbiased=False) for group in groups])
    metrics: dict[str, Any] = {
        "reward_mean": float(final.mean()),
        "reward_std": float(final.std()) if final.numel() > 1 else 0.0,
        "group_std": float(spread.mean()),
        "zero_spread_groups": float((spread < 1e-6).float().mean()),
    }
    if bool(torch.isfinite(rewards).all()):
        metrics["mean_abs_gain"] = rewards.diff(dim=-1).abs().mean(0).tolist()
    return metrics
