"""Policy losses: pure functions of Gaussians, advantages and weights.

Every log-density and divergence is a mean over latent elements, every loss a weighted mean over
transitions.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Lt
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import softplus

from flowrl.core.errors import ConfigError
from flowrl.core.options import Count, NonNegative, Positive, checked_options
from flowrl.core.types import Gaussian, LossBatch, LossResult, PerSample, Unit
from flowrl.flow import kl, log_prob, log_prob_without_constants
from flowrl.losses.terms import beyond, mean_over, over_units, ratio_metrics, surrogate

Clip = Annotated[float, Gt(0), Lt(1)]


def counted(batch: LossBatch) -> LossBatch:
    """`batch` with weight 0 for deterministic transitions (behaviour std 0), too.

    Rows of weight 0 get std 0 and advantage 0, so their densities, divergences and policy terms are
    exactly 0, with zero gradients. Selecting the rows would make the host wait for the device in
    every micro-batch.
    """
    counts = (batch.weight > 0) & (batch.behaviour.std > 0)

    def only(gaussian: Gaussian, mean: Tensor) -> Gaussian:
        return Gaussian(mean, gaussian.std.detach().masked_fill(~counts, 0.0))

    reference = batch.reference
    return replace(
        batch,
        new=only(batch.new, batch.new.mean),
        behaviour=only(batch.behaviour, batch.behaviour.mean.detach()),
        reference=reference and only(reference, reference.mean.detach()),
        next_node=batch.next_node.detach(),
        advantages=batch.advantages.masked_fill(~counts, 0.0),
        weight=batch.weight.detach().masked_fill(~counts, 0.0),
        delta=batch.delta.masked_fill(~counts, 1.0),
    )


def log_ratio(rows: LossBatch) -> PerSample:
    """log pi(next_node) - log pi_old(next_node) of each row."""
    return log_prob(rows.new, rows.next_node) - log_prob(rows.behaviour, rows.next_node)


def linear_log_ratio(rows: LossBatch) -> PerSample:
    """The part of the log-ratio that is linear in the move of the mean: mean of eps (mu - mu_old) /
    std, with eps the noise that was drawn.
    """
    return log_ratio(rows) + kl(rows.new, rows.behaviour)


def velocity_distance(rows: LossBatch, loss: object) -> PerSample:
    """mean (v - v_ref)^2 of each row: its KL times 2 (std / slope)^2; 0 in rows that do not count.

    Raises `ConfigError`, which names the `loss`, if the batch has no reference or no slope.
    """
    if rows.reference is None or rows.slope is None:
        raise ConfigError(
            f"{type(loss).__name__} needs LossBatch.reference and LossBatch.slope for a distance"
            " of velocities; one is None"
        )
    slope = rows.slope.masked_fill(rows.behaviour.std == 0, 1.0)
    return 2.0 * kl(rows.new, rows.reference) * (rows.behaviour.std / slope).square()


@dataclass(frozen=True, kw_only=True)
class _Penalised:
    """What all policy losses share: the divergence from the base model, and the metrics."""

    _unit: ClassVar[Unit] = "transition"
    anchored: ClassVar[bool] = False
    """Whether another penalty than the divergence from the base model acts at advantage 0."""

    kl_weight: NonNegative = 0.0
    kl: Literal["exact", "without_delta", "velocity"] = "exact"

    @property
    def unit(self) -> Unit:
        """What a batch must contain whole."""
        return self._unit

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a penalty has a gradient at advantage 0."""
        return self.needs_reference or self.anchored

    def _combined(
        self, rows: LossBatch, ratio: Tensor, terms: Tensor, clipped: Bool[Tensor, " sample"]
    ) -> LossResult:
        """Weighted mean of the policy `terms` plus the divergence from the reference.

        `clipped`: rows at the border of the trust region; their fraction is a metric.
        """
        policy_loss = loss = mean_over(terms, rows.weight)
        metrics = {
            "policy_loss": policy_loss.detach(),
            **ratio_metrics(ratio, clipped, rows.weight),
            "approx_kl": mean_over(kl(rows.new, rows.behaviour), rows.weight).detach(),
        }
        if rows.reference is not None:
            if self.kl == "velocity":
                divergence = velocity_distance(rows, self)
            else:
                scale = rows.delta if self.kl == "without_delta" else 1.0
                divergence = kl(rows.new, rows.reference) * scale
            penalty = mean_over(divergence, rows.weight)
            metrics["kl"] = penalty.detach()
            loss = loss + self.kl_weight * penalty if self.kl_weight > 0 else loss
        elif self.kl_weight > 0:
            raise ConfigError(
                f"kl_weight = {self.kl_weight!r} needs LossBatch.reference, which is None"
            )
        return LossResult(loss=loss, metrics=metrics, policy_term=policy_loss)

    def _clipped(self, rows: LossBatch, ratio: Tensor, clip_range: float) -> LossResult:
        """The clipped surrogate of PPO with some ratio."""
        terms = surrogate(ratio, rows.advantages, clip_range)
        return self._combined(rows, ratio, terms, beyond(ratio, clip_range))


