"""Reading reward tables: increments, and checks of what goes into and comes out of a rule."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import CreditError
from flowrl.types import Probe


def gains(rewards: Float[Tensor, "prompt member node"]) -> Float[Tensor, "prompt member node-1"]:
    """g_i = R_{i+1} - R_i, the increment of the estimated reward at step i; the sum over steps is R_T - R_0.

    Source: Stepwise-Flow-GRPO (arXiv 2603.28718); TP-GRPO's incremental reward (arXiv 2602.06422).
    """
    return rewards[..., 1:] - rewards[..., :-1]


def reward_to_go(rewards: Float[Tensor, "prompt member node"]) -> Float[Tensor, "prompt member node-1"]:
    """R_T - R_i: everything gained from step i on. Source: TP-GRPO's aggregated reward (arXiv 2602.06422)."""
    return rewards[..., -1:] - rewards[..., :-1]


def require_nodes(rewards: Float[Tensor, "prompt member node"], nodes: list[int], rule: str, probe: Probe) -> None:
    """Raise `CreditError` naming those of `nodes` whose rewards are not finite, and the probe that fills them."""
    if rewards.shape[-1] < 2:
        raise CreditError(f"{rule} needs rewards at 2 or more nodes, got a table of shape {tuple(rewards.shape)}")
    finite = torch.isfinite(rewards[..., nodes]).flatten(0, 1).all(dim=0).tolist()
    missing = [node % rewards.shape[-1] for node, ok in zip(nodes, finite, strict=True) if not ok]
    if missing:
        raise CreditError(
            f"{rule} needs a finite reward at node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
            f"0..{rewards.shape[-1] - 1}: roll out with the probe {probe} (the rule's `probe`) to fill them"
        )


def check_advantages(advantages: object, rewards: Float[Tensor, "prompt member node"], rule_name: str) -> Tensor:
    """`advantages`, or a `CreditError` that says how the rule `rule_name` broke its contract.

    A rule must return a floating-point tensor [prompt, member, step], step = node - 1, all of it finite.
    """
    if not isinstance(advantages, Tensor):
        raise CreditError(f"{rule_name}.assign returned a {type(advantages).__name__}, not a torch.Tensor")
    prompts, members, nodes = rewards.shape
    if tuple(advantages.shape) != (prompts, members, nodes - 1):
        raise CreditError(
            f"{rule_name}.assign returned shape {tuple(advantages.shape)}, not [prompt, member, step] = "
            f"({prompts}, {members}, {nodes - 1}); the rewards are {tuple(rewards.shape)} and step = node - 1"
        )
    if not advantages.is_floating_point():
        raise CreditError(f"{rule_name}.assign returned dtype {advantages.dtype}, not a floating-point tensor")
    bad = ~torch.isfinite(advantages)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise CreditError(
            f"{rule_name}.assign returned {int(bad.sum())} values that are not finite, the first at (prompt, member, "
            f"step) = {where}; rewards at nodes that the rule's probe does not fill are NaN"
        )
    return advantages
