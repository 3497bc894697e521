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
    """A(u) = Z(V(u)) over the distinct states drawn at the node of u, Z(y) = (y - mean) / (std + eps).

    `scope` = "prompt": over all of the prompt; "tree": over those with the same initial noise. `std` =
    "population": eps = 1e-4; "sample": divided by n - 1, eps = 1e-8, and 0 for a single state or a std below 1e-6. `backup` =
    "mean": V of the reward table; "softmax": V(u) is the mean of the children's weighted by the softmax of their
    log-probabilities per element, from the leaves up. Children are drawn from these probabilities already, so that the second
    weighting is biased; the mean is not. Then clamped to +-`clamp`.

    A state without siblings differs from the others by what happened before it only, and is credited for it.

    Sources: BranchGRPO (arXiv 2509.06040) is scope "tree", std "sample" by its code (commit 19fbb9f), `backup` its
    `tree_prob_weighted`; Multi-GRPO (arXiv 2512.00743, temporal groups) and TempFlow-GRPO (arXiv 2508.04324) without seed
    grouping are scope "prompt". Raises `ConfigError` for a bad field or a probe without branches, `CreditError` if the
    schedule has no branched tree or, for "softmax", its tree no log-probabilities.
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
