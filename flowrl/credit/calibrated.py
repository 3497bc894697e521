"""Credit from cheap values, which count only as far as they predict the final reward."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Decisions, Needs, ValueTable
from flowrl.core.options import Share, checked_options
from flowrl.credit.table import (
    Clamp,
    Columns,
    centred,
    gain_columns,
    last_column,
    read_columns,
    require_columns,
    zscore,
)
from flowrl.probes import Probe, Tweedie


class Calibration(NamedTuple):
    """The regression of the final reward on the values of a column, within groups.

    Args:
        slope: slope of the reward on the value, in [0, 1] [prompt, 1, decision+1].
        r2: their squared correlation, in [0, 1] [prompt, 1, decision+1].
    """

    slope: Float[Tensor, "prompt 1 column"]
    r2: Float[Tensor, "prompt 1 column"]


def calibration(deviations: ValueTable, cross_fit: bool = False) -> Calibration:
    """slope_j = sum v_j r / sum v_j^2, limited to [0, 1], and r2_j = (sum v_j r)^2 / (sum v_j^2 sum
    r^2).

    The sums are over members and prompts, with v_j and r the deviations of V_j and of the final
    reward R from their group's means. A column without variance or with a negative slope has slope
    = r2 = 0. A value with errors of its own, such as noise of the score, has a smaller slope: the
    slope of least squares is the one that predicts R best from the value with its errors.

    Args:
        deviations: [prompt, member, decision+1], 0 for members that do not count.
        cross_fit: the sums for a prompt leave out its own group, so that they do not depend on the
            rewards that they shrink; with one prompt all slopes are 0.

    Returns:
        Slope and r2 of every column; both are 1 for the last if rewards vary.
    """
    reward = deviations[..., -1:]
    products = deviations * reward, deviations.square(), reward.square().expand_as(deviations)
    sums = torch.stack(products).double().sum(2, keepdim=True)  # [3, prompt, 1, column]
    total = sums.sum(1, keepdim=True)
    together, values, rewards = total - sums if cross_fit else total.expand_as(sums)
    together = together.clamp(min=0)
    varies = (values > 0) & (rewards > 0)
    slope = torch.where(varies, together / values, 0.0).clamp(max=1)
    r2 = torch.where(varies, together.square() / (values * rewards), 0.0).clamp(max=1)
    return Calibration(slope.to(deviations), r2.to(deviations))


def value_quality(values: ValueTable) -> dict[str, list[float | None]]:
    """How well the values predict the final reward: by decision, "value_slope" and "value_r2" as
    `calibration` has them, over the samples with a reward.

    Args:
        values: value table V [prompt, member, decision+1]; NaN in columns without values and for
            samples without a reward.

    Returns:
        Lists by name [decision], None for a column without values; empty if there is none.
    """
    judged = values[..., -1:].isfinite()
    known = (values.isfinite() | ~judged).all(1).all(0) & judged
    if not known[..., :-1].any():
        return {}
    slope, r2 = calibration(centred(values, ("member",), known))
    used = known.any(1).any(0)[:-1].tolist()
    tables = {"value_slope": slope, "value_r2": r2}
    return {
        name: [value if is_known else None for value, is_known in zip(row, used, strict=True)]
        for name, row in ((name, table[0, 0, :-1].tolist()) for name, table in tables.items())
    }


@checked
def predictions(
    values: ValueTable, cross_fit: bool, known: Bool[Tensor, "prompt member column"]
) -> tuple[ValueTable, Float[Tensor, "prompt 1 column"]]:
    """p_j = s_j v_j [prompt, member, decision+1], whose last column is r, and r2_j, from the
    entries that are `known`; see `calibration`.
    """
    deviations = centred(values, ("member",), known)
    slope, r2 = calibration(deviations, cross_fit)
    predicted = slope * deviations
    predicted[..., -1:] = deviations[..., -1:]
    return predicted, r2


@checked
def calibrated_gains(
    values: ValueTable,
    gain_weight: float | None = None,
    cross_fit: bool = False,
    known: Bool[Tensor, "prompt member column"] | None = None,
) -> CreditTable:
    """w_{k+1} s_{k+1} v_{k+1} + (1 - w_{k+1}) r - s_k v_k, not normalised; see `CalibratedGain`.

    Args:
        values: value table V [prompt, member, decision+1]; its last column is the final reward R.
        gain_weight: w_j for j < D, one number in [0, 1]; None for r2_j.
        cross_fit: see `calibration`.
        known: the entries that count; None for all. A column counts for all of its members or for
            none.

    Returns:
        Credit [prompt, member, decision], in units of the reward, with mean 0 over the members.
    """
    known = torch.ones_like(values, dtype=torch.bool) if known is None else known
    predicted, r2 = predictions(values, cross_fit, known)
    reward = predicted[..., -1:]
    weight = r2[..., 1:] if gain_weight is None else torch.full_like(r2[..., 1:], gain_weight)
    return weight * predicted[..., 1:] + (1 - weight) * reward - predicted[..., :-1]


def gain_and_last_columns(mask: Bool[Tensor, "*group decision"]) -> Columns:
    """The columns k and k + 1 of the decisions of `mask`, and the last one."""
    return gain_columns(mask) | last_column(mask)


@checked_options
@dataclass(frozen=True)
class CalibratedGain:
    """Credits a decision with the gain in a cheap value, to the extent that the value predicts the
    final reward, and with the unpredicted reward for the rest.

    A_k = Z(w_{k+1} s_{k+1} v_{k+1} + (1 - w_{k+1}) r - s_k v_k), with v_j and r the deviations of
    V_j and of the final reward R from the means of their group, s_j the slope of r on v_j, and w_j
    its r2 (`calibration`). At the end s_D v_D = r. Z(y) = (y - mean) / (std + 1e-4) over
    members and decisions, clamped to +-`clamp`. A group of equal rewards gets 0.

    This is the gain V'_{k+1} - V'_k of the calibrated value V' with weight w, and the reward-to-go
    R - V'_k with weight 1 - w, where V'_j = m(R) + s_j (V_j - m(V_j)), m the mean over the other
    members; the factor G / (G - 1) of a group of G cancels in Z. The gain has the errors of V' as
    bias, the reward-to-go has none, whatever V' is, but all later luck. Before Z: values that
    predict nothing (s = r2 = 0) give r, which is uniform credit; exact values give E[A_k | z_k,
    z_{k+1}] = V*(z_{k+1}) - V*(z_k).

    `assign` raises `CreditError` if a value that the credit reads is not finite. Not published. See
    GAE (arXiv 1506.02438) for the mix of gains and reward-to-go, and Q-Prop (arXiv 1611.02247) for
    an imperfect critic weighted by its measured covariance with the return.

    Args:
        probe: the probe that scores unfinished states. The Tweedie estimate costs no network
            evaluation, but a decode and a reward call per decision.
        gain_weight: w_j for j < D, the same number in [0, 1] at every decision; None for r2_j. 1:
            gains of the calibrated value; 0: the reward-to-go, with the value as a baseline only.
        cross_fit: see `calibration`.
        clamp: largest absolute advantage; None for no clamp.

    Raises:
        ConfigError: a field is out of range.
    """

    needs: ClassVar[Needs] = Needs(columns=gain_and_last_columns)

    probe: Probe = Tweedie()
    gain_weight: Share | None = None
    cross_fit: bool = False
    clamp: Clamp = 5.0

    @checked
    def gains(self, values: ValueTable, known: Bool[Tensor, "prompt member column"]) -> CreditTable:
        """Credit before Z, from the entries that are `known`."""
        return calibrated_gains(values, self.gain_weight, self.cross_fit, known)

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self)
        mask = decisions.mask
        known = mask.any(-1, keepdim=True) & read_columns(self, mask).any(1, keepdim=True)
        credit = self.gains(values, known)
        # equal rewards do not tell which values are right, and Z would amplify their differences
        final = centred(values[..., -1:], ("member",), known[..., -1:])
        credit = credit.masked_fill((final == 0).all(1, keepdim=True), 0.0)
        return zscore(credit, ("member", "decision"), clamp=self.clamp, mask=mask)
