"""Qwen-Image (arXiv 2508.02324) as a policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import require
from flowrl.policies.family import decode_standardised, linear_guidance, packed_shape, resolution_shift, unpacked
from flowrl.policies.lora import LORA_TARGETS


@dataclass(frozen=True)
class QwenImage:
    """`Family` of diffusers' `QwenImagePipeline`.

    Latents are packed like FLUX's: [sample, token, 4 x channel]. A prompt is the last hidden layer of Qwen2.5-VL without the
    tokens of the pipeline's template; prompts of different length are padded, with a mask. Guidance is classifier-free with the
    norm of the prompt's velocity (`guide`). The last block's text queries and outputs do not reach the image: their LoRA has
    no gradient. The last time before 0 is the scheduler's `shift_terminal` (.02 for Qwen-Image), and the noise of the last step
    is small: leave it out of the trained steps (window `:-1`).

    Args:
        pipeline: see `Family`.
        encoders: see `Family`.
        text_tokens: see `Family`.
        lora_targets: see `Family`.
    """

    pipeline: str = "QwenImagePipeline"
    encoders: tuple[str, ...] = ("text_encoder",)
    text_tokens: int = 512
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """(height / 16 x width / 16, channels).

        Raises `ConfigError` unless both sizes are multiples of 16. A guidance-distilled transformer raises it, too: diffusers'
        class has a setting for it but cannot compute it.
        """
        distilled = pipe.transformer.config.guidance_embeds
        require(not distilled, "guidance_embeds of the transformer", distilled, "false: Qwen-Image has no distilled guidance")
        return packed_shape(pipe, height, width)

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any) -> None:
        """The even grid 1, ..., 1/T, shifted by the number of image tokens and stretched to end at `shift_terminal`, as far as
        the scheduler's config requires it. A single step is not stretched: diffusers would divide by 0."""
        terminal = scheduler.config.shift_terminal
        scheduler.register_to_config(shift_terminal=terminal if steps > 1 else None)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=resolution_shift(scheduler, latent_shape[0], 1.15))
        scheduler.register_to_config(shift_terminal=terminal)

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """The prompt's tokens [token, dim], at most `tokens` of them, and a mask of ones; padding adds zeros to both."""
        words, _ = pipe.encode_prompt(text, device=device, max_sequence_length=tokens)
        return {"words": words[0], "mask": words.new_ones(words.shape[1], dtype=torch.bool)}

    def velocity(
        self, transformer: Any, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """`QwenImageTransformer2DModel` with t (it multiplies by 1000) and the mask of the prompts' tokens."""
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=rows["words"],
            encoder_hidden_states_mask=rows["mask"],
            timestep=timestep / 1000,
            img_shapes=[[(1, size[0] // 2, size[1] // 2)]] * len(latent),
            return_dict=False,
        )[0]

    def guide(self, away: Tensor, towards: Tensor, scale: float) -> Tensor:
        """c |v_prompt| / |c| with c = v_neg + s (v_prompt - v_neg); norms over the channels of a token. Gradients flow through
        the norms."""
        combined = linear_guidance(away, towards, scale)
        return combined * (towards.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Tokens unpacked to a video of one frame, z std + mean per channel, and the decoder's first frame."""
        return decode_standardised(pipe.vae, unpacked(latent, size).unsqueeze(2))[:, :, 0]
