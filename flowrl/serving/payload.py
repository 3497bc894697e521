"""The contents of a request: prompts from JSON, pictures from PNG or safetensors. Nothing is ever unpickled."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flowrl.serving.limits import Limits, Refusal
from flowrl.types import Prompt

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
PNG_MODES = ("RGB", "L", "P", "1")


class PromptPayload(BaseModel):
    """A prompt on the wire: its text, and metadata as any JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(max_length=100_000)
    metadata: dict[str, Any] = Field(default_factory=dict)


PROMPTS: TypeAdapter[list[PromptPayload]] = TypeAdapter(list[PromptPayload])


def read_prompts(data: bytes, limits: Limits) -> list[Prompt]:
    """A JSON list of {"text": ..., "metadata": {...}}. Raises `Refusal` (413, 422)."""
    try:
        found = PROMPTS.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal(422, "bad_prompts", f"prompts{f' at {where}' if where else ''}: {first['msg'][:200]}") from error
    if len(found) > limits.samples:
        raise Refusal(413, "too_many_samples", f"{len(found)} samples in one request; allowed: 1 to {limits.samples}")
    return [Prompt(item.text, item.metadata) for item in found]


def read_safetensors(data: bytes, limits: Limits) -> Tensor:
    """One tensor called "images" [sample, channel, height, width]; floats as they are, uint8 as value / 255. Float32."""
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, OverflowError, MemoryError) as error:
        message = f"the safetensors part cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise Refusal(422, "bad_safetensors", message) from error
    if set(tensors) != {"images"}:
        names = ", ".join(sorted(tensors))[:200] or "none"
        raise Refusal(422, "bad_safetensors", f"the safetensors part holds the tensors {names}; allowed: images, alone")
    images = tensors["images"]
    if images.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise Refusal(422, "bad_images", f"images are {str(images.dtype).removeprefix('torch.')}; allowed: {allowed}")
    if images.ndim != 4 or 0 in images.shape:
        shape = list(images.shape)
        raise Refusal(422, "bad_images", f"images have shape {shape}; allowed: [sample, channel, height, width], none of them 0")
    _check_pixels(images.shape[3], images.shape[2], limits)
    if images.shape[0] > limits.samples:
        raise Refusal(413, "too_many_samples", f"{images.shape[0]} samples in one request; allowed: 1 to {limits.samples}")
    values = images.float() / 255.0 if images.dtype == torch.uint8 else images.float()
    if not bool(torch.isfinite(values).all()):
        raise Refusal(422, "bad_images", "images hold values that are not finite")
    return values


def png_sizes(files: Sequence[bytes], limits: Limits) -> tuple[int, int]:
    """Width and height of all pictures, from their headers alone. Raises `Refusal` where they differ or are too large."""
    sizes = {_open(number, data).size for number, data in enumerate(files)}
    if len(sizes) != 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:4])
        raise Refusal(422, "bad_images", f"pictures of one request must have one size; found {shown}")
    width, height = sizes.pop()
    _check_pixels(width, height, limits)
    return width, height


def read_pngs(files: Sequence[bytes]) -> Tensor:
    """[sample, 3, height, width] float32 in [0, 1]: value / 255. 8 bits, RGB, grey or palette; no transparency or animation."""
    images = torch.empty(0)
    for number, data in enumerate(files):
        picture = _open(number, data)
        if picture.mode not in PNG_MODES or "transparency" in picture.info:
            message = f"png {number} has mode {picture.mode}; allowed: 8-bit {', '.join(PNG_MODES)} without transparency"
            raise Refusal(422, "bad_images", message)
        if getattr(picture, "n_frames", 1) != 1:
            raise Refusal(422, "bad_images", f"png {number} is animated; allowed: one frame")
        try:
            _open(number, data).verify()  # every chunk's checksum, to the end of the file; decoding alone is lenient
            pixels = np.array(picture.convert("RGB"))
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise _unreadable(number, error) from error
        if number == 0:
            images = torch.empty(len(files), 3, *pixels.shape[:2])
        images[number] = torch.from_numpy(pixels).permute(2, 0, 1)
    return images.div_(255.0)


def _open(number: int, data: bytes) -> Image.Image:
    """The picture with its header read. Only Pillow's PNG reader is tried."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked before decoding
            return Image.open(io.BytesIO(data), formats=("PNG",))
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise _unreadable(number, error) from error


def _unreadable(number: int, error: Exception) -> Refusal:
    told = "it is no PNG" if isinstance(error, UnidentifiedImageError) else f"{type(error).__name__}: {str(error)[:100]}"
    return Refusal(422, "bad_images", f"png {number} cannot be read: {told}")


def _check_pixels(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise Refusal(413, "too_many_pixels", f"pictures of {width} x {height}; allowed: {limits.pixels} pixels")
