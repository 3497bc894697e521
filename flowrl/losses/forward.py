"""Forward-process losses: pure functions of velocities at noised finished images, advantages and
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowrl.core.checks import checked
from flowrl.core.errors import ConfigError, require
from flowrl.core.forward import Decay, ForwardBatch, Noise, WeightCopy
from flowrl.core.options import NonNegative, Positive, Share, checked_options
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import Latents, LossResult, PerSample, Unit, unit_means
from flowrl.flow import DrawnSteps, LateSteps, PermutedTimes, StratifiedTimes, expand
from flowrl.losses.terms import (
    beyond,
    mean_over,
    over_units,
    quadratic,
    ratio_metrics,
    surrogate,
)
from flowrl.probes import LatentReward

VELOCITIES = ("new", "target", "old", "average", "reference")
LEAST_WEIGHT = 1e-5
"""Smallest weight w of an error in DiffusionNFT."""
PENALTIES = {"reference": "kl", "average": "average_kl"}
"""Metrics of the distances from other networks, by the network's name."""


def counted_rows(batch: ForwardBatch) -> ForwardBatch:
    """`batch` with advantage 0, time 1 and velocities 0 in rows of weight 0, so that their terms
    and gradients are 0 or constant.

    Selecting the other rows would make the host wait for the device.
    """
    counts = batch.weight > 0
    zeroed = {}
    for name in VELOCITIES:
        value = getattr(batch, name)
        if value is not None:
            kept = value if name == "new" else value.detach()
            zeroed[name] = torch.where(expand(counts, value), kept, 0.0)
    return replace(
        batch,
        advantages=batch.advantages.detach().masked_fill(~counts, 0.0),
        time=batch.time.detach().masked_fill(~counts, 1.0),
        weight=batch.weight.detach(),
        **zeroed,
    )


@checked
def matching(velocity: Latents, target: Latents) -> PerSample:
    """l = mean over latent elements of (v - v*)^2, shape [sample]."""
    return (velocity - target).square().flatten(1).mean(1)


@checked
def normalised_error(velocity: Latents, target: Latents, time: PerSample) -> PerSample:
    """Mean squared error t^2 l of the clean estimate, divided by its detached mean absolute value w
    = t mean |v - v*|, at least 1e-5; shape [sample].
    """
    distance = (velocity - target).detach().abs().flatten(1).mean(1)
    error = time.square() * matching(velocity, target)
    return error / (time * distance).clamp(min=LEAST_WEIGHT)


@checked
def elbo_weight(time: PerSample) -> PerSample:
    """1 / (2 sigma^2) with Flow-SDE's sigma^2 = 0.49 t / (1 - min(t, 0.99)).

    Turns the squared distance of two velocities into the divergence of the transitions per unit of
    time. Source: AWM's code (arXiv 2509.25050), kl_weight ELBO.
    """
    return (1.0 - time.clamp(max=0.99)) / (2.0 * 0.49 * time)


@checked
def combined(
    loss: object,
    rows: ForwardBatch,
    policy_terms: PerSample,
    penalties: Mapping[Any, float],
    metrics: Mapping[str, Tensor],
    scale: PerSample | float = 1.0,
    new: Latents | None = None,
) -> LossResult:
    """Mean of `policy_terms` plus weighted mean distances from other networks.

    `penalties`: weights by network; a network of weight 0 is not needed. `scale`: a factor of each
    row's distance. `new`: the velocity that is compared, if it is not `rows.new`.
    """
    new = rows.new if new is None else new
    policy_loss = total = mean_over(policy_terms, rows.weight)
    shown = {"policy_loss": policy_loss.detach()}
    for network, factor in penalties.items():
        if factor > 0:
            distance = scale * matching(new, rows.velocity_of(network, loss))
            penalty = mean_over(distance, rows.weight)
            total, shown[PENALTIES[network]] = total + factor * penalty, penalty.detach()
    shown["matching"] = mean_over(matching(rows.new.detach(), rows.target), rows.weight)
    return LossResult(loss=total, metrics={**shown, **metrics}, policy_term=policy_loss)


