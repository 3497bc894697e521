"""Errors in public code as negative controls, to measure their effect. No other code may use
them.
"""

from dataclasses import dataclass, field

from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.protocols import CreditAssigner
from flowrl.credit import TurningPoint
from flowrl.probes import Probe


@dataclass(frozen=True)
class FreshNoiseFault:
    """A rule that gets the pure-ODE reward of another noise as V_0, as the public release of
    TP-GRPO computes it.

    If members of a group start from independent noise, every member has its own V_0. Here it gets
    its neighbour's: a draw from the same distribution that is independent of the member. This
    corrupts d_0, the trend and every sign. Source: the public code of arXiv 2602.06422, whose
    comment says "same initial noise".
    """

    rule: CreditAssigner = field(default_factory=TurningPoint)

    @property
    def probe(self) -> Probe:
        """The rule's probe."""
        return self.rule.probe

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """The rule's advantages [prompt, member, decision] of the corrupted table."""
        corrupted = values.clone()
        corrupted[..., 0] = values[..., 0].roll(1, dims=1)
        return self.rule.assign(corrupted, decisions)
