"""Warnings about a failing run with advice, as pure functions of its metrics.

The thresholds were set on healthy and deliberately broken runs of the built-in worlds
(docs/guides/watching-a-run.md).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.experience import needs_of
from flowrl.core.protocols import GroupReward, Stateful, extras
from flowrl.run.config import RunConfig
from flowrl.run.results import reward_text
from flowrl.run.statistics import COLLAPSE, HACKED, collapsed, evaluation_noise, hacked
from flowrl.trainer import Trainer

Row = Mapping[str, Any]

EVERY = 20
"""Iterations before a kind of warning is repeated."""
WINDOW = 3
"""Iterations over which noisy metrics are averaged."""
HISTORY = 20
"""Iterations before the window whose median is the usual value."""
KL_LIMITS = {
    "kl": (1.0, 2.0, "to the base model"),
    "approx_kl": (0.1, 4.0, "to the policy that sampled"),
}
"""Of a KL per latent element: its level and its growth over the usual value, and what it is a KL
to. At 1.0 the means differ by sqrt(2) standard deviations of the step's noise.
"""
SHARE = 0.9
"""Largest fraction of the policy term's squared gradient in one step."""


@dataclass(frozen=True)
class Notice:
    """A warning.

    Args:
        kind: a key of `CHECKS`, or the name of an observer.
        text: what happened, and what to do.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Limits:
    """What the warnings of a run depend on, besides its metrics.

    Args:
        clip: the loss's clip range for the ratio; None for a loss without one.
        prompts: number of groups per iteration.
        samples: held-out samples per evaluation.
        zero_spread: largest fraction of groups with equal rewards.
        compared: whether the training reward compares samples: its mean does not rise, and
            evaluations have another scale.
        guidance: scale of the guidance in sampling and training; 1: none.
    """

    clip: float | None = None
    prompts: int = 1
    samples: int = 192
    zero_spread: float = 0.5
    compared: bool = False
    guidance: float = 1.0


def limits_of(trainer: Trainer, config: RunConfig) -> Limits:
    """The limits of this run."""
    rule = trainer.method.credit
    # with a memory by prompt, groups of equal rewards may have credit, too
    remembers = isinstance(rule, Stateful) and "prompts" in needs_of(rule).fields
    return Limits(
        getattr(trainer.method.loss, "clip_range", None),
        config.rollout.groups,
        config.evaluation.eval_samples,
        1.0 if remembers else Limits.zero_spread,
        isinstance(trainer.reward, GroupReward),
        getattr(extras(trainer.policy, "guided", "guidance_scale"), "guidance_scale", 1.0),
    )


def notices(rows: Sequence[Row], limits: Limits) -> list[Notice]:
    """Warnings after the last of `rows`.

    A kind that is among the "warnings" of one of the `EVERY` - 1 rows before is not repeated. A
    resumed run therefore gives the same warnings.

    Args:
        rows: one row per iteration; row 0, the untrained model, may be included.
        limits: the limits of the run.

    Returns:
        The warnings.
    """
    now = rows[-1]["iteration"]
    recent = {
        warning["kind"]
        for row in rows[:-1]
        if now - row["iteration"] < EVERY
        for warning in row.get("warnings", ())
    }
    texts = {kind: check(rows, limits) for kind, check in CHECKS.items() if kind not in recent}
    return [Notice(kind, text) for kind, text in texts.items() if text]


def _last(rows: Sequence[Row], name: str) -> list[Any]:
    """The metric in the last `WINDOW` rows; empty as long as there are fewer with this metric."""
    values = [row[name] for row in rows[-WINDOW:] if name in row]
    return values if len(values) == WINDOW else []


def zero_spread(rows: Sequence[Row], limits: Limits) -> str:
    """Most groups had equal rewards, so their advantages are 0 and they do not train."""
    share = statistics.fmean(_last(rows, "zero_spread_groups") or [0.0])
    if share <= limits.zero_spread:
        return ""
    return (
        f"{share:.0%} of the groups have equal rewards, so their advantages are 0. The prompts may"
        " be solved already, or too hard. Use a finer reward (reward_form soft instead of strict),"
        " other prompts, a larger group_size, or a larger noise_level"
    )


def ratio_noise(rows: Sequence[Row], limits: Limits) -> str:
    """Rounding exceeds the clip: a ratio differs from 1 before the first optimizer step of an
    iteration.

    The reasons are half precision, another batch shape, merged adapters, and guidance, which
    multiplies the rounding of the network: with independent errors of the two velocities by
    sqrt(g^2 + (g-1)^2). Tiny clips such as TP-GRPO's 1e-5 (arXiv 2602.06422) and Flow-GRPO's 1e-4
    (arXiv 2505.05470) are of this size.
    """
    noise, scale = rows[-1].get("ratio_noise", 0.0), limits.guidance
    if limits.clip is None or noise <= limits.clip:
        return ""
    by_step = rows[-1].get("log_prob_noise")
    where = f", most at step {by_step.index(max(by_step))} (the first is 0)" if by_step else ""
    guided = ""
    if scale > 1:
        factor = math.hypot(scale, scale - 1)
        guided = f" Guidance of {scale:g} makes this rounding {factor:.1f} times as large."
    return (
        f"before any update the ratio, which should be 1, is off by up to {noise:.1e}, more"
        f" than the clip of {limits.clip:.1e}{where}, so rounding decides which pairs are"
        f" clipped.{guided} Use max_batch auto (calls of one shape), a finer dtype"
        f" (docs/guides/tuning.md), {'less guidance, ' * (scale > 1)}or"
        f" clip_range {3 * noise:.1e} or more"
    )


def step_share(rows: Sequence[Row], limits: Limits) -> str:
    """One of several trained steps had most of the policy term's squared gradient."""
    recent = _last(rows, "step_shares")
    # without credit all shares are 0, and with one trained step there is nothing to compare
    if not recent or any(sum(share > 0 for share in shares) < 2 for shares in recent):
        return ""
    means = [statistics.fmean(shares) for shares in zip(*recent, strict=True)]
    step = max(range(len(means)), key=means.__getitem__)
    if means[step] <= SHARE:
        return ""
    return (
        f"step {step} (the first is 0) has {100 * means[step]:.4g}% of the policy term's squared"
        f" gradient, so the other steps hardly train. Exclude it from trained_steps, or use loss"
        " grpo-guard or, with cps, clipped(log_prob=released_cps), each with its own clip_range"
        " (docs/guides/tuning.md)"
    )


