"""The contract of a reward's scores: one finite number per image, NaN only from a reward that marks invalid samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.errors import RewardContractError
from flowrl.protocols import AnyReward, GroupReward
from flowrl.types import Prompt, tensor_problem

__all__ = [
    "ComponentScores",
    "check_group_scores",
    "check_score_shape",
    "check_scores",
    "component_methods",
    "is_remote",
    "marks_invalid",
]

ComponentMethods = tuple[Callable[[Tensor, Sequence[Prompt]], Mapping[str, Tensor]], Callable[[Mapping[str, Tensor]], Tensor]]


@dataclass(frozen=True)
class ComponentScores:
    """Scores of a batch of images; NaN marks invalid samples.

    Args:
        total: scores [sample].
        parts: scores [sample] of every component of a composite reward; empty for others.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def invalid(self) -> Tensor:
        """Which samples [sample] are marked, in the total or in any component."""
        return torch.stack([values.isnan() for values in (self.total, *self.parts.values())]).any(0)


def is_remote(reward: object) -> bool:
    """Whether a server computes this reward or one of its components (`flowrl.serving.client`)."""
    models = getattr(reward, "models", None)
    inside = [*(models.values() if isinstance(models, Mapping) else ()), *(getattr(reward, n, None) for n in ("reward", "model"))]
    rewards = [part for part in inside if hasattr(part, "score") or hasattr(part, "score_groups")]
    return getattr(reward, "remote", False) is True or any(map(is_remote, rewards))


def marks_invalid(reward: AnyReward) -> bool:
    """Whether NaN from this reward marks a sample as invalid; see `protocols.RewardModel`."""
    return bool(getattr(reward, "marks_invalid", False))


def component_methods(reward: AnyReward) -> ComponentMethods | None:
    """The methods of a reward with named components, or None for other rewards.

    Returns:
        `parts` (of a group reward `group_parts`) and `total`; see `protocols.RewardModel`.
    """
    parts = getattr(reward, "group_parts" if isinstance(reward, GroupReward) else "parts", None)
    total = getattr(reward, "total", None)
    return None if parts is None or total is None else (parts, total)


def check_scores(scores: object, prompts: Sequence[Prompt], origin: str, allow_invalid: bool = False) -> Tensor:
    """`scores` unchanged, if they are a tensor [sample] of numbers that are finite in float32.

    Args:
        scores: what a reward returned for as many images as `prompts`.
        prompts: the prompts of the images; the message quotes the first one with a bad score.
        origin: what returned the scores, the subject of the message.
        allow_invalid: whether NaN is allowed, as the mark of an invalid sample.

    Returns:
        The scores [sample].

    Raises:
        RewardContractError: the type or the shape is wrong, or a value is not finite.
    """
    values = check_score_shape(scores, len(prompts), origin)
    in_float32 = values.detach().float()
    bad = torch.isinf(in_float32) if allow_invalid else ~torch.isfinite(in_float32)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise RewardContractError(
            f"{origin} returned {int(bad.sum())} of {len(prompts)} values that are not finite, the first at sample {first} "
            f"(prompt {prompts[first].text!r}); scores must be finite"
        )
    return values


def check_group_scores(
    scores: object, prompts: Sequence[Prompt], members: int, origin: str, allow_invalid: bool = False
) -> Tensor:
    """`scores` unchanged, if they are a tensor [prompt, member] of numbers that are finite in float32.

    Args:
        scores: what a group reward returned.
        prompts: the prompts, one per group.
        members: number of members per group.
        origin: what returned the scores, the subject of the message.
        allow_invalid: whether NaN is allowed, as the mark of an invalid sample.

    Returns:
        The scores [prompt, member].

    Raises:
        RewardContractError: the type or the shape is wrong, or a value is not finite.
    """
    if isinstance(scores, Tensor) and not tensor_problem(scores) and scores.shape != (len(prompts), members):
        found = f"{tuple(scores.shape)} for {len(prompts)} groups of {members} images"
        raise RewardContractError(f"{origin} returned shape {found}; allowed: [prompt, member] = ({len(prompts)}, {members})")
    flat = scores.flatten() if isinstance(scores, Tensor) and not tensor_problem(scores) else scores
    repeated = [prompt for prompt in prompts for _ in range(members)]
    return check_scores(flat, repeated, origin, allow_invalid).view(len(prompts), members)


def check_score_shape(scores: object, count: int, origin: str) -> Tensor:
    """`scores` unchanged, if they are a tensor with one entry per image.

    Args:
        scores: what a reward returned.
        count: number of images.
        origin: what returned the scores, the subject of the message.

    Returns:
        The scores [sample].

    Raises:
        RewardContractError: the type or the shape is wrong.
    """
    if not isinstance(scores, Tensor):
        raise RewardContractError(f"{origin} returned a {type(scores).__name__}; a torch.Tensor of shape [sample] is required")
    if tensor_problem(scores):
        raise RewardContractError(f"{origin} returned scores in a tensor that {tensor_problem(scores)}")
    if scores.shape != (count,):
        raise RewardContractError(f"{origin} returned shape {tuple(scores.shape)} for {count} images; allowed: ({count},)")
    return scores
