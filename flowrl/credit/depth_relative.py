"""Depth-relative credit: a state is compared with all states of its node."""

from dataclasses import dataclass
from typing import Literal

from flowrl.credit.table import require_clamp
from flowrl.credit.units import Backup, Std, backed_up, branched_tree, group_zscore, unit_values
from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes import Branch, Branching, Probe
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class DepthRelative:
    """A branch is compared with all branches at the same depth of the tree.

    A(u) = Z(V(u)) over the distinct states drawn at the node of u, Z(y) = (y - mean) / (std + eps).

    A state without siblings differs from the others only by earlier steps, and is credited for them.

    `assign` raises `CreditError` if the schedule has no branched tree or, for "softmax", its tree no log-probabilities. Sources:
    BranchGRPO (arXiv 2509.06040) is scope "tree", std "sample" by its code (commit 19fbb9f), `backup` its `tree_prob_weighted`;
    Multi-GRPO (arXiv 2512.00743, temporal groups) and TempFlow-GRPO (arXiv 2508.04324) without seed grouping are scope "prompt".

    Args:
        scope: compare with all states of the prompt ("prompt"), or with those from the same initial noise ("tree").
        std: "population": eps = 1e-4; "sample": divided by n - 1, eps = 1e-8, and 0 for a single state or a std below 1e-6.
        backup: V: "mean": the reward table; "softmax": from the leaves up, the children's mean weighted by the softmax of their
            log-probabilities per element. Children are drawn from these probabilities already, so the second weighting is biased.
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    scope: Literal["prompt", "tree"] = "prompt"
    std: Std = "population"
    backup: Backup = "mean"
    clamp: float | None = 5.0
    probe: Probe = Branch((2, 2))

    def __post_init__(self) -> None:
        require_clamp("DepthRelative", self.clamp)
        require(isinstance(self.probe, Branching), "DepthRelative.probe", self.probe, "a branching probe: Branch or Comb")

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; 0 where a step is no decision."""
        tree = branched_tree(rewards, schedule, "DepthRelative")
        values = unit_values(rewards, tree, "DepthRelative", self.probe)
        if self.backup == "softmax":
            final = rewards[..., -1]
            values = backed_up(final - final[:, :1], tree, "softmax", "DepthRelative(backup='softmax')")
        group = 2 * tree.node + tree.drawn
        if self.scope == "tree":
            group = group * tree.units + tree.roots
        return tree.step_table(group_zscore(values, group, self.std, self.clamp))
