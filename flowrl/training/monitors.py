"""Warnings about a failing run with advice, as pure functions of its metrics.

The thresholds were set on healthy and deliberately broken runs of the built-in worlds
(docs/guides/watching-a-run.md).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.core.protocols import ExperienceCredit, GroupReward, Stateful
from flowrl.policies.families import SD3
from flowrl.training.trainer import Trainer

Row = Mapping[str, Any]

EVERY = 20
"""Iterations before a kind of warning is repeated."""
WINDOW = 3
"""Iterations over which noisy metrics are averaged."""
HISTORY = 20
"""Iterations before the window whose median is the usual value."""


@dataclass(frozen=True)
class Notice:
    """A warning.

    Args:
        kind: one of `KINDS`.
        text: what happened, and what to do.
    """

    kind: str
    text: str

    def as_dict(self) -> dict[str, str]:
        """Plain values for metrics.jsonl."""
        return asdict(self)


KINDS = ("zero-spread", "no-update", "ratio-noise", "step-share", "kl", "collapse", "memory")


@dataclass(frozen=True)
class Limits:
    """The thresholds of the warnings.

    Args:
        clip: the loss's clip range for the ratio; None for a loss without one.
        prompts: number of groups per iteration.
        kl_growth: smallest growth of the KL to the base model, as a factor.
        approx_kl_growth: smallest growth of the approximate KL, as a factor.
        dtype: precision of the network.
    """

    clip: float | None = None
    prompts: int = 1
    samples: int = 192
    """Held-out samples per evaluation."""
    zero_spread: float = 0.5
    """Fraction of groups with equal rewards."""
    kl: float = 1.0
    """KL to the base model per latent element; at 1.0 the means differ by sqrt(2) standard
    deviations of the step's noise.
    """
    kl_growth: float = 2.0
    approx_kl: float = 0.1
    """KL between the policy after and before one iteration's updates, per latent element."""
    approx_kl_growth: float = 4.0
    fall: float = 0.5
    """Lost fraction of the gain."""
    share: float = 0.9
    """Fraction of the policy term's squared gradient in one step."""
    dtype: str = "float32"
    float16_works: bool = False
    """Whether the network's activations stay within the range of float16 on this device: SD3.5's on
    a GPU do, FLUX's do not.
    """
    compared: bool = False
    """Whether the training reward compares samples: its mean does not rise, and evaluations have
    another scale.
    """


def limits_of(trainer: Trainer) -> Limits:
    """The thresholds for this run."""
    config, policy = trainer.config, trainer.policy
    float16_works = policy.device.type == "cuda" and isinstance(
        getattr(policy, "family", None), SD3
    )
    clip = getattr(trainer.method.loss, "clip_range", None)
    rule = trainer.method.credit
    # with a memory by prompt, groups of equal rewards may have credit, too
    remembers = isinstance(rule, ExperienceCredit) and isinstance(rule, Stateful)
    return Limits(
        clip,
        config.rollout.groups,
        config.evaluation.eval_samples,
        1.0 if remembers else Limits.zero_spread,
        dtype=config.policy.dtype,
        float16_works=float16_works,
        compared=isinstance(trainer.reward, GroupReward),
    )


def notices(rows: Sequence[Row], limits: Limits, every: int = EVERY) -> list[Notice]:
    """Warnings after the last of `rows`.

    A kind that is among the "warnings" of one of the `every` - 1 rows before is not repeated.
    step-share, which depends only on the settings, is given once. A resumed run therefore gives the
    same warnings.

    Args:
        rows: one row per iteration; row 0, the untrained model, may be included.
        limits: the thresholds.
        every: iterations before a kind is repeated.

    Returns:
        The warnings.
    """
    trained = [row for row in rows if row.get("iteration", 0) > 0]
    if not trained:
        return []
    now = trained[-1]["iteration"]
    before = [(row, said["kind"]) for row in trained[:-1] for said in row.get("warnings", ())]
    recent = {
        kind for row, kind in before if now - row["iteration"] < every or kind == "step-share"
    }
    checks = (zero_spread, no_update, ratio_noise, step_share, kl_runaway)
    found = [*(check(trained, limits) for check in checks), collapse(rows, limits)]
    return [notice for notice in found if notice is not None and notice.kind not in recent]


