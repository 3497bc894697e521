"""The contract of a reward's scores: a finite number per image, NaN only from a reward that marks
invalid samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, FlowrlError, RewardContractError, part_call
from flowrl.core.protocols import AnyReward, GroupReward
from flowrl.core.types import Prompt, tensor_problem


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
    if (declared := getattr(reward, mark, None)) is not None:
        return bool(declared)
    return any(_declares(part, mark) for part in rewards_inside(reward))


def rewards_inside(reward: object) -> list[AnyReward]:
    """The rewards that a sum or a wrapper consists of."""
    inside = [getattr(reward, name, None) for name in ("reward", "model")]
    inside += dict(getattr(reward, "models", {})).values()
    return [part for part in inside if isinstance(part, AnyReward)]


def is_remote(reward: object) -> bool:
    """Whether a server computes this reward or one of its components (`flowrl.serving.client`)."""
    return _declares(reward, "remote")


def marks_invalid(reward: AnyReward) -> bool:
    """Whether NaN from this reward, or from a reward inside it, marks a sample as invalid; see
    `protocols.RewardModel`.
    """
    return _declares(reward, "marks_invalid")


def refusal(reward: object, prompt: Prompt) -> str:
    """Why a reward, or a reward inside it, cannot score images of `prompt` (its `refuses`); "" if
    it can, or does not say so.

    Raises `PartError` if a user's `refuses` fails, and `RewardContractError` if it returns no text.
    """
    refuses = getattr(reward, "refuses", None)
    if refuses is None:
        return next(filter(None, (refusal(part, prompt) for part in rewards_inside(reward))), "")
    name = f"{type(reward).__name__}.refuses"
    with part_call(name):
        reason = refuses(prompt)
    if not isinstance(reason, str):
        kind = type(reason).__name__
        raise RewardContractError(f"{name} returned a {kind}; allowed: a text, empty for none")
    return reason


def require_packages(reward: object) -> None:
    """Raise `ConfigError` if one of the `packages` of a reward, or of a reward inside it, is not
    installed.
    """
    for package in getattr(reward, "packages", ()):
        if find_spec(package) is None:
            name = type(reward).__name__
            raise ConfigError(f"reward: {name} needs the package {package}: pip install {package}")
    for part in rewards_inside(reward):
        require_packages(part)


def load_reward(reward: object) -> None:
    """Call `load()` of a reward, if it has one, and of the rewards among the fields of a data class
    such as `WeightedSum`.

    Raises `ConfigError` if that fails.
    """
    load = getattr(reward, "load", None)
    if callable(load):
        name = type(reward).__name__
        with part_call(f"{name}.load"):
            try:
                load()
            except FlowrlError:
                raise
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ConfigError(f"reward: {name}.load() failed: {reason}") from error
    for item in fields(reward) if is_dataclass(reward) else ():
        value = getattr(reward, item.name)
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(part, AnyReward):
                load_reward(part)


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
    shape = (len(prompts),) if members is None else (len(prompts), members)
    if not isinstance(scores, Tensor):
        problem = f"a {type(scores).__name__}; a torch.Tensor is required"
    elif reason := tensor_problem(scores):
        problem = f"scores in a tensor that {reason}"
    elif scores.shape != shape:
        images = "images" if members is None else f"groups of {members} images"
        problem = f"shape {tuple(scores.shape)} for {len(prompts)} {images}; allowed: {shape}"
    else:
        # float64 may overflow when the rollout converts it
        values = scores.detach().float()
        bad = (values.isinf() if allow_invalid else ~values.isfinite()).flatten().nonzero()
        if not len(bad):
            return scores
        sample = int(bad[0])
        prompt = prompts[sample // (members or 1)].text
        problem = (
            f"{len(bad)} of {values.numel()} values that are not finite, the first at sample"
            f" {sample} (prompt {prompt!r}); allowed: finite scores, and NaN for a sample that"
            " cannot be judged if the reward has marks_invalid = True"
        )
    raise RewardContractError(f"{origin} returned {problem}")


def checked_scores(
    reward: AnyReward, images: Tensor, prompts: Sequence[Prompt], origin: str
) -> Tensor:
    """The scores of a reward of either kind by `check_scores`."""
    grouped = isinstance(reward, GroupReward)
    scores = (reward.score_groups if grouped else reward.score)(images, prompts)
    members = images.shape[1] if grouped else None
    return check_scores(scores, prompts, origin, marks_invalid(reward), members)
