"""The published sizes of the models that people fine-tune, as configurations of their networks: to count, and to measure with
random weights, without a download."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.policies.family import Family


@dataclass(frozen=True)
class Architecture:
    """A transformer: its class in diffusers and its configuration. `image_channels` are those of the latent picture, an eighth of
    the image's height and width; `text_tokens` and `text_width` are those of a prompt's embedding."""

    transformer: str
    config: dict[str, Any]
    image_channels: int
    text_tokens: int
    text_width: int
    decoder: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
        """The transformer with random weights; on "meta" it has shapes only, and costs nothing."""
        with torch.device(device), _default_dtype(dtype):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)

    def pipeline(self, device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
        """The pipeline with random weights and without text encoders (give its family's embeddings by `RandomEmbeddings`).

        The image decoder is the published one in size. Weights are made on `device` in `dtype` at once: FLUX.1 in bfloat16 takes
        24 GB and never more.
        """
        diffusers = import_module("diffusers")
        with torch.device(device):
            decoder = diffusers.AutoencoderKL(**_DECODER, **self.decoder).eval()
        parts = {"transformer": self.build(device, dtype), "vae": decoder}
        parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(**self.scheduler)
        if self.transformer.startswith("SD3"):
            encoders = {f"{part}{n}": None for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")}
            return diffusers.StableDiffusion3Pipeline(**parts, **encoders)
        encoders = {f"{part}{n}": None for part in ("text_encoder", "tokenizer") for n in ("", "_2")}
        return diffusers.FluxPipeline(**parts, **encoders)


class RandomEmbeddings:
    """`family` whose prompts are embedded as noise of the true shape: words [tokens, width] and pooled [width], float32.

    `tokens` is the length of the whole embedding (SD3: CLIP's and T5's together). A text has always the same embedding.
    """

    def __init__(self, family: Family, tokens: int) -> None:
        self.family, self.tokens = family, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """The embeddings of one prompt; `tokens` (of T5 alone) is not asked."""
        config = pipe.transformer.config
        generator = torch.Generator().manual_seed(int.from_bytes(text.encode()[-7:], "big"))
        words = torch.randn(self.tokens, config.joint_attention_dim, generator=generator)
        return {"words": words, "pooled": torch.randn(config.pooled_projection_dim, generator=generator)}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


_DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "latent_channels": 16, "norm_num_groups": 32, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_SD35_SCALE = {"scaling_factor": 1.5305, "shift_factor": 0.0609}
_FLUX_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_DEV_GRID = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
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
        16, 333, 4096, _SD35_SCALE, {"shift": 3.0},
    ),
    "sd3.5-large": Architecture(
        "SD3Transformer2DModel",
        {**_SD35, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192},
        16, 333, 4096, _SD35_SCALE, {"shift": 3.0},
    ),
    "flux.1-dev": Architecture(
        "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, 16, 512, 4096, _FLUX_SCALE, _DEV_GRID
    ),
    "flux.1-schnell": Architecture(
        "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}, 16, 512, 4096, _FLUX_SCALE, {"shift": 1.0}
    ),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """An architecture by name. Raises `ConfigError` for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