def kl_runaway(rows: Sequence[Row], limits: Limits) -> str:
    """The mean KL of the last `WINDOW` iterations is above a level and a multiple of the median of
    the (up to `HISTORY`) iterations before.
    """
    for name, (level, growth, what) in KL_LIMITS.items():
        values = [row[name] for row in rows if name in row]
        recent, before = values[-WINDOW:], values[-WINDOW - HISTORY : -WINDOW]
        if not before:
            continue
        mean, usual = statistics.fmean(recent), statistics.median(before)
        if mean > level and mean > growth * usual:
            return (
                f"the KL {what} has grown to {mean:.2g} per latent element from {usual:.2g}. Look"
                " at the samples; lower learning_rate or minibatches, or raise kl_weight"
            )
    return ""


def fallen(values: Sequence[float], noise: float, share: float = COLLAPSE) -> str:
    """How the last of `values` has collapsed (`flowrl.run.statistics.collapsed`); "" if it has
    not.
    """
    if not values or not collapsed(values, noise, share):
        return ""
    named = values[0], max(values), values[-1]
    first, best, last = (reward_text(value, named) for value in named)
    return f"{last} from its best, {best} (it began at {first})"


def collapse(rows: Sequence[Row], limits: Limits) -> str:
    """The held-out reward has collapsed (`flowrl.run.statistics.collapsed`); or the training reward
    has (means of `WINDOW` iterations), and by more than 7 standard errors, as if all of its
    variance were between prompts.
    """
    trained = [row for row in rows if "reward_mean" in row]
    if limits.compared or not trained:
        return ""
    spread = statistics.median(row["reward_std"] for row in trained)
    means = [
        statistics.fmean(row["reward_mean"] for row in trained[i - WINDOW : i])
        for i in range(WINDOW, len(trained) + 1)
    ]
    heldout = [row["evaluation"]["reward"] for row in rows if row.get("evaluation")]
    for name, values, noise in (
        ("held-out", heldout, evaluation_noise(spread, limits.samples)),
        ("training", means, 7.0 / (WINDOW * limits.prompts) ** 0.5 * spread),
    ):
        if text := fallen(values, noise):
            return (
                f"the {name} reward has fallen back to {text}. Stop, and resume from an earlier"
                " checkpoint (keep_checkpoints above 1) with a lower learning_rate or clip_range,"
                " fewer minibatches or a kl_weight"
            )
    return ""


