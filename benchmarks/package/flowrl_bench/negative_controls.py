"""Faults of public code, kept here so that what they cost can be measured; nothing else may use them."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from flowrl.credit import TurningPoint
from flowrl.protocols import CreditAssigner
from flowrl.types import Probe, Schedule


@dataclass(frozen=True)
class FreshNoiseFault:
    """A rule that is shown another noise's pure-ODE reward as R_0, as the public release of TP-GRPO computes it.

    Members of a group that start from independent noise all have an R_0 of their own; here each gets its neighbour's, which is
    a draw from the same distribution that knows nothing of the member. That contaminates d_0, the trend and every sign.
    Source: the public code of arXiv 2602.06422, whose comment says "same initial noise".
    """

    rule: CreditAssigner = field(default_factory=TurningPoint)

    @property
    def probe(self) -> Probe:
        """What the rule needs."""
        return self.rule.probe

    def assign(self, rewards: Float[Tensor, "prompt member node"], schedule: Schedule | None = None) -> Tensor:
        """The rule's advantages [prompt, member, step] of the spoilt table."""
        spoilt = rewards.clone()
        spoilt[..., 0] = rewards[..., 0].roll(1, dims=1)
        return self.rule.assign(spoilt, schedule)