@checked_options
@dataclass(frozen=True)
class ClippedLoss(_Penalised):
    """GRPO's clipped loss.

    mean of max(-A ratio, -A clip(ratio, 1-c, 1+c)) + beta KL(new || reference), ratio = exp(logp -
    logp_old).

    Means are weighted and run over the stochastic transitions; if their weights are 0 the loss is
    exactly 0 with zero gradients. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has
    no reference.

    Metrics: policy_loss, ratio_mean, ratio_deviation and ratio_distance (max and mean |ratio - 1|),
    clip_fraction (|ratio - 1| > c), approx_kl (KL of new from behaviour), and kl if the batch has a
    reference. Source: Flow-GRPO (arXiv 2505.05470) and its public code.

    Args:
        clip_range: c in (0, 1); tiny (1e-4 in Flow-GRPO, 1e-5 in TP-GRPO) because logp is a *mean*
            over latent elements.
        kl_weight: beta, 0 or more.
        kl: "exact": the transition's KL per element, w^2 / 2 mean (v - v_ref)^2 with w = |d mu / d
            v| / std; "without_delta": this KL times Delta, as the public Flow-GRPO code computes
            it; "velocity": mean (v - v_ref)^2 without w, after UniGRPO (arXiv 2603.23500, abstract
            read). Early steps, whose noise is large, have small w: on SD3's grid of 10 steps with
            Flow-SDE a = 0.7 the velocities' distance weights the first step 680 times as much,
            relative to the last trained one, as the KL does. Equal mean strength over steps is
            beta_v = beta mean(w^2) / 2, there 0.19 beta.
        log_prob: "exact": the Gaussian log-density; "released_cps": without 1/(2 std^2) and
            constants, as in the public CPS code, which scales each step's log-ratio by 2 std^2.

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: Clip = 1e-4
    log_prob: Literal["exact", "released_cps"] = "exact"

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        density = log_prob if self.log_prob == "exact" else log_prob_without_constants
        difference = density(rows.new, rows.next_node) - density(rows.behaviour, rows.next_node)
        return self._clipped(rows, difference.exp(), self.clip_range)


@checked_options
@dataclass(frozen=True)
class GSPO(_Penalised):
    """Group sequence policy optimisation: GRPO's clipped loss with one ratio per trajectory.

    mean of max(-A s, -A clip(s, 1-c, 1+c)) + beta KL(new || reference), s = exp(mean over the
    trajectory of log ratio).

    s is the geometric mean of the ratios of the trajectory's transitions, with their weights, so
    all of a trajectory's transitions are clipped or none is. With `chunks`, the mean is over a
    chunk of consecutive steps (Chunk-GRPO). On policy the gradient is that of `ClippedLoss`. The
    noise of the mean of n log-ratios is about sqrt(n) times smaller than that of one, so the same
    clip is wider than for single transitions.

    Needs one advantage per trajectory: a rule that credits its steps differently is refused, unless
    `by_step`. Needs whole trajectories in a micro-batch, or two passes (see
    `protocols.PolicyLoss`).

    Metrics as in `ClippedLoss`, of s. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch
    has no reference. Source: GSPO (arXiv 2507.18071, equations 5 to 7; published for language
    models with ranges of 3e-4 below and 4e-4 above 1); Chunk-GRPO (arXiv 2510.21583), chunks of 2,
    3, 4 and 7 steps as others cite it.

    Args:
        clip_range: c in (0, 1).
        chunks: numbers of steps of the chunks, from step 0 on; further steps are one more chunk.
            Empty: the whole trajectory.
        by_step: every transition has its own advantage, with the gradient of its own log-ratio and
            the value s (GSPO-token, equation 13).
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    _unit: ClassVar[Unit] = "trajectory"

    clip_range: Clip = 1e-4
    chunks: tuple[Count, ...] = ()
    by_step: bool = False

    @property
    def one_advantage(self) -> bool:
        """Whether credit that differs between steps is refused."""
        return not self.by_step

    def pooled_units(self, batch: LossBatch) -> tuple[Tensor, ...]:
        """The numbers that identify the chunk of each row."""
        chunk = torch.zeros_like(batch.step)
        for end in accumulate(self.chunks):  # numbers, so that the host does not wait
            chunk = chunk + (batch.step >= end)
        return batch.sample, chunk

    @torch.no_grad()
    def row_terms(self, batch: LossBatch) -> PerSample:
        """The log-ratio of each transition; its mean over a trajectory is log s."""
        return log_ratio(counted(batch))

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = over_units(log_ratio(rows), rows, self).exp()
        return self._clipped(rows, ratio, self.clip_range)


