"""Backed-up credit: the leaves' advantages, averaged up the tree."""

from dataclasses import dataclass

import torch

from flowrl.core.errors import require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import last_column, require_clamp, require_columns, zscore
from flowrl.credit.units import Backup, backed_up, branched_tree, unit_log_probs
from flowrl.probes import Branch, Branching, Probe


@checked_options
@dataclass(frozen=True)
class BackedUp:
    """The leaves of a tree are compared, and their advantages averaged back to the root.

    A(leaf) = Z(R) over the leaves of the prompt, clamped to +-`clamp`; A(u) = sum over the children
    c of w_c A(c).

    Z(y) = (y - mean) / (std + 1e-4). A single child has the advantage of its parent. Children are
    drawn from p already, so weighting by p again estimates another value than that of u; equal
    weights do not. Members outside the mask, and branches without others, are left out.

    Both methods raise `CreditError` if the decisions have no branched tree; `assign` also for
    "softmax", which needs the log-probabilities of the record. Source: TreeGRPO (arXiv 2512.08153),
    "softmax".

    Args:
        backup: "softmax": w is the softmax over the children of log p(c | u), a mean over latent
            elements; "mean": equal weights.
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
        require(
            isinstance(self.probe, Branching),
            "BackedUp.probe",
            self.probe,
            "a branching probe: Branch or Comb",
        )

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """The log-probabilities, for "softmax"."""
        return ("log_probs",) if self.backup == "softmax" else ()

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]; 0 where a member's transition was not drawn."""
        return self._advantages(values, decisions, None)

    def credit(self, experience: Experience) -> Credit:
        """Advantages, with the record's log-probabilities."""
        return Credit(
            self._advantages(experience.values, experience.decisions, experience.log_probs)
        )

    def _advantages(
        self, values: ValueTable, decisions: Decisions, log_probs: CreditTable | None
    ) -> CreditTable:
        tree = branched_tree(decisions, "BackedUp")
        require_columns(values, decisions, self, last_column(decisions.mask))
        members = decisions.mask.any(-1, keepdim=True)
        scores = zscore(values[..., -1:], ("member",), clamp=self.clamp, mask=members)
        leaves = scores.masked_fill(~members, torch.nan)[..., 0]
        weights = leaves.new_zeros(len(leaves), tree.units)
        if self.backup == "softmax":
            weights = unit_log_probs(log_probs, decisions, tree, "BackedUp(backup='softmax')").to(
                leaves
            )
        return tree.decision_table(backed_up(leaves, tree, weights))
