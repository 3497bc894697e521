"""Shared code of the credit rules: increments of a reward table, their normalisation, checks of a rule's input and output."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import CreditError, require
from flowrl.probes import Probe
from flowrl.types import NodeTable, StepTable, tensor_problem

AXES = ("prompt", "member", "step")
STD_EPSILON = 1e-4


def gains(rewards: NodeTable) -> StepTable:
    """g_i = R_{i+1} - R_i, the increment of the estimated reward at step i; the sum over steps is R_T - R_0.

    Source: Stepwise-Flow-GRPO (arXiv 2603.28718); TP-GRPO's incremental reward (arXiv 2602.06422).
    """
    return rewards[..., 1:] - rewards[..., :-1]


def reward_to_go(rewards: NodeTable) -> StepTable:
    """R_T - R_i: the total gain from step i on. Source: TP-GRPO's aggregated reward (arXiv 2602.06422)."""
    return rewards[..., -1:] - rewards[..., :-1]


def probed(rewards: NodeTable, probe: Probe) -> NodeTable:
    """A copy of a full table as a rollout with `probe` fills it: NaN at the nodes without estimate, except the last.

    Args:
        rewards: a full reward table [prompt, member, node].
        probe: the probe whose nodes are kept.

    Returns:
        The table [prompt, member, node] with NaN at the other nodes.
    """
    steps = rewards.shape[-1] - 1
    filled = {*probe.fills(steps), steps}
    left_out = torch.tensor([node not in filled for node in range(steps + 1)], device=rewards.device)
    return rewards.masked_fill(left_out, float("nan"))


def zscore(
    values: Float[Tensor, "prompt member step"],
    over: Sequence[str],
    std_over: Sequence[str] | None = None,
    clamp: float | None = 5.0,
) -> Float[Tensor, "prompt member step"]:
    """(y - mean) / (std + 1e-4), then clamped to [-`clamp`, `clamp`].

    Equal values along `over` give exactly 0 whatever their size: one of them is subtracted before the mean, so a large common
    offset costs no precision. A group of one member has no comparison and gets exactly 0. Source: the advantage normalisation of
    Flow-GRPO (arXiv 2505.05470), public code.

    Args:
        values: values y [prompt, member, step], in units of the reward.
        over: the axes of the mean: "prompt", "member", "step".
        std_over: the axes of the population standard deviation; None for those of `over`.
        clamp: largest absolute score; None for no clamp.

    Returns:
        Scores [prompt, member, step], dimensionless.

    Raises:
        ConfigError: an axis is unknown, or there is none.
    """
    if values.shape[AXES.index("member")] == 1:
        return torch.zeros_like(values)
    deviations = _centred(values, over)
    spread = deviations if std_over is None else _centred(values, std_over)
    std = spread.square().mean(dim=_dims(over if std_over is None else std_over), keepdim=True).sqrt()
    scores = deviations / (std + STD_EPSILON)
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def _dims(axes: Sequence[str]) -> tuple[int, ...]:
    for axis in axes:
        require(axis in AXES, "zscore axis", axis, f"one of {', '.join(AXES)}")
    require(len(axes) > 0, "zscore axes", tuple(axes), "one or more axes")
    return tuple(AXES.index(axis) for axis in axes)


def _centred(values: Tensor, axes: Sequence[str]) -> Tensor:
    """`values` minus their mean over `axes`; exactly 0 where they are all equal."""
    dims = _dims(axes)
    first = values
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    shifted = values - first
    return shifted - shifted.mean(dim=dims, keepdim=True)


def require_clamp(rule: str, clamp: float | None) -> None:
    """Raise `ConfigError` unless `clamp` is None or finite and above 0."""
    fits = clamp is None or (math.isfinite(clamp) and clamp > 0)
    require(fits, f"{rule}.clamp", clamp, "None, or finite and above 0")


def require_nodes(rewards: NodeTable, nodes: list[int], rule: str, probe: Probe) -> None:
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


def check_advantages(advantages: object, rewards: NodeTable, rule_name: str) -> Tensor:
    """Return `advantages` if they satisfy the contract of a credit rule.

    A rule must return a floating-point tensor [prompt, member, step], step = node - 1, all of it finite.

    Args:
        advantages: what the rule returned.
        rewards: the reward table that the rule received, [prompt, member, node].
        rule_name: name of the rule for the message.

    Returns:
        The advantages [prompt, member, step], detached.

    Raises:
        CreditError: `advantages` are no tensor, have a wrong shape or dtype, or contain a value that is not finite.
    """
    if not isinstance(advantages, Tensor):
        raise CreditError(f"{rule_name}.assign returned a {type(advantages).__name__}, not a torch.Tensor")
    if tensor_problem(advantages):
        raise CreditError(f"{rule_name}.assign returned a tensor that {tensor_problem(advantages)}")
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
    return advantages.detach()


def check_trained(trained: object, advantages: StepTable, rule_name: str) -> Tensor:
    """Return `trained` if it is a Boolean tensor of the advantages' shape with at least one true entry.

    Args:
        trained: what the rule's `trained` returned.
        advantages: the rule's advantages [prompt, member, step].
        rule_name: name of the rule for the message.

    Returns:
        The mask of trained pairs [prompt, member, step].

    Raises:
        CreditError: the type, dtype or shape is wrong, or every entry is false.
    """
    if not isinstance(trained, Tensor) or trained.dtype != torch.bool or trained.shape != advantages.shape:
        found = f"{trained.dtype} {tuple(trained.shape)}" if isinstance(trained, Tensor) else f"a {type(trained).__name__}"
        raise CreditError(f"{rule_name}.trained returned {found}, not a Boolean tensor {tuple(advantages.shape)}")
    if not bool(trained.any()):
        raise CreditError(f"{rule_name}.trained leaves no pair to train on")
    return trained
