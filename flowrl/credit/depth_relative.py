"""Depth-relative credit: a state is compared with all states of its node."""

from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.core.errors import require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import centred, last_column, require_clamp, require_columns
from flowrl.credit.units import (
    Backup,
    Std,
    backed_up,
    branched_tree,
    group_zscore,
    next_columns,
    unit_log_probs,
    unit_values,
)
from flowrl.probes import Branch, Branching, Probe


@checked_options
@dataclass(frozen=True)
class DepthRelative:
    """A branch is compared with all branches at the same depth of the tree.

    A(u) = Z(V(u)) over the distinct states drawn at the node of u, Z(y) = (y - mean) / (std + eps).

    A state without siblings differs from the others only by earlier steps, and is credited for
    them.

    Both methods raise `CreditError` if the decisions have no branched tree; `assign` also for
    "softmax", which needs the log-probabilities of the record. Sources: BranchGRPO (arXiv
    2509.06040) is scope "tree", std "sample" by its code (commit 19fbb9f), `backup` its
    `tree_prob_weighted`; Multi-GRPO (arXiv 2512.00743, temporal groups) and TempFlow-GRPO (arXiv
    2508.04324) without seed grouping are scope "prompt".

    Args:
        scope: compare with all states of the prompt ("prompt"), or with those from the same initial
            noise ("tree").
        std: "population": eps = 1e-4; "sample": divided by n - 1, eps = 1e-8, and 0 for a single
            state or a std below 1e-6.
        backup: V: "mean": the value table; "softmax": from the leaves up, the children's mean
            weighted by the softmax of their log-probabilities per element. Children are drawn from
            these probabilities already, so the second weighting is biased.
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
        require(
            isinstance(self.probe, Branching),
            "DepthRelative.probe",
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
        tree, mask = branched_tree(decisions, "DepthRelative"), decisions.mask
        require_columns(values, decisions, self, next_columns(mask) | last_column(mask))
        states = unit_values(values, decisions, tree)
        if self.backup == "softmax":
            weights = unit_log_probs(
                log_probs, decisions, tree, "DepthRelative(backup='softmax')"
            ).to(states)
            members = mask.any(-1)
            final = centred(values[..., -1], ("member",), members).masked_fill(~members, torch.nan)
            states = backed_up(final, tree, weights).masked_fill(states.isnan(), torch.nan)
        group = tree.node if self.scope == "prompt" else tree.node * tree.units + tree.roots
        return tree.decision_table(group_zscore(states, group, self.std, self.clamp))
