"""Architectures of published models and of a model's folder, built from shapes alone; nothing is downloaded."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.policies.lora import LORA_TARGETS
from flowrl.policies.wan import Wan

DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "latent_channels": 16, "norm_num_groups": 32, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
"""The image decoder of SD3, SD3.5 and FLUX.1, an `AutoencoderKL`."""
QWEN_DECODER: dict[str, Any] = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True],
    "input_channels": 3,
}  # fmt: skip
"""The image decoder of Qwen-Image, an `AutoencoderKLQwenImage`, which decodes videos; an image is one frame."""
WAN_DECODER: dict[str, Any] = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True],
}  # fmt: skip
"""The video decoder of Wan 2.1, an `AutoencoderKLWan`."""
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

    Args:
        transformer: class of the transformer in diffusers.
        config: configuration of the transformer.
        clip_tokens: length of a prompt for CLIP; 0 if its tokens are not part of the embedding.
        prompt_tokens: length of a prompt for the encoder whose length `max_sequence_length` sets (T5, Qwen2.5-VL, UMT5).
        encoder_parameters: number of parameters of all text encoders.
        decoder: configuration of the image decoder.
        decoder_class: class of the image decoder in diffusers.
    """

    transformer: str
    config: dict[str, Any]
    clip_tokens: int
    prompt_tokens: int
    encoder_parameters: int
    decoder: dict[str, Any] = field(default_factory=lambda: DECODER)
    decoder_class: str = "AutoencoderKL"

    @property
    def text_tokens(self) -> int:
        """The length of a prompt's embedding."""
        return self.clip_tokens + self.prompt_tokens

    @property
    def latent_factor(self) -> int:
        """Pixels per latent, along a side."""
        halvings = self.decoder.get("temperal_downsample")
        return 2 ** (len(self.decoder["block_out_channels"]) - 1 if halvings is None else len(halvings))

    @property
    def latent_channels(self) -> int:
        """Channels of a latent image."""
        return self.decoder["latent_channels" if "latent_channels" in self.decoder else "z_dim"]

    @property
    def text_width(self) -> int:
        """The width of a prompt's embedding."""
        return self.config["text_dim" if self.makes_videos else "joint_attention_dim"]

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The layers that get a LoRA by default."""
        return Wan().lora_targets if self.makes_videos else LORA_TARGETS

    @property
    def makes_videos(self) -> bool:
        """Whether samples are videos."""
        return self.transformer.startswith("Wan")

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """The decoder's input for one sample: [channel, height, width], or [channel, frame, height, width] for videos."""
        halvings = self.decoder.get("temperal_downsample")
        frames = () if halvings is None else ((size.frames - 1) // 2 ** sum(halvings) + 1,)
        return (self.latent_channels, *frames, size.height // self.latent_factor, size.width // self.latent_factor)

    def latent_image(self, rows: int, size: Size, precision: torch.dtype) -> Tensor:
        """The decoder's input on "meta": [row, *`latent_shape`]."""
        return torch.empty(rows, *self.latent_shape(size), device="meta", dtype=precision)

    def inputs(self, rows: int, size: Size, precision: torch.dtype) -> dict[str, Any]:
        """The arguments of the transformer for `rows` latents, on "meta", without the mask of padded prompts (one byte per
        token)."""

        def shaped(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta", dtype=precision)

        latent = self.latent_shape(size)
        high, wide = latent[-2:]
        words = {"encoder_hidden_states": shaped(rows, self.text_tokens, self.text_width)}
        common = {**words, "timestep": shaped(rows), "return_dict": False}
        if self.makes_videos:
            return {**common, "hidden_states": shaped(rows, *latent)}
        packed = {"hidden_states": shaped(rows, (high // 2) * (wide // 2), 4 * self.latent_channels)}
        if self.transformer.startswith("Qwen"):
            return {**common, **packed, "img_shapes": [[(1, high // 2, wide // 2)]] * rows}
        common["pooled_projections"] = shaped(rows, self.config["pooled_projection_dim"])
        if self.transformer.startswith("SD3"):
            return {**common, "hidden_states": shaped(rows, *latent)}
        guidance = shaped(rows) if self.config["guidance_embeds"] else None
        positions = {"txt_ids": shaped(self.text_tokens, 3), "img_ids": shaped((high // 2) * (wide // 2), 3)}
        return {**common, **packed, **positions, "guidance": guidance}

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights on `device`; on "meta" it has shapes only and takes no memory."""
        return self._build(self.transformer, self.config, device)

    def build_decoder(self, device: str = "meta") -> Any:
        """The image decoder, in the same way."""
        return self._build(self.decoder_class, self.decoder, device)

    @staticmethod
    def _build(name: str, config: dict[str, Any], device: str) -> Any:
        with torch.device(device):
            return getattr(import_module("diffusers"), name)(**config)

    @staticmethod
    def of_folder(folder: Path) -> "Architecture":
        """The architecture of the SD3, FLUX, Qwen-Image or Wan pipeline in `folder`, from its JSON files and its encoders'
        headers.

        Raises `OSError`, `KeyError` or `ValueError` if files are missing or have another form.
        """
        read = {part: json.loads((folder / part / "config.json").read_text()) for part in ("transformer", "vae")}
        plain = {part: {n: v for n, v in values.items() if not n.startswith("_")} for part, values in read.items()}
        known = _CLASSES[read["transformer"]["_class_name"]]
        tokenizer = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())
        clip = tokenizer["model_max_length"] if known.clip_tokens else 0
        encoders = sum(map(_elements, folder.glob("text_encoder*/*.safetensors")))
        return replace(
            known, config=plain["transformer"], clip_tokens=clip, encoder_parameters=encoders,
            decoder=plain["vae"],
        )  # fmt: skip


_SD35: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
_SD35_MEDIUM = {
    **_SD35, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
_SD35_LARGE = {
    **_SD35, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 3584, "guidance_embeds": False, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2), "in_channels": 16, "out_channels": 16, "num_layers": 30, "attention_head_dim": 128,
    "num_attention_heads": 12, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "cross_attn_norm": True,
}  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "sd3.5-medium": Architecture("SD3Transformer2DModel", _SD35_MEDIUM, 77, 256, SD3_ENCODERS),
    "sd3.5-large": Architecture("SD3Transformer2DModel", _SD35_LARGE, 77, 256, SD3_ENCODERS),
    "flux.1-dev": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, 0, 512, FLUX_ENCODERS),
    "flux.1-schnell": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}, 0, 512, FLUX_ENCODERS),
    "qwen-image": Architecture(
        "QwenImageTransformer2DModel", _QWEN, 0, 512, QWEN_ENCODER, QWEN_DECODER, "AutoencoderKLQwenImage"
    ),
    "wan2.1-t2v-1.3b": Architecture("WanTransformer3DModel", _WAN, 0, 512, WAN_ENCODER, WAN_DECODER, "AutoencoderKLWan"),
}
"""The published architectures by name."""
_CLASSES = {known.transformer: known for known in ARCHITECTURES.values()}
"""An architecture of every transformer class."""
_ENDINGS = {
    "3.5-medium": "sd3.5-medium", "3.5-large": "sd3.5-large", "flux.1-dev": "flux.1-dev", "flux.1-schnell": "flux.1-schnell",
    "qwen-image": "qwen-image", "wan2.1-t2v-1.3b-diffusers": "wan2.1-t2v-1.3b",
}  # fmt: skip
"""Architectures by the end of a model's name."""


def architecture(name: str) -> Architecture:
    """An architecture by name. Raises `ConfigError` for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def architecture_of(model: str) -> Architecture | None:
    """The architecture of the pipeline in the folder `model`, or of a model whose name determines it."""
    if (Path(model) / "model_index.json").is_file():
        with suppress(OSError, KeyError, ValueError):
            return Architecture.of_folder(Path(model))
    name = next((known for ending, known in _ENDINGS.items() if model.lower().rstrip("/").endswith(ending)), "")
    return architecture(name) if name else None


def _elements(file: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
