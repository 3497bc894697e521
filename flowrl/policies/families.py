"""The built-in model families: Stable Diffusion 3 and 3.5, FLUX.1, Qwen-Image, and Wan 2.1."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.parts.plugins import plugin
from flowrl.policies.family import (
    Family,
    decode_scaled,
    decode_standardised,
    linear_guidance,
    packed_shape,
    require_multiples,
    resolution_shift,
    unpacked,
)
from flowrl.policies.lora import LORA_TARGETS


@dataclass(frozen=True)
class SD3:
    """`Family` of diffusers' `StableDiffusion3Pipeline` (SD3-Medium, SD3.5-Medium,
    SD3.5-Large; arXiv 2403.03206).

    Latents are [sample, channel, height / 8, width / 8]. Prompts go through two CLIP encoders and
    T5, which may be absent.

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
        """(channels, height / 8, width / 8). Raises `ConfigError` unless both sizes are multiples
        of 8 x patch size.
        """
        factor = pipe.vae_scale_factor
        unit = factor * pipe.transformer.config.patch_size
        largest = pipe.transformer.config.pos_embed_max_size * unit
        require_multiples(height, width, unit, largest)
        return (pipe.transformer.config.in_channels, height // factor, width // factor)

    def set_timesteps(
        self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any
    ) -> None:
        """The scheduler's grid with its fixed shift (3 for SD3.5), or shifted by resolution if its
        config requires it.
        """
        _, height, width = latent_shape
        patch = pipe.transformer.config.patch_size
        dynamic = scheduler.config.use_dynamic_shifting
        shift = (
            {"mu": resolution_shift(scheduler, (height // patch) * (width // patch), 1.16)}
            if dynamic
            else {}
        )
        scheduler.set_timesteps(steps, **shift)

    def encode(
        self, pipe: Any, text: str, tokens: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """Concatenated CLIP and T5 tokens [token, dim], and the pooled CLIP embeddings [dim]."""
        found = pipe.encode_prompt(
            text,
            None,
            None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=tokens,
        )
        return {"words": found[0][0], "pooled": found[2][0]}

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
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


@dataclass(frozen=True)
class Flux:
    """`Family` of diffusers' `FluxPipeline`.

    Latents are packed: [sample, token, 4 x channel]; a token is a 2 x 2 patch of the latent image.

    Args:
        distilled_guidance: guidance input of a guidance-distilled model (FLUX.1-dev), 0 or more, at
            no cost; separate from classifier-free guidance (`ModelOptions.guidance_scale`, the
            pipeline's `true_cfg_scale`).
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
        require(
            self.distilled_guidance >= 0, "distilled_guidance", self.distilled_guidance, "0 or more"
        )

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """(height / 16 x width / 16, channels). Raises `ConfigError` unless both sizes are
        multiples of 16.
        """
        return packed_shape(pipe, height, width)

    def set_timesteps(
        self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any
    ) -> None:
        """The even grid 1, ..., 1/T, shifted by the number of image tokens if the scheduler's
        config has dynamic shifting.
        """
        sigmas = (
            None
            if scheduler.config.get("use_flow_sigmas", False)
            else np.linspace(1.0, 1 / steps, steps)
        )
        scheduler.set_timesteps(
            steps, sigmas=sigmas, mu=resolution_shift(scheduler, latent_shape[0], 1.15)
        )

    def encode(
        self, pipe: Any, text: str, tokens: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """T5 tokens [token, dim], and the pooled CLIP embedding [dim]."""
        words, pooled, _ = pipe.encode_prompt(text, device=device, max_sequence_length=tokens)
        return {"words": words[0], "pooled": pooled[0]}

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
    ) -> Tensor:
        """`FluxTransformer2DModel` with t (it multiplies by 1000), positions, and the distilled
        guidance if it has that input.
        """
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
        """Tokens unpacked to the latent image, which is then scaled and shifted as in the
        pipeline.
        """
        return decode_scaled(pipe.vae, unpacked(latent, size))


@cache
def _positions(size: tuple[int, int], device: torch.device) -> Tensor:
    """(0, row, column) of every 2 x 2 patch, [token, 3]."""
    row, column = (
        torch.arange(size[0] // 2, device=device),
        torch.arange(size[1] // 2, device=device),
    )
    grid = torch.cartesian_prod(row, column).float()
    return torch.cat([torch.zeros_like(grid[:, :1]), grid], dim=1)


@dataclass(frozen=True)
class QwenImage:
    """`Family` of diffusers' `QwenImagePipeline` (arXiv 2508.02324).

    Latents are packed like FLUX's: [sample, token, 4 x channel]. A prompt is the last hidden layer
    of Qwen2.5-VL without the tokens of the pipeline's template; prompts of different length are
    padded, with a mask. Guidance is classifier-free with the norm of the prompt's velocity
    (`guide`). The last block's text queries and outputs do not reach the image: their LoRA has no
    gradient. The last time before 0 is the scheduler's `shift_terminal` (.02 for Qwen-Image), and
    the noise of the last step is small: leave it out of the trained steps (window `:-1`).

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

        Raises `ConfigError` unless both sizes are multiples of 16. A guidance-distilled transformer
        raises it, too: diffusers' class has a setting for it but cannot compute it.
        """
        distilled = pipe.transformer.config.guidance_embeds
        require(
            not distilled,
            "guidance_embeds of the transformer",
            distilled,
            "false: Qwen-Image has no distilled guidance",
        )
        return packed_shape(pipe, height, width)

    def set_timesteps(
        self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any
    ) -> None:
        """The even grid 1, ..., 1/T, shifted by the number of image tokens and stretched to end at
        `shift_terminal`, as far as the scheduler's config requires it. A single step is not
        stretched: diffusers would divide by 0.
        """
        terminal = scheduler.config.shift_terminal
        scheduler.register_to_config(shift_terminal=terminal if steps > 1 else None)
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps),
            mu=resolution_shift(scheduler, latent_shape[0], 1.15),
        )
        scheduler.register_to_config(shift_terminal=terminal)

    def encode(
        self, pipe: Any, text: str, tokens: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """The prompt's tokens [token, dim], at most `tokens` of them, and a mask of ones; padding
        adds zeros to both.
        """
        words, _ = pipe.encode_prompt(text, device=device, max_sequence_length=tokens)
        return {"words": words[0], "mask": words.new_ones(words.shape[1], dtype=torch.bool)}

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
    ) -> Tensor:
        """`QwenImageTransformer2DModel` with t (it multiplies by 1000) and the mask of the prompts'
        tokens.
        """
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=rows["words"],
            encoder_hidden_states_mask=rows["mask"],
            timestep=timestep / 1000,
            img_shapes=[[(1, size[0] // 2, size[1] // 2)]] * len(latent),
            return_dict=False,
        )[0]

    def guide(self, away: Tensor, towards: Tensor, scale: float) -> Tensor:
        """c |v_prompt| / |c| with c = v_neg + s (v_prompt - v_neg); norms over the channels of a
        token. Gradients flow through the norms.
        """
        combined = linear_guidance(away, towards, scale)
        return combined * (towards.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Tokens unpacked to a video of one frame, z std + mean per channel, and the decoder's
        first frame.
        """
        return decode_standardised(pipe.vae, unpacked(latent, size).unsqueeze(2))[:, :, 0]


@dataclass(frozen=True)
class Wan:
    """`Family` of diffusers' `WanPipeline` with one transformer (Wan 2.1 text to video, arXiv
    2503.20314).

    Latents are [sample, channel, frame, height, width]: one latent frame for the first frame of the
    video, then one for every four frames. A prompt is UMT5's last hidden layer with zeros after its
    tokens, up to the full length. The transformer has no mask and attends to these zeros, so the
    number of tokens matters. The default is the 512 of the pipeline's call; `encode_prompt` alone
    has 226. The time input is 1000 t. Guidance is v_neg + s (v_prompt - v_neg).

    Args:
        pipeline: see `Family`.
        encoders: see `Family`.
        text_tokens: see `Family`.
        lora_targets: see `Family`.
    """

    pipeline: str = "WanPipeline"
    encoders: tuple[str, ...] = ("text_encoder",)
    text_tokens: int = 512
    lora_targets: tuple[str, ...] = tuple(
        f"{layer}.{name}"
        for layer in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """`video_shape` of a single frame."""
        return self.video_shape(pipe, height, width, 1)

    def video_shape(self, pipe: Any, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(channels, (frames - 1) / 4 + 1, height / 8, width / 8).

        Raises `ConfigError` unless frames - 1 is a multiple of 4 and both sizes are multiples of
        16. Wan 2.2, which has two transformers or a time per token, is not supported and raises it,
        too.
        """
        wan21 = (
            pipe.transformer_2 is None
            and pipe.config["boundary_ratio"] is None
            and not pipe.config["expand_timesteps"]
        )
        require(wan21, "model", "Wan 2.2", "Wan 2.1: one transformer, and one time for all tokens")
        side, factor = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        require_multiples(height, width, side * pipe.transformer.config.patch_size[1])
        require(
            (frames - 1) % factor == 0, "num_frames", frames, f"1 more than a multiple of {factor}"
        )
        return (
            pipe.transformer.config.in_channels,
            (frames - 1) // factor + 1,
            height // side,
            width // side,
        )

    def set_timesteps(
        self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any
    ) -> None:
        """The scheduler's grid with its fixed shift: 3 for 480p, 5 for 720p."""
        scheduler.set_timesteps(steps)

    def encode(
        self, pipe: Any, text: str, tokens: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """The prompt's embeddings [tokens, dim], padded with zeros."""
        words, _ = pipe.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=tokens, device=device
        )
        return {"words": words[0]}

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
    ) -> Tensor:
        """`WanTransformer3DModel`."""
        return transformer(latent, timestep, rows["words"], return_dict=False)[0]

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """z std + mean per channel, decoded frame by frame: [sample, frame, 3, height, width]."""
        return decode_standardised(pipe.vae, latent).transpose(1, 2)


FAMILIES: dict[str, Callable[[], Family]] = {
    made().pipeline: made for made in (SD3, Flux, QwenImage, Wan)
}
"""Built-in families by the class of their pipeline; a package adds one by an entry point of that
name in `flowrl.families`.
"""


def family_of(pipeline: str) -> Family:
    """The family of a diffusers pipeline class. Raises `ConfigError` that lists the available
    ones.
    """
    if pipeline in FAMILIES:
        return FAMILIES[pipeline]()
    point = plugin("flowrl.families", pipeline, "model family")
    if point is not None:
        return point.load()()
    known = ", ".join([*FAMILIES, *entry_points(group="flowrl.families").names])
    raise ConfigError(
        f"model: no family for a {pipeline}; known: {known}. docs/model-families.md explains how to"
        " add one"
    )
