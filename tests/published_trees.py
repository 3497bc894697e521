"""Records of trees, and the trees of BranchGRPO's published code (`tests/golden_trees`)."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.core.experience import Decisions
from flowrl.core.tree import Tree
from flowrl.credit import credit_of, on_tree
from flowrl.probes import Branch

GOLDEN = Path(__file__).parent / "golden_trees"


def record_of(tree, rewards, log_probs=None):
    """The record of a tree from the leaves' rewards [prompt, member] and log-probabilities [prompt,
    unit].
    """
    record = on_tree(rewards, Decisions.like(torch.zeros(*rewards.shape, tree.steps + 1)), tree)
    if log_probs is None:
        return record
    table = tree.decision_table(log_probs).masked_fill(~record.decisions.drawn, torch.nan)
    return replace(record, log_probs=table)


def credit(rule, record):
    """Advantages [prompt, member, decision]."""
    return credit_of(rule, record).advantages


FILES = load_file(GOLDEN / "branch.safetensors")
SPLITS = {
    "published": (20, (0, 3, 6, 9)),
    "small": (4, (0, 2)),
    "late": (8, (1, 4, 5)),
    "rounds": (10, (0, 3, 6)),
    "mixed": (12, (0, 3, 6, 9)),
    "equal_rewards": (4, (0, 2)),
}


@dataclass(frozen=True)
class Published:
    """A pair of trees of the published code as one tree of two prompts; `units` [prompt, unit] are
    the nodes in its files.
    """

    name: str
    tree: Tree
    units: Tensor

    def read(self, what):
        """A number per unit [prompt, unit]."""
        return FILES[f"{self.name}/{what}"][self.units]

    @property
    def record(self):
        log_probs = FILES[f"{self.name}/log_prob"][self.units]
        return record_of(self.tree, FILES[f"{self.name}/rewards"].view(2, -1), log_probs)


@cache
def published(name):
    steps, splits = SPLITS[name]
    depth, parent, leaf = (FILES[f"{name}/{what}"].tolist() for what in ("step", "parent", "leaf"))
    decisions = sorted(
        {d - 1 for d, sde in zip(depth, FILES[f"{name}/is_sde_edge"].tolist(), strict=True) if sde}
    )
    members = 2 ** len(splits)
    tree = Branch(dict.fromkeys(splits, 2)).tree(
        steps, decisions, members, False, torch.Generator()
    )
    units = torch.zeros(2, tree.units, dtype=torch.long)
    for place, node in enumerate(leaf):
        for unit in reversed(tree.paths[place % members].tolist()):
            units[place // members, unit] = node
            node = parent[node]
        assert node == -1
    assert sorted(units.flatten().tolist()) == list(range(len(depth))), "every node is one unit"
    assert torch.equal(FILES[f"{name}/step"][units], tree.node.expand(2, -1).short())
    return Published(name, tree, units)
