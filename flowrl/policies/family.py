"""Model families as a protocol, and the options of a policy over a pipeline.

The built-in families are `sd3`, `flux`, `qwen_image` and `wan`; docs/model-families.md explains how
to add one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from annotated_types import Ge, Gt, Le
from einops import rearrange
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count
from flowrl.parts.settings import settings_group

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Precisions by their names in settings."""


class Family(Protocol):
    """The differences between model families: the names of a pipeline's components, and the call of
    its transformer.

    Optional methods: a family of videos has `video_shape(pipe, height, width, frames)`, the shape
    of one latent; it raises `ConfigError` for a size or length that is not supported. A family with
    another guidance than `linear_guidance` has `guide(away, towards, scale)`: the guided velocity
    from that of the negative prompt and that of the prompt, float32 [sample, *latent].
    """

    @property
    def pipeline(self) -> str:
        """The diffusers class of this family; `pipe` below is a pipeline of that class."""
        ...

    @property
    def encoders(self) -> tuple[str, ...]:
        """The attributes of its text encoders."""
        ...

    @property
    def text_tokens(self) -> int:
        """The default length of its prompts: tokens of its T5 encoder, or of its only encoder."""
        ...

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Ends of the names of the layers that get a LoRA by default."""
        ...

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """Shape of one latent. Raises `ConfigError` for a size that the pipeline does not
        support.
        """
        ...

    def set_timesteps(
        self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any
    ) -> None:
        """Set the pipeline's own grid of `steps` steps, with its resolution-dependent shift, in
        `scheduler`.
        """
        ...

    def encode(
        self, pipe: Any, text: str, tokens: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """The embeddings of one prompt, without a prompt axis.

        If prompts differ in shape, they are padded with zeros at the end to a common shape. A mask
        of ones among the tensors marks the entries that are not padding.
        """
        ...

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
    ) -> Tensor:
        """v at `latent` [sample, *latent] in the network's precision; `timestep` = 1000 t [sample],
        `size` = height, width of the latent image, `rows` the embeddings [sample, ...].
        """
        ...

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Pixels [sample, 3, height, width] (videos: [sample, frame, 3, height, width]) in about
        [-1, 1] from latents [sample, *latent] in the decoder's precision.
        """
        ...


def latent_size(pipe: Any, height: int, width: int) -> tuple[int, int]:
    """Height and width of the latent image."""
    factor = getattr(pipe, "vae_scale_factor", None) or pipe.vae_scale_factor_spatial
    return height // factor, width // factor


def latent_shape(
    pipe: Any, family: Family, height: int, width: int, frames: int
) -> tuple[int, ...]:
    """The shape of the latent of an image or video."""
    if hasattr(family, "video_shape"):
        return cast(Any, family).video_shape(pipe, height, width, frames)
    require(frames == 1, "num_frames", frames, f"1: a {family.pipeline} makes images")
    return family.latent_shape(pipe, height, width)


