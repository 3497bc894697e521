"""Sibling-relative credit: a draw is compared with the other draws from the same state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.table import require_clamp
from flowrl.credit.units import Units, branched_tree, group_deviations, group_zscore, siblings, unit_values
from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes import Branch, Branching, Probe
from flowrl.tree import Tree
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class SiblingRelative:
    """A branch is compared with the other branches from the same state.

    A(u) = (V(u) - mean) / (std + 1e-4) over the siblings of u, the draws from the same state; 0 for a draw without siblings.

    Siblings differ only by what happened at the step itself, so earlier luck is not credited. If members are finished by ODE
    steps of several strides (`Comb(strides=...)`), A(u) is the sum over the strides s of Z(V_s), with V_s the mean over the
    members of stride s behind u.

    `assign` raises `CreditError` if the schedule has no branched tree. Sources: Granular-GRPO (arXiv 2510.01982), whose siblings
    share their trunk, summed over strides; TempFlow-GRPO (arXiv 2508.04324), comparison per seed. Leave-one-out is our extension.

    Args:
        normalise: divide by the standard deviation; of two siblings only the sign then remains. False: A is in units of the
            reward.
        leave_one_out: multiply by k / (k - 1) for k siblings, because the mean contains the draw's own value.
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
        require(isinstance(self.probe, Branching), "SiblingRelative.probe", self.probe, "a branching probe: Branch or Comb")

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; 0 where a step is no decision."""
        tree = branched_tree(rewards, schedule, "SiblingRelative")
        values = unit_values(rewards, tree, "SiblingRelative", self.probe)
        if tree.strides is None:
            return tree.step_table(self._among_siblings(values, siblings(tree)))
        total = torch.zeros_like(values)
        for stride in tree.strides.unique().tolist():
            total += self._of_stride(rewards[..., -1], tree, tree.strides == stride)
        return tree.step_table(total)

    def _of_stride(self, final: Tensor, tree: Tree, members: Tensor) -> Units:
        """Advantages from the `members` of one stride; 0 for units that none of them passes."""
        reached = tree.passes[members].any(0)
        passed = tree.passes[members][:, reached].to(final)
        first = final[:, members][:, :1]
        values = (final[:, members] - first) @ passed / passed.sum(0)
        found = final.new_zeros(len(final), tree.units)
        found[:, reached] = self._among_siblings(values, siblings(tree)[reached])
        return found

    def _among_siblings(self, values: Units, family: Tensor) -> Units:
        if self.normalise:
            return group_zscore(values, family, clamp=self.clamp, leave_one_out=self.leave_one_out)
        count = (family == family[:, None]).sum(0)
        factor = count / (count - 1).clamp(min=1) if self.leave_one_out else torch.ones_like(count)
        difference = group_deviations(values, family) * factor.to(values)
        return difference if self.clamp is None else difference.clamp(-self.clamp, self.clamp)
