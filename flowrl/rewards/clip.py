"""Rewards on CLIP's embeddings: PickScore, CLIPScore, LAION's aesthetic score, HPSv2.1.

Weights are loaded by `load` or at the first score, from a local folder in transformers' format or
from the Hugging Face Hub by name. The command line works offline unless ``HF_HUB_OFFLINE=0`` is
set. Rewards with the same model and settings share the weights.

Images are rounded to 8 bits, resized to the network's size (224 x 224) with Pillow's bicubic
filter, and normalised with OpenAI's mean and standard deviation. Images that are not square are
cropped at their centre, or letterboxed for HPSv2.1, as in the published code. Prompts are truncated
to 77 tokens. Features are normalised and compared in float32 for every `dtype` of the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Gt
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import require
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.images import Images, to_pillow
from flowrl.rewards.weights import (
    DATA_ONLY,
    Precision,
    affine_map,
    from_open_clip,
    load_network,
    loading,
    read_weights,
)

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Channel means and standard deviations of CLIP's training data (arXiv 2103.00020, public code)."""
TOKENS = 77
FeatureRows = Float[Tensor, "sample feature"]
Pixels = Float[Tensor, "sample 3 size size"]


def clip_pixels(images: Images, size: int = 224, letterbox: bool = False) -> Pixels:
    """The network's input: 8 bits, `size` x `size` (bicubic, antialiased), (x - mean) / std. On the
    CPU.

    The shorter side is resized to `size` and the centre is cropped; with `letterbox` the longer
    side is, and black bars fill the rest.
    """
    squares = np.stack([np.asarray(_square(image, size, letterbox)) for image in to_pillow(images)])
    levels = torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255
    return (levels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def _square(image: Image.Image, size: int, letterbox: bool) -> Image.Image:
    """The image with its shorter (`letterbox`: longer) side resized to `size`, the other one
    cropped (filled with black).
    """
    if letterbox:  # as open_clip rounds
        scale = size / max(image.size)
        wide, high = (max(1, round(side * scale)) for side in image.size)
        left, top = -((size - wide) // 2), -((size - high) // 2)
    else:  # as torchvision rounds
        wide, high = (size * side // min(image.size) for side in image.size)
        left, top = round((wide - size) / 2), round((high - size) / 2)
    return image.resize((wide, high), Image.Resampling.BICUBIC).crop(
        (left, top, left + size, top + size)
    )


@dataclass(frozen=True)
class Encoder:
    """A CLIP model with its tokenizer: normalised float32 features of images and texts, `batch` at
    a time, on the CPU.
    """

    model: Any
    tokenizer: Any
    batch: int

    @property
    def size(self) -> int:
        """Height and width of the network's input."""
        return self.model.config.vision_config.image_size

    @torch.no_grad()
    def images(self, images: Images, letterbox: bool = False) -> FeatureRows:
        """Features of the images, of length 1; `letterbox` as in `clip_pixels`."""
        return torch.cat(
            [
                self.features(clip_pixels(piece, self.size, letterbox))
                for piece in images.split(self.batch)
            ]
        )

    @torch.no_grad()
    def features(self, pixels: Pixels) -> FeatureRows:
        """Features of the output of `clip_pixels`, of length 1."""
        return _normalised(
            self.model.get_image_features(
                pixel_values=pixels.to(self.model.device, self.model.dtype)
            )
        )

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> FeatureRows:
        """Features of the texts, of length 1; equal texts are encoded once."""
        distinct, rows = list(dict.fromkeys(texts)), []
        for start in range(0, len(distinct), self.batch):
            piece = distinct[start : start + self.batch]
            tokens = self.tokenizer(
                piece, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            rows.append(_normalised(self.model.get_text_features(**tokens.to(self.model.device))))
        return torch.cat(rows)[[distinct.index(text) for text in texts]]

    def cosines(
        self, images: Images, texts: Sequence[str], letterbox: bool = False
    ) -> Float[Tensor, " sample"]:
        """Cosine of every image's features with those of its text; `letterbox` as in
        `clip_pixels`.
        """
        return (self.images(images, letterbox) * self.texts(texts)).sum(1)


def _normalised(output: Any) -> Tensor:
    """Features of length 1; transformers 5 wraps them in an output object."""
    features = output if isinstance(output, Tensor) else output.pooler_output
    return F.normalize(features.float(), dim=1).cpu()


@lru_cache(maxsize=8)
def load_encoder(
    model: str,
    tokenizer: str = "",
    device: str = "cpu",
    dtype: str = "float32",
    batch: int = 32,
    weights: str = "",
) -> Encoder:
    """The CLIP model in the folder `model`, or of that name on the Hub, loaded once per setting.

    `tokenizer`: folder or name of the tokenizer; "" for the model's. `weights`: a file in
    open_clip's format that replaces the model's weights; only the model's configuration is then
    read. Raises `ConfigError` for a model that cannot be loaded or lacks weights, a tokenizer of
    another model, or a device that does not exist.
    """
    with loading(model):
        from transformers import AutoTokenizer, CLIPConfig, CLIPModel

        words = AutoTokenizer.from_pretrained(tokenizer or model, **DATA_ONLY)
        if weights:
            network: Any = CLIPModel(CLIPConfig.from_pretrained(model, **DATA_ONLY))
            network.load_state_dict(from_open_clip(read_weights(weights)))
            network = network.eval().requires_grad_(False).to(device, getattr(torch, dtype))
        else:
            network = load_network(CLIPModel, model, device, dtype)
    vocabulary = network.config.text_config.vocab_size
    # From a folder without a vocabulary transformers makes a tokenizer of two special tokens, which
    # encodes all texts alike.
    fits = vocabulary / 2 <= len(words) <= vocabulary
    needed = (
        f"the folder of a tokenizer for {vocabulary} pieces of text (this one has {len(words)})"
    )
    require(fits, "tokenizer", tokenizer or model, needed)
    return Encoder(network, words, batch)


@lru_cache(maxsize=4)
def _head(place: str) -> tuple[Tensor, Tensor]:
    return affine_map(read_weights(place))


@dataclass(frozen=True)
class ClipNetwork:
    """The options of everything that uses a CLIP model; some have a `tokenizer` or `weights` of
    their own.
    """

    model: str
    device: str = "cpu"
    dtype: Precision = "float32"
    batch: Count = 32

    def load(self) -> Encoder:
        """The network, loaded at the first call."""
        tokenizer, weights = (getattr(self, option, "") for option in ("tokenizer", "weights"))
        return load_encoder(self.model, tokenizer, self.device, self.dtype, self.batch, weights)


@checked_options
@dataclass(frozen=True)
class PickScore(ClipNetwork):
    """exp(logit_scale) cos(image, prompt) of a CLIP ViT-H/14 trained on human preferences; about 17
    to 24.

    Source: Pick-a-Pic (arXiv 2305.01569), the model card's code; its probability that one of two
    images is preferred is the softmax of the two scores. Weights: MIT.

    Args:
        model: the model's folder, or its name on the Hub.
        device: name of the device.
        dtype: precision of the network.
        batch: images or texts per network call.
        tokenizer: the tokenizer's folder, or its name on the Hub.
        form: "exact", or "released": divided by 26, as in Flow-GRPO's public code, about 0.65 to
            0.9. The division changes the advantages of groups whose scores hardly differ, because
            1e-4 is added to the std.

    Raises:
        ConfigError: `form` is unknown. `load` and `score` also raise it if the model cannot be
            loaded.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    form: Literal["exact", "released"] = "exact"

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        encoder = self.load()
        scale = float(encoder.model.logit_scale.float().exp()) / (
            26 if self.form == "released" else 1
        )
        return scale * encoder.cosines(images, [prompt.text for prompt in prompts])


@checked_options
@dataclass(frozen=True)
class CLIPScore(ClipNetwork):
    """`weight` max(0, cos(image, `prefix` + prompt)) with OpenAI's CLIP ViT-B/32; in practice about
    0.4 to 1.

    Source: CLIPScore (arXiv 2104.08718), equation 1: weight 2.5, prefix "A photo depicts" and a
    space. Weights: MIT.

    Args:
        model: the model's folder, or its name on the Hub.
        device: name of the device.
        dtype: precision of the network.
        batch: images or texts per network call.
        prefix: text before the prompt.
        weight: factor of the cosine, above 0.

    Raises:
        ConfigError: `weight` is not above 0. `load` and `score` also raise it if the model cannot
            be loaded.
    """

    model: str = "openai/clip-vit-base-patch32"
    prefix: str = "A photo depicts "
    weight: Annotated[float, Gt(0)] = 2.5
    batch: Count = 64

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, `weight`]."""
        encoder = self.load()
        prefix = f"{self.prefix.rstrip()} " if self.prefix else ""
        return self.weight * encoder.cosines(
            images, [prefix + prompt.text for prompt in prompts]
        ).clamp(min=0)


@checked_options
@dataclass(frozen=True)
class Aesthetic(ClipNetwork):
    """Predicted human rating of the image from 1 to 10: a linear head on CLIP ViT-L/14's features,
    independent of the prompt.

    The published head is five linear layers without activations between them, which is one affine
    map. Source: LAION's improved aesthetic predictor (public code, file
    sac+logos+ava1-l14-linearMSE; the reward of DDPO, arXiv 2305.13301). Weights:
    Apache-2.0, CLIP's: MIT.

    Args:
        model: the model's folder, or its name on the Hub.
        device: name of the device.
        dtype: precision of the network.
        batch: images per network call.
        head: file with the head's layers (``layers.N.weight`` and ``bias``, or ``weight`` and
            ``bias``), or ``REPOSITORY:FILE`` on the Hub; safetensors or PyTorch's format, read
            without running code.
    """

    model: str = "openai/clip-vit-large-patch14"
    head: str = "trl-lib/ddpo-aesthetic-predictor:aesthetic-model.pth"

    def load(self) -> Encoder:
        """The network, loaded with the head at the first call."""
        encoder = super().load()
        features = encoder.model.config.projection_dim
        require(
            len(_head(self.head)[0]) == features,
            "head",
            self.head,
            f"a head for {features} features",
        )
        return encoder

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Ratings [sample]."""
        features = self.load().images(images)
        weight, bias = _head(self.head)
        return (features.double() @ weight + bias).float()


@checked_options
@dataclass(frozen=True)
class HPSv21(ClipNetwork):
    """cos(image, prompt) of a CLIP ViT-H/14 trained on human preferences (HPS v2.1); about 0.2 to
    0.35.

    Source: HPS v2 (arXiv 2306.09341) and its public code, which letterboxes images that are not
    square. Weights: Apache-2.0.

    Args:
        model: folder or name on the Hub of a model with the same architecture.
        device: name of the device.
        dtype: precision of the network.
        batch: images or texts per network call.
        weights: the published file in open_clip's format, or ``REPOSITORY:FILE`` on the Hub, which
            replaces the weights of `model`; read without running code. "" if `model` is a folder
            with HPS v2.1 in transformers' format.
    """

    model: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    weights: str = "xswu/HPSv2:HPS_v2.1_compressed.pt"

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        encoder = self.load()
        return encoder.cosines(images, [prompt.text for prompt in prompts], letterbox=True)
