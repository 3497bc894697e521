"""Architectures of models, published ones and those of a folder, built on shapes alone; nothing is downloaded."""

import json
import math
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import ConfigError

DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "latent_channels": 16, "norm_num_groups": 32, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
"""The image decoder of SD3, SD3.5 and FLUX.1, an `AutoencoderKL`."""
FLUX_ENCODERS = 4_762_310_656 + 123_650_304
"""Parameters of T5 v1.1 XXL's encoder and of CLIP ViT-L/14's text encoder."""
SD3_ENCODERS = FLUX_ENCODERS + 694_659_840
"""The same, and OpenCLIP ViT-bigG/14's text encoder."""


@dataclass(frozen=True)
class Architecture:
    """A transformer: its class in diffusers and its configuration; the lengths of a prompt for CLIP (0 if its tokens are not part
    of the embedding) and for T5, the parameters of all text encoders, and the configuration of the image decoder."""

    transformer: str
    config: dict[str, Any]
    clip_tokens: int
    t5_tokens: int
    encoder_parameters: int
    decoder: dict[str, Any] = field(default_factory=lambda: DECODER)

    @property
    def text_tokens(self) -> int:
        """The length of a prompt's embedding."""
        return self.clip_tokens + self.t5_tokens

    @property
    def latent_factor(self) -> int:
        """Pixels per latent, along a side."""
        return 2 ** (len(self.decoder["block_out_channels"]) - 1)

    @property
    def text_width(self) -> int:
        """The width of a prompt's embedding."""
        return self.config["joint_attention_dim"]

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights on `device`; on "meta" it has shapes only and takes no memory."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)

    @staticmethod
    def of_folder(folder: Path) -> "Architecture":
        """The architecture of the SD3 or FLUX pipeline in `folder`, from its JSON files and the headers of its text encoders.
        Raises `OSError`, `KeyError` or `ValueError` if they are not there or have another form."""
        read = {part: json.loads((folder / part / "config.json").read_text()) for part in ("transformer", "vae")}
        plain = {part: {n: v for n, v in values.items() if not n.startswith("_")} for part, values in read.items()}
        known = _CLASSES[read["transformer"]["_class_name"]]
        clip = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())["model_max_length"]
        encoders = sum(map(_elements, folder.glob("text_encoder*/*.safetensors")))
        return replace(
            known, config=plain["transformer"], clip_tokens=known.clip_tokens and clip, encoder_parameters=encoders,
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
ARCHITECTURES: dict[str, Architecture] = {
    "sd3.5-medium": Architecture("SD3Transformer2DModel", _SD35_MEDIUM, 77, 256, SD3_ENCODERS),
    "sd3.5-large": Architecture("SD3Transformer2DModel", _SD35_LARGE, 77, 256, SD3_ENCODERS),
    "flux.1-dev": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, 0, 512, FLUX_ENCODERS),
    "flux.1-schnell": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}, 0, 512, FLUX_ENCODERS),
}
"""The published architectures by name."""
_CLASSES = {known.transformer: known for known in ARCHITECTURES.values()}
"""An architecture of every transformer class."""


def architecture(name: str) -> Architecture:
    """An architecture by name. Raises `ConfigError` for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _elements(file: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
