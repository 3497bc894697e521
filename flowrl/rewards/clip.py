"""Rewards on CLIP's embeddings: PickScore, CLIPScore, LAION's aesthetic score, HPSv2.1.

Weights are loaded by `load` or at the first score, from a local folder in transformers' format or
from the Hugging Face Hub by name. The command line works offline unless ``HF_HUB_OFFLINE=0`` is
set. Rewards with the same model and settings share the weights.

Images are rounded to 8 bits and, on the network's device, resized to its size (224 x 224) with
Pillow's bicubic filter and normalised with OpenAI's mean and standard deviation. Images that are
not square are cropped at their centre, or letterboxed for HPSv2.1, as in the published code.
Prompts are truncated to 77 tokens. Features are normalised and compared in float32 for every
`dtype` of the network.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.images import Images, resized, to_levels, to_rgb

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Channel means and standard deviations of CLIP's training data (arXiv 2103.00020, public code)."""
TOKENS = 77
Head = list[tuple[Tensor, Tensor]]
"""Weight [out, in] and bias [out] of successive linear layers."""
FeatureRows = Float[Tensor, "sample feature"]
Pixels = Float[Tensor, "sample 3 size size"]


Precision = Literal["float32", "bfloat16", "float16"]
DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
"""For every `from_pretrained`: never run code in a model's folder (``auto_map``), without a prompt
to allow it.
"""

CLIP_NAMES = {
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "transformer.resblocks": "text_model.encoder.layers",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    ".ln_1": ".layer_norm1",
    ".ln_2": ".layer_norm2",
    ".attn.": ".self_attn.",
    ".mlp.c_fc": ".mlp.fc1",
    ".mlp.c_proj": ".mlp.fc2",
}
"""Parts of the names in open_clip's files and in transformers' `CLIPModel`, replaced in this order.
"""
CLIP_CONSTANTS = ("attn_mask", "input_resolution", "context_length", "vocab_size")
"""Entries of open_clip's files that are not weights."""


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Errors of transformers and PyTorch within this context, among them that a device does not
    exist, become `ConfigError`s; a damaged file can raise anything.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"reward: {source!r} cannot be loaded as a model for this reward"
            f" ({type(error).__name__}: {reason}); set HF_HUB_OFFLINE=0 to download from the Hub"
        ) from error


def load_network(loader: Any, model: str, device: str, dtype: str) -> Any:
    """`loader.from_pretrained(model)` for inference in the precision `dtype`, with every weight
    from safetensors files.

    transformers fills missing weights with random ones, and such a network would score noise, so
    missing weights raise `ConfigError` here.
    """
    network, info = loader.from_pretrained(
        model,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        use_safetensors=True,
        **DATA_ONLY,
    )
    missing = sorted(set(info["missing_keys"]) & {name for name, _ in network.named_parameters()})
    kind = type(network).__name__
    require(not missing, f"reward: weights of {kind} that {model} lacks", missing[:3], "none")
    return network.eval().requires_grad_(False).to(device)


