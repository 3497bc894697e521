"""Images in 8 bits per channel, as other programs read them, and rewards for their size as JPEG
files.

The JPEG rewards need no network and show within minutes whether training works.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.options import checked_options
from flowrl.core.types import Prompt

Quality = Annotated[int, Ge(1), Le(95)]
Images = Float[Tensor, "sample channel height width"]
"""Images in [0, 1]."""


def to_bytes(images: Images) -> UInt8[Tensor, "sample height width channel"]:
    """round(255 x) of images in [0, 1] (values outside are clamped), on the CPU, with the channels
    last.
    """
    levels = (images.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def to_rgb(images: Images) -> Float[Tensor, "sample 3 height width"]:
    """The images with three channels: a single one is repeated, a fourth dropped.

    Raises `RewardError` for two channels, and for videos.
    """
    if images.ndim != 4:
        raise RewardError(
            f"this reward scores images, and got videos {list(images.shape)};"
            " frame-mean(reward=...) scores frames"
        )
    channels = images.shape[1]
    if channels not in (1, 3, 4):
        raise RewardError(f"this reward needs images with 1 channel or 3, not {channels}")
    return images.expand(-1, 3, -1, -1) if channels == 1 else images[:, :3]


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

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Kilobytes [sample]."""
        return torch.tensor([self._kilobytes(image) for image in to_pillow(images)])

    def _kilobytes(self, image: Image.Image) -> float:
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000


@checked_options
@dataclass(frozen=True)
class JPEGCompressibility:
    """-(size in kilobytes) as a JPEG file of `quality`; plain images score higher. See
    `JPEGIncompressibility`.

    Source: DDPO (arXiv 2305.13301). Flow-GRPO's public code divides by 500, which is a constant
    weight.
    """

    quality: Quality = 95

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Minus the kilobytes [sample]."""
        return -JPEGIncompressibility(self.quality).score(images, prompts)
