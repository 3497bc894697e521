"""The contract of a reward's scores: a finite number per image, NaN only from a reward that marks
invalid samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.errors import RewardContractError
from flowrl.core.protocols import AnyReward, GroupReward
from flowrl.core.types import Prompt, tensor_problem

__all__ = [
    "ComponentScores",
    "check_group_scores",
    "check_scores",
    "component_methods",
    "is_remote",
    "marks_invalid",
]


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


def _declares(reward: object, mark: str) -> bool:
    """The attribute `mark` of a reward; without one, whether any reward inside it (in a sum or a
    wrapper) declares it.
    """
    own = getattr(reward, mark, None)
    if own is not None:
        return bool(own)
    models = getattr(reward, "models", None)
    inside = [
        *(models.values() if isinstance(models, Mapping) else ()),
        *(getattr(reward, n, None) for n in ("reward", "model")),
    ]
    return any(
        _declares(part, mark)
        for part in inside
        if hasattr(part, "score") or hasattr(part, "score_groups")
    )


def is_remote(reward: object) -> bool:
    """Whether a server computes this reward or one of its components (`flowrl.serving.client`)."""
    return _declares(reward, "remote")


def marks_invalid(reward: AnyReward) -> bool:
    """Whether NaN from this reward, or from a reward inside it, marks a sample as invalid; see
    `protocols.RewardModel`.
    """
    return _declares(reward, "marks_invalid")


def component_methods(
    reward: AnyReward,
) -> tuple[Callable[..., Mapping[str, Tensor]], Callable[..., Tensor]] | None:
    """The methods of a reward with named components, or None for other rewards.

    Returns:
        `parts` (of a group reward `group_parts`) and `total`; see `protocols.RewardModel`.
    """
    parts = getattr(reward, "group_parts" if isinstance(reward, GroupReward) else "parts", None)
    total = getattr(reward, "total", None)
    return None if parts is None or total is None else (parts, total)


def check_scores(
    scores: object,
    prompts: Sequence[Prompt],
    origin: str,
    allow_invalid: bool = False,
    members: int | None = None,
) -> Tensor:
    """`scores` unchanged, if they are a tensor of numbers that are finite in float32, one per
    image.

    Args:
        scores: what a reward returned for as many images as `prompts`.
        prompts: the prompts of the images; the message quotes the first one with a bad score.
        origin: what returned the scores, the subject of the message.
        allow_invalid: whether NaN is allowed, as the mark of an invalid sample.
        members: number of images per prompt of a group reward; None: one score per prompt.

    Returns:
        The scores [sample], or [prompt, member] of a group reward.

    Raises:
        RewardContractError: the type or the shape is wrong, or a value is not finite.
    """
    if not isinstance(scores, Tensor):
        raise RewardContractError(
            f"{origin} returned a {type(scores).__name__}; a torch.Tensor is required"
        )
    if tensor_problem(scores):
        raise RewardContractError(
            f"{origin} returned scores in a tensor that {tensor_problem(scores)}"
        )
    shape = (len(prompts),) if members is None else (len(prompts), members)
    if scores.shape != shape:
        images = (
            f"{len(prompts)} images"
            if members is None
            else f"{len(prompts)} groups of {members} images"
        )
        raise RewardContractError(
            f"{origin} returned shape {tuple(scores.shape)} for {images}; allowed: {shape}"
        )
    in_float32 = scores.detach().float()
    bad = torch.isinf(in_float32) if allow_invalid else ~torch.isfinite(in_float32)
    if bool(bad.any()):
        sample, text = int(bad.flatten().nonzero()[0]), prompts[int(bad.nonzero()[0, 0])].text
        raise RewardContractError(
            f"{origin} returned {int(bad.sum())} of {bad.numel()} values that are not finite, the"
            f" first at sample {sample} (prompt {text!r}); scores must be finite"
        )
    return scores


def check_group_scores(
    scores: object,
    prompts: Sequence[Prompt],
    members: int,
    origin: str,
    allow_invalid: bool = False,
) -> Tensor:
    """`check_scores` for a group reward.

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
    return check_scores(scores, prompts, origin, allow_invalid, members)