def linear_guidance(away: Tensor, towards: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, v_neg + s (v_prompt - v_neg) (arXiv 2207.12598).

    Args:
        away: velocity v_neg for the negative prompt [sample, *latent].
        towards: velocity v_prompt for the prompt [sample, *latent].
        scale: guidance scale s; 1 gives v_prompt.

    Returns:
        The guided velocity [sample, *latent].
    """
    return away + scale * (towards - away)


def resolution_shift(scheduler: Any, tokens: int, largest: float) -> float:
    """mu, linear in the number of image tokens between the sizes in the scheduler's config (arXiv
    2403.03206, 5.3.2).

    The grid is then sigma = e^mu / (e^mu + 1 / sigma' - 1).

    Args:
        scheduler: diffusers' scheduler, whose config has sizes and shifts.
        tokens: number of image tokens.
        largest: default for a missing `max_shift` in the config, as in the pipelines.

    Returns:
        mu, dimensionless.
    """
    config = scheduler.config
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", largest)
    return least + (most - least) * (tokens - low) / (high - low)


def require_multiples(height: int, width: int, unit: int, largest: int = 2**30) -> None:
    """Raise `ConfigError` for a side that is not a multiple of `unit` or larger than `largest`."""
    for name, value in (("height", height), ("width", width)):
        require(
            value % unit == 0 and value <= largest,
            name,
            value,
            f"a multiple of {unit}, at most {largest} (settings resolution, width)",
        )


def packed_shape(pipe: Any, height: int, width: int) -> tuple[int, int]:
    """Shape of a latent whose tokens are its 2 x 2 patches.

    Args:
        pipe: the diffusers pipeline.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        (tokens, channels).

    Raises:
        ConfigError: the image is not divisible into patches.
    """
    unit = 2 * pipe.vae_scale_factor
    require_multiples(height, width, unit)
    return ((height // unit) * (width // unit), pipe.transformer.config.in_channels)


def unpacked(latent: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens of 2 x 2 patches, rearranged as latent images.

    Args:
        latent: tokens [sample, token, 4 x channel].
        size: (height, width) of the latent image.

    Returns:
        Latents [sample, channel, height, width].
    """
    return rearrange(latent, "s (h w) (k p q) -> s k (h p) (w q)", h=size[0] // 2, p=2, q=2)


def decode_scaled(vae: Any, latent: Tensor) -> Tensor:
    """Pixels from latents of an `AutoencoderKL`: z / scale + shift, decoded.

    Args:
        vae: the autoencoder; its config has scale and shift.
        latent: latents z [sample, channel, height, width].

    Returns:
        Pixels in about [-1, 1], [sample, channel, height, width].
    """
    return vae.decode(
        latent / vae.config.scaling_factor + (vae.config.shift_factor or 0.0), return_dict=False
    )[0]


def decode_standardised(vae: Any, latent: Tensor) -> Tensor:
    """Pixels in about [-1, 1] from latents of a video autoencoder [sample, channel, frame, height,
    width]:
    z std + mean, decoded.
    """
    std, mean = (
        latent.new_tensor(v).view(-1, 1, 1, 1)
        for v in (vae.config.latents_std, vae.config.latents_mean)
    )
    return vae.decode(latent * std + mean, return_dict=False)[0]


@settings_group
class ModelOptions:
    """Options of a policy over a pipeline. Sizes in pixels; the defaults are Flow-GRPO's for
    SD3.5-Medium (arXiv 2505.05470).

    Args:
        height: height of the image.
        width: width of the image.
        device: cpu, cuda or cuda:NUMBER.
        negative_prompt: the prompt of v_neg.
        lora_rank: rank of the LoRA.
        lora_alpha: alpha of the LoRA, which scales it by alpha / rank.

    Raises:
        ConfigError: an option is out of range.
    """

    height: Count = 512
    width: Count = 512
    num_frames: Count = 1
    """Frames of a video (Wan: 1 more than a multiple of 4); 1 for models of images."""
    device: str = "cpu"
    dtype: Dtype = "float32"
    """Precision of the frozen weights and of the network's arithmetic (autocast): float32, bfloat16
    or float16. Trained weights, velocities, latents and everything computed from them are float32.
    Use bfloat16 for training on a GPU; float16 needs a scaled loss (the run's `loss_scale`), or
    small gradients vanish.
    """
    guidance_scale: Annotated[float, Ge(1)] = 1.0
    """Classifier-free guidance s: v = v_neg + s (v_prompt - v_neg), for Qwen-Image rescaled to the
    norm of v_prompt, in rollouts and updates alike; 1 = off (half the cost).
    """
    negative_prompt: str = ""
    guidance_gradient: Literal["both", "prompt"] = "both"
    """both, or prompt: v_neg is computed without a gradient (less memory; the values are the same).
    """
    tuning: Literal["lora", "full", "nothing"] = "lora"
    """lora, full (all weights of the transformer) or nothing."""
    lora_rank: Count = 32
    lora_alpha: Annotated[float, Gt(0)] = 64.0
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of the layers that get a LoRA; empty: the family's default."""
    adapter: str = ""
    """Start from this LoRA: a file or folder that `load_lora_weights` can read."""
    adapter_name: str = "default"
    """The name of the trained adapter."""
    frozen_adapters: tuple[str, ...] = ()
    """Further LoRAs, as NAME=PATH or PATH, which are active in sampling, training and the
    reference, but not trained.
    """
    keep_reference: bool = True
    """Full fine-tuning: keep a frozen copy of the transformer in `dtype`, for a KL to the base
    model.
    """
    gradient_checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass instead of storing them.
    """
    max_sequence_length: Annotated[int, Ge(0), Le(512)] = 0
    """Tokens of the T5 encoder, or of the family's only encoder; 0: the family's default."""
    attention_backend: str = ""
    """diffusers' name of the attention kernels, as in _native_cudnn or flash
    (`set_attention_backend`); empty: diffusers' default, with which PyTorch chooses. All kernels
    give the same result up to rounding.
    """
    decode_batch: Count = 8
    """Latents per call of the image decoder."""
    decode_dtype: Dtype = "float32"
    """Precision of the image decoder; images are float32 in any case. bfloat16 is faster and rounds
    colours slightly.
    """
    compile: str = ""
    """Backend (inductor) that compiles the transformer's blocks; empty: off. The first call of
    every shape is slow. Sampling and training are then different programs, so the ratio of the
    first update differs from 1 by rounding.
    """
    prompt_cache: Count = 2048
    """Number of prompts whose embeddings are kept in main memory (SD3.5: 2.7 MB each in bfloat16 at
    256 T5 tokens; FLUX and Wan: 4 MB at 512). Those of further prompts are kept in a temporary
    folder.
    """
    seed: int = 0
    """Seed of the LoRA's initial matrices."""


def device_of(name: str | torch.device) -> torch.device:
    """The device `name`: cpu, cuda, or cuda:NUMBER. Raises `ConfigError` for any other name, or a
    GPU that does not exist.
    """
    require(
        re.fullmatch(r"cpu|cuda(:\d{1,3})?", str(name)) is not None,
        "device",
        str(name),
        "cpu, cuda or cuda:NUMBER",
    )
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        allowed = (
            f"cpu: PyTorch {torch.__version__} sees no GPU"
            if count == 0
            else f"cuda:0 to cuda:{count - 1}, or cpu"
        )
        require((device.index or 0) < count, "device", str(name), allowed)
    return device
