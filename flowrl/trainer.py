"""The trainer: one iteration, from prompts to a weight update, readable from top to bottom.

prompts -> trajectories + estimates -> values [prompt, member, decision+1] -> advantages and weights
[prompt, member, decision] -> update
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.forward import Guidance
from flowrl.core.processes import Processes
from flowrl.core.protocols import (
    AnyReward,
    AnySampler,
    FlowPolicy,
    ForwardLoss,
    Sampler,
    Stateful,
    extras,
    needs_of,
)
from flowrl.core.types import Condition, Prompt
from flowrl.credit import credit_of, read_columns, value_quality
from flowrl.methods import Method, check_one_advantage
from flowrl.nonfinite import NonFiniteCheck
from flowrl.probes import ValueProbe, whole
from flowrl.rollout import Groups, Usage, log_probs, predicted, transition_weights, usable
from flowrl.rollout.batches import (
    ForwardBatches,
    LossBatches,
    MicroBatch,
    Rows,
    checked_loss,
    credited,
    micro_batches,
    minibatch_rows,
)
from flowrl.rollout.collector import Collected, Collector
from flowrl.rollout.metrics import Clock, LossMetrics, reward_metrics
from flowrl.rollout.order import PromptStream
from flowrl.rollout.values import Inspect
from flowrl.samplers import RandomSteps, trained_steps, transition_stds, windowed
from flowrl.weights import Copies, LossScaler, update_average, weights_replaced

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Updates:
    """The numbers of an iteration's update.

    Args:
        minibatches: optimizer steps per iteration; the trajectories are split between them.
        micro_batch: (trajectory, step) pairs per backward pass.
        max_grad_norm: largest gradient norm; longer gradients are scaled down.
        ema_decay: decay per optimizer step of the averaged weights; 0: no average.
        loss_scale: initial scale of the loss, for a network in float16; 0: none.
        trained_steps: the stochastic steps in the loss.
        drop_zero_advantages: give weight 0 to trajectories whose advantages are all 0.
        guidance: the guidance in a forward-process loss.
        learning_rate: the rate after a number of iterations; None: the optimizer's own.
    """

    minibatches: int = 4
    micro_batch: int = 256
    max_grad_norm: float = 1.0
    ema_decay: float = 0.8
    loss_scale: float = 0.0
    trained_steps: slice | RandomSteps = field(default_factory=lambda: slice(None))
    drop_zero_advantages: bool = False
    guidance: Guidance = Guidance()
    learning_rate: Callable[[int], float] | None = None


def asks_for_all(chosen: slice | RandomSteps, method: Method) -> bool:
    """Whether every column of the value table is estimated, whatever the rule reads: random trained
    steps are drawn after the rollout.
    """
    forward = isinstance(method.loss, ForwardLoss)
    every = needs_of(method.credit).columns is None
    return isinstance(chosen, RandomSteps) or forward or every


class Iteration(dict[str, Any]):
    """The metrics of one iteration as plain values by name, with its record. Tensors are in main
    memory.

    Args:
        metrics: the metrics.
        experience: the values [prompt, member, decision+1], the decisions, and those of its larger
            fields that `Trainer.recorded` contains.
        credit: the rule's advantages and weights [prompt, member, decision].
        weights: weight of each transition in the loss [prompt, member, decision].
    """

    def __init__(
        self, metrics: Mapping[str, Any], experience: Experience, credit: Credit, weights: Tensor
    ) -> None:
        super().__init__(metrics)
        self.experience, self.credit, self.weights = experience, credit, weights


class Trainer:
    """Fine-tunes a policy; independent of the method.

    Call `iteration()` once per iteration; it returns the metrics of that iteration, and its record.
    The trainer itself keeps no record. Within `averaged()` the policy has its EMA weights.
    `iteration` raises `NonFiniteError` if a loss or gradient is not finite, and `CreditError` or
    `RewardError` if a part breaks its contract; the weights are then those of the last complete
    update.

    Args:
        policy: the policy.
        method: sampler, credit rule and loss.
        reward: scores the samples.
        prompts: the training prompts.
        groups: prompts per iteration.
        members: samples per prompt.
        steps: denoising steps.
        optimizer: makes the optimizer of the trained parameters.
        updates: the numbers of the update.
        seed: seed of the order of the prompts and of all noise.
        max_batch: largest number of latents per network call without gradients.
        chunk: groups that are rolled out at a time; 0: all; "auto": see `Collector`.
        overlap: score a chunk while the next one is rolled out.
        offload: keep trajectories in main memory until the update.
        reference: makes contexts in which the policy is the reference of the loss; None: its base.
        processes: the processes.
        recorded: the larger fields of the record (`flowrl.core.experience.LARGER`) that are
            gathered besides those that the rule reads, as in ``("log_probs",)``.
        on_phase: called with the name of each phase when it begins.
        inspect: called once, with the first images, prompts and scores.
    """

    def __init__(
        self,
        policy: FlowPolicy,
        method: Method,
        reward: AnyReward,
        prompts: Sequence[Prompt],
        *,
        groups: int,
        members: int,
        steps: int,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] = torch.optim.AdamW,
        updates: Updates = Updates(),
        seed: int = 0,
        max_batch: int = 512,
        chunk: int | Literal["auto"] = 0,
        overlap: bool = False,
        offload: bool = False,
        reference: Callable[[], AbstractContextManager[None]] | None = None,
        processes: Processes = Processes(),
        recorded: Collection[str] = (),
        on_phase: Callable[[str], None] = lambda phase: None,
        inspect: Inspect | None = None,
    ) -> None:
        self.policy, self.method, self.reward, self.updates = policy, method, reward, updates
        self.processes, self.recorded, self.on_phase = processes, recorded, on_phase
        self.prompts = PromptStream(prompts, seed)
        self.generator = torch.Generator(policy.device).manual_seed(seed + 1)
        self.schedule = policy.schedule(steps)
        self.groups = Groups(groups, members, method.shared_noise)
        self.parameters = dict(policy.trainable())
        self.average = [parameter.detach().clone() for parameter in self.parameters.values()]
        self.optimizer = optimizer([*self.parameters.values()])
        self.scaler = LossScaler(updates.loss_scale, policy.device)
        self.copies = Copies(method.loss, policy, self.parameters, processes)
        self.reference = reference or policy.reference
        self.collector = Collector(
            policy,
            reward,
            self.schedule,
            self.groups,
            method.credit.probe,
            processes,
            max_batch,
            chunk,
            overlap,
            offload,
            inspect,
        )
        self.done = 0

    def iteration(self) -> Iteration:
        """One pass from prompts to updated weights; returns its metrics and its record."""
        usage, clock = Usage(), Clock(self.on_phase, "rollout")

        # Rollout: this process's trajectories [sample, node, *latent], values of all groups
        # [prompt, member, decision+1].
        prompts = self.prompts.take(self.groups.prompts)
        condition = self.policy.encode(prompts)
        noise = self.groups.noise(self.policy.latent_shape, self.generator)
        sampler = self.draw_sampler()
        columns = self.asked_columns(sampler)
        with self.copies.sampling():
            collected = self.collector.collect(
                prompts, condition, noise, sampler, self.generator, usage, clock.enter, columns
            )

        # Credit: advantages and weights [prompt, member, decision]; what the reward marked invalid
        # has weight 0.
        experience = self.experience(prompts, condition, sampler, collected)
        credit = credit_of(self.method.credit, experience)
        if (features := collected.values.features) is not None:
            probe = cast(ValueProbe, self.method.credit.probe)
            probe.fit(features, collected.values.total[..., :-1], experience)
        drop_zeros = self.updates.drop_zero_advantages
        weights = transition_weights(credit, experience.decisions, drop_zeros)

        # Update: one optimizer step per mini-batch. Micro-batches are transitions of this process,
        # or (image, drawn time) rows; the weighted sum of their mean losses, over all processes, is
        # the mean over the mini-batch.
        clock.enter("update")
        if self.updates.learning_rate is not None:
            self.optimizer.param_groups[0]["lr"] = self.updates.learning_rate(self.done)
        loss, metrics, train_nfe = self.method.loss, LossMetrics(self.schedule.steps), 0
        batches, rows = self.loss_batches(sampler, collected, experience, credit, weights)
        first = collected.samples.start
        check = NonFiniteCheck(self.done + 1, prompts, experience, credit, batches, first)
        for minibatch, all_rows in self.minibatches(rows, collected):
            self.optimizer.zero_grad()
            with self.processes.shared_errors():
                batches.prepare(minibatch)
                train_nfe += all_rows.evaluations * batches.passes
                share = all_rows.evaluated / all_rows.total
                for number, micro in enumerate(minibatch, 1):
                    batch = batches.of(micro.sample, micro.column, micro.shared)
                    result = checked_loss(loss, batch)
                    steps = batches.evaluated_steps(micro)
                    metrics.add(micro.weight / len(rows), result, batch, steps, share)
                    if extra := extras(self.policy, "velocity_network"):
                        last = number == len(minibatch)
                        self.processes.sum_in_backward(extra.velocity_network, last)
                    self.scaler.scale(result.loss * micro.weight).backward()
                losses = metrics.take()
                check.losses(losses, minibatch)
            metrics.merge(self.processes.gather(losses))
            self.optimizer_step(minibatch, check, metrics)
        self.copies.after("iteration")
        clock.stop()

        self.done += 1
        mask, advantages = experience.decisions.mask, credit.advantages
        row = {
            "iteration": self.done,
            **reward_metrics(experience.values),
            **value_quality(experience.values),
            "invalid": int((~experience.valid).sum()),
            "trajectories": self.groups.samples,
            **vars(usage),
            "seconds": sum(clock.phases.values()),
            "phases": clock.phases,
            **metrics.means,
            "train_nfe": whole(train_nfe),
            "gradient_nfe": whole(sum(r.evaluations for r in rows) * batches.with_gradient),
            "zero_rows": sum(part.zeros for part in rows),
            "abs_advantage": float(advantages[mask].abs().mean()),
        }
        if experience.parts:
            tables = experience.parts.items()
            row["parts"] = {name: float(table[..., -1].nanmean()) for name, table in tables}
        if drop_zeros:
            row["dropped"] = int((mask.any(-1) & ~(weights > 0).any(-1)).sum())
        return Iteration(row, experience.only(self.recorded), credit, weights)

    @property
    def with_memory(self) -> Mapping[str, Stateful]:
        """The credit rule and its probe, if they have a memory, by the prefix of its tensors in a
        checkpoint.
        """
        rule = self.method.credit
        parts: dict[str, Any] = {"credit.": rule, "probe.": rule.probe}
        return {prefix: part for prefix, part in parts.items() if isinstance(part, Stateful)}

    def draw_sampler(self) -> AnySampler:
        """This iteration's sampler; a random or sliding window is drawn once for all groups."""
        method, steps = self.method, self.schedule.steps
        return windowed(method.sampler, method.window, steps, self.generator, self.done)

    def asked_columns(self, sampler: AnySampler) -> Tensor | None:
        """The columns of the value table that the rule reads [decision+1], Boolean; None for all of
        them.
        """
        if asks_for_all(self.updates.trained_steps, self.method):
            return None
        stds = transition_stds(sampler, self.schedule).cpu()
        drawn = (stds > 0).nonzero().flatten()
        return read_columns(self.method.credit, torch.isin(drawn, self.trained_steps(stds)))

    def experience(
        self,
        prompts: Sequence[Prompt],
        condition: Condition,
        sampler: AnySampler,
        collected: Collected,
    ) -> Experience:
        """The record of the iteration, in main memory, with the larger fields that the rule or
        `recorded` names.
        """
        path, values = collected.rollout.trajectories, collected.values
        total = predicted(self.method.credit.probe, values)
        forward = isinstance(self.method.loss, ForwardLoss)
        trained = None if forward else self.trained_steps(path.stds).tolist()
        decisions = Decisions.of(path.schedule, path.stds, path.tree, usable(values.valid), trained)
        experience = Experience(prompts, total, decisions, values.valid, values.parts)
        fields = {*needs_of(self.method.credit).fields, *self.recorded}
        larger: dict[str, Any] = {}
        if fields & {"trajectories", "log_probs"}:
            kept = collected.to_gather()

            def gathered(table: Tensor) -> Tensor:
                return torch.cat(self.processes.gather(table.cpu()))

            if "trajectories" in fields:
                states, outputs = gathered(kept.states), gathered(kept.outputs)
                larger["trajectories"] = replace(kept, states=states, outputs=outputs)
            if "log_probs" in fields:
                larger["log_probs"] = gathered(log_probs(sampler, kept))
        if "condition" in fields:
            # a copy: the policy may keep these tensors for later iterations
            tensors = condition.tensors.items()
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
            larger["condition"] = Condition(copied, condition.keys)
        return replace(experience, **larger)

    def trained_steps(self, stds: Tensor) -> Tensor:
        """The steps of this iteration's loss (`samplers.trained_steps`); random steps are drawn
        once for all groups.
        """
        return trained_steps(self.updates.trained_steps, stds, self.generator)

    def loss_batches(
        self,
        sampler: AnySampler,
        collected: Collected,
        experience: Experience,
        credit: Credit,
        weights: Tensor,
    ) -> tuple[LossBatches | ForwardBatches, list[Rows]]:
        """A maker of the loss's batches, and the rows of each mini-batch among all processes.

        Trajectories with a weight above 0 are split into mini-batches in random order, the same in
        every process; rows that belong together, such as those of a branched tree, in the order of
        their indices. Rows of advantage 0 are not evaluated if the loss declares that they have no
        gradient.
        """
        rollout, condition, loss = collected.rollout, collected.condition, self.method.loss
        # in main memory
        advantages, weights = credit.advantages.flatten(0, 1), weights.flatten(0, 1)
        samples, decisions = collected.samples, experience.decisions
        device, tree = self.policy.device, rollout.trajectories.tree
        on_device = advantages[samples].to(device), weights[samples].to(device)
        if isinstance(loss, ForwardLoss):
            times, seed = self.draw_times(loss)
            parts = self.draw_parts(weights)
            weights = weights.gather(1, credited(times.cpu(), decisions.time))
            rows = minibatch_rows(parts, weights, tree, loss.unit, share_states=False)
            copies, guidance = self.copies.by_name, self.updates.guidance
            batches = ForwardBatches(
                self.policy,
                loss,
                rollout,
                condition,
                *on_device,
                times[samples],
                decisions,
                seed,
                copies,
                guidance,
            )
        else:
            assert isinstance(sampler, Sampler), "log-probabilities need a kernel"
            parts = self.draw_parts(weights)
            check_one_advantage(loss, self.method.credit, credit.advantages, decisions.mask)
            rows = minibatch_rows(parts, weights, tree, loss.unit)
            if not loss.trains_zero_advantages:
                rows = [part.without_zeros(advantages) for part in rows if len(part)]
            given = (*on_device, sampler, experience.prompts)
            batches = LossBatches(self.policy, loss, rollout, condition, *given)
        batches.reference = self.reference
        return batches, [part for part in rows if len(part)]

    def draw_parts(self, weights: Tensor) -> Sequence[Tensor]:
        """The samples of each mini-batch: those with a weight above 0 [sample, decision], in random
        order.
        """
        order = self.draw_order().cpu()
        order = order[(weights > 0).any(1)[order]]
        return order.chunk(self.updates.minibatches) if len(order) else ()

    def draw_times(self, loss: ForwardLoss) -> tuple[Tensor, int]:
        """The times [sample, draw] of all samples of this iteration, and the seed of their
        noise.
        """
        generator = self.generator
        times = loss.times.draw(self.schedule, self.groups.samples, generator)
        return times, int(torch.randint(2**62, (), generator=generator, device=generator.device))

    def minibatches(
        self, rows: Sequence[Rows], collected: Collected
    ) -> Iterator[tuple[list[MicroBatch], Rows]]:
        """This process's micro-batches of each mini-batch, and the rows of all processes in it."""
        size = self.updates.micro_batch
        for part in rows:
            yield micro_batches(part, size, collected, self.processes), part

    def draw_order(self) -> Tensor:
        """This iteration's order of all samples, a random permutation."""
        device = self.policy.device
        return torch.randperm(self.groups.samples, generator=self.generator, device=device)

    def optimizer_step(
        self, minibatch: Sequence[MicroBatch], check: NonFiniteCheck, metrics: LossMetrics
    ) -> None:
        """Sum the gradients over the processes, clip, step and average; a step with overflowed
        float16 gradients is skipped.
        """
        parameters = [*self.parameters.values()]
        self.processes.all_reduce_gradients(parameters)
        norm = self.scaler.clip(self.optimizer, self.updates.max_grad_norm)
        scaled = self.scaler.is_enabled()
        if not scaled:
            check.gradient(norm, minibatch)
        taken = self.scaler.take(self.optimizer)
        if scaled:
            scale = self.scaler.get_scale()
            metrics.means |= {"loss_scale": scale, "skipped_steps": self.scaler.skipped}
        if taken:
            self.copies.after("update")
            metrics.means["grad_norm"] = norm
            update_average(self.average, parameters, self.updates.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        parameters = [*self.parameters.values()]
        with weights_replaced(self.policy, parameters, self.average, self.processes):
            yield
