"""Backed-up credit: the leaves' advantages, averaged up the tree."""

from dataclasses import dataclass

from flowrl.credit.table import require_clamp, zscore
from flowrl.credit.units import Backup, backed_up, branched_tree
from flowrl.credit.units import unit_values as require_values
from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.probes import Branch, Branching, Probe
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class BackedUp:
    """The leaves of a tree are compared, and their advantages averaged back to the root.

    A(leaf) = Z(R) over the leaves of the prompt, clamped to +-`clamp`; A(u) = sum over the children c of w_c A(c).

    Z(y) = (y - mean) / (std + 1e-4). A single child has the advantage of its parent. Children are drawn from p already, so
    weighting by p again estimates another value than that of u; equal weights do not.

    `assign` raises `CreditError` if the schedule has no branched tree or, for "softmax", its tree no log-probabilities. Source:
    TreeGRPO (arXiv 2512.08153), "softmax".

    Args:
        backup: "softmax": w is the softmax over the children of log p(c | u), a mean over latent elements; "mean": equal weights.
        clamp: largest absolute advantage of a leaf; None for no clamp.
        probe: the probe that branches the trajectories.

    Raises:
        ConfigError: a field is out of range, or the probe has no branches.
    """

    backup: Backup = "softmax"
    clamp: float | None = 5.0
    probe: Probe = Branch((2, 2))

    def __post_init__(self) -> None:
        require_clamp("BackedUp", self.clamp)
        require(isinstance(self.probe, Branching), "BackedUp.probe", self.probe, "a branching probe: Branch or Comb")

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step]; 0 where a step is no decision."""
        tree = branched_tree(rewards, schedule, "BackedUp")
        require_values(rewards, tree, "BackedUp", self.probe)
        leaves = zscore(rewards[..., -1:], over=("member",), clamp=self.clamp)[..., 0]
        return tree.step_table(backed_up(leaves, tree, self.backup, "BackedUp(backup='softmax')"))