def _require_equal_times(loss: Any) -> None:
    shared, name = getattr(loss.times, "shared", True), f"{type(loss).__name__}.times"
    require(shared, name, loss.times, "shared=True: a group needs equal times")


@checked_options
@dataclass(frozen=True)
class DiffusionNFT:
    """Forward-process loss of DiffusionNFT: towards good samples, away from bad ones.

    (c/beta) [r e(v+)/w+ + (1-r) e(v-)/w-] + kl_weight |v - v_ref|^2, v+ and v- around v_old.

    The mean over rows. v+ = v_old + beta (v - v_old) and v- = v_old - beta (v - v_old). e is a mean
    squared error over latent elements. The optimality r = 1/2 + clip(A, -c, c) / (2c) weights the
    positive branch.

    If w+ = w- = w, the policy term is (t^2/w) [(c/beta) l(v_old) + 2 A <v_old - v*, v - v_old> + c
    beta |v - v_old|^2] (means over elements, |A| <= c). At v = v_old its value does not depend on
    rewards; its gradient does, and is proportional to A. The proximal term also applies to rows of
    advantage 0.

    Published: `decay` (0, 0.001, 0.5) for GenEval, PickScore and several rewards, (75, 0.0075,
    0.999) for OCR; beta 1 (OCR and several rewards 0.1), kl_weight 1e-4, sampling without guidance
    by DPM-Solver++ of order 2 in 10 steps, advantages divided by the standard deviation of the
    batch (``uniform(std=batch)``), AdamW at 3e-4, one update per iteration (OCR 2), LoRA rank 32.
    The released loss is a float64 sum of float16 velocities; here everything is float32.

    Metrics: policy_loss, positive and negative (the two branches), old_distance (|v - v_old|^2),
    matching (|v - v*|^2), kl if kl_weight > 0. `loss` raises `ConfigError` if a velocity is
    missing. Source: DiffusionNFT (arXiv 2509.16117, Theorem 3.2) and its public code (commit
    24af555).

    Args:
        beta: distance of the two branches from v_old, above 0.
        advantage_clip: c, above 0.
        kl_weight: weight of the distance from the base model, 0 or more.
        error: "normalised": e = t^2 |v+- - v*|^2 of the clean estimate, divided by w+- = t mean
            |v+- - v*| (detached, at least 1e-5), as in the released code; "velocity": r |v+ - v*|^2
            + (1-r) |v- - v*|^2, the paper's Theorem 3.2, without w and c/beta.
        mode: the released adv_mode: all advantages, only positive or only negative ones, 1 if
            positive else 0 ("one_only"), or signs.
        decay: (start, rate, cap) of the old network, as in `forward.Decay`; it is updated once per
            iteration, and samples.
        times: the training times.
        noise: which rows share their noise (see `forward.ForwardLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    beta: Positive = 1.0
    advantage_clip: Positive = 5.0
    kl_weight: NonNegative = 1e-4
    error: Literal["normalised", "velocity"] = "normalised"
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    decay: tuple[float, float, float] = (0, 0.001, 0.5)
    times: TimeDraw = PermutedTimes()
    noise: Noise = "each"

    def __post_init__(self) -> None:
        Decay(*self.decay)

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The old network, which samples and is updated once per iteration."""
        return {"old": WeightCopy(Decay(*self.decay), sample_from=0)}

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """Rows are independent."""
        return "transition"

    @checked
    def optimality(self, advantages: PerSample) -> PerSample:
        """r in [0, 1] of each row."""
        clip = self.advantage_clip
        chosen = advantages.clamp(-clip, clip)
        if self.mode in ("one_only", "binary"):
            chosen = chosen.sign()
        if self.mode in ("positive_only", "one_only"):
            chosen = chosen.clamp(min=0.0)
        if self.mode == "negative_only":
            chosen = chosen.clamp(max=0.0)
        return (0.5 + chosen / (2.0 * clip)).clamp(0.0, 1.0)

    def _branch(self, velocity: Latents, rows: ForwardBatch) -> PerSample:
        """The error of one branch, e/w or |v+- - v*|^2."""
        if self.error == "velocity":
            return matching(velocity, rows.target)
        return normalised_error(velocity, rows.target, rows.time)

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        old = rows.velocity_of("old", self)
        step = self.beta * (rows.new - old)
        positive, negative = self._branch(old + step, rows), self._branch(old - step, rows)
        r = self.optimality(rows.advantages)
        scale = self.advantage_clip / self.beta if self.error == "normalised" else 1.0
        terms = scale * (r * positive + (1.0 - r) * negative)
        distance = matching(rows.new, old)
        branches = {"positive": positive, "negative": negative, "old_distance": distance}
        metrics = {name: mean_over(value.detach(), rows.weight) for name, value in branches.items()}
        return combined(self, rows, terms, {"reference": self.kl_weight}, metrics)


