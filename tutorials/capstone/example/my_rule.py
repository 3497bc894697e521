"""An example of a submission: what is left to win at a decision, instead of the whole reward."""

from dataclasses import dataclass

from flowrl.credit import reward_to_go, zscore
from flowrl.probes import Completion, Probe


@dataclass(frozen=True)
class MyRule:
    """A_k = Z(R - V_k) over the members of a prompt, with V_k the reward of an ODE completion.

    V_k depends on the state before decision k alone, so it is a baseline: it removes what earlier
    decisions have contributed to the reward.
    """

    probe: Probe = Completion()

    def assign(self, values, decisions):
        """Values [prompt, member, decision+1] to advantages [prompt, member, decision]."""
        return zscore(reward_to_go(values), over=("member",), mask=decisions.mask)
