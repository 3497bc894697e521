"""Stepwise gains relative to a moving average of each step's gain, a baseline kept across iterations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.credit.table import gains, require_clamp, require_nodes, zscore
from flowrl.errors import CreditError, require
from flowrl.options import checked_options
from flowrl.probes import Probe, Substeps
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass
class MovingAverageGain:
    """A step gets its gain, less the running average of the gains at this step.

    A = Z(g_i - b_i) over members and steps, g_i = R_{i+1} - R_i, b_i an exponential moving average of g_i.

    After every table b_i <- `decay` b_i + (1 - `decay`) mean(g_i), the mean over all prompts and members; the first table sets
    b_i. Z(y) = (y - mean) / (std + 1e-4) per prompt. Subtracting the mean gain of a step removes the larger credit that early
    steps get only because they are early. A group of equal rewards gets exactly 0: such rewards contain no information about any
    step, but the baseline would add some.

    `assign` updates the baseline; checkpoints contain it (`state_dict`), so a resumed run continues with the same values. It
    raises `CreditError` if a node's reward is not finite or the number of steps changes. Source: the moving-average ablation of
    Stepwise-Flow-GRPO (arXiv 2603.28718).

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
    baseline: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0.0 <= self.decay < 1.0, "MovingAverageGain.decay", self.decay, "in [0, 1)")
        require_clamp("MovingAverageGain", self.clamp)

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step] relative to the baseline of earlier tables; then updates the baseline."""
        require_nodes(rewards, list(range(rewards.shape[-1])), "MovingAverageGain", self.probe)
        increments = gains(rewards)
        mean = increments.mean(dim=(0, 1))
        if self.baseline is None:
            self.baseline = mean
        before = self.baseline.to(increments)
        if len(before) != len(mean):
            raise CreditError(f"MovingAverageGain has a baseline of {len(before)} steps, but the table has {len(mean)} steps")
        advantages = zscore(increments - before, over=("member", "step"), clamp=self.clamp)
        self.baseline = self.decay * before + (1.0 - self.decay) * mean
        silent = (rewards == rewards[:, :1, :1]).flatten(1).all(dim=1)
        return torch.where(silent[:, None, None], torch.zeros_like(advantages), advantages)

    def state_dict(self) -> dict[str, Tensor]:
        """The baseline, [step]; empty before the first table."""
        return {} if self.baseline is None else {"baseline": self.baseline.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.baseline = state["baseline"].clone() if "baseline" in state else None
