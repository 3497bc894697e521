"""The rule to submit: replace the body of `assign`, its docstring, and the probe."""

from dataclasses import dataclass

from flowrl.credit import zscore
from flowrl.probes import NoProbe, Probe


@dataclass(frozen=True)
class MyRule:
    """Uniform credit: every decision gets the group advantage of the finished image.

    A_k = Z(R) over the members of a prompt. As it is, it earns no points for originality.
    """

    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        """Values [prompt, member, decision+1] to advantages [prompt, member, decision]."""
        reward = values[..., -1:].expand(decisions.mask.shape)
        return zscore(reward, over=("member",), mask=decisions.mask)
