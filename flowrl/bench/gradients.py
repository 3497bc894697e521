"""Comparison of a credit rule's policy gradient with the gradient of the expected reward.

The truth is the pathwise gradient: with the noise of every step held fixed, the finished sample is
a differentiable function of the weights, so grad E[R] = E[grad R]. It needs a reward that is
differentiable in the image, such as the 2-D world's. No policy gradient can estimate the part
through deterministic steps, which can be left out.

The estimate is the policy gradient sum_i A_i grad log pi(z_{i+1} | z_i) per trajectory. log pi is a
mean over the d latent elements and the loss a mean over K decisions here, so gradients of the loss
are multiplied by -K d.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import CreditError, FlowrlError, require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.protocols import (
    CreditAssigner,
    FlowPolicy,
    ForwardLoss,
    PolicyLoss,
    RewardModel,
)
from flowrl.core.types import Prompt, Schedule
from flowrl.credit import credit_of, generalised_gains
from flowrl.flow import expand
from flowrl.losses import PolicyGradientLoss
from flowrl.probes import NoProbe, Probe
from flowrl.rollout import (
    ForwardObjective,
    Groups,
    Rollout,
    Rows,
    TransitionObjective,
    Usage,
    log_probs,
    rollout,
    score_rollout,
    transition_weights,
)
from flowrl.samplers import transition_stds
from flowrl.weights import Copies


@dataclass(frozen=True)
class Setting:
    """The quantities that determine the expected reward: a policy with its stochastic sampler and
    time grid, a reward, and prompts.
    """

    policy: FlowPolicy
    sampler: Any  # a Sampler for gradients, or a MultistepSolver
    schedule: Schedule
    reward: RewardModel
    prompts: Sequence[Prompt]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters in order."""
        return list(self.policy.trainable().values())

    @property
    def stds(self) -> Tensor:
        """Standard deviations of the sampler's transitions [step]."""
        return transition_stds(self.sampler, self.schedule)

    def rollout(
        self,
        groups: Groups,
        generator: torch.Generator,
        probe: Probe,
        usage: Usage | None = None,
        max_batch: int = 1024,
    ) -> Rollout:
        """Stochastic trajectories of all prompts, with states scored by `probe`; the trajectories
        do not depend on it.
        """
        condition, noise = (
            self.policy.encode(self.prompts),
            groups.noise(self.policy.latent_shape, generator),
        )
        return rollout(
            self.policy,
            self.sampler,
            self.schedule,
            condition,
            noise,
            generator,
            groups,
            probe,
            usage,
            max_batch,
        )

    def experience(
        self, result: Rollout, usage: Usage | None = None, reward: RewardModel | None = None
    ) -> Experience:
        """The record of a rollout with all of its fields, scored by `reward` instead of the
        setting's reward if it is given.
        """
        path = result.trajectories
        scored = score_rollout(self.policy, reward or self.reward, result, self.prompts, usage)
        logs, condition = log_probs(self.sampler, path), self.policy.encode(self.prompts)
        return replace(scored, trajectories=path, log_probs=logs, condition=condition)


@dataclass(frozen=True)
class RawCredit:
    """Credit without normalisation, for which theory makes exact statements.

    `lam` None: A_k = R; else A_k = sum_j lam^j g_{k+j}. With `baseline` the mean of the group's
    *other* members is subtracted. It does not depend on the member's own noise, so it adds no bias;
    GRPO's group mean, which includes the member, scales the gradient by (G - 1) / G. Unbiased: R,
    and R - V_k (`lam` = 1) with V_k a function of the state from which decision k starts. The gain
    alone (`lam` = 0) is the gradient of a decision's contribution to the estimate, not of R.
    """

    lam: float | None = None
    probe: Probe = NoProbe()
    baseline: bool = True

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        final = values[..., -1:].expand(-1, -1, len(decisions))
        credit = final if self.lam is None else generalised_gains(values, self.lam)
        others = (credit.sum(1, keepdim=True) - credit) / max(1, credit.shape[1] - 1)
        return credit - others if self.baseline else credit


