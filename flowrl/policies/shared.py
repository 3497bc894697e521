"""What several model families compute in the same way."""

from typing import Any

from torch import Tensor


def resolution_shift(scheduler: Any, tokens: int, largest: float) -> float:
    """mu, linear in the number of image tokens between the sizes that the scheduler's config names (arXiv 2403.03206, 5.3.2).

    The grid is then sigma = e^mu / (e^mu + 1 / sigma' - 1). `largest` stands in for a missing `max_shift`, as in the pipelines.
    """
    config = scheduler.config
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", largest)
    return least + (most - least) * (tokens - low) / (high - low)


def decode_scaled(vae: Any, latent: Tensor) -> Tensor:
    """Pixels in about [-1, 1] from latents [sample, channel, height, width] of an `AutoencoderKL`: z / scale + shift, decoded."""
    return vae.decode(latent / vae.config.scaling_factor + (vae.config.shift_factor or 0.0), return_dict=False)[0]
