"""The trainer: one iteration, from prompts to a weight update, readable from top to bottom.

prompts -> trajectories + estimates -> values [prompt, member, decision+1] -> advantages and weights
[prompt, member, decision] -> update
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from flowrl.core.experience import Credit, Experience, needs_of
from flowrl.core.forward import Guidance
from flowrl.core.processes import Processes
from flowrl.core.protocols import AnyReward, AnySampler, FlowPolicy, Stateful, extras
from flowrl.core.types import Condition, Prompt, whole
from flowrl.credit import credit_of, read_columns, value_quality
from flowrl.methods import Method, check_one_advantage
from flowrl.nonfinite import NonFiniteCheck
from flowrl.probes import NoProbe, ValueProbe
from flowrl.rollout import (
    Groups,
    Objective,
    Rollout,
    Rows,
    Usage,
    log_probs,
    predicted,
    transition_weights,
)
from flowrl.rollout.groups import PromptStream
from flowrl.rollout.metrics import (
    Clock,
    LossMetrics,
    credit_metrics,
    reward_metrics,
    source_metrics,
)
from flowrl.rollout.rollout import Collector
from flowrl.rollout.values import OnImages, require_usable
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
    every = isinstance(chosen, RandomSteps) or method.objective.draws_times
    return every or needs_of(method.credit).columns is None


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
        method: sampler, credit rule and loss, whose clip is used as it is (see
            `Method.for_elements`).
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
        recorded: the larger fields (`flowrl.core.experience.LARGER`) of the record that
            `iteration` returns, as in ``("log_probs",)``; what the rule reads is not kept
            otherwise.
        on_phase: called with the name of each phase when it begins.
        on_images: called with the finished images of this process, their latents, prompts and
            scores, batch by batch; with `overlap` in another thread.
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
        on_images: OnImages | None = None,
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
        self.objective_type = method.objective
        self.copies = Copies(getattr(method.loss, "copies", {}), policy, self.parameters, processes)
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
            on_images,
        )
        self.done = 0

    def iteration(self) -> Iteration:
        """One pass from prompts to updated weights; returns its metrics and its record."""
        with self.at_size():
            return self._iteration()

    @contextmanager
    def at_size(self) -> Iterator[None]:
        """Within this context samples have the size of this iteration, which is the next of the
        policy's `sizes`; their time grid depends on it.
        """
        sizes, kept = getattr(self.policy, "sizes", ()), self.schedule
        if len(sizes) < 2:
            yield
            return
        try:
            with extras(self.policy, "at_size").at_size(*sizes[self.done % len(sizes)]):
                self.schedule = self.collector.schedule = self.policy.schedule(kept.steps)
                yield
        finally:
            self.schedule = self.collector.schedule = kept

    def _iteration(self) -> Iteration:
        """An iteration with samples of the policy's size."""
        usage, clock = Usage(), Clock(self.on_phase, "rollout")

        # Rollout: this process's trajectories [sample, node, *latent], values of all groups
        # [prompt, member, decision+1].
        prompts = self.prompts.take(self.groups.prompts)
        condition = self.policy.encode(prompts)
        noise = self.groups.noise(self.policy.latent_shape, self.generator)
        sampler = self.draw_sampler()
        columns = self.asked_columns(sampler)
        with self.copies.sampling():
            rollout, scored = self.collector.collect(
                prompts, condition, noise, sampler, self.generator, usage, clock.enter, columns
            )

        # Credit: advantages and weights [prompt, member, decision]. A sample that the reward marked
        # invalid, or that has no valid sample to be compared with, is not in `decisions.mask` and
        # has weight 0.
        experience = self.experience(scored, rollout, condition, sampler)
        credit = credit_of(self.method.credit, experience)
        if scored.features is not None:
            probe = cast(ValueProbe, self.method.credit.probe)
            probe.fit(scored.features, scored.values[..., :-1], experience)
        drop_zeros = self.updates.drop_zero_advantages
        weights = transition_weights(credit, experience.decisions, drop_zeros)

        # Update: one optimizer step per mini-batch.
        clock.enter("update")
        objective = self.objective(sampler, rollout, experience, credit, weights)
        check = NonFiniteCheck(self.done + 1, experience, credit, objective)
        updated = self.update(objective, check)
        self.copies.after("iteration")
        clock.stop()

        self.done += 1
        row = {
            "iteration": self.done,
            **self.value_metrics(experience),
            "invalid": int((~experience.valid).sum()),
            "trajectories": self.groups.samples,
            **vars(usage),
            "seconds": sum(clock.phases.values()),
            "phases": clock.phases,
            **updated,
            **credit_metrics(experience, credit),
            **source_metrics(experience),
        }
        if drop_zeros:
            row["dropped"] = int((experience.decisions.mask.any(-1) & ~(weights > 0).any(-1)).sum())
        return Iteration(row, experience.only(self.recorded), credit, weights)

    def update(self, objective: Objective, check: NonFiniteCheck) -> dict[str, Any]:
        """Minimise the objective by one optimizer step per mini-batch; returns metrics and costs.

        Rows are transitions, or images at drawn times. The weighted sum of the mean losses of
        micro-batches, over all processes, is the mean over the mini-batch.
        """
        updates, metrics, train_nfe = self.updates, LossMetrics(self.schedule.steps), 0
        if updates.learning_rate is not None:
            self.optimizer.param_groups[0]["lr"] = updates.learning_rate(self.done)
        minibatches = objective.minibatches(self.draw_order(), updates.minibatches)
        sharded = self.processes.sharded
        for rows in minibatches:
            self.optimizer.zero_grad()
            micro_batches = objective.micro_batches(rows, updates.micro_batch, self.processes)
            with self.processes.shared_errors():
                objective.prepare(micro_batches)
                train_nfe += rows.evaluations * objective.passes
                share = rows.evaluated / rows.total
                for number, micro in enumerate(micro_batches, 1):
                    batch = objective.batch(micro)
                    result = objective.result(batch)
                    steps = objective.evaluated_steps(micro)
                    metrics.add(micro.share / len(minibatches), result, batch, steps, share)
                    if (network := getattr(self.policy, "velocity_network", None)) is not None:
                        self.processes.sum_in_backward(network, number == len(micro_batches))
                    self.scaler.scale(result.loss * micro.share).backward()
                    if metrics.merged == 0 and number == 1 < len(micro_batches) and not sharded:
                        scale = self.scaler.scale(torch.ones((), device=self.policy.device))
                        metrics.add_part(self.parameters.values(), micro.share / share, scale)
                losses = metrics.take()
                if not all(math.isfinite(row["loss"]) for row in losses):
                    check.losses(losses, micro_batches)
            metrics.merge(self.processes.gather(losses))
            self.optimizer_step(micro_batches, check, metrics)
        evaluations = sum(rows.evaluations for rows in minibatches)
        return {
            **metrics.means,
            "train_nfe": whole(train_nfe),
            "gradient_nfe": whole(evaluations * objective.with_gradient),
            "zero_rows": sum(rows.zeros for rows in minibatches),
        }

    def value_metrics(self, experience: Experience) -> dict[str, Any]:
        """Statistics of the rewards, and of the values of unfinished states if there are any."""
        row = reward_metrics(experience.values)
        if isinstance(self.method.credit.probe, NoProbe):
            return row
        return {**row, **value_quality(experience.values)}

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
        self, scored: Experience, rollout: Rollout, condition: Condition, sampler: AnySampler
    ) -> Experience:
        """The record of the iteration, in main memory, with the trained decisions, the predictions
        of a `ValueProbe`, and the larger fields that the rule or `recorded` names.
        """
        require_usable(scored.valid)
        values, decisions = predicted(self.method.credit.probe, scored), scored.decisions
        if not self.objective_type.draws_times:
            decisions = decisions.training(self.trained_steps(rollout.trajectories.stds).tolist())
        experience = replace(scored, values=values, decisions=decisions, features=None)
        fields = {*needs_of(self.method.credit).fields, *self.recorded}
        larger: dict[str, Any] = {}
        if fields & {"trajectories", "log_probs"}:
            groups = rollout.groups  # those of this process alone, without repeated ones
            own = self.processes.assign(groups.all).own
            kept = rollout.part(own.start - groups.first, len(own)).trajectories

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

    def objective(
        self,
        sampler: AnySampler,
        rollout: Rollout,
        experience: Experience,
        credit: Credit,
        weights: Tensor,
    ) -> Objective:
        """The loss with the rows of this iteration."""
        if getattr(self.method.loss, "one_advantage", False):
            rule, mask = self.method.credit, experience.decisions.mask
            check_one_advantage(self.method.loss, rule, credit.advantages, mask)
        return self.objective_type(
            self.policy,
            self.method.loss,
            rollout,
            experience.decisions,
            credit.advantages,
            weights,
            sampler,
            self.schedule,
            self.generator,
            experience.prompts,
            self.reference,
            self.copies.by_name,
            self.updates.guidance,
            self.reward,
        )

    def draw_order(self) -> Tensor:
        """This iteration's order of all samples, a random permutation."""
        device = self.policy.device
        return torch.randperm(self.groups.samples, generator=self.generator, device=device)

    def optimizer_step(
        self, minibatch: Sequence[Rows], check: NonFiniteCheck, metrics: LossMetrics
    ) -> None:
        """Sum the gradients over the processes, clip, step and average; a step with overflowed
        float16 gradients is skipped.
        """
        parameters = [*self.parameters.values()]
        self.processes.all_reduce_gradients(parameters)
        norm = self.scaler.clip(self.optimizer, self.updates.max_grad_norm)
        scaled = self.scaler.is_enabled()
        if not scaled and not math.isfinite(norm):
            check.gradient(norm, minibatch)
        taken = self.scaler.take(self.optimizer)
        if scaled:
            scale = self.scaler.get_scale()
            metrics.means |= {"loss_scale": scale, "skipped_steps": self.scaler.skipped}
        if taken:
            self.copies.after("update")
            metrics.add_norm(norm)
            update_average(self.average, parameters, self.updates.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the policy has its averaged (EMA) weights."""
        parameters = [*self.parameters.values()]
        with weights_replaced(self.policy, parameters, self.average, self.processes):
            yield
