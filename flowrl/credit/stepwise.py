"""Stepwise-Flow-GRPO's credit: the gain of each decision, and its generalisation towards
reward-to-go.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Decisions, Needs, ValueTable
from flowrl.core.options import Share, checked_options
from flowrl.credit.table import Clamp, Columns, gain_columns, gains, require_columns, zscore
from flowrl.probes import Completion, Probe, Substeps


def generalised_gains(values: ValueTable, lam: float = 0.0, gamma: float = 1.0) -> CreditTable:
    """sum_{j >= 0} (gamma lam)^j g_{k+j} with g_k = V_{k+1} - V_k, not normalised.

    `lam` = 0 gives the gains (Stepwise-Flow-GRPO, arXiv 2603.28718). `lam` = `gamma` = 1 gives the
    reward-to-go R - V_k (TP-GRPO's aggregated reward, arXiv 2602.06422). The sum is that of
    generalised advantage estimation (arXiv 1506.02438, equation 16).

    Args:
        values: value table V [prompt, member, decision+1]; its last column is the final reward R.
        lam: weight of later gains, in [0, 1].
        gamma: discount per decision, in [0, 1].

    Returns:
        Generalised gains [prompt, member, decision], in units of the reward.
    """
    increments = gains(values)
    decay = gamma * lam
    if decay == 0:
        return increments
    backwards = reversed(increments.unbind(dim=-1))
    sums = list(accumulate(backwards, lambda total, gain: gain + decay * total))
    return torch.stack(sums[::-1], dim=-1)


def later_columns(mask: Bool[Tensor, "*group decision"]) -> Columns:
    """All columns from the first decision of `mask` on."""
    return gain_columns(mask.cumsum(-1) > 0)


@checked_options
@dataclass(frozen=True)
class StepwiseGain:
    """Credits a decision with its gain: the increase in the estimated value.

    A_k = Z(sum_j (gamma lam)^j g_{k+j}), g_k = V_{k+1} - V_k, Z(y) = (y - mean) / (std + 1e-4),
    clamped to +-`clamp`.

    The mean is always the group's, so a group of equal rewards gets 0. In the paper all members
    start from the same noise. The gain of the last decision is R - V of its state: R is exact, V is
    the probe's estimate. A bias c of all estimates before the end therefore shifts every last gain
    by -c. Z per decision removes this shift. Joint Z does not: of D decisions, the last gets -c (1
    - 1/D) / std more for all members, the others c / (D std), and std grows with c.

    `assign` raises `CreditError` if a value that the credit reads is not finite. Source:
    Stepwise-Flow-GRPO (arXiv 2603.28718, gain-based advantages; lam = 0, T' = 5).

    Args:
        normalise: "joint": Z over members and decisions together, as in the paper (late gains are
            smaller, and Z per decision would amplify them); "step": over members, decision by
            decision.
        lam: weight of later gains, in [0, 1].
        gamma: discount per decision, in [0, 1].
        pool: Z's std is the group's ("prompt") or that of all prompts of the table ("batch"); the
            paper does not specify this.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    normalise: Literal["joint", "step"] = "joint"
    lam: Share = 0.0
    gamma: Share = 1.0
    pool: Literal["prompt", "batch"] = "prompt"
    clamp: Clamp = 5.0
    probe: Probe = Substeps(5)

    @property
    def needs(self) -> Needs:
        """Columns k and k + 1 of trained decisions; if `gamma lam` > 0 all from the first trained
        decision on.
        """
        columns = gain_columns if self.lam * self.gamma == 0 else later_columns
        return Needs(columns=columns, shared_noise=True)

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self)
        over = ("member", "decision") if self.normalise == "joint" else ("member",)
        std_over = over if self.pool == "prompt" else ("prompt", *over)
        increments = generalised_gains(values, self.lam, self.gamma)
        return zscore(increments, over, std_over, self.clamp, decisions.mask)


DenseGain = partial(StepwiseGain, normalise="step", probe=Completion())
"""Credits a decision with its gain, normalised separately for each decision.

`StepwiseGain` of ODE completions, A_k = Z(g_k), DenseGRPO's credit (arXiv 2601.20218).
"""
