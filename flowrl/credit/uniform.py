"""Flow-GRPO's credit: the whole trajectory's advantage at every decision."""

from dataclasses import dataclass
from typing import Literal

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import Clamp, centred, clamped, last_column, require_columns, zscore
from flowrl.probes import NoProbe, Probe


@checked_options
@dataclass(frozen=True)
class Uniform:
    """Credits every decision with the final reward, normalised within the group.

    A_k = (R - mean) / (std + 1e-4), or R - mean, the same at every decision k, with R the reward of
    the final image.

    The mean is the group's, so a group of equal rewards gets 0. A member counts if one of its
    decisions is in the mask. `assign` raises `CreditError` if such a member's R is not finite.
    Source: Flow-GRPO (arXiv 2505.05470) and its public code.

    Args:
        std: "group": over the members of the prompt, as in the paper; "batch": over all samples of
            the table, the public code's default; None: not divided, in units of the reward, as in
            EPG (arXiv 2602.04663).
        clamp: largest absolute advantage c; None for no limit.
        limit: "clamp": A is clamped to +-c; "tanh": c tanh(A / c), as in V-GRPO (arXiv 2604.23380).
        probe: the probe of the rollout, of which only R is used.

    Raises:
        ConfigError: a field is out of range.
    """

    std: Literal["group", "batch"] | None = "group"
    clamp: Clamp = 5.0
    limit: Literal["clamp", "tanh"] = "clamp"
    probe: Probe = NoProbe()

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]."""
        require_columns(values, decisions, self, last_column(decisions.mask))
        members, rewards = decisions.mask.any(-1, keepdim=True), values[..., -1:]
        if self.std is None:
            scores = centred(rewards, ("member",), members)
        else:
            std_over = ("member",) if self.std == "group" else ("prompt", "member")
            scores = zscore(rewards, ("member",), std_over, None, members)
        if self.limit == "tanh" and self.clamp is not None:
            scores = self.clamp * (scores / self.clamp).tanh()
        scores = clamped(scores, self.clamp)
        return scores.repeat(1, 1, len(decisions))
