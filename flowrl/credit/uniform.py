"""Flow-GRPO's credit: the whole trajectory's advantage at every step."""

from dataclasses import dataclass
from typing import Literal

from flowrl.credit.table import require_clamp, require_nodes, zscore
from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes import NoProbe, Probe
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class Uniform:
    """Every step gets the final reward, normalised within the group.

    A_i = (R_T - mean) / (std + 1e-4), the same at every step i; reads the last node only.

    The mean is the group's, so a group of equal rewards gets 0. `assign` raises `CreditError` if R_T is not finite. Source:
    Flow-GRPO (arXiv 2505.05470) and its public code.

    Args:
        std: "group": over the members of the prompt, as in the paper; "batch": over all samples of the table, the public code's
            default.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe of the rollout, of which only R_T is used.

    Raises:
        ConfigError: a field is out of range.
    """

    std: Literal["group", "batch"] = "group"
    clamp: float | None = 5.0
    probe: Probe = NoProbe()

    def __post_init__(self) -> None:
        require(self.std in ("group", "batch"), "Uniform.std", self.std, "'group' or 'batch'")
        require_clamp("Uniform", self.clamp)

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; the schedule is not used."""
        require_nodes(rewards, [-1], "Uniform", self.probe)
        std_over = ("member",) if self.std == "group" else ("prompt", "member")
        scores = zscore(rewards[..., -1:], over=("member",), std_over=std_over, clamp=self.clamp)
        return scores.repeat(1, 1, rewards.shape[-1] - 1)
