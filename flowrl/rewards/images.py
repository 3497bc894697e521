"""Images in 8 bits per channel, as other programs read them, and rewards that need no network: the
size as a JPEG file, the motion of videos.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.checks import checked
from flowrl.core.errors import RewardError
from flowrl.core.options import Count, checked_options
from flowrl.core.types import ImagesOrVideos, Prompt

Quality = Annotated[int, Ge(1), Le(95)]
Images = Float[Tensor, "sample channel height width"]
"""Images in [0, 1]."""
Frames = Literal["all"] | Count


def to_levels(images: Images) -> Images:
    """round(255 x) of images in [0, 1] (values outside are clamped), float32, on their device.
    Raises `RewardError` for values that are not finite.
    """
    if not bool(images.isfinite().all()):
        raise RewardError("images have values that are not finite; allowed: numbers in [0, 1]")
    return (images.detach().float().clamp(0, 1) * 255).round()


def to_bytes(images: Images) -> UInt8[Tensor, "sample height width channel"]:
    """`to_levels` in 8 bits, on the CPU, with the channels last."""
    return to_levels(images).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def resized(levels: Images, height: int, width: int) -> Images:
    """The output of `to_levels` resized with Pillow's bicubic filter (a = -1/2, antialiased), along
    the width and then along the height, each rounded to 8 bits as in Pillow.

    Pillow rounds the filter's coefficients, so 0.06% of the values of shrunk images differ from its
    result by one level, and 0.8% of those of images enlarged tenfold by one or two.
    """
    for size in ((levels.shape[-2], width), (height, width)):
        levels = F.interpolate(levels, size=size, mode="bicubic", antialias=True)
        levels = levels.round().clamp(0, 255)
    return levels


def to_rgb(images: Images) -> Float[Tensor, "sample 3 height width"]:
    """The images with three channels: a single one is repeated, a fourth dropped.

    Raises `RewardError` for two channels, and for videos.
    """
    if images.ndim != 4:
        raise RewardError(
            f"this reward scores images but got videos {list(images.shape)};"
            " to score their frames, use frame-mean(reward=...)"
        )
    if images.shape[1] == 1:
        return images.expand(-1, 3, -1, -1)
    if images.shape[1] not in (3, 4):
        raise RewardError(f"this reward needs images with 1 or 3 channels, not {images.shape[1]}")
    return images[:, :3]


def to_pillow(images: Images) -> list[Image.Image]:
    """The images as Pillow's RGB images (`to_rgb`)."""
    return [Image.fromarray(array) for array in to_bytes(to_rgb(images)).numpy()]


@checked_options
@dataclass(frozen=True)
class JPEGIncompressibility:
    """Size in kilobytes (1000 bytes) of the image as a JPEG file of `quality`; more detail scores
    higher.

    Pillow's encoder with its default settings. Source: DDPO (arXiv 2305.13301), its public code:
    quality 95. Raises `ConfigError` for a quality outside 1 to 95.
    """

    quality: Quality = 95
    on_cpu: ClassVar[bool] = True

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Kilobytes [sample]."""
        sizes = []
        for image in to_pillow(images):
            image.save(buffer := io.BytesIO(), format="JPEG", quality=self.quality)
            sizes.append(buffer.tell() / 1000)
        return torch.tensor(sizes)


@checked_options
@dataclass(frozen=True)
class JPEGCompressibility:
    """-(size in kilobytes) as a JPEG file of `quality`; plain images score higher. See
    `JPEGIncompressibility`.

    Source: DDPO (arXiv 2305.13301). Flow-GRPO's public code divides by 500, which is a constant
    weight.
    """

    quality: Quality = 95
    on_cpu: ClassVar[bool] = True

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Minus the kilobytes [sample]."""
        return -JPEGIncompressibility(self.quality).score(images, prompts)


def is_video(images: Tensor) -> bool:
    """Whether samples have a frame axis."""
    return images.ndim == 5


def chosen_frames(frames: Frames, count: int) -> list[int]:
    """The indices of all frames, or of a number of `frames` at equal distances, including the first
    and the last (1: the middle one, the earlier of two; all if there are fewer).
    """
    if frames == 1:
        return [(count - 1) // 2]
    number = count if frames == "all" else min(frames, count)
    return torch.linspace(0, count - 1, number).round().int().tolist()


@dataclass(frozen=True)
class Motion:
    """The mean absolute change between successive frames, 1/(F - 1) sum_f mean |x_{f+1} - x_f|, 0
    (a still) to 1.

    It needs no network and shows within minutes whether training on videos works. As a held-out
    reward it reveals a policy that has learned to freeze its videos under a reward of single
    frames. `score` raises `RewardError` for images and for videos of one frame.
    """

    @checked
    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if not is_video(images) or images.shape[1] < 2:
            raise RewardError(
                f"motion scores videos with two or more frames, not images {list(images.shape)}"
            )
        return images.diff(dim=1).abs().flatten(1).mean(1)


@checked
def stills(images: ImagesOrVideos) -> Float[Tensor, "sample channel height side"]:
    """Images for display: images unchanged, and videos as their first, middle and last frames from
    left to right.
    """
    if not is_video(images):
        return images
    return torch.cat(images[:, chosen_frames(3, images.shape[1])].unbind(1), dim=-1)