def assigned(rule: CreditAssigner, experience: Experience) -> Credit:
    """The rule's credit. Raises `CreditError` if it fails or breaks its contract."""
    try:
        return credit_of(rule, experience)
    except FlowrlError:
        raise
    except Exception as error:
        call, shape = f"{type(rule).__name__}.assign", tuple(experience.values.shape)
        failure = f"{call} failed on values of shape {shape}"
        raise CreditError(f"{failure}: {type(error).__name__}: {error}") from error


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all entries."""
    return torch.cat([t.detach().flatten() for t in tensors])


def sampled_rewards(
    setting: Setting, repeats: int, generator: torch.Generator, decisions_only: bool = False
) -> Tensor:
    """R of `repeats` stochastic trajectories per prompt [sample], differentiable in the weights
    (noise held fixed).

    With `decisions_only` the weights are constants in deterministic steps; the trajectory still
    runs through them.
    """
    prompts = [prompt for prompt in setting.prompts for _ in range(repeats)]
    condition = setting.policy.encode(prompts)
    x = torch.randn((len(prompts), *setting.policy.latent_shape), generator=generator)
    schedule, stochastic = setting.schedule, (setting.stds > 0).tolist()
    learning = torch.is_grad_enabled()
    for i in range(schedule.steps):
        for parameter in setting.parameters:
            parameter.requires_grad_(learning and (stochastic[i] or not decisions_only))
        velocity = setting.policy.velocity(
            x, schedule.network_timesteps[i].expand(len(x)), condition
        )
        transition = setting.sampler.transition(x, velocity, schedule, torch.full((len(x),), i))
        noise = torch.randn(x.shape, generator=generator)
        x = transition.mean + expand(transition.std, x) * noise
    for parameter in setting.parameters:
        parameter.requires_grad_(True)
    return setting.reward.score(setting.policy.decode(x), prompts)


def pathwise_gradients(
    setting: Setting, batches: int, repeats: int, seed: int = 0, decisions_only: bool = False
) -> Tensor:
    """grad of the mean reward over `repeats` trajectories per prompt, [batch, parameter]; its mean
    is grad E[R].

    A policy gradient uses log-probabilities only, so it does not contain the effect of the weights
    in deterministic steps (the last step, steps outside a window). `decisions_only` leaves that
    part out: the mean is then what a policy gradient estimates.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batches):
        mean = sampled_rewards(setting, repeats, generator, decisions_only).mean()
        rows.append(flat(torch.autograd.grad(mean, setting.parameters)))
    return torch.stack(rows)


def policy_gradients(
    setting: Setting,
    rule: CreditAssigner,
    batches: int,
    members: int,
    shared_noise: bool = False,
    seed: int = 0,
    loss: PolicyLoss = PolicyGradientLoss(),
    usage: Usage | None = None,
    reward: RewardModel | None = None,
) -> Tensor:
    """The estimate of each of `batches` iterations (all prompts, `members` each), on policy,
    [batch, parameter].

    `usage` counts the cost of rollouts and probes without the update (see `update_evaluations`).
    `reward` replaces the setting's reward for the rule. Raises `CreditError` if the rule breaks its
    contract.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = Groups(len(setting.prompts), members, shared_noise)
    elements = math.prod(setting.policy.latent_shape)
    count = int((setting.stds > 0).sum())
    sample, column = torch.cartesian_prod(torch.arange(groups.samples), torch.arange(count)).unbind(
        1
    )
    rows, every = [], Rows.of(sample, column)
    for _ in range(batches):
        result, record = _rolled(setting, rule, groups, generator, usage, reward)
        tables = credit_tables(rule, record)
        objective = TransitionObjective(
            setting.policy, loss, result, record.decisions, *tables, setting.sampler
        )
        value = loss.loss(objective.batch(every)).loss
        rows.append(-flat(torch.autograd.grad(value, setting.parameters)) * count * elements)
    return torch.stack(rows)


def forward_gradients(
    setting: Setting,
    rule: CreditAssigner,
    loss: ForwardLoss,
    batches: int,
    members: int,
    seed: int = 0,
    usage: Usage | None = None,
) -> Tensor:
    """Minus the gradient of a forward-process loss in each of `batches` iterations, as
    `policy_gradients`, [batch, parameter].

    On policy: the loss's copies of the weights are the current ones, as in the first update.
    `usage` counts the rollouts. The mean is not the gradient of E[R], but of a surrogate;
    `alignment` measures how close they are, up to a factor.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = Groups(len(setting.prompts), members)
    copies = Copies(loss.copies, setting.policy, dict(setting.policy.trainable())).by_name
    draws, rows = loss.times.draws(setting.schedule), []
    sample, draw = torch.cartesian_prod(torch.arange(groups.samples), torch.arange(draws)).unbind(1)
    for _ in range(batches):
        result, record = _rolled(setting, rule, groups, generator, usage)
        objective = ForwardObjective(
            setting.policy,
            loss,
            result,
            record.decisions,
            *credit_tables(rule, record),
            setting.sampler,
            setting.schedule,
            generator,
            copies=copies,
        )
        value = loss.loss(objective.batch(Rows.of(sample, draw))).loss
        rows.append(-flat(torch.autograd.grad(value, setting.parameters)))
    return torch.stack(rows)