@checked_options
@dataclass(frozen=True)
class RSM(_Penalised):
    """Reward score matching: the clip acts on the log-ratio, from one side.

    mean of max(c |A| - A log rho, 0) + beta KL(new || reference).

    The gradient is that of -A log rho until A log rho exceeds c |A|, so the loss is `ClippedLoss`
    to first order in log rho, without exp. With `fair` the clip acts on std^2 log rho, so that it
    allows every step an equal change of the mean, and the term of a step is divided by std Delta;
    on policy its gradient is then that of -A log rho times std / Delta.

    Metrics as in `ClippedLoss`; clip_fraction is the fraction of rows without gradient. `loss`
    raises `ConfigError` if `kl_weight` > 0 and the batch has no reference. Source: RSM (arXiv
    2604.17415) and its public code (commit e8be3df), losses matching and fair_clip2.

    Args:
        clip_range: c in (0, 1).
        fair: clip std^2 log rho.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: Clip = 1e-4
    fair: bool = False

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        difference = log_ratio(rows)
        std = rows.behaviour.std
        scaled = std.square() * difference if self.fair else difference
        room = self.clip_range * rows.advantages.abs() - rows.advantages * scaled
        terms = room.clamp(min=0.0)
        if self.fair:
            terms = terms / (std * rows.delta).masked_fill(std == 0, 1.0)
        return self._combined(rows, difference.exp(), terms, room.detach() < 0)


@checked_options
@dataclass(frozen=True)
class StepNFT(_Penalised):
    """DiffusionNFT's preference between two branches, on the visited transitions.

    mean of softplus((scale / 2) y (E+ - E-)) - log 2 + beta KL(new || reference), y = A / 5.

    E+- = mean((mu+- - x_next)^2) / (std^2 + 1e-4) is the error of the branch mu+- = mu_old +- step
    (mu - mu_old). The squares cancel in E+ - E- = -4 step mean((mu - mu_old) eps) std / (std^2 +
    1e-4), with eps the noise that was drawn. The first gradient is therefore the policy gradient of
    y, times step scale std^2 / (std^2 + 1e-4); afterwards the sigmoid limits it, and nothing else
    does. Advantages need not be equal for all steps.

    Metrics as in `ClippedLoss`, with clip_fraction 0. `loss` raises `ConfigError` if `kl_weight` >
    0 and the batch has no reference. Source: pi-StepNFT (arXiv 2603.02083) and RLinf's code (commit
    a3816b5), where y = 2 r - 1 is a success of a robot; y = A / 5 is DiffusionNFT's.

    Args:
        step: distance of the branches from mu_old, in units of mu - mu_old, above 0.
        scale: factor of the preference's logit, above 0.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    step: Positive = 1.0
    scale: Positive = 1.0

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        variance = rows.behaviour.std.square()
        margin = -4.0 * self.step * variance / (variance + 1e-4) * linear_log_ratio(rows)
        logit = self.scale / 2.0 * rows.advantages / 5.0 * margin
        ratio = log_ratio(rows).exp()
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return self._combined(rows, ratio, softplus(logit) - math.log(2.0), never)


