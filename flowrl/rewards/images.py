"""From tensors to what other programs read: 8-bit pictures."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from flowrl.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from PIL.Image import Image


def to_bytes(images: Float[Tensor, "sample channel height width"]) -> UInt8[Tensor, "sample height width channel"]:
    """round(255 x) of images in [0, 1] (values outside are clamped), on the CPU, with the channels last."""
    levels = (images.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def to_colours(images: Float[Tensor, "sample channel height width"]) -> Float[Tensor, "sample 3 height width"]:
    """The images with red, green and blue: one channel is repeated, a fourth left out. Raises `RewardError` for two channels."""
    channels = images.shape[1]
    if channels not in (1, 3, 4):
        raise RewardError(f"this reward needs pictures: 1 channel or 3, not {channels}")
    return images.expand(-1, 3, -1, -1) if channels == 1 else images[:, :3]


def to_pillow(images: Float[Tensor, "sample channel height width"]) -> "list[Image]":
    """The images as Pillow's RGB pictures (`to_colours`). Raises `ConfigError` where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError('this reward needs Pillow: pip install -e ".[rewards]"') from error
    return [Image.fromarray(array) for array in to_bytes(to_colours(images)).numpy()]
