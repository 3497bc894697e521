"""Credit from cheap values, which count only as far as they predict the final reward."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import (
    STD_EPSILON,
    Clamp,
    centred,
    clamped,
    gain_columns,
    last_column,
    masked_std,
    require_columns,
)
from flowrl.probes import Probe, Tweedie


class Calibration(NamedTuple):
    """Regression of the final reward on the values of a column, within groups.

    Args:
        slope: of the reward on the value, in [0, 1] [prompt, 1, column].
        r2: squared correlation, in [0, 1] [prompt, 1, column].
    """

    slope: Float[Tensor, "prompt 1 column"]
    r2: Float[Tensor, "prompt 1 column"]


def calibration(deviations: ValueTable, cross_fit: bool = False) -> Calibration:
    """slope_j = sum v r / sum v^2, limited to [0, 1], and r2_j = (sum v r)^2 / (sum v^2 sum r^2).

    The sums are over all groups and members, with v and r the deviations of V_j and of the final
    reward from their group's means. A column without variance, or with a negative slope, has slope
    = r2 = 0.

    Args:
        deviations: [prompt, member, decision+1], 0 for members that do not count.
        cross_fit: the sums of a prompt leave out its own group.

    Returns:
        Slope and r2 of every column; 1 for the last if rewards vary.
    """
    reward = deviations[..., -1:]
    products = torch.stack(
        [deviations * reward, deviations.square(), reward.square().expand_as(deviations)]
    ).double()
    sums = products.sum(2, keepdim=True)  # [3, prompt, 1, column]
    total = sums.sum(1, keepdim=True)
    both, values, rewards = (total - sums if cross_fit else total.expand_as(sums)).to(deviations)
    both = both.clamp(min=0.0)
    varies = (values > 0) & (rewards > 0)
    slope = torch.where(varies, both / values, 0.0).clamp(max=1.0)
    r2 = torch.where(varies, both.square() / (values * rewards), 0.0).clamp(max=1.0)
    return Calibration(slope, r2)


@checked_options
@dataclass(frozen=True)
class CalibratedGain:
    probe: Probe = Tweedie()
    std: Literal["reward", "credit", "max", "batch"] = "credit"
    trust: Literal["r2", "gains", "baseline"] = "r2"
    cross_fit: bool = False
    clamp: Clamp = 5.0

    def reads(self, trained: Tensor) -> Tensor:
        return gain_columns(trained) | last_column(trained)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        require_columns(values, decisions, self)
        mask = decisions.mask
        members = mask.any(-1, keepdim=True)
        known = members & self.reads(mask)
        deviations = centred(values, ("member",), known)
        slope, r2 = calibration(deviations, self.cross_fit)
        r2 = {"r2": r2, "gains": torch.ones_like(r2), "baseline": torch.zeros_like(r2)}[self.trust]
        if self.trust == "baseline":
            r2[..., -1] = 1
        predicted, reward = slope * deviations, deviations[..., -1:]
        outcome = r2 * predicted + (1 - r2) * reward
        credit = (outcome[..., 1:] - predicted[..., :-1]).masked_fill(~mask, 0.0)
        count = members.sum(1, keepdim=True)
        credit = credit * count / (count - 1).clamp(min=1)
        scale = masked_std(reward, ("member",), members)
        if self.std == "batch":
            scale = masked_std(credit, ("prompt", "member", "decision"), mask)
        elif self.std != "reward":
            own = masked_std(credit, ("member", "decision"), mask)
            scale = own if self.std == "credit" else torch.maximum(own, scale)
        credit = credit / (scale + STD_EPSILON)
        return clamped(centred(credit, ("member",), mask), self.clamp)