def _rolled(
    setting: Setting,
    rule: CreditAssigner,
    groups: Groups,
    generator: torch.Generator,
    usage: Usage | None,
    reward: RewardModel | None = None,
) -> tuple[Rollout, Experience]:
    """A rollout of all prompts with the rule's probe, and its record."""
    result = setting.rollout(groups, generator, rule.probe, usage)
    return result, setting.experience(result, reward=reward)


def credit_tables(rule: CreditAssigner, record: Experience) -> tuple[Tensor, Tensor]:
    """A rule's advantages and the weights of the transitions [prompt, member, decision]."""
    credit = assigned(rule, record)
    return credit.advantages, transition_weights(credit, record.decisions)


def update_evaluations(setting: Setting, members: int) -> int:
    """Network evaluations of one policy update on prompts x `members` trajectories without a
    reference: one per trajectory and decision; what the trainer counts as `train_nfe`.
    """
    return len(setting.prompts) * members * int((setting.stds > 0).sum())


@dataclass(frozen=True)
class Alignment:
    """How close a rule's mean gradient is to the truth, with 95% intervals by jackknife over
    batches.

    `cosine`: of the angle between them, with the noise of the estimate removed from its length.
    `scale`: <g, truth> / |truth|^2, the factor by which the rule stretches the true gradient.
    `signal_to_noise`: |E g| over the rms deviation of one batch's gradient (0 where all are 0).
    """

    cosine: float
    cosine_interval: tuple[float, float]
    scale: float
    scale_interval: tuple[float, float]
    signal_to_noise: float
    batches: int


def _squared_norm(batches: Tensor) -> Tensor:
    """|E g|^2 without bias: the mean of inner products of different batches."""
    count = len(batches)
    mean = batches.mean(0)
    return (count**2 * mean.square().sum() - batches.square().sum()) / (count * (count - 1))


def _statistics(estimates: Tensor, truth: Tensor, truth_squared: float) -> tuple[float, float]:
    """(cosine, scale) of the mean estimate to the truth."""
    inner = float(estimates.mean(0) @ truth)
    squared = float(_squared_norm(estimates))
    return inner / math.sqrt(max(squared, 1e-30) * truth_squared), inner / truth_squared


def alignment(estimates: Tensor, truths: Tensor) -> Alignment:
    """Compare estimates [batch, parameter] with independent `pathwise_gradients` [batch,
    parameter].

    Raises `ConfigError` for fewer than 3 estimates (the jackknife leaves one out, and a length
    without noise takes two) or fewer than 2 truths.
    """
    require(
        len(estimates) >= 3,
        "alignment: batches",
        len(estimates),
        "3 or more: the jackknife leaves one out",
    )
    require(
        len(truths) >= 2,
        "alignment: batches of the truth",
        len(truths),
        "2 or more: a length without noise takes two",
    )
    estimates, truth, truth_squared = (
        estimates.double(),
        truths.double().mean(0),
        float(_squared_norm(truths.double())),
    )
    cosine, scale = _statistics(estimates, truth, truth_squared)
    count = len(estimates)
    left_out = [
        _statistics(torch.cat([estimates[:i], estimates[i + 1 :]]), truth, truth_squared)
        for i in range(count)
    ]
    intervals = []
    for value, column in zip((cosine, scale), zip(*left_out, strict=True), strict=True):
        spread = torch.tensor(column, dtype=torch.float64)
        error = math.sqrt((count - 1) / count * float((spread - spread.mean()).square().sum()))
        intervals.append((value - 1.96 * error, value + 1.96 * error))
    noise = float((estimates - estimates.mean(0)).square().sum(1).mean().sqrt())
    signal = math.sqrt(max(float(_squared_norm(estimates)), 0.0)) / noise if noise > 0 else 0.0
    return Alignment(cosine, intervals[0], scale, intervals[1], signal, count)
