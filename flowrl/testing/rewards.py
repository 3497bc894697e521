"""The promises of reward models, and of rewards that compare the members of a group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import GroupReward, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards.contract import checked_scores, component_methods
from flowrl.rollout.values import score
from flowrl.testing.contract import (
    INAPPLICABLE,
    Pure,
    Separate,
    basic,
    expect,
    promise,
    same,
)

Examples = tuple[Tensor, Sequence[Prompt]]


def smooth_images() -> Examples:
    """Smooth random images, 32x32: eight with plain prompts."""
    small = torch.rand(15, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").clamp(0, 1)
    return images, [Prompt(f"image number {i}") for i in range(len(images))]


def smooth_groups() -> Examples:
    """The same images in three groups of five."""
    images, prompts = smooth_images()
    return images.unflatten(0, (3, 5)), prompts[:3]


@dataclass(frozen=True)
class RewardContract(Pure, Separate):
    """The contract of a reward model (`RewardModel`).

    Args:
        part: the reward model: an object (not copied), a class, or a function that makes it.
        examples: images [sample, channel, height, width] or videos [sample, frame, ...] in [0, 1]
            and as many prompts, two or more; by default smooth random images of 32x32.
        without: names of promises that the part breaks on purpose.
    """

    examples: Examples = field(default_factory=smooth_images)
    shared = True
    tolerance = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        shape, count = tuple(self.images.shape), len(self.prompts)
        allowed = "images and as many prompts (of groups, one per group), 2 or more"
        require(shape[0] == count >= 2, "examples", f"{shape} and {count} prompts", allowed)

    @property
    def images(self) -> Tensor:
        """Images [sample, ...] or, for a group reward, [prompt, member, ...]."""
        return self.examples[0]

    @property
    def prompts(self) -> list[Prompt]:
        """A prompt per sample or group."""
        return list(self.examples[1])

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What `result` must leave alone."""
        return {"images": self.images}

    def result(self, rows: Tensor | None = None, members: Sequence[int] | None = None) -> Tensor:
        """Scores, as a rollout computes them, of the samples or groups `rows`, and of the chosen
        `members` of each; None for all.
        """
        images, prompts = self.images, self.prompts
        if rows is not None:
            images, prompts = images[rows], [prompts[row] for row in rows]
        if members is not None:
            images = images[:, members]
        if not isinstance(self.part, GroupReward):
            return score(self.part, images, prompts).total
        total = score(self.part, images.flatten(0, 1), prompts).total
        return total.view(images.shape[:2])

    @basic
    def gives_one_number_per_image(self) -> None:
        """One finite number per image: a tensor [sample], of a group reward [prompt, member]; NaN
        only from a model with `marks_invalid`.
        """
        self.result()

    @promise
    def adds_up_its_parts(self) -> str | None:
        """A reward with components: the scores equal `total(parts(...))`
        (`total(group_parts(...))`).

        Are weights applied twice, or in one only?
        """
        if component_methods(self.part) is None:
            return INAPPLICABLE
        direct = checked_scores(self.part, self.images, self.prompts, "the reward")
        same(self.result(), direct, "by total(parts), the score", self.tolerance)
        return None


@dataclass(frozen=True)
class GroupRewardContract(RewardContract):
    """The contract of a reward that compares the members of a group (`GroupReward`).

    Args:
        part: the group reward: an object (not copied), a class, or a function that makes it.
        examples: images [prompt, member, channel, height, width], or videos, with two or more
            prompts of three or more members, and the prompts; by default smooth random images.
        without: names of promises that the part breaks on purpose.
    """

    examples: Examples = field(default_factory=smooth_groups)

    @promise
    def names_an_evaluation_reward(self) -> None:
        """`evaluation` is a reward of single samples."""
        reward = self.part.evaluation
        fits = isinstance(reward, RewardModel) and not isinstance(reward, GroupReward)
        expect(fits, f"`evaluation` is {reward!r}, which has no method score(images, prompts)")

    @promise
    def treats_members_alike(self) -> None:
        """Groups may have any number of members from 2, and permuting them permutes their scores.

        Does the first of a pair have an advantage? Compare both ways round.
        """
        for count in range(2, self.images.shape[1] + 1):
            order = [*range(1, count), 0]
            got, expected = self.result(None, order), self.result(None, range(count))[:, order]
            same(got, expected, f"with the members {order}, the score", self.tolerance)

    @promise
    def gives_equal_images_equal_scores(self) -> None:
        """Equal images of a prompt get equal scores.

        Is a tie decided by the place in the group? Let each have half of it.
        """
        count = self.images.shape[1]
        for copies in ([0, *range(count - 1)], [0] * count):
            scores = self.result(None, copies)
            what = f"with the members {copies}, the score of member 1"
            same(scores[:, 1], scores[:, 0], what, self.tolerance)
