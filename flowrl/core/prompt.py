"""Prompts, and the images that they refer to."""

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReferenceImage:
    """An image that a prompt refers to, such as the picture to edit: a file, which is read at every
    use, or the content of one.

    Args:
        sha256: hash of the file's content.
        path: the file; None if `data` is its content.
        data: the content of a file, such as a PNG; empty if `path` is given.
        read: how the file is read.
    """

    sha256: str
    path: Path | None = None
    data: bytes = field(default=b"", repr=False)
    read: Callable[[Path], bytes] = field(default=Path.read_bytes, repr=False, compare=False)

    @staticmethod
    def of_file(path: Path, read: Callable[[Path], bytes]) -> "ReferenceImage":
        """The image in a file. Raises `ConfigError` for a file that is none."""
        name = hashlib.sha256(_content(path, read)).hexdigest()
        image = ReferenceImage(name, path.absolute(), read=read)
        image.pillow()
        return image

    @staticmethod
    def of_pixels(pixels: "Tensor") -> "ReferenceImage":
        """The image with these pixels [3, height, width] in [0, 1], rounded to 8 bits."""
        import torch
        from PIL import Image

        values = (pixels.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
        file = io.BytesIO()
        Image.fromarray(values.permute(1, 2, 0).numpy()).save(file, "PNG")
        return ReferenceImage(hashlib.sha256(file.getvalue()).hexdigest(), data=file.getvalue())

    def content(self) -> bytes:
        """The file's content. Raises `ConfigError` if the file is missing or has changed."""
        if self.path is None:
            return self.data
        content = _content(self.path, self.read)
        same = hashlib.sha256(content).hexdigest() == self.sha256
        require(same, f"image {self.path}", "changed", "the file that was there at the start")
        return content

    def pillow(self) -> Any:
        """The image as Pillow's, in red, green and blue; transparent parts are white."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        place = self.path or "of a prompt"
        try:
            image: Any = ImageOps.exif_transpose(Image.open(io.BytesIO(self.content())))
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                ground = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(ground, image.convert("RGBA"))
            return image.convert("RGB")
        except Image.DecompressionBombError as error:
            raise ConfigError(f"image {place} is too large ({error})") from error
        except UnidentifiedImageError as error:
            raise ConfigError(f"image {place} cannot be read: it is no image") from error
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damaged files
            raise ConfigError(f"image {place} cannot be read ({error})") from error

    def pixels(self) -> "Tensor":
        """The image [3, height, width] in [0, 1], float32."""
        import numpy as np
        import torch

        return torch.from_numpy(np.array(self.pillow())).permute(2, 0, 1).float() / 255


def _content(path: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise ConfigError(f"image {path} cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        text: the text, which conditions the network.
        metadata: data that a verifier needs (for example the requested objects).
        images: the images to which the text refers, which condition the network too: that to edit.
        weight: how often training draws the prompt, relative to the others.
        source: name of the source that it is from; "" if there is one. Credit is assigned within a
            source.

    Raises:
        ConfigError: the text has a NUL character, or the weight is not a finite number above 0.
    """

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[ReferenceImage, ...] = ()
    weight: float = 1
    source: str = ""

    def __post_init__(self) -> None:
        number = type(self.weight) in (int, float) and 0 < self.weight < math.inf
        allowed = "a finite number above 0; remove a prompt that is not to be drawn"
        require(number, "weight of a prompt", self.weight, allowed)
        # C libraries (tokenizers, file names, PNG texts) end a text at NUL
        require("\0" not in self.text, "prompt", self.text, "text without NUL characters")

    @property
    def key(self) -> str:
        """What conditions the network: equal for prompts with the same text and images."""
        return "\0".join([self.text, *(image.sha256 for image in self.images)])


def source_weights(prompts: Iterable[Prompt]) -> dict[str, float]:
    """The sum of the weights of the prompts of each source."""
    weights = dict[str, float]()
    for prompt in prompts:
        weights[prompt.source] = weights.get(prompt.source, 0.0) + prompt.weight
    return weights


def require_images(prompts: Iterable[Prompt], least: int, most: int, reader: str) -> None:
    """Raise `ConfigError` unless every prompt has from `least` to `most` images, which `reader`
    reads.
    """
    allowed = f"{least}" if least == most else f"{least} to {most}"
    for prompt in prompts:
        fits = least <= len(prompt.images) <= most
        name = f"images of the prompt {prompt.text!r:.60}"
        require(fits, name, len(prompt.images), f"{allowed} with {reader}")
