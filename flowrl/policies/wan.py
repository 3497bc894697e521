"""Wan 2.1 text to video (arXiv 2503.20314) as a policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.policies.family import decode_standardised, require_multiples

_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class Wan:
    """`Family` of diffusers' `WanPipeline` with one transformer (Wan 2.1).

    Latents are [sample, channel, frame, height, width]: one latent frame for the first frame of the video, then one for every
    four frames. A prompt is UMT5's last hidden layer with zeros after its tokens, up to the full length. The transformer has no
    mask and attends to these zeros, so the number of tokens matters. The default is the 512 of the pipeline's call;
    `encode_prompt` alone has 226. The time input is 1000 t. Guidance is v_neg + s (v_prompt - v_neg).

    Args:
        pipeline: see `Family`.
        encoders: see `Family`.
        text_tokens: see `Family`.
        lora_targets: see `Family`.
    """

    pipeline: str = "WanPipeline"
    encoders: tuple[str, ...] = ("text_encoder",)
    text_tokens: int = 512
    lora_targets: tuple[str, ...] = tuple(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in _PROJECTIONS)

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """`video_shape` of a single frame."""
        return self.video_shape(pipe, height, width, 1)

    def video_shape(self, pipe: Any, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(channels, (frames - 1) / 4 + 1, height / 8, width / 8).

        Raises `ConfigError` unless frames - 1 is a multiple of 4 and both sizes are multiples of 16. Wan 2.2, which has two
        transformers or a time per token, is not supported and raises it, too.
        """
        wan21 = pipe.transformer_2 is None and pipe.config["boundary_ratio"] is None and not pipe.config["expand_timesteps"]
        require(wan21, "model", "Wan 2.2", "Wan 2.1: one transformer, and one time for all tokens")
        side, factor = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        require_multiples(height, width, side * pipe.transformer.config.patch_size[1])
        require((frames - 1) % factor == 0, "num_frames", frames, f"1 more than a multiple of {factor}")
        return (pipe.transformer.config.in_channels, (frames - 1) // factor + 1, height // side, width // side)

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any) -> None:
        """The scheduler's grid with its fixed shift: 3 for 480p, 5 for 720p."""
        scheduler.set_timesteps(steps)

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """The prompt's embeddings [tokens, dim], padded with zeros."""
        words, _ = pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=tokens, device=device)
        return {"words": words[0]}

    def velocity(
        self, transformer: Any, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """`WanTransformer3DModel`."""
        return transformer(latent, timestep, rows["words"], return_dict=False)[0]

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """z std + mean per channel, decoded frame by frame: [sample, frame, 3, height, width]."""
        return decode_standardised(pipe.vae, latent).transpose(1, 2)
