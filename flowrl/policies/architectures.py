"""Architectures of published models and of a model's folder, built from shapes alone; nothing is downloaded."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.policies.family import Family, latent_shape, latent_size
from flowrl.policies.flux import Flux
from flowrl.policies.qwen_image import QwenImage
from flowrl.policies.sd3 import SD3
from flowrl.policies.wan import Wan

DECODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""The image decoder of SD3, SD3.5 and FLUX.1, an `AutoencoderKL`."""
FLUX_ENCODERS = 4_762_310_656 + 123_650_304
"""Parameters of T5 v1.1 XXL's encoder and of CLIP ViT-L/14's text encoder."""
SD3_ENCODERS = FLUX_ENCODERS + 694_659_840
"""Parameters of these and of OpenCLIP ViT-bigG/14's text encoder."""
QWEN_ENCODER = 8_292_166_656
"""Parameters of Qwen2.5-VL-7B with its vision tower, which the pipeline also loads."""
WAN_ENCODER = 5_680_910_336
"""Parameters of UMT5 XXL's encoder."""


@dataclass(frozen=True)
class Size:
    """Size of an image or a video.

    Args:
        height: height in pixels.
        width: width in pixels.
        frames: number of frames; 1 for an image.
    """

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class Architecture:
    """A transformer, the lengths of its prompts, and its image decoder.

    Settings that are left out have the defaults of diffusers' classes, which are the published ones of
    FLUX.1, Qwen-Image and Wan 2.1.

    Args:
        family: the model family.
        transformer: class of the transformer in diffusers.
        config: settings of the transformer.
        encoder_parameters: number of parameters of all text encoders.
        prompt_tokens: length of a prompt for the encoder whose length `max_sequence_length` sets (T5,
            Qwen2.5-VL, UMT5).
        clip_tokens: length of a prompt for CLIP; 0 if its tokens are not part of the embedding.
        decoder_class: class of the image decoder in diffusers.
        decoder: settings of the image decoder.
    """

    family: Family
    transformer: str
    config: Mapping[str, Any]
    encoder_parameters: int
    prompt_tokens: int = 512
    clip_tokens: int = 0
    decoder_class: str = "AutoencoderKL"
    decoder: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_tokens(self) -> int:
        """The length of a prompt's embedding."""
        return self.clip_tokens + self.prompt_tokens

    @property
    def text_width(self) -> int:
        """The width of a prompt's embedding."""
        config = self.pipeline.transformer.config
        return config.get("joint_attention_dim") or config["text_dim"]

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline on "meta", without text encoders."""
        diffusers = import_module("diffusers")
        names = [(name, name.replace("text_encoder", "tokenizer")) for name in self.family.encoders]
        return getattr(diffusers, self.family.pipeline)(
            transformer=self.build(),
            vae=self.build_decoder(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            **dict.fromkeys(sum(names, ())),
        )

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """The shape of one latent."""
        return latent_shape(self.pipeline, self.family, size.height, size.width, size.frames)

    def inputs(self, rows: int, size: Size, precision: torch.dtype) -> tuple[Any, ...]:
        """The arguments of `Family.velocity` after the transformer for `rows` latents, on "meta".

        The mask of padded prompts, one byte per token, is left out.
        """

        def shaped(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, device="meta", dtype=precision)

        embeddings = {
            "words": shaped(self.text_tokens, self.text_width),
            "pooled": shaped(self.pipeline.transformer.config.get("pooled_projection_dim", 0)),
            "mask": None,
        }
        image = latent_size(self.pipeline, size.height, size.width)
        return shaped(*self.latent_shape(size)), shaped(), embeddings, image

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights on `device`; on "meta" it takes no memory."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)

    def build_decoder(self, device: str = "meta") -> Any:
        """The image decoder, in the same way."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.decoder_class)(**self.decoder)

    @staticmethod
    def of_folder(folder: Path) -> "Architecture":
        """The architecture of the pipeline in `folder`, from its JSON files and its encoders' headers.

        Raises `OSError`, `KeyError` or `ValueError` if files are missing or have another form.
        """
        transformer, decoder = (json.loads((folder / part / "config.json").read_text()) for part in ("transformer", "vae"))
        tokenizer = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())
        known = {known.transformer: known for known in ARCHITECTURES.values()}[transformer["_class_name"]]
        return replace(
            known,
            config={name: value for name, value in transformer.items() if not name.startswith("_")},
            clip_tokens=tokenizer["model_max_length"] if known.clip_tokens else 0,
            encoder_parameters=sum(map(_elements, folder.glob("text_encoder*/*.safetensors"))),
            decoder={name: value for name, value in decoder.items() if not name.startswith("_")},
        )


def _sd35(layers: int, **config: Any) -> Architecture:
    """SD3.5; a layer more is a head of 64 channels more."""
    sizes = {"num_layers": layers, "num_attention_heads": layers, "caption_projection_dim": 64 * layers}
    config = {**sizes, "qk_norm": "rms_norm", "pooled_projection_dim": 2048, **config}
    return Architecture(SD3(), "SD3Transformer2DModel", config, SD3_ENCODERS, 256, 77, decoder=DECODER)


def _flux(distilled: bool) -> Architecture:
    config = {"num_layers": 19, "num_single_layers": 38, "pooled_projection_dim": 768, "guidance_embeds": distilled}
    return Architecture(Flux(), "FluxTransformer2DModel", config, FLUX_ENCODERS, decoder=DECODER)


ARCHITECTURES: dict[str, Architecture] = {
    "sd3.5-medium": _sd35(24, pos_embed_max_size=384, dual_attention_layers=tuple(range(13))),
    "sd3.5-large": _sd35(38, pos_embed_max_size=192),
    "flux.1-dev": _flux(True),
    "flux.1-schnell": _flux(False),
    "qwen-image": Architecture(
        QwenImage(), "QwenImageTransformer2DModel", {}, QWEN_ENCODER, decoder_class="AutoencoderKLQwenImage"
    ),
    "wan2.1-t2v-1.3b": Architecture(
        Wan(),
        "WanTransformer3DModel",
        {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        WAN_ENCODER,
        decoder_class="AutoencoderKLWan",
    ),
}
"""The published architectures by name."""


def architecture_of(model: str) -> Architecture | None:
    """The architecture of the pipeline in the folder `model`, or of a model whose name determines it."""
    if (Path(model) / "model_index.json").is_file():
        with suppress(OSError, KeyError, ValueError):
            return Architecture.of_folder(Path(model))
    name = model.lower().rstrip("/").removesuffix("-diffusers")
    return next((known for end, known in ARCHITECTURES.items() if name.endswith(end.removeprefix("sd"))), None)


def _elements(file: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
