"""The control of a submission: uniform credit that trains each step as strongly as the rule."""

from dataclasses import dataclass, replace

from flowrl.core.protocols import CreditAssigner
from flowrl.credit import RuleAround, Uniform


@dataclass(frozen=True)
class Control(RuleAround):
    """A_k = w_k A_k', with A' uniform credit and w_k = rms(A_k of `rule`) / rms(A_k').

    The probe and the estimates are those of `rule`, so both cost the same. They differ in *which*
    samples are credited at a step, not in how much the step is trained. A rule that is uniform
    credit times a factor per step is its own control.

    Args:
        rule: the rule that is judged, without memory.
    """

    rule: CreditAssigner

    def assign(self, values, decisions, record=None):
        """Advantages [prompt, member, decision]; weights in the loss are those of `rule`."""
        credit, uniform = self.inner_credit(values, decisions, record), Uniform()
        advantages = uniform.assign(values, decisions)
        own, plain = (
            table.square().mean((0, 1)).sqrt() for table in (credit.advantages, advantages)
        )
        return replace(credit, advantages=advantages * (own / plain.clamp(min=1e-8)))