@checked_options
@dataclass(frozen=True)
class AWM:
    """Forward-process loss of Advantage Weighted Matching: a clipped ratio of flow-matching losses.

    max(-A rho, -A clip(rho, 1-c, 1+c)), rho = exp(log p - log p_old), plus distances of velocities.

    Means over rows. The distances are kl_weight |v - v_ref|^2 from the base model and
    average_weight |v - v_avg|^2 from an average of the weights, means over latent elements. log p
    is minus a weighted matching error, with l = mean over latent elements of (v - v*)^2. With one
    update per iteration, as published, rho = 1 exactly unless `off_policy`, and the policy gradient
    is that of -A log p. While the average network's decay is 0 it equals the current weights, and
    its penalty has no gradient.

    Published: ghuber with p 0.25, c 1, average_weight 1, kl_weight 0.001 (GenEval), 0.003 (OCR),
    1e-4 (PickScore), 6 of 14 times per sample (`flow.StratifiedTimes`; there, one draw per
    micro-batch), sampling without guidance by SA-Solver in 14 steps, advantages divided by the
    standard deviation of the batch (``uniform(std=batch)``), AdamW at 3e-4, one update per
    iteration, LoRA rank 32; the first two iterations do not train. Another implementation uses a
    clip of 1e-5 and average_weight 0.1 against collapse.

    Metrics: policy_loss, ratio_mean, ratio_deviation, ratio_distance, clip_fraction, matching (l),
    kl and average_kl if their weights are above 0. `loss` raises `ConfigError` if a velocity is
    missing. Source: AWM (arXiv 2509.25050) and its public code (commit be51372).

    Args:
        weight: log p: "uniform": -l; "t": -t l; "t2": -t^2 l; "huber": -t (sqrt(l + 1e-10) - 1e-5);
            "ghuber": -(t/p) ((l + 1e-10)^p - 1e-10^p); "normalised": minus the error of the clean
            estimate as in `DiffusionNFT`, t^2 l / w with w = t mean |v - v*| (detached).
        power: p of "ghuber", above 0.
        clip: c; with 1 only ratios above 2 are clipped.
        trust: "clip": the clipped loss; "quadratic": -A rho + |A| (rho - 1)^2 / (2 c), as in FDFO.
        ratio: "exp_first": one ratio per row; "sum_first": one per sample, of the mean log p over
            its times, which needs all times of a sample (see `protocols.PolicyLoss`).
        advantage_clip: advantages are clipped to +- this value and divided by it.
        advantage_scale: factor of the clipped advantages.
        kl_weight: weight of the distance from the base model, 0 or more.
        average_weight: weight of the distance from the average network, 0 or more.
        kl: "elbo" multiplies both squared distances by (1 - min(t, 0.99)) / (0.98 t); "uniform" by
            1.
        off_policy: form the ratio against the average network, which then samples, instead of the
            iteration's initial weights.
        decay: (start, rate, cap) of the average network, as in `forward.Decay`; updated once per
            iteration.
        times: the training times.
        noise: which rows share their noise (see `forward.ForwardLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    weight: Literal["uniform", "t", "t2", "huber", "ghuber", "normalised"] = "ghuber"
    power: Positive = 0.25
    clip: Positive = 1.0
    trust: Literal["clip", "quadratic"] = "clip"
    ratio: Literal["exp_first", "sum_first"] = "exp_first"
    advantage_clip: Positive = 5.0
    advantage_scale: Positive = 1.0
    kl_weight: NonNegative = 1e-3
    average_weight: NonNegative = 1.0
    kl: Literal["uniform", "elbo"] = "uniform"
    off_policy: bool = False
    decay: tuple[float, float, float] = (0, 0.001, 0.3)
    times: TimeDraw = StratifiedTimes()
    noise: Noise = "each"

    def __post_init__(self) -> None:
        Decay(*self.decay)

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The weights at the beginning of the iteration for the ratio, and the average."""
        decay = Decay(*self.decay)
        if self.off_policy:
            return {"average": WeightCopy(decay, sample_from=0)}
        average = {"average": WeightCopy(decay)} if self.average_weight > 0 else {}
        return {"old": WeightCopy(), **average}

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """Rows are independent, unless the ratio is that of a sample."""
        return "trajectory" if self.ratio == "sum_first" else "transition"

    @checked
    def log_prob(self, velocity: Latents, target: Latents, time: PerSample) -> PerSample:
        """log p of each row under the network with this velocity; 0 is the largest value."""
        if self.weight == "normalised":
            return -normalised_error(velocity, target, time)
        error = matching(velocity, target)
        tiny, power = 1e-10, self.power  # keeps the gradient finite at error 0
        if self.weight == "huber":
            return -time * ((error + tiny).sqrt() - tiny**0.5)
        if self.weight == "ghuber":
            return -(time / power) * ((error + tiny).pow(power) - tiny**power)
        factors = {"uniform": torch.ones_like(time), "t": time, "t2": time.square()}
        return -factors[self.weight] * error

    @checked
    def scaled(self, advantages: PerSample) -> PerSample:
        """The advantages that weight the rows."""
        clip = self.advantage_clip
        return advantages.clamp(-clip, clip) * (self.advantage_scale / clip)

    def _log_ratio(self, rows: ForwardBatch) -> PerSample:
        old = rows.velocity_of("average" if self.off_policy else "old", self)
        new, old = (self.log_prob(v, rows.target, rows.time) for v in (rows.new, old))
        return new - old

    @torch.no_grad()
    def row_terms(self, batch: ForwardBatch) -> PerSample:
        """log p - log p_old of each row; "sum_first" averages it over a sample's times."""
        return self._log_ratio(counted_rows(batch))

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        log_ratio = self._log_ratio(rows)
        # the value of the mean over times, and each time's share of its gradient
        if self.ratio == "sum_first":
            log_ratio = over_units(log_ratio, rows, self)
        ratio = log_ratio.exp()
        bounded = surrogate if self.trust == "clip" else quadratic
        terms = bounded(ratio, self.scaled(rows.advantages), self.clip)
        scale = elbo_weight(rows.time) if self.kl == "elbo" else 1.0
        metrics = ratio_metrics(ratio, beyond(ratio, self.clip), rows.weight)
        penalties = {"reference": self.kl_weight, "average": self.average_weight}
        return combined(self, rows, terms, penalties, metrics, scale)


