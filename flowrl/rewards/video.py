"""Videos [sample, frame, channel, height, width]: rewards of their frames and of their motion, and
still images for display.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.options import Count, checked_options
from flowrl.core.protocols import RewardModel
from flowrl.core.types import ImagesOrVideos, Prompt
from flowrl.rewards.contract import check_scores, marks_invalid

Frames = Literal["first", "middle", "last", "all"] | Count


def is_video(images: Tensor) -> bool:
    """Whether samples have a frame axis."""
    return images.ndim == 5


def chosen_frames(frames: Frames, count: int) -> list[int]:
    """The indices among `count` frames that `frames` selects.

    first, middle (the earlier one of two), last, all, or a number k of frames at equal distances,
    rounded, including the first and the last (k = 1: the middle one; all if there are fewer).
    """
    named = {
        "first": [0],
        "middle": [(count - 1) // 2],
        "last": [count - 1],
        "all": list(range(count)),
        1: [(count - 1) // 2],
    }
    if frames in named:
        return named[frames]
    return list(dict.fromkeys(torch.linspace(0, count - 1, int(frames)).round().int().tolist()))


@checked_options
@dataclass(frozen=True)
class FrameMean:
    """The mean over frames of a reward for images: R = 1/|F| sum_{f in F} r(frame f, prompt).

    The reward scores all chosen frames of a video in one call. An image counts as a video of one
    frame. A video is invalid if the reward marks one of its chosen frames. For components, put it
    inside a weighted sum.

    Args:
        reward: a reward for images.
        frames: F: first, middle, last, all, or a number of frames at equal distances, including the
            first and the last.

    Raises:
        ConfigError: `frames` is not allowed.
    """

    reward: RewardModel
    frames: Frames = "all"

    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]. Raises `RewardContractError` if the reward breaks its contract on the
        frames.
        """
        videos = images if is_video(images) else images.unsqueeze(1)
        chosen = chosen_frames(self.frames, videos.shape[1])
        repeated = [prompt for prompt in prompts for _ in chosen]
        scores = self.reward.score(videos[:, chosen].flatten(0, 1), repeated)
        origin = f"the reward {type(self.reward).__name__} of frame-mean"
        return (
            check_scores(scores, repeated, origin, marks_invalid(self.reward))
            .view(len(prompts), -1)
            .mean(1)
        )


@dataclass(frozen=True)
class Motion:
    """The mean absolute change between successive frames, 1/(F - 1) sum_f mean |x_{f+1} - x_f|, 0
    (a still) to 1.

    It needs no network and shows within minutes whether training on videos works. As a held-out
    reward it reveals a policy that has learned to freeze its videos under a reward of single
    frames. `score` raises `RewardError` for images and for videos of one frame.
    """

    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if not is_video(images) or images.shape[1] < 2:
            raise RewardError(
                f"motion scores videos of two frames or more, not images {list(images.shape)}"
            )
        return images.diff(dim=1).abs().flatten(1).mean(1)


def stills(images: ImagesOrVideos) -> Float[Tensor, "sample channel height side"]:
    """Images for display: images unchanged, and videos as their first, middle and last frames from
    left to right.
    """
    if not is_video(images):
        return images
    chosen = sorted(
        {chosen_frames(frame, images.shape[1])[0] for frame in ("first", "middle", "last")}
    )
    return torch.cat(images[:, chosen].unbind(1), dim=-1)