@checked_options
@dataclass(frozen=True)
class Distillation(_Penalised):
    """On-policy distillation: the divergence from a teacher on the student's own states, without
    rewards.

    mean of KL(new || teacher), the teacher being the run's reference (`--reference`).

    Every step has its exact target: this is credit per step without an estimate. The KL of a
    Flow-SDE step weights the squared difference of velocities by the sampler, most at the last
    steps; `equal` gives all steps the same weight in velocities. Gradients do not flow through
    sampling.

    Metrics as in `ClippedLoss`, with clip_fraction 0; kl is the loss. `loss` raises `ConfigError`
    if the batch has no reference. Source: DiffusionOPD (arXiv 2605.15055), whose public copies
    divide by sigma^2 without Delta for Flow-SDE.

    Args:
        equal: multiply each step's KL by (std / slope)^2, slope = |d mean / d velocity|: half the
            mean squared difference of the velocities.

    Raises:
        ConfigError: a field is out of range.
    """

    anchored: ClassVar[bool] = True

    equal: bool = False

    @property
    def needs_reference(self) -> bool:
        """Always: it is the teacher."""
        return True

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        if rows.reference is None:
            raise ConfigError("Distillation needs LossBatch.reference, which is None")
        divergence = kl(rows.new, rows.reference)
        if self.equal:
            divergence = velocity_distance(rows, self) / 2.0
        never = torch.zeros_like(divergence, dtype=torch.bool)
        return self._combined(rows, log_ratio(rows).exp(), divergence, never)


@checked_options
@dataclass(frozen=True)
class GRPOGuard(_Penalised):
    """Clipped loss with a normalised ratio and equally weighted steps.

    log ratio = std (logp - logp_old + |mu - mu_old|^2 / (2 std^2)), means over latent elements,
    with the transition's std. The added term cancels the negative mean of the plain log-ratio, and
    the factor std equalises its spread over the steps. Each clipped term max(-A ratio, -A
    clip(ratio, 1-c, 1+c)) is divided by its step length Delta. On policy the gradient is therefore
    the policy gradient with step weights std / Delta. The KL to the reference is not divided by
    Delta.

    Metrics as in `ClippedLoss`, of the normalised ratio; policy_loss includes the division by
    Delta. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has no reference. Source:
    GRPO-Guard (arXiv 2510.22319).

    Args:
        clip_range: c in (0, 1).
        kl_weight: weight of the KL to the reference, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    clip_range: Clip = 1e-4

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = (rows.behaviour.std * linear_log_ratio(rows)).exp()
        terms = surrogate(ratio, rows.advantages, self.clip_range) / rows.delta
        return self._combined(rows, ratio, terms, beyond(ratio, self.clip_range))


@checked_options
@dataclass(frozen=True)
class FlowDPPO(_Penalised):
    """GRPO's loss without transitions that have moved too far.

    mean of -A ratio + beta KL(new || reference), without transitions that are too far and would
    move further away.

    A transition is dropped (no loss, no gradient; it still counts in the mean) if its KL(behaviour
    || new), a mean over latent elements, exceeds `bound` and the update would move away from the
    behaviour policy: A > 0 and ratio > 1, or A < 0 and ratio < 1. The KL of two Gaussians of equal
    std is exact; the ratio of a single sample has sampling noise.

    The default bound is that of the authors' code (kl_mask_threshold, also a mean over elements,
    for SD3.5-Medium at 512 pixels). At a KL of K, the log-ratio of one sample of d elements has a
    standard deviation of sqrt(2 K / d), so a clip c corresponds to K = c^2 d / 2. That is 3e-4 both
    for c = 1e-4 at SD3.5's latents (d = 65,536) and for c = 2e-3 in the built-in image world (d =
    128). The published bound is tighter than both; small worlds may need `bound` = 3e-4.

    Metrics as in `ClippedLoss`; clip_fraction is the fraction of dropped rows. `loss` raises
    `ConfigError` if `kl_weight` > 0 and the batch has no reference. Source: Flow-DPPO (arXiv
    2606.11025, equations 14 and 18) and its public code.

    Args:
        bound: largest KL per latent element, above 0.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    bound: Positive = 1e-5

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = log_ratio(rows).exp()
        far = kl(rows.behaviour, rows.new).detach() > self.bound
        dropped = far & (rows.advantages * (ratio.detach() - 1.0) > 0)
        terms = torch.where(dropped, 0.0, -rows.advantages * ratio)
        return self._combined(rows, ratio, terms, dropped)


