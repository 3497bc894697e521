"""DiffusionNFT: regress two mixtures of the old and the new velocity, one towards good and one away
from bad images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flowrl.core.forward import Decay, ForwardBatch, Noise, WeightCopy
from flowrl.core.options import checked_options
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import Latents, LossResult, PerSample, Unit, checked
from flowrl.flow.times import PermutedTimes
from flowrl.losses._forward import combine_rows, counted_rows, matching
from flowrl.losses._terms import mean_over, require_positive, require_weight

LEAST_WEIGHT = 1e-5


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

    beta: float = 1.0
    advantage_clip: float = 5.0
    kl_weight: float = 1e-4
    error: Literal["normalised", "velocity"] = "normalised"
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    decay: tuple[float, float, float] = (0, 0.001, 0.5)
    times: TimeDraw = PermutedTimes()
    noise: Noise = "each"

    def __post_init__(self) -> None:
        require_positive("DiffusionNFT", "beta", self.beta)
        require_positive("DiffusionNFT", "advantage_clip", self.advantage_clip)
        require_weight("DiffusionNFT", "kl_weight", self.kl_weight)
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

    def optimality(self, advantages: PerSample) -> PerSample:
        """r in [0, 1] of each row."""
        clip = self.advantage_clip
        chosen = advantages.clamp(-clip, clip)
        if self.mode == "positive_only":
            chosen = chosen.clamp(min=0.0)
        elif self.mode == "negative_only":
            chosen = chosen.clamp(max=0.0)
        elif self.mode != "all":
            chosen = chosen.sign().clamp(min=0.0 if self.mode == "one_only" else -1.0)
        return (0.5 + chosen / (2.0 * clip)).clamp(0.0, 1.0)

    def _branch(self, velocity: Latents, rows: ForwardBatch) -> PerSample:
        """The error of one branch, e/w or |v+- - v*|^2."""
        error = matching(velocity, rows.target)
        if self.error == "velocity":
            return error
        distance = (velocity - rows.target).detach().abs().flatten(1).mean(1)
        return rows.time.square() * error / (rows.time * distance).clamp(min=LEAST_WEIGHT)

    @checked
    def loss(self, batch: ForwardBatch) -> LossResult:
        """The scalar loss over the rows of `batch`, and its metrics."""
        rows = counted_rows(batch)
        old = rows.velocity_of("old", self)
        step = self.beta * (rows.new - old)
        positive, negative = self._branch(old + step, rows), self._branch(old - step, rows)
        r = self.optimality(rows.advantages)
        scale = self.advantage_clip / self.beta if self.error == "normalised" else 1.0
        terms = scale * (r * positive + (1.0 - r) * negative)
        penalties = {}
        if self.kl_weight > 0:
            penalties["kl"] = (
                self.kl_weight,
                matching(rows.new, rows.velocity_of("reference", self)),
            )
        found = {
            "positive": positive,
            "negative": negative,
            "old_distance": matching(rows.new, old),
        }
        metrics = {name: mean_over(value.detach(), rows.weight) for name, value in found.items()}
        return combine_rows(rows, terms, penalties, metrics)
