"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206) as policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policies.family import decode_scaled, require_multiples, resolution_shift
from flowrl.policies.lora import LORA_TARGETS


@dataclass(frozen=True)
class SD3:
    """`Family` of diffusers' `StableDiffusion3Pipeline` (SD3-Medium, SD3.5-Medium, SD3.5-Large).

    Latents are [sample, channel, height / 8, width / 8]. Prompts go through two CLIP encoders and T5, which may be absent.

    Args:
        pipeline: see `Family`.
        encoders: see `Family`.
        text_tokens: see `Family`.
        lora_targets: see `Family`.
    """

    pipeline: str = "StableDiffusion3Pipeline"
    encoders: tuple[str, ...] = ("text_encoder", "text_encoder_2", "text_encoder_3")
    text_tokens: int = 256
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """(channels, height / 8, width / 8). Raises `ConfigError` unless both sizes are multiples of 8 x patch size."""
        factor = pipe.vae_scale_factor
        unit = factor * pipe.transformer.config.patch_size
        largest = pipe.transformer.config.pos_embed_max_size * unit
        require_multiples(height, width, unit, largest)
        return (pipe.transformer.config.in_channels, height // factor, width // factor)

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any) -> None:
        """The scheduler's grid with its fixed shift (3 for SD3.5), or shifted by resolution if its config requires it."""
        _, height, width = latent_shape
        patch = pipe.transformer.config.patch_size
        dynamic = scheduler.config.use_dynamic_shifting
        shift = {"mu": resolution_shift(scheduler, (height // patch) * (width // patch), 1.16)} if dynamic else {}
        scheduler.set_timesteps(steps, **shift)

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """Concatenated CLIP and T5 tokens [token, dim], and the pooled CLIP embeddings [dim]."""
        found = pipe.encode_prompt(text, None, None, device=device, do_classifier_free_guidance=False, max_sequence_length=tokens)
        return {"words": found[0][0], "pooled": found[2][0]}

    def velocity(
        self, transformer: Any, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """`SD3Transformer2DModel` with 1000 t."""
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=rows["words"],
            pooled_projections=rows["pooled"],
            timestep=timestep,
            return_dict=False,
        )[0]

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Scaled and shifted as in the pipeline."""
        return decode_scaled(pipe.vae, latent)