def reward_errors(rows: Sequence[Row], limits: Limits) -> str:
    """Samples of the iteration or of its evaluation were skipped, because a call of the reward
    failed (`flowrl.run.reward_guard`).
    """
    row, texts = rows[-1], []
    if skipped := row.get("skipped"):
        texts.append(f"{skipped} of {row['trajectories']} samples were skipped")
    evaluation = row.get("evaluation") or {}
    if skipped := evaluation.get("skipped"):
        texts.append(f"{skipped} of {limits.samples} held-out samples were skipped")
    error = row.get("reward_error") or evaluation.get("reward_error")
    return f"{', '.join(texts)}: {error}" if texts else ""


def sacrificed(rows: Sequence[Row], samples: int, evaluations: int = HACKED) -> str:
    """Which held-out reward falls while the trained one rises (`flowrl.run.statistics.hacked`); ""
    if none does. If the trained reward has errors (`reward_noise`, `reward_bias`), the reward
    without them is a held-out one.

    Args:
        rows: rows of metrics.jsonl.
        samples: held-out samples per evaluation.
        evaluations: number of evaluations.
    """
    tables = [row["evaluation"] for row in rows if row.get("evaluation")]
    tables = [table for table in tables if "spread" in table]
    for name in ("reward", *(tables[-1].get("heldout", ()) if tables else ())):
        known = [table for table in tables if heldout_value(table, name) is not None]
        trained, values = ([heldout_value(t, n) for t in known] for n in ("proxy", name))
        noises = [
            [evaluation_noise(table["spread"][which], samples) for table in known]
            for which in ("proxy", name)
        ]
        if not hacked(trained, values, *noises, evaluations=evaluations):
            continue
        best = values.index(max(values))
        high, low = (reward_text(values[i], values) for i in (best, -1))
        early, late = (reward_text(trained[i], trained) for i in (best, -1))
        what = "the reward without its errors" if name == "reward" else f"held-out {name}"
        return (
            f"{what} fell from {high} to {low}, while the trained reward rose from {early} to"
            f" {late}"
        )
    return ""


def heldout_value(evaluation: Row, name: str) -> Any:
    """A score of an evaluation by name: "reward", a held-out reward, or a score of the world; None
    if it was not measured.
    """
    return {**evaluation, **evaluation.get("heldout", {})}.get(name)


def hacking(rows: Sequence[Row], limits: Limits) -> str:
    """A held-out reward falls while the trained one rises (`sacrificed`)."""
    text = "" if limits.compared else sacrificed(rows, limits.samples)
    return text and (
        f"{text}: the images please the reward and nothing else. Look at them; stop, and continue"
        " from the best checkpoint with a kl_weight, or another reward"
    )


DRIFT = {
    "brightness": (0.25, None),
    "contrast": (None, 2.5),
    "saturation": (0.25, None),
    "detail": (None, 2.5),
    "repetition": (0.4, None),
    "constant": (0.1, None),
    "latent_rms": (None, 1.5),
    "diversity": (None, 2.5),
}
"""By statistic of the training images (`flowrl.run.images`): the largest change, or the largest
factor or its inverse, between the first `WINDOW` iterations and the last ones.
"""


def drifted(rows: Sequence[Row]) -> str:
    """How the training images have drifted (`DRIFT`); "" if they have not."""
    tables = [row["images"] for row in rows if row.get("images")]
    if len(tables) < 2 * WINDOW:
        return ""
    found = list[str]()
    for name, (change, factor) in DRIFT.items():
        first, last = (
            statistics.fmean(table[name] for table in part)
            for part in (tables[:WINDOW], tables[-WINDOW:])
        )
        low, high = sorted((first, last))
        if (change and high - low > change) or (factor and high > factor * low + 1e-6):
            found.append(f"{name} {first:.2g} -> {last:.2g}")
    return ", ".join(found)


def drift(rows: Sequence[Row], limits: Limits) -> str:
    """The training images look different than at the start of the run (`drifted`)."""
    text = drifted(rows)
    return text and (
        f"the training images have changed since the start: {text} (docs/guides/watching-a-run.md)."
        " Look at them: the reward may be hacked"
    )


CHECKS: dict[str, Callable[[Sequence[Row], Limits], str]] = {
    "zero-spread": zero_spread,
    "ratio-noise": ratio_noise,
    "step-share": step_share,
    "kl": kl_runaway,
    "collapse": collapse,
    "reward-errors": reward_errors,
    "hacking": hacking,
    "drift": drift,
}
"""The text of each kind of warning, or "" if it does not apply."""