@checked_options
@dataclass(frozen=True)
class DGPO:
    """Forward-process loss of DGPO: group preferences by flow-matching losses.

    sigmoid(S) A l(v) + kl_weight |v - v_ref|^2, S = beta_dpo E_group[A (l(v) - l(v_anchor))],
    detached.

    The mean over rows; l = mean over latent elements of (v - v*)^2. A group is the rows of one
    prompt at one time, which share their noise. The gradient is that of -log sigmoid(-S) /
    beta_dpo, the paper's Equation 17 with lambda_t and T absorbed:
    `beta_dpo` changes the sharpness of the sigmoid, not the scale of the gradient. If advantages
    sum to 0 over a group, so do the weights of its errors. Invalid samples must therefore be left
    out before advantages are computed, and advantages must not be clamped: ``uniform(std=batch,
    clamp=none)``.

    S needs whole groups: in one batch, or by two passes (see `protocols.PolicyLoss`). Guidance of
    the velocities is a setting of the run: `train_guidance_scale` 1 as published;
    `reference_guidance_scale` for a guided reference (kl_cfg). The start of `decay` is 1 because
    the released code does not count the current step.

    Published otherwise: beta_dpo 100 (PickScore 10), clip 0.01 (PickScore 0.05), kl_weight 0.02
    (PickScore 0.001), 4 of the first 7 of 10 times (GenEval 5), sampling by DPM-Solver++ with
    guidance 4.5 although training has none, AdamW at 3e-4, one update per iteration, LoRA rank 64.

    Metrics: policy_loss, ratio_mean, ratio_deviation, ratio_distance and clip_fraction (of rho, if
    clipping is on), group_weight (sigmoid(S)), matching (l), kl if kl_weight > 0. `loss` raises
    `ConfigError` if a velocity is missing. Source: DGPO (arXiv 2510.08425, Equation 17) and its
    public code (commit 01ceb4b).

    Args:
        beta_dpo: sharpness of the preference, above 0.
        clip: c: with rho = exp(l_old - l), rows with A > 0 and rho > 1+c, or A <= 0 and rho < 1-c,
            have no policy gradient; None: off.
        clip_kl: clipped rows have no gradient from the penalty either.
        kl_weight: weight of the distance from the base model, 0 or more.
        anchor: v_anchor: the base model ("reference") or the copy `old` (released use_ema_ref, with
            beta_dpo 2000 to 5000 and clip 1e-5 to 1e-4).
        decay: (start, rate, cap) of the copy `old`, as in `forward.Decay`; updated at every
            optimizer step.
        sample_from: the copy `old` samples after this many optimizer steps (published: 200, GenEval
            500); None: never.
        times: the training times, the same for all samples of a group.
        noise: which rows share their noise (see `forward.ForwardLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    beta_dpo: Positive = 100.0
    clip: Positive | None = 0.01
    clip_kl: bool = False
    kl_weight: NonNegative = 0.02
    anchor: Literal["reference", "old"] = "reference"
    decay: tuple[float, float, float] = (1, 0.001, 0.3)
    sample_from: int | None = 200
    times: TimeDraw = DrawnSteps()
    noise: Noise = "group"

    def __post_init__(self) -> None:
        _require_equal_times(self)
        _ = self.copies

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The copy `old`, for the ratio and, from `sample_from` steps on, for sampling."""
        evaluated = self.clip is not None or self.anchor == "old"
        return {"old": WeightCopy(Decay(*self.decay), "update", self.sample_from, evaluated)}

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss: it is the anchor, or `kl_weight` > 0."""
        return self.anchor == "reference" or self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """The members of a group at one time."""
        return "group"

    @torch.no_grad()
    def row_terms(self, batch: ForwardBatch) -> PerSample:
        """beta_dpo A (l - l_anchor) of each row; its mean over a group is S."""
        rows = counted_rows(batch)
        anchor = matching(rows.velocity_of(self.anchor, self), rows.target)
        return self.beta_dpo * rows.advantages * (matching(rows.new, rows.target) - anchor)

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        total, error = rows.pooled, matching(rows.new, rows.target)
        if total is None:
            total = unit_means(self.row_terms(batch), rows.units("group"), rows.weight)
        weight, new = total.detach().sigmoid(), rows.new
        metrics = {"group_weight": mean_over(weight, rows.weight)}
        if self.clip is not None:
            ratio = (matching(rows.velocity_of("old", self), rows.target) - error.detach()).exp()
            high, low = ratio > 1.0 + self.clip, ratio < 1.0 - self.clip
            clipped = torch.where(rows.advantages > 0, high, low)
            metrics |= ratio_metrics(ratio, clipped, rows.weight)
            error = torch.where(clipped, error.detach(), error)
            if self.clip_kl:
                new = torch.where(expand(clipped, new), new.detach(), new)
        terms = weight * rows.advantages * error
        return combined(self, rows, terms, {"reference": self.kl_weight}, metrics, new=new)


@checked_options
@dataclass(frozen=True)
class CRD:
    """Forward-process loss of Centered Reward Distillation: the reward that the network implies
    shall equal the reward that was given, both minus their means over the group.

    (c/beta) (beta (r - r_group) - (u - u_group))^2 + kl_weight f |v - v_ref|^2, r = l(v_old) -
    l(v).

    The mean over rows; l = mean over latent elements of (v - v*)^2, u = clip(A / (2c) + 1/2, 0, 1),
    and r_group, detached, and u_group are means over the rows of one prompt at one time, which
    share their noise. A constant of the prompt, such as its normaliser, cancels in both
    differences. With `form` "bce" the square is replaced by the binary cross entropy of the
    probability sigmoid(beta (r - r_group)) from sigmoid(u - u_group).

    At v = v_old the gradient of the squares is that of `AWM` with weight "uniform", (A - A_group)
    grad l for |A| <= c; that of "bce" is c (sigmoid(u - u_group) - 1/2) grad l, an eighth of it to
    first order. Away from v_old, the squares add c beta (r - r_group)^2, so a larger beta holds the
    network closer to v_old.

    The means need whole groups: in one batch, or by two passes (see `protocols.PolicyLoss`). In the
    code that was read they run over the rows of a micro-batch on all processes, whatever their
    prompts and times. Its centring by advantages (weight_temp) is not offered.

    Metrics: policy_loss, implied_reward (r), old_distance (|v - v_old|^2), matching (l), kl if
    kl_weight > 0. `loss` raises `ConfigError` if a velocity is missing. Sources: CRD (arXiv
    2603.14128), abstract, and a port (Flow-Factory, commit 396dd6e; its settings for SD3.5-Medium:
    beta 1, "mse", "normalised", kl_weight 0.1 with `kl` "reward" and a reference with guidance 4.5,
    decays (75, 0.0075, 0.999) for sampling and 0.25 + 0.005 s up to 0.999 for v_old, which `decay`
    cannot start at 0.25).

    Args:
        beta: scale of the implied reward, above 0.
        advantage_clip: c, above 0.
        form: "mse" or "bce".
        error: "velocity": l as above; "normalised": l divided by the detached mean |v - v*|, at
            least 1e-5, each network by its own (adaptive_logp in the port).
        kl_weight: weight of the distance from the base model, 0 or more.
        kl: f: "uniform": 1; "reward": m + u (1 - m) with m = min(1e-4 / kl_weight, 1), so that good
            samples are held closer.
        decay: (start, rate, cap) of v_old, as in `forward.Decay`; updated once per iteration.
        sampling_decay: the same of the copy that samples; None: the current weights sample.
        times: the training times, the same for all samples of a group.
        noise: which rows share their noise (see `forward.ForwardLoss`).

    Raises:
        ConfigError: a field is out of range.
    """

    beta: Positive = 1.0
    advantage_clip: Positive = 5.0
    form: Literal["mse", "bce"] = "mse"
    error: Literal["velocity", "normalised"] = "velocity"
    kl_weight: NonNegative = 0.1
    kl: Literal["uniform", "reward"] = "reward"
    decay: tuple[float, float, float] = (0, 0.001, 0.5)
    sampling_decay: tuple[float, float, float] | None = (0, 0.001, 0.5)
    times: TimeDraw = PermutedTimes(shared=True)
    noise: Noise = "group"

    def __post_init__(self) -> None:
        _require_equal_times(self)
        _ = self.copies

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The copy `old` of the implied reward, and `average`, which samples."""
        old = {"old": WeightCopy(Decay(*self.decay))}
        if self.sampling_decay is None:
            return old
        samples = WeightCopy(Decay(*self.sampling_decay), sample_from=0, evaluated=False)
        return {**old, "average": samples}

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """The members of a group at one time."""
        return "group"

    def _error(self, velocity: Latents, rows: ForwardBatch) -> PerSample:
        if self.error == "velocity":
            return matching(velocity, rows.target)
        return normalised_error(velocity, rows.target, torch.ones_like(rows.time))

    def _rewards(self, rows: ForwardBatch) -> Tensor:
        """r and u of each row [row, 2]."""
        old = self._error(rows.velocity_of("old", self), rows)
        given = (rows.advantages / (2.0 * self.advantage_clip) + 0.5).clamp(0.0, 1.0)
        return torch.stack([old - self._error(rows.new, rows), given], 1)

    @torch.no_grad()
    def row_terms(self, batch: ForwardBatch) -> Tensor:
        """r and u of each row [row, 2], whose means over a group are subtracted."""
        rows = counted_rows(batch)
        return torch.where((rows.weight > 0)[:, None], self._rewards(rows), 0.0)

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        rewards, means = self._rewards(rows), rows.pooled
        if means is None:
            means = unit_means(rewards.detach(), rows.units("group"), rows.weight)
        implied, given = (rewards - means.detach()).unbind(1)
        if self.form == "mse":
            terms = (self.beta * implied - given).square()
        else:
            logit = self.beta * implied
            terms = binary_cross_entropy_with_logits(logit, given.sigmoid(), reduction="none")
        terms = self.advantage_clip / self.beta * terms
        scale: PerSample | float = 1.0
        if self.kl == "reward" and self.kl_weight > 0:
            least = min(1e-4 / self.kl_weight, 1.0)
            scale = least + rewards[:, 1] * (1.0 - least)
        shown = {
            "implied_reward": rewards[:, 0],
            "old_distance": matching(rows.new, rows.velocity_of("old", self)),
        }
        metrics = {name: mean_over(value.detach(), rows.weight) for name, value in shown.items()}
        return combined(self, rows, terms, {"reference": self.kl_weight}, metrics, scale)


