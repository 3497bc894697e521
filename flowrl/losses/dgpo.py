"""DGPO: direct preference optimisation of the good half of a group over the bad half."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.core.errors import require
from flowrl.core.forward import Decay, ForwardBatch, Noise, WeightCopy
from flowrl.core.options import checked_options
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import LossResult, PerSample, Unit, checked, unit_means
from flowrl.flow.path import expand
from flowrl.flow.times import DrawnSteps
from flowrl.losses._forward import combine_rows, counted_rows, matching, ratio_metrics
from flowrl.losses._terms import mean_over, require_positive, require_weight


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

    beta_dpo: float = 100.0
    clip: float | None = 0.01
    clip_kl: bool = False
    kl_weight: float = 0.02
    anchor: Literal["reference", "old"] = "reference"
    decay: tuple[float, float, float] = (1, 0.001, 0.3)
    sample_from: int | None = 200
    times: TimeDraw = DrawnSteps()
    noise: Noise = "group"

    def __post_init__(self) -> None:
        require_positive("DGPO", "beta_dpo", self.beta_dpo)
        require_weight("DGPO", "kl_weight", self.kl_weight)
        if self.clip is not None:
            require_positive("DGPO", "clip", self.clip)
        require(
            getattr(self.times, "shared", True),
            "DGPO.times",
            self.times,
            "shared=True: a group needs equal times",
        )
        WeightCopy(Decay(*self.decay), sample_from=self.sample_from)

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
        gap = matching(rows.new, rows.target) - matching(
            rows.velocity_of(self.anchor, self), rows.target
        )
        return self.beta_dpo * rows.advantages * gap

    @checked
    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows, pooled = counted_rows(batch), batch.pooled
        total = (
            unit_means(self.row_terms(batch), rows.units("group"), rows.weight)
            if pooled is None
            else pooled
        )
        weight = total.detach().sigmoid()
        error, metrics = (
            matching(rows.new, rows.target),
            {"group_weight": mean_over(weight, rows.weight)},
        )
        new = rows.new
        if self.clip is not None:
            ratio = (matching(rows.velocity_of("old", self), rows.target) - error.detach()).exp()
            clipped = torch.where(
                rows.advantages > 0, ratio > 1.0 + self.clip, ratio < 1.0 - self.clip
            )
            metrics |= ratio_metrics(ratio, clipped, rows.weight)
            error = torch.where(clipped, error.detach(), error)
            if self.clip_kl:
                new = torch.where(expand(clipped, new), new.detach(), new)
        penalties = {}
        if self.kl_weight > 0:
            penalties["kl"] = self.kl_weight, matching(new, rows.velocity_of("reference", self))
        return combine_rows(rows, weight * rows.advantages * error, penalties, metrics)
