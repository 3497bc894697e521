"""FLUX.1 (dev and schnell) as policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.policies.family import decode_scaled, packed_shape, resolution_shift, unpacked
from flowrl.policies.lora import LORA_TARGETS


@dataclass(frozen=True)
class Flux:
    """`Family` of diffusers' `FluxPipeline`.

    Latents are packed: [sample, token, 4 x channel]; a token is a 2 x 2 patch of the latent image.

    Args:
        distilled_guidance: guidance input of a guidance-distilled model (FLUX.1-dev), 0 or more, at no cost; separate from
            classifier-free guidance (`ModelOptions.guidance_scale`, the pipeline's `true_cfg_scale`).
        pipeline: see `Family`.
        encoders: see `Family`.
        text_tokens: see `Family`.
        lora_targets: see `Family`.

    Raises:
        ConfigError: `distilled_guidance` is negative.
    """

    distilled_guidance: float = 3.5
    pipeline: str = "FluxPipeline"
    encoders: tuple[str, ...] = ("text_encoder", "text_encoder_2")
    text_tokens: int = 512
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        require(self.distilled_guidance >= 0, "distilled_guidance", self.distilled_guidance, "0 or more")

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """(height / 16 x width / 16, channels). Raises `ConfigError` unless both sizes are multiples of 16."""
        return packed_shape(pipe, height, width)

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any) -> None:
        """The even grid 1, ..., 1/T, shifted by the number of image tokens if the scheduler's config has dynamic shifting."""
        sigmas = None if scheduler.config.get("use_flow_sigmas", False) else np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(steps, sigmas=sigmas, mu=resolution_shift(scheduler, latent_shape[0], 1.15))

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """T5 tokens [token, dim], and the pooled CLIP embedding [dim]."""
        words, pooled, _ = pipe.encode_prompt(text, device=device, max_sequence_length=tokens)
        return {"words": words[0], "pooled": pooled[0]}

    def velocity(
        self, transformer: Any, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """`FluxTransformer2DModel` with t (it multiplies by 1000), positions, and the distilled guidance if it has that input."""
        words, device = rows["words"], latent.device
        guidance = torch.full((len(latent),), self.distilled_guidance, device=device)
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=words,
            pooled_projections=rows["pooled"],
            timestep=timestep / 1000,
            guidance=guidance if transformer.config.guidance_embeds else None,
            txt_ids=torch.zeros(words.shape[1], 3, device=device, dtype=words.dtype),
            img_ids=_positions(size, device).to(words.dtype),
            return_dict=False,
        )[0]

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Tokens unpacked to the latent image, which is then scaled and shifted as in the pipeline."""
        return decode_scaled(pipe.vae, unpacked(latent, size))


@cache
def _positions(size: tuple[int, int], device: torch.device) -> Tensor:
    """(0, row, column) of every 2 x 2 patch, [token, 3]."""
    row, column = torch.arange(size[0] // 2, device=device), torch.arange(size[1] // 2, device=device)
    grid = torch.cartesian_prod(row, column).float()
    return torch.cat([torch.zeros_like(grid[:, :1]), grid], dim=1)
