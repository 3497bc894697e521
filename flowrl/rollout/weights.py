"""The weight of each transition in the loss: one table, from validity, the rule's factors and the
method's conventions.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit, CreditTable, Decisions


def usable(valid: Bool[Tensor, "prompt member"]) -> Bool[Tensor, "prompt member"]:
    """The valid samples of groups that have two or more of them, so that they can be compared.

    Args:
        valid: False for samples that the reward could not judge [prompt, member].

    Returns:
        A mask [prompt, member].

    Raises:
        RewardError: no sample remains.
    """
    used = valid & (valid.sum(1) >= 2)[:, None]
    if not bool(used.any()):
        found = f"the reward marked {int((~valid).sum())} of {valid.numel()} samples invalid"
        raise RewardError(f"{found}; no prompt has two left to be compared")
    return used


def transition_weights(
    credit: Credit, decisions: Decisions, drop_zero: bool = False
) -> CreditTable:
    """mask x convention x the rule's factor: the weight of each transition in the loss, which is a
    weighted mean.

    Conventions: in a tree that counts edges (`flowrl.core.tree.Tree.weight`) a transition that n
    members share counts 1 / n for each of them. With `drop_zero` a member whose advantages are 0 at
    every trained decision has weight 0, its KL included, as in Flow-GRPO's public code (arXiv
    2505.05470).

    Args:
        credit: advantages and the rule's factors.
        decisions: the axis of credit.
        drop_zero: the method's convention for advantages of 0.

    Returns:
        Weights [prompt, member, decision], 0 or more.
    """
    mask, tree = decisions.mask, decisions.tree
    weights = mask.to(credit.advantages.dtype)
    if credit.weights is not None:
        weights = torch.where(mask, credit.weights.to(weights), 0.0)
    if tree is not None and tree.weight == "edge":
        weights = weights / shared_by(mask, decisions).clamp(min=1)
    if drop_zero:
        credited = (credit.advantages != 0) & mask
        weights = weights * credited.any(-1, keepdim=True)
    return weights


def shared_by(mask: Tensor, decisions: Decisions) -> Tensor:
    """The number of members within `mask` that share each transition [prompt, member, decision]."""
    assert decisions.tree is not None
    arrived = decisions.tree.paths[:, decisions.step + 1]
    same = (arrived[:, None] == arrived[None]) & decisions.drawn[:, None] & decisions.drawn[None]
    return (same[None] & mask[:, None]).sum(2)
