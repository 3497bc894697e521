"""Advantage-weighted matching (AWM): the matching loss as a log-likelihood, weighted by
advantages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.core.forward import Decay, ForwardBatch, Noise, WeightCopy
from flowrl.core.options import checked_options
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import Latents, LossResult, PerSample, Unit, checked
from flowrl.flow.times import StratifiedTimes
from flowrl.losses._forward import combine_rows, counted_rows, elbo_weight, matching, ratio_metrics
from flowrl.losses._terms import beyond, over_units, require_positive, require_weight, surrogate

TINY = 1e-10


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
            "ghuber": -(t/p) ((l + 1e-10)^p - 1e-10^p).
        power: p of "ghuber", above 0.
        clip: c; with 1 only ratios above 2 are clipped.
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

    weight: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    power: float = 0.25
    clip: float = 1.0
    ratio: Literal["exp_first", "sum_first"] = "exp_first"
    advantage_clip: float = 5.0
    advantage_scale: float = 1.0
    kl_weight: float = 1e-3
    average_weight: float = 1.0
    kl: Literal["uniform", "elbo"] = "uniform"
    off_policy: bool = False
    decay: tuple[float, float, float] = (0, 0.001, 0.3)
    times: TimeDraw = StratifiedTimes()
    noise: Noise = "each"

    def __post_init__(self) -> None:
        for option in ("power", "clip", "advantage_clip", "advantage_scale"):
            require_positive("AWM", option, getattr(self, option))
        for option in ("kl_weight", "average_weight"):
            require_weight("AWM", option, getattr(self, option))
        Decay(*self.decay)

    @property
    def copies(self) -> Mapping[str, WeightCopy]:
        """The weights at the beginning of the iteration for the ratio, and the average."""
        old = {} if self.off_policy else {"old": WeightCopy()}
        if not self.off_policy and self.average_weight == 0:
            return old
        return old | {
            "average": WeightCopy(Decay(*self.decay), sample_from=0 if self.off_policy else None)
        }

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is part of the loss (`kl_weight` > 0)."""
        return self.kl_weight > 0

    @property
    def unit(self) -> Unit:
        """Rows are independent, unless the ratio is that of a sample."""
        return "trajectory" if self.ratio == "sum_first" else "transition"

    def log_prob(self, velocity: Latents, target: Latents, time: PerSample) -> PerSample:
        """log p of each row under the network with this velocity; 0 is the largest value."""
        error = matching(velocity, target)
        if self.weight == "huber":
            return -time * ((error + TINY).sqrt() - TINY**0.5)
        if self.weight == "ghuber":
            return -(time / self.power) * ((error + TINY).pow(self.power) - TINY**self.power)
        return (
            -{"uniform": torch.ones_like(time), "t": time, "t2": time.square()}[self.weight] * error
        )

    def scaled(self, advantages: PerSample) -> PerSample:
        """The advantages that weight the rows."""
        return advantages.clamp(-self.advantage_clip, self.advantage_clip) * (
            self.advantage_scale / self.advantage_clip
        )

    def _log_ratio(self, rows: ForwardBatch) -> PerSample:
        old = rows.velocity_of("average" if self.off_policy else "old", self)
        return self.log_prob(rows.new, rows.target, rows.time) - self.log_prob(
            old, rows.target, rows.time
        )

    @torch.no_grad()
    def row_terms(self, batch: ForwardBatch) -> PerSample:
        """log p - log p_old of each row; "sum_first" averages it over a sample's times."""
        return self._log_ratio(counted_rows(batch))

    @checked
    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        log_ratio = self._log_ratio(rows)
        # the value of the mean over times, and each time's share of its gradient
        if self.ratio == "sum_first":
            log_ratio = over_units(log_ratio, rows, "trajectory")
        ratio = log_ratio.exp()
        terms = surrogate(ratio, self.scaled(rows.advantages), self.clip)
        scale = elbo_weight(rows.time) if self.kl == "elbo" else 1.0
        penalties = {}
        if self.kl_weight > 0:
            penalties["kl"] = (
                self.kl_weight,
                scale * matching(rows.new, rows.velocity_of("reference", self)),
            )
        if self.average_weight > 0:
            penalties["average_kl"] = (
                self.average_weight,
                scale * matching(rows.new, rows.velocity_of("average", self)),
            )
        return combine_rows(
            rows, terms, penalties, ratio_metrics(ratio, beyond(ratio, self.clip), rows.weight)
        )
