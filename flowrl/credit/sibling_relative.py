"""Sibling-relative credit: a draw is compared with the other draws from the same state."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import last_column, require_clamp, require_columns
from flowrl.credit.units import (
    Units,
    branched_tree,
    group_deviations,
    group_zscore,
    next_columns,
    unit_values,
)
from flowrl.probes import Branch, Branching, Probe


@checked_options
@dataclass(frozen=True)
class SiblingRelative:
    """A branch is compared with the other branches from the same state.

    A(u) = (V(u) - mean) / (std + 1e-4) over the siblings of u, the draws from the same state; 0 for
    a draw without siblings.

    Siblings differ only by what happened at the step itself, so earlier luck is not credited. If
    members are finished by ODE steps of several strides (`Comb(strides=...)`), A(u) is the sum over
    the strides s of Z(V_s), with V_s the mean over the members of stride s behind u.

    `assign` raises `CreditError` if the decisions have no branched tree. Sources: Granular-GRPO
    (arXiv 2510.01982), whose siblings share their trunk, summed over strides; TempFlow-GRPO (arXiv
    2508.04324), comparison per seed. Leave-one-out is our extension.

    Args:
        normalise: divide by the standard deviation; of two siblings only the sign then remains.
            False: A is in units of the reward.
        leave_one_out: multiply by k / (k - 1) for k siblings, because the mean contains the draw's
            own value.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    normalise: bool = True
    leave_one_out: bool = False
    clamp: float | None = 5.0
    probe: Probe = Branch((2, 2))

    def __post_init__(self) -> None:
        require_clamp("SiblingRelative", self.clamp)
        require(
            isinstance(self.probe, Branching),
            "SiblingRelative.probe",
            self.probe,
            "a branching probe: Branch or Comb",
        )

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]; 0 where a member's transition was not drawn."""
        tree, mask = branched_tree(decisions, "SiblingRelative"), decisions.mask
        require_columns(values, decisions, self, next_columns(mask) | last_column(mask))
        total = values.new_zeros(len(values), tree.units)
        strides = torch.ones(tree.members) if tree.strides is None else tree.strides
        for stride in strides.unique():
            chosen = replace(decisions, mask=mask & (strides == stride)[:, None])
            total += self._among_siblings(unit_values(values, chosen, tree), tree.parent)
        return tree.decision_table(total)

    def _among_siblings(self, values: Units, family: Tensor) -> Units:
        if self.normalise:
            return group_zscore(values, family, clamp=self.clamp, leave_one_out=self.leave_one_out)
        difference = group_deviations(values, family)
        if self.leave_one_out:
            known = ~values.isnan()
            count = (known[:, None] & (family == family[:, None])).sum(-1)
            difference = difference * count / (count - 1).clamp(min=1)
        return difference if self.clamp is None else difference.clamp(-self.clamp, self.clamp)
