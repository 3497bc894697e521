"""Agreement of a rule's credit with the true advantage, corrected for the Monte Carlo noise of the
truth.

`flowrl.bench.continuations` measures the true advantage; this module also exports its functions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.bench.continuations import Look, LookCredit, TrueAdvantages, true_advantages
from flowrl.core.errors import require
from flowrl.run.statistics import Estimate

__all__ = [
    "Agreement",
    "CreditReport",
    "Look",
    "LookCredit",
    "TrueAdvantages",
    "compare_credit",
    "true_advantages",
]

RESOLVED = 2.0
"""A true advantage counts as resolved if it is more than this many standard errors away from 0."""

LEAST_RELIABILITY = 0.1
"""The smallest reliability that the correction of a correlation uses."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a rule's credit with the true advantage, over the decisions of all groups, or at
    one step.

    `correlation`: Pearson, divided by the root of `reliability`, which corrects for the Monte Carlo
    noise of the truth (`raw_correlation` does not), within [-1, 1]. `sign`: fraction of the
    *resolved* decisions (|A*| above two standard errors) whose credit has the sign of A* (credit 0
    counts as half); `resolved` is their fraction of all. `bias`: the mean credit of a step over all
    outcomes, root mean square over steps, in units of the credit's std; the true one is 0, since
    E[A* | z_i] = 0.
    """

    correlation: Estimate
    raw_correlation: float
    reliability: float
    sign: Estimate
    resolved: float
    bias: Estimate


@dataclass(frozen=True)
class CreditReport:
    """`overall`, and by step of the decisions `per_step`."""

    overall: Agreement
    steps: tuple[int, ...]
    per_step: tuple[Agreement, ...]


def compare_credit(
    credit: Tensor, truth: TrueAdvantages, draws: int = 1000, seed: int = 0
) -> CreditReport:
    """Compare a rule's `credit` [prompt, member, decision] with the truth; intervals by bootstrap
    over groups. Decisions count as the truth's `weights` say.

    Raises `ConfigError` for credit of another shape than the truth's, or not finite.
    """
    shape, wanted = tuple(credit.shape), tuple(truth.values.shape)
    allowed = f"[prompt, member, decision] = {wanted}, as the true advantages"
    require(shape == wanted, "credit of shape", shape, allowed)
    bad = int((~torch.isfinite(credit)).sum())
    require(bad == 0, "credit: values that are not finite", bad, "none")
    weights = None if truth.weights is None else truth.weights.double()
    sums = _sums(credit.double(), truth.values.double(), truth.errors.double(), weights)
    by_step = _resampled(sums, draws, seed)
    per_step = tuple(_agreement(by_step[:, i : i + 1]) for i in range(len(truth.steps)))
    return CreditReport(_agreement(by_step), truth.steps, per_step)


def _resampled(sums: Tensor, draws: int, seed: int) -> Tensor:
    """Sums over groups [draw, step, 9]: of the data, then of `draws` bootstrap draws."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(1, len(sums), dtype=sums.dtype)
    picks = torch.randint(0, len(sums), (draws, len(sums)), generator=generator)
    resampled = torch.zeros(draws, len(sums), dtype=sums.dtype).scatter_add_(
        1, picks, torch.ones_like(picks, dtype=sums.dtype)
    )
    return torch.einsum("dg,gsk->dsk", torch.cat([weights, resampled]), sums)


def _sums(credit: Tensor, truth: Tensor, errors: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums over members from which all statistics are computed, [group, step, 9]."""
    resolved = (truth.abs() > RESOLVED * errors).to(truth)
    agrees = torch.where(credit == 0, 0.5, (credit.sign() == truth.sign()).to(truth))
    ones = torch.ones_like(truth)
    columns = [
        ones,
        credit,
        truth,
        credit.square(),
        truth.square(),
        credit * truth,
        errors.square(),
        resolved,
        resolved * agrees,
    ]
    table = torch.stack(columns, dim=-1)
    return (table if weights is None else table * weights[..., None]).sum(1)


@dataclass(frozen=True)
class _Moments:
    """Of credit and truth, [draw]."""

    count: Tensor
    variance_a: Tensor
    variance_t: Tensor
    covariance: Tensor
    reliability: Tensor


def _moments(sums: Tensor) -> _Moments:
    n, a, t, aa, tt, at, noise = sums.sum(1).unbind(-1)[:7]
    n = n.clamp(min=1e-30)  # a step without a decision
    variance_a, variance_t = (
        (aa / n - (a / n).square()).clamp(min=0),
        (tt / n - (t / n).square()).clamp(min=1e-30),
    )
    covariance = at / n - a * t / n.square()
    reliability = (1 - noise / n / variance_t).clamp(min=LEAST_RELIABILITY, max=1.0)
    return _Moments(n, variance_a, variance_t, covariance, reliability)


def _raw(m: _Moments) -> Tensor:
    raw = m.covariance / (m.variance_a * m.variance_t).clamp(min=1e-60).sqrt()
    return torch.where(m.variance_a > 0, raw, torch.zeros_like(m.count))


def _corrected(m: _Moments) -> Tensor:
    return (_raw(m) / m.reliability.sqrt()).clamp(-1.0, 1.0)


def _agreement(sums: Tensor) -> Agreement:
    """Statistics of sums [draw, step, 9]; the first draw is the data itself, the others are
    bootstrap draws.
    """
    moments, (resolved, agrees) = _moments(sums), sums.sum(1).unbind(-1)[7:]
    corrected = _corrected(moments)
    sign = agrees / resolved.clamp(min=1)
    bias = (
        _mean_credit(sums[..., 1] / sums[..., 0].clamp(min=1e-30))
        / moments.variance_a.clamp(min=1e-30).sqrt()
    )
    return Agreement(
        correlation=_measured(corrected),
        raw_correlation=float(_raw(moments)[0]),
        reliability=float(moments.reliability[0]),
        sign=_measured(sign),
        resolved=float(resolved[0] / moments.count[0]),
        bias=_measured(bias),
    )


def _mean_credit(by_step: Tensor) -> Tensor:
    """Root mean square over steps of the mean credit [draw, step], corrected for the sampling noise
    of those means; [draw].
    """
    noise = (by_step[1:] - by_step[:1]).square().mean(0)
    times = torch.full_like(by_step[:, 0], 2.0)
    times[0] = 1.0  # a bootstrap draw has the noise of the data and its own
    return (by_step.square() - times[:, None] * noise).mean(1).clamp(min=0).sqrt()


def _measured(draws: Tensor) -> Estimate:
    """The data's own value and the 2.5 and 97.5 percentiles of the bootstrap draws."""
    low, high = torch.quantile(draws[1:], torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return Estimate(float(draws[0]), low, high)
