"""Stepwise gains relative to a moving average of each decision's gain, a baseline kept across
iterations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import (
    first_of,
    gain_columns,
    gains,
    masked_mean,
    require_clamp,
    require_columns,
    zscore,
)
from flowrl.probes import Probe, Substeps


@checked_options
@dataclass
class MovingAverageGain:
    """A decision gets its gain, less the running average of the gains at its time.

    A = Z(g_k - b_k) over members and decisions, g_k = V_{k+1} - V_k, b_k an exponential moving
    average of g_k.

    After every table b_k <- `decay` b_k + (1 - `decay`) mean(g_k), the mean over all prompts and
    members in the mask. The average is kept by the time of the decision; a time that was not seen
    before starts with its mean gain. Z(y) = (y - mean) / (std + 1e-4) per prompt. Subtracting the
    mean gain of a decision removes the larger credit that early decisions get only because they are
    early. A group of equal rewards gets exactly 0: such rewards contain no information about any
    decision, but the baseline would add some.

    `assign` updates the baseline; checkpoints contain it (`state_dict`), so a resumed run continues
    with the same values. It raises `CreditError` if a value that the credit reads is not finite.
    Source: the moving-average ablation of Stepwise-Flow-GRPO (arXiv 2603.28718).

    Args:
        decay: weight of the previous baseline, in [0, 1).
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    shared_noise: ClassVar[bool] = True

    decay: float = 0.9
    clamp: float | None = 5.0
    probe: Probe = Substeps(5)
    baseline: dict[float, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0.0 <= self.decay < 1.0, "MovingAverageGain.decay", self.decay, "in [0, 1)")
        require_clamp("MovingAverageGain", self.clamp)

    def reads(self, trained: Tensor) -> Tensor:
        """Columns k and k + 1 of trained decisions."""
        return gain_columns(trained)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision] relative to the baseline of earlier tables; then
        updates the baseline.
        """
        require_columns(values, decisions, self)
        mask, increments, over = decisions.mask, gains(values), ("member", "decision")
        mean: list[float] = masked_mean(increments, ("prompt", "member"), mask).flatten().tolist()
        times: list[float] = decisions.time.tolist()
        seen = mask.any(0).any(0).tolist()
        known = self.baseline
        before = [known.get(time, new) for time, new in zip(times, mean, strict=True)]
        advantages = zscore(
            increments - increments.new_tensor(before), over, clamp=self.clamp, mask=mask
        )
        for time, old, new, counted in zip(times, before, mean, seen, strict=True):
            if counted:
                known[time] = self.decay * old + (1.0 - self.decay) * new
        read = self.reads(mask)
        silent = ((values == first_of(values, over, read)) | ~read).all(-1).all(-1)
        return advantages.masked_fill(silent[:, None, None], 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Times [n] and the baseline at each [n]; empty before the first table."""
        if not self.baseline:
            return {}
        times, baseline = torch.tensor(list(self.baseline.items()), dtype=torch.float64).T
        return {"times": times.clone(), "baseline": baseline.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        tables = (state[name].tolist() for name in ("times", "baseline") if name in state)
        self.baseline = dict(zip(*tables, strict=True))