@checked_options
@dataclass(frozen=True)
class KLPenalty(_Penalised):
    """The policy gradient's surrogate with a penalty on the distance from the behaviour policy, and
    no clip.

    mean of -A ratio + coefficient KL(new || behaviour) + beta KL(new || reference), ratio =
    exp(logp - logp_old).

    The KL of two Gaussians of equal std is exact and symmetric, so this is PPO's KL(old || new). It
    pulls back every transition, also those of advantage 0; at the first update of an iteration it
    is 0 with gradient 0. Alone, a transition of advantage A moves its mean by A / `coefficient`
    standard deviations per element, at any resolution.

    Metrics as in `ClippedLoss`, with clip_fraction 0; approx_kl is the penalty without its
    coefficient. `loss` raises `ConfigError` if `kl_weight` > 0 and the batch has no reference.
    Source: PPO (arXiv 1707.06347, equation 8, fixed beta).

    Args:
        coefficient: weight of the divergence from the behaviour policy, above 0.
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    anchored: ClassVar[bool] = True

    coefficient: Positive = 1.0

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        ratio = log_ratio(rows).exp()
        never = torch.zeros_like(ratio, dtype=torch.bool)
        result = self._combined(rows, ratio, -rows.advantages * ratio, never)
        divergence = mean_over(kl(rows.new, rows.behaviour), rows.weight)
        return replace(result, loss=result.loss + self.coefficient * divergence)


@checked_options
@dataclass(frozen=True)
class PolicyGradientLoss(_Penalised):
    """The plain policy gradient: no ratio, no clip.

    mean of -A log pi(x_next) + beta KL(new || reference).

    Unbiased on policy only, that is for one mini-batch per iteration (`minibatches` = 1). Further
    updates on the same trajectories are biased, and no term limits the distance from the behaviour
    policy. On policy its gradient equals that of `ClippedLoss`.

    Metrics as in `ClippedLoss`, with clip_fraction 0. `loss` raises `ConfigError` if `kl_weight` >
    0 and the batch has no reference. Source: REINFORCE (Williams 1992) on the denoising process, as
    DDPO-SF (arXiv 2305.13301).

    Args:
        kl_weight: beta, 0 or more.
        kl: form of the divergence from the reference (see `ClippedLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    def loss(self, batch: LossBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted(batch)
        density = log_prob(rows.new, rows.next_node)
        ratio = (density.detach() - log_prob(rows.behaviour, rows.next_node)).exp()
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return self._combined(rows, ratio, -rows.advantages * density, never)
