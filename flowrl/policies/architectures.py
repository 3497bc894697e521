"""The published sizes of the models that people fine-tune, as configurations of their transformers: to count, and to measure with
random weights, without a download."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class Architecture:
    """A transformer: its class in diffusers and its configuration. `image_channels` are those of the latent picture, an eighth of
    the image's height and width; `text_tokens` and `text_width` are those of a prompt's embedding."""

    transformer: str
    config: dict[str, Any]
    image_channels: int
    text_tokens: int
    text_width: int

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights; on "meta" it has shapes only, and costs nothing."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)


_SD35: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "sd3.5-medium": Architecture(
        "SD3Transformer2DModel",
        {
            **_SD35, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
        },
        16, 333, 4096,
    ),
    "sd3.5-large": Architecture(
        "SD3Transformer2DModel",
        {**_SD35, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192},
        16, 333, 4096,
    ),
    "flux.1-dev": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, 16, 512, 4096),
    "flux.1-schnell": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}, 16, 512, 4096),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """An architecture by name. Raises `ConfigError` for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
