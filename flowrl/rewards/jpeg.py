"""The size of a picture as a JPEG file: a reward that needs no network and shows at once whether training works."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require
from flowrl.rewards.images import to_pillow
from flowrl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class JPEGIncompressibility:
    """Size in kilobytes (1000 bytes) of the picture as a JPEG file of `quality`; more detail scores higher.

    Pillow's encoder with its other settings left alone. Source: DDPO (arXiv 2305.13301), its public code: quality 95.
    Raises `ConfigError` for a quality outside 1 to 95.
    """

    quality: int = 95

    def __post_init__(self) -> None:
        require(1 <= self.quality <= 95, "quality", self.quality, "1 to 95")

    def score(self, images: Float[Tensor, "sample channel height width"], prompts: Sequence[Prompt]) -> Tensor:
        """Kilobytes [sample]."""
        return torch.tensor([_kilobytes(picture, self.quality) for picture in to_pillow(images)])


@dataclass(frozen=True)
class JPEGCompressibility:
    """-(size in kilobytes) as a JPEG file of `quality`; plain pictures score higher. See `JPEGIncompressibility`.

    Source: DDPO (arXiv 2305.13301). Flow-GRPO's public code divides by 500, which a weight does too.
    """

    quality: int = 95

    def __post_init__(self) -> None:
        require(1 <= self.quality <= 95, "quality", self.quality, "1 to 95")

    def score(self, images: Float[Tensor, "sample channel height width"], prompts: Sequence[Prompt]) -> Tensor:
        """Minus the kilobytes [sample]."""
        return -JPEGIncompressibility(self.quality).score(images, prompts)


def _kilobytes(picture: "Image", quality: int) -> float:
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000
