"""The promises of reward models, and of rewards that compare the members of a group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import GroupReward, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import check_scores, component_methods, marks_invalid
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    Promise,
    expect,
    is_pure,
    maker,
    same,
    treats_samples_separately,
)

Examples = tuple[Tensor, Sequence[Prompt]]
SomeExamples = Examples | Callable[[], Examples] | None


@dataclass(frozen=True)
class Case:
    """A reward model with images [sample, ...] or, for a group reward, [prompt, member, ...]."""

    reward: Any
    images: Tensor
    prompts: Sequence[Prompt]
    grouped: bool = False
    tolerance = 1e-4
    repeats = 1e-6

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What `result` must leave alone."""
        return {"images": self.images}

    def result(self, rows: Tensor | None = None, members: Sequence[int] | None = None) -> Tensor:
        """Checked scores of the samples or groups `rows`, and of the chosen `members` of each; None
        for all.
        """
        index = list(range(len(self.prompts))) if rows is None else rows.tolist()
        images, prompts = self.images[index], [self.prompts[i] for i in index]
        if members is not None:
            images = images[:, list(members)]
        if rows is None and members is None:
            images = self.images  # the tensor itself, which must not be changed
        score = self.reward.score_groups if self.grouped else self.reward.score
        return self.checked(score(images, prompts), prompts, images)

    def checked(self, scores: Any, prompts: Sequence[Prompt], images: Tensor) -> Tensor:
        """Scores that are one number per image."""
        count = images.shape[1] if self.grouped else None
        return check_scores(scores, prompts, "the reward", marks_invalid(self.reward), count)


def default_examples(grouped: bool = False) -> Examples:
    """Smooth random images, 32x32, and plain prompts: eight, or three groups of five."""
    small = torch.rand(15, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").clamp(0, 1)
    images = images.unflatten(0, (3, 5)) if grouped else images[:8]
    return images, [Prompt(f"image number {i}") for i in range(len(images))]


def gives_one_number_per_image(case: Case) -> None:
    """One finite number per image: a tensor [sample], of a group reward [prompt, member]; NaN only
    from a model with `marks_invalid`.
    """
    case.result()


def names_an_evaluation_reward(case: Case) -> None:
    """`evaluation` is a reward of single samples."""
    reward = getattr(case.reward, "evaluation", None)
    fits = isinstance(reward, RewardModel) and not isinstance(reward, GroupReward)
    expect(fits, f"`evaluation` is {reward!r}, which has no method score(images, prompts)")


def needs_no_gradient(case: Case) -> None:
    """It works under torch.no_grad() and torch.inference_mode(), and its scores never carry a
    gradient.
    """
    scores = case.result()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(case.result(), scores, f"under {mode.__name__}(), the score", "", case.tolerance)
    expect(not scores.requires_grad, "scores carry a gradient: decorate `score` by torch.no_grad()")


def adds_up_its_parts(case: Case) -> str | None:
    """A reward with components: the scores equal `total(parts(...))` (`total(group_parts(...))`),
    and every component is finite.
    """
    methods = component_methods(case.reward)
    if methods is None:
        return INAPPLICABLE
    parts = methods[0](case.images.clone(), list(case.prompts))
    for values in parts.values():
        case.checked(values, case.prompts, case.images)
    hint = "Are weights applied twice, or in one only?"
    same(methods[1](parts), case.result(), "by total(parts), the score", hint, case.tolerance)
    return None


def accepts_any_number_of_members(case: Case) -> None:
    """Groups may have any number of members from 2."""
    for count in range(2, case.images.shape[1] + 1):
        case.result(None, range(count))


def treats_members_alike(case: Case) -> None:
    """Permuting the members of a group permutes its scores."""
    count = case.images.shape[1]
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    for order in (list(range(count))[::-1], shuffled):
        got, expected = case.result(None, order), case.result()[:, order]
        hint = "Does the first of a pair have an advantage? Compare both ways round."
        same(got, expected, f"with the members {order}, the score", hint, case.tolerance)


def gives_equal_images_equal_scores(case: Case) -> None:
    """Equal images of a prompt get equal scores."""
    count = case.images.shape[1]
    for copies in ([0, *range(count - 1)], [0] * count):
        scores = case.result(None, copies)
        hint = "Is a tie decided by the place in the group? Let each have half of it."
        what = f"with the members {copies}, the score of member 1"
        same(scores[:, 1], scores[:, 0], what, hint, case.tolerance)


def compares_members(case: Case) -> str | None:
    """(advice) A member's score depends on the other members of its group."""
    count = case.images.shape[1] - 1
    few, scores = case.result(None, range(count)), case.result()[:, :count]
    if not torch.allclose(few, scores, rtol=1e-4, atol=1e-5, equal_nan=True):
        return None
    return "members have the same scores in smaller groups: a RewardModel is simpler"


BASIC = (gives_one_number_per_image, is_pure)
SINGLE = (treats_samples_separately, needs_no_gradient, adds_up_its_parts)
GROUPED = (
    *SINGLE,
    names_an_evaluation_reward,
    accepts_any_number_of_members,
    treats_members_alike,
    gives_equal_images_equal_scores,
    compares_members,
)


def reward_model(part: Any, examples: SomeExamples = None, without: Sequence[str] = ()) -> Contract:
    """The contract of a reward model (`RewardModel`).

    Args:
        part: the reward model: an object (not copied), a class, or a function that makes it.
        examples: images [sample, channel, height, width] or videos [sample, frame, ...] in [0, 1]
            and as many prompts, two or more; or a function that makes them; None: smooth random
            images of 32x32 with plain prompts.
        without: names of promises that the part breaks on purpose.
    """
    return _contract("reward model", SINGLE, part, examples, without)


def group_reward(part: Any, examples: SomeExamples = None, without: Sequence[str] = ()) -> Contract:
    """The contract of a reward that compares the members of a group (`GroupReward`).

    Args:
        part: the group reward: an object (not copied), a class, or a function that makes it.
        examples: images [prompt, member, channel, height, width], or videos, with two or more
            prompts of three or more members, and the prompts; or a function that makes them; None:
            smooth random images of 32x32.
        without: names of promises that the part breaks on purpose.
    """
    return _contract("group reward", GROUPED, part, examples, without)


def _contract(
    kind: str,
    promises: Sequence[Promise],
    part: Any,
    examples: SomeExamples,
    without: Sequence[str],
) -> Contract:
    grouped = promises is GROUPED
    images, prompts = (examples() if callable(examples) else examples) or default_examples(grouped)
    fits = images.ndim - grouped in (4, 5) and len(images) == len(prompts) >= 2
    fits = fits and not (grouped and images.shape[1] < 3)
    axes = "[prompt, member >= 3, ...]" if grouped else "[sample, ...]"
    allowed = f"images or videos {axes} and as many prompts, 2 or more"
    require(fits, "examples", f"{tuple(images.shape)} and {len(prompts)} prompts", allowed)
    make = maker(part, share=True)

    def case(reward: Any) -> Case:
        return Case(reward, images, prompts, grouped)

    return Contract(kind, BASIC, promises, make, case, without)