def zero_spread(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """Most groups of the last `WINDOW` iterations had equal rewards, so their advantages are 0 and
    they do not train.

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    values = [row["zero_spread_groups"] for row in rows[-WINDOW:] if "zero_spread_groups" in row]
    if len(values) < WINDOW or statistics.fmean(values) <= limits.zero_spread:
        return None
    return Notice(
        "zero-spread",
        f"{statistics.fmean(values):.0%} of the groups have equal rewards, so their advantages are"
        " 0. The prompts may be solved already, or too hard. Use a finer reward (reward_form soft"
        " instead of strict), other prompts, a larger group_size, or a larger noise_level",
    )


def no_update(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """`drop_zero_advantages` left no sample for the loss, so the weights did not change.

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    if not rows[-1].get("dropped") or rows[-1]["train_nfe"] > 0:
        return None
    return Notice(
        "no-update",
        f"all advantages are 0, so all {rows[-1]['dropped']} samples were dropped and the weights"
        " did not change in this iteration. If this happens often, use a finer reward, other"
        " prompts, a larger group_size, or a larger noise_level",
    )


def ratio_noise(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """Rounding exceeds the clip: a ratio differs from 1 before the first optimizer step of an
    iteration.

    The reasons are half precision, another batch shape, or merged adapters. Tiny clips such as
    TP-GRPO's 1e-5 (arXiv 2602.06422) and Flow-GRPO's 1e-4 (arXiv 2505.05470) are of this size.
    float16 is recommended if it works and a tenth of the noise suffices: its noise was 11 to 65
    times smaller than bfloat16's in benchmarks/ratio.py.

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    noise = rows[-1].get("ratio_noise")
    if limits.clip is None or noise is None or noise <= limits.clip:
        return None
    mean = f" (mean {rows[-1]['ratio_noise_mean']:.1e})" if "ratio_noise_mean" in rows[-1] else ""
    float16 = limits.dtype == "bfloat16" and limits.float16_works and noise <= 10 * limits.clip
    finer = (
        "dtype float16, which rounds 8 times finer (the loss is scaled), or "
        if float16
        else "dtype float32 or "
    )
    return Notice(
        "ratio-noise",
        f"before any update the ratio, which should be 1, is off by up to {noise:.1e}{mean}, more"
        f" than the clip of {limits.clip:.1e}, so rounding decides which pairs count. Use"
        f" {'' if limits.dtype == 'float32' else finer}clip_range {_round_up(3 * noise):.0e} or"
        " more",
    )


def step_share(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """One of several trained steps had most of the policy term's squared gradient in the last
    `WINDOW` iterations.

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    recent = [
        row["step_shares"]
        for row in rows[-WINDOW:]
        if sum(share > 0 for share in row.get("step_shares", ())) > 1
    ]
    if len(recent) < WINDOW:
        return None
    means = [statistics.fmean(shares) for shares in zip(*recent, strict=True)]
    step, share = max(enumerate(means), key=lambda one: one[1])
    if share <= limits.share:
        return None
    others = [i for i, mean in enumerate(means) if mean > 0 and i != step]
    span = (
        f"trained_steps {others[0]}:{others[-1] + 1}"
        if others[-1] - others[0] == len(others) - 1
        else "another window"
    )
    return Notice(
        "step-share",
        f"step {step} (the first is 0) has {100 * share:.4g}% of the policy term's squared"
        f" gradient, so the other steps hardly train. Leave it out ({span}), or use loss grpo-guard"
        " or, with cps, clipped(log_prob=released_cps), each with its own clip_range"
        " (docs/reading-the-ratio.md)",
    )


def kl_runaway(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """The mean KL of the last `WINDOW` iterations is above a level and a multiple of the median of
    the (up to `HISTORY`) iterations before.

    The policy moves too far from the base model ("kl"), or from the one that sampled ("approx_kl").

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    for key, level, growth, what in (
        ("kl", limits.kl, limits.kl_growth, "to the base model"),
        ("approx_kl", limits.approx_kl, limits.approx_kl_growth, "to the policy that sampled"),
    ):
        values = [row[key] for row in rows if key in row]
        recent, before = values[-WINDOW:], values[-WINDOW - HISTORY : -WINDOW]
        if len(recent) < WINDOW or not before:
            continue
        mean, usual = statistics.fmean(recent), statistics.median(before)
        if mean > level and mean > growth * usual:
            return Notice(
                "kl",
                f"the KL {what} has grown to {mean:.2g} per latent element from {usual:.2g}. Look"
                " at the samples; lower learning_rate or minibatches, or raise kl_weight",
            )
    return None


def collapse(rows: Sequence[Row], limits: Limits) -> Notice | None:
    """The reward fell from its best by more than `fall` of the gain, and by more than chance
    explains.

    Chance: for the held-out reward 0.2 standard deviations of a sample's reward, or 3 standard
    errors if this is more; for the training reward (means of `WINDOW` iterations) 7 standard
    errors, as if all of the reward's variance were between prompts.

    Args:
        rows: the metrics so far.
        limits: the thresholds.

    Returns:
        The warning; None if all is well.
    """
    if limits.compared:
        return None
    trained = [row for row in rows if "reward_mean" in row]
    spread = statistics.median([row["reward_std"] for row in trained]) if trained else 0.0
    held = [row["evaluation"]["reward"] for row in rows if row.get("evaluation")]
    means = [
        statistics.fmean(row["reward_mean"] for row in trained[i - WINDOW : i])
        for i in range(WINDOW, len(trained) + 1)
    ]
    chance = 7.0 * spread / (WINDOW * limits.prompts) ** 0.5
    for name, values, least in (
        ("held-out", held, max(0.2, 3.0 / limits.samples**0.5) * spread),
        ("training", means, chance),
    ):
        if len(values) < 2:
            continue
        first, best, last = values[0], max(values), values[-1]
        if best - last > max(limits.fall * (best - first), least):
            return Notice(
                "collapse",
                f"the {name} reward has fallen back to {last:.3f} from its best, {best:.3f} (it"
                f" began at {first:.3f}). Stop, and resume from an earlier checkpoint"
                " (keep_checkpoints above 1) with a lower learning_rate or clip_range, fewer"
                " minibatches or a kl_weight",
            )
    return None


def _round_up(value: float) -> float:
    """Rounded up to one digit."""
    unit = 10.0 ** int(f"{value:e}".partition("e")[2])
    return -(-value // unit) * unit