def read_weights(place: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors or PyTorch file (those under "state_dict" if it has that
    entry), on the CPU.

    `place` is a path, or ``REPOSITORY:FILE`` on the Hub. PyTorch files are read with
    ``weights_only``. Raises `ConfigError` for a file that does not exist or contains anything else.
    """
    repository, _, name = place.rpartition(":")
    with loading(place):
        path = place
        if repository and not Path(place).is_file():
            path = import_module("huggingface_hub").hf_hub_download(repository, name)
        if path.endswith(".safetensors"):
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("state_dict", content)
        return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a CLIP model in OpenAI's and open_clip's naming, renamed for transformers'
    `CLIPModel`.

    Their query, key and value matrices are one matrix [3 width, width], and their projections are
    transposed.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in CLIP_CONSTANTS:
            continue
        for old, new in CLIP_NAMES.items():
            name = name.replace(old, new)
        if ".in_proj_" in name:
            for letter, matrix in zip("qkv", tensor.chunk(3), strict=True):
                result[name.replace("in_proj_", f"{letter}_proj.")] = matrix
        else:
            result[name] = tensor.t().contiguous() if "projection" in name else tensor
    return result


@lru_cache(maxsize=4)
def read_head(place: str) -> Head:
    """`head_of` the entries ``[PREFIX.N.]weight`` and ``bias`` of `read_weights`."""
    weights = read_weights(place)
    with loading(place):
        return head_of(weights)


def head_of(weights: Mapping[str, Tensor]) -> Head:
    """Linear layers by name, float64 on the CPU."""
    names = sorted(name.removesuffix("weight") for name in weights if name.endswith("weight"))
    return [(weights[f"{n}weight"].double(), weights[f"{n}bias"].double()) for n in names]


def apply_head(
    head: Head, features: Tensor, activation: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, "sample output"]:
    """The layers, with `activation` between them, of features [sample, feature], in float64."""
    result = features.double().cpu()
    for number, (weight, bias) in enumerate(head):
        if number and activation:
            result = activation(result)
        result = F.linear(result, weight, bias)
    return result


def clip_pixels(images: Images, size: int = 224, letterbox: bool = False) -> Pixels:
    """The network's input on the images' device: 8 bits, `size` x `size` (`resized`), `standard`.

    The shorter side is resized to `size` and the centre is cropped; with `letterbox` the longer
    side is, and black bars fill the rest.
    """
    levels = to_levels(to_rgb(images))
    sides = levels.shape[-2:]
    if letterbox:  # as open_clip rounds
        high, wide = (max(1, round(side * size / max(sides))) for side in sides)
        top, left = -((size - high) // 2), -((size - wide) // 2)
    else:  # as torchvision rounds
        high, wide = (size * side // min(sides) for side in sides)
        top, left = round((high - size) / 2), round((wide - size) / 2)
    edges = (-left, left + size - wide, -top, top + size - high)  # below 0: cropped
    return standard(F.pad(resized(levels, high, wide), edges))


def standard(levels: Images) -> Images:
    """(x / 255 - `MEAN`) / `STD` of the output of `to_levels`."""
    mean, std = (levels.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return (levels / 255 - mean) / std


@lru_cache(maxsize=8)
def load_clip(model: str, tokenizer: str, weights: str, device: str, dtype: str) -> tuple[Any, Any]:
    """A CLIP model and its tokenizer, loaded once per setting.

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
    size = network.config.text_config.vocab_size
    # From a folder without a vocabulary transformers makes a tokenizer of two special tokens, which
    # encodes all texts alike.
    fits = size / 2 <= len(words) <= size
    require(fits, "tokenizer", tokenizer or model, f"one of {size} tokens, not {len(words)}")
    return network, words


@dataclass(frozen=True)
class ClipNetwork:
    """A CLIP model: normalised float32 features of images and texts, `batch` at a time, on the CPU.

    Some rewards have a `tokenizer` or `weights` of their own.
    """

    model: str
    device: str = "cpu"
    dtype: Precision = "float32"
    batch: Count = 32

    def load(self) -> tuple[Any, Any]:
        """The network and its tokenizer, loaded at the first call."""
        tokenizer, weights = (getattr(self, option, "") for option in ("tokenizer", "weights"))
        return load_clip(self.model, tokenizer, weights, self.device, self.dtype)

    def pixels(self, images: Images, letterbox: bool = False) -> Pixels:
        """The network's input for images, on its device; `letterbox` as in `clip_pixels`."""
        network, _ = self.load()
        size = network.config.vision_config.image_size
        return clip_pixels(images.to(network.device), size, letterbox)

    def images(self, images: Images, letterbox: bool = False) -> FeatureRows:
        """Features of images; `letterbox` as in `clip_pixels`."""
        pieces = images.split(self.batch)
        return torch.cat([self.features(self.pixels(piece, letterbox)) for piece in pieces])

    @torch.no_grad()
    def features(self, pixels: Pixels) -> FeatureRows:
        """Features of the output of `pixels`."""
        network, _ = self.load()
        inputs = pixels.to(network.device, network.dtype)
        return _normalised(network.get_image_features(pixel_values=inputs))

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> FeatureRows:
        """Features of texts; equal texts are encoded once."""
        (network, tokenizer), rows = self.load(), []
        distinct = list(dict.fromkeys(texts))
        for start in range(0, len(distinct), self.batch):
            piece = distinct[start : start + self.batch]
            tokens = tokenizer(
                piece, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            rows.append(_normalised(network.get_text_features(**tokens.to(network.device))))
        return torch.cat(rows)[[distinct.index(text) for text in texts]]

    def cosines(
        self, images: Images, texts: Sequence[str], letterbox: bool = False
    ) -> Float[Tensor, " sample"]:
        """Cosine of every image's features with those of its text."""
        return (self.images(images, letterbox) * self.texts(texts)).sum(1)


def _normalised(output: Any) -> FeatureRows:
    # transformers 5 wraps features in an output object
    features = output if isinstance(output, Tensor) else output.pooler_output
    return F.normalize(features.float(), dim=1).cpu()


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
        scale = float(self.load()[0].logit_scale.float().exp())
        if self.form == "released":
            scale /= 26
        return scale * self.cosines(images, [prompt.text for prompt in prompts])


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
        prefix = f"{self.prefix.rstrip()} " if self.prefix else ""
        texts = [prefix + prompt.text for prompt in prompts]
        return self.weight * self.cosines(images, texts).clamp(min=0)


@checked_options
@dataclass(frozen=True)
class Aesthetic(ClipNetwork):
    """Predicted human rating of the image from 1 to 10: a linear head on CLIP ViT-L/14's features,
    independent of the prompt.

    The published head is five linear layers without activations between them. Source: LAION's
    improved aesthetic predictor (public code, file sac+logos+ava1-l14-linearMSE; the reward of
    DDPO, arXiv 2305.13301). Weights: Apache-2.0, CLIP's: MIT.

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

    def load(self) -> tuple[Any, Any]:
        """The network, loaded with the head at the first call."""
        network, tokenizer = super().load()
        size = network.config.projection_dim
        inputs = read_head(self.head)[0][0].shape[1]
        require(inputs == size, "features of the head", inputs, size)
        return network, tokenizer

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Ratings [sample]."""
        return apply_head(read_head(self.head), self.images(images)).squeeze(1).float()


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
        texts = [prompt.text for prompt in prompts]
        return self.cosines(images, texts, letterbox=True)


@checked_options
@dataclass(frozen=True)
class ClipFeatures(ClipNetwork):
    """CLIP's image features, of length 1: the distance is sqrt(2 - 2 cos), 0 to 2, and reflects
    content rather than noise.

    Args:
        model: a folder in transformers' format, or a name on the Hub.
        device: name of the device.
        dtype: precision of the network.
        batch: images per network call.
    """

    model: str = "openai/clip-vit-base-patch32"
    batch: Count = 64

    def __call__(self, images: Images) -> Tensor:
        """[sample, feature]."""
        return self.images(images)