@checked_options
@dataclass(frozen=True)
class RewardAscent:
    """Direct gradients of a differentiable reward r, through single steps of the sampler;
    advantages are ignored.

    -weight r + kl_weight |v - v_ref|^2, the mean over samples of the sum over the drawn steps k,
    with dr/dv_k = rho (d x_{k+1} / d v_k) dr/dx_0.

    Trajectories are sampled without gradients, the states x_k are constants, and r is the reward of
    the sampled image, whose gradient is computed once per sample. For an ODE step d x_{k+1} / d v_k
    = -Delta_k, so the gradient of r is -rho sum_k Delta_k (dr/dx_0) (dv_k / d theta). The exact one
    has the factors prod_{j>k} (1 - Delta_j dv_j/dx) between dr/dx_0 and dv_k, which are 1 for a
    velocity that does not depend on x; they are left out here. rho = 1 + y (sum_k Delta_k / sum_S
    Delta_k - 1) with y = `rescale` and S the drawn steps.

    `times` is S, one of `flow.LateSteps`, or of the others that draw steps of the grid:
    ``late-steps(last=1)`` is DRaFT-1 (arXiv 2309.17400), ``late-steps(count=3, power=2)``
    FlowBP-Sparse (arXiv 2606.11075; its code at 34c93f9), ``permuted(fraction=1.0)`` all steps.
    With `through` "estimate", r is that of x_k - t_k v_k at the current v_k, and dr/dv_k = -t_k
    dr/dx: ReFL (arXiv 2304.05977) with ``late-steps(last=11)`` of 40 steps, the same as DRaFT-1 at
    the last step, and with `noise` "each" the re-noised copies of DRaFT-LV, ``late-steps(last=1)``
    of the finished image (each row is a new copy; the sampled state itself is not among them).

    With a `latent_reward` r is that of the node after the step, moved by the change of the current
    velocity: PRFL (arXiv 2511.21541; its code at 59ab9d7: weight 0.1, target 2, one step). If r is
    the value of the state this is credit per step without variance from later steps; its errors are
    exploited.

    The sampler must make single steps, unless `through` is "estimate"; ode is the papers'. The
    reward must be differentiable in its images, and the policy's `decode` in the latents; a reward
    is ascended beyond what it measures, and only the target, the penalty and the number of updates
    limit that. The counted costs leave out the decodes, rewards and gradients of this loss.

    Metrics: policy_loss, ascent_reward (the mean of r), matching, kl if kl_weight > 0. `loss`
    raises `ConfigError` if the batch has no reward or slope, or no reference with `kl_weight` > 0;
    a batch is made with `RewardError` if the reward has no gradient, with `ProbeError` if the
    latent reward has none.

    Args:
        latent_reward: a reward of noisy latents; None: the run's reward.
        through: "image" or "estimate".
        weight: factor of the reward, above 0.
        target: r from which a row has no gradient, -weight max(target - r, 0) in place of r; None:
            no target.
        rescale: y in [0, 1], for "image".
        kl_weight: weight of the distance from the base model, 0 or more.
        times: the steps.
        noise: "path", or for "estimate" also "each" or "group" (see `forward.ForwardLoss`).

    Raises:
        ConfigError: a field is out of range, or does not fit the others.
    """

    latent_reward: LatentReward | None = None
    through: Literal["image", "estimate"] = "image"
    weight: Positive = 1.0
    target: float | None = None
    rescale: Share = 0.0
    kl_weight: NonNegative = 0.0
    times: TimeDraw = LateSteps(count=3, power=2.0)
    noise: Literal["path", "each", "group"] = "path"

    def __post_init__(self) -> None:
        image = self.through == "image"
        fits = self.latent_reward is None or image
        require(fits, "RewardAscent.through", self.through, "image with a latent_reward")
        fits = self.noise == "path" or not image
        require(fits, "RewardAscent.noise", self.noise, "path unless through is estimate")
        fits = self.rescale == 0 or self.ascends == "image"
        require(fits, "RewardAscent.rescale", self.rescale, "0 unless r is that of the image")

    @property
    def ascends(self) -> Literal["image", "estimate", "next"]:
        """What the reward is that of (see `forward.ForwardLoss`)."""
        return self.through if self.latent_reward is None else "next"

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """None."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """Rows are independent."""
        return "transition"

    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        if batch.reward is None or batch.slope is None:
            raise ConfigError("RewardAscent needs ForwardBatch.reward and slope; one is None")
        rows = counted_rows(batch)
        counts = rows.weight > 0
        slope = torch.where(expand(counts, batch.slope), batch.slope.detach(), 0.0)
        value = torch.where(counts, batch.reward.detach(), 0.0)
        reward = value + (slope * (rows.new - rows.new.detach())).flatten(1).sum(1)
        terms = -reward if self.target is None else (self.target - reward).clamp(min=0.0)
        metrics = {"ascent_reward": mean_over(value, rows.weight)}
        penalties = {"reference": self.kl_weight}
        return combined(self, rows, self.weight * terms, penalties, metrics)
