"""Images in 8 bits per channel, as other programs read them, and rewards without a network of
their own: the size as a JPEG file, recognised text (OCR), the motion of videos.
"""

import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, UInt8
from PIL import Image
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.options import Count, Whole, checked_options
from flowrl.core.types import ImagesOrVideos, Prompt

Quality = Annotated[int, Ge(1), Le(95)]
Images = Float[Tensor, "sample channel height width"]
"""Images in [0, 1]."""
Frames = Literal["first", "middle", "last", "all"] | Count


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

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Minus the kilobytes [sample]."""
        return -JPEGIncompressibility(self.quality).score(images, prompts)


QUOTED = re.compile(r'"([^"]+)"|„([^“”]+)[“”]|“([^”]+)”|«([^»]+)»|「([^」]+)」')


@checked_options
@dataclass(frozen=True)
class OCR:
    """max(0, 1 - N_e / N_ref), N_e the edit distance between recognised and target text, N_ref the
    target's length.

    The target is the text in quotation marks in the prompt, or else the entry "text" of its
    metadata. Recognised passages are joined from top to bottom. The recogniser is RapidOCR (PP-OCR,
    Latin and Chinese script, Apache-2.0), whose package contains its models, so nothing is
    downloaded.

    `score` raises `RewardError` for a prompt without a target, and `ConfigError` if RapidOCR is not
    installed. Source: Flow-GRPO (arXiv 2505.05470), visual text rendering.

    Args:
        form: "exact": white space, case and Unicode's compatible forms are ignored, and a
            superfluous letter costs as much as a missing one. "released": as in Flow-GRPO's public
            code, an image that contains the target scores 1 regardless of other text, only the
            first text in quotation marks counts, and only spaces and case are ignored.
        confidence: passages recognised with a lower confidence are left out, in [0, 1]. The
            released code keeps all passages from PaddleOCR 2, which drops those below 0.5.
        side: images whose shorter side has fewer pixels are enlarged for the detector, 32 or more;
            smaller values are faster and miss small letters.
        threads: number of threads; 0: one per core.

    Raises:
        ConfigError: a field is out of range.
    """

    form: Literal["exact", "released"] = "exact"
    confidence: Annotated[float, Ge(0), Le(1)] = 0.5
    side: Annotated[int, Ge(32)] = 736
    threads: Whole = 0

    def load(self) -> Any:
        """The recogniser, loaded at the first call."""
        return _engine(self.confidence, self.side, self.threads)

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1]."""
        targets = [target_text(prompt, self.form) for prompt in prompts]
        pairs = zip(self.read(images), targets, strict=True)
        return torch.tensor([text_score(text, target, self.form) for text, target in pairs])

    def read(self, images: Images) -> list[str]:
        """The recognised text of each image."""
        engine = self.load()
        blue_first = to_bytes(to_rgb(images)).flip(-1).numpy()
        return [" ".join(engine(array).txts or ()) for array in blue_first]


def quoted_text(prompt: str, first: bool = False) -> str:
    """The text in quotation marks ("...", “...”, „...“, «...», 「...」): the `first`, or all joined
    by spaces.
    """
    texts = [match[match.lastindex or 0] for match in QUOTED.finditer(prompt)]
    return " ".join(texts[:1] if first else texts)


def target_text(prompt: Prompt, form: str = "exact") -> str:
    """The text that an image of `prompt` should contain. Raises `RewardError` if there is none."""
    quoted = quoted_text(prompt.text, first=form == "released")
    text = quoted or str(prompt.metadata.get("text", ""))
    if not _plain(text):
        raise RewardError(
            f"ocr: the prompt {prompt.text!r} has no text to render; put it in quotation marks"
        )
    return text


def text_score(read: str, target: str, form: str = "exact") -> float:
    """max(0, 1 - edit distance / length of `target`) in a `form` of `OCR`."""
    if form == "released":
        read, target = (text.replace(" ", "").lower() for text in (read, target))
        if target in read:
            return 1.0
    else:
        read, target = _plain(read), _plain(target)
    return max(0.0, 1 - Levenshtein.distance(read, target) / len(target))


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


@lru_cache(maxsize=2)
def _engine(confidence: float, side: int, threads: int) -> Any:
    """The recogniser, built once per setting."""
    try:
        rapidocr: Any = import_module("rapidocr")
        import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError('ocr: RapidOCR is not installed: pip install -e ".[rewards]"') from error
    limits = {"Global.text_score": confidence, "Det.limit_side_len": side}
    pools = [f"EngineConfig.onnxruntime.{pool}_op_num_threads" for pool in ("intra", "inter")]
    return rapidocr.RapidOCR(
        params={"Global.log_level": "critical", **limits, **dict.fromkeys(pools, threads or -1)}
    )


def is_video(images: Tensor) -> bool:
    """Whether samples have a frame axis."""
    return images.ndim == 5


def chosen_frames(frames: Frames, count: int) -> list[int]:
    """The indices among `count` frames that `frames` selects.

    first, middle (the earlier one of two), last, all, or a number k of frames at equal distances,
    rounded, including the first and the last (k = 1: the middle one; all if there are fewer).
    """
    middle = (count - 1) // 2
    ends = {"first": 0, "middle": middle, "last": count - 1, 1: middle}
    if frames in ends:
        return [ends[frames]]
    number = count if frames == "all" else min(int(frames), count)
    return torch.linspace(0, count - 1, number).round().int().tolist()


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
    ends = ("first", "middle", "last")
    chosen = sorted({chosen_frames(frame, images.shape[1])[0] for frame in ends})
    return torch.cat(images[:, chosen].unbind(1), dim=-1)
