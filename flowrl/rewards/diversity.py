"""Diversity of the samples of one prompt: the mean distance of pairs in a feature space.

A policy that has collapsed to one high-scoring image per prompt keeps its score; its diversity falls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import RewardError, require
from flowrl.options import checked_options
from flowrl.protocols import Features
from flowrl.rewards.images import Images
from flowrl.types import checked


@checked
def pairwise_diversity(features: Float[Tensor, "prompt member feature"]) -> Float[Tensor, " prompt"]:
    """D = 2 / (M (M - 1)) sum_{i<j} |f_i - f_j| over the M members of each prompt: the mean Euclidean distance of its pairs.

    Pairs of a sample with itself are excluded, so D is an unbiased estimate of E|f(X) - f(X')| for independent samples X, X' of
    the prompt (a U-statistic): its expectation does not depend on the number of samples. 0 if all samples are equal. Float64.
    """
    members = features.shape[1]
    require(members >= 2, "members", members, "2 or more: one sample has no pair")
    distances = [torch.nn.functional.pdist(group) for group in features.double().cpu()]
    return torch.stack([pairs.mean() for pairs in distances])


@dataclass(frozen=True)
class PixelFeatures:
    """The image's values, divided by the root of their number: distances are root mean square differences per value.

    They are 0 to 1 for images in [0, 1]; for the mixture world's points they are distances in the plane divided by sqrt(2).
    """

    def __call__(self, images: Images) -> Tensor:
        """[sample, channel x height x width]."""
        flat = images.detach().flatten(1).float()
        return flat / flat.shape[1] ** 0.5


@dataclass(frozen=True)
class LatentFeatures:
    """As `PixelFeatures`, for the latents before decoding."""

    reads_latents: ClassVar[bool] = True

    def __call__(self, latents: Tensor) -> Tensor:
        """[sample, value]."""
        return PixelFeatures()(latents)


@checked_options
@dataclass(frozen=True)
class ClipFeatures:
    """CLIP's image features, of length 1: the distance is sqrt(2 - 2 cos), 0 to 2, and reflects content rather than noise.

    Images are preprocessed as in `flowrl.rewards.clip`.

    Args:
        model: a folder in transformers' format, or a name on the Hub.
        device: name of the device.
        dtype: precision of the network.
        batch: images per network call.
    """

    model: str = "openai/clip-vit-base-patch32"
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 64

    def __call__(self, images: Images) -> Tensor:
        """[sample, feature]."""
        from flowrl.rewards.clip import load_encoder

        return load_encoder(self.model, "", self.device, self.dtype, self.batch).images(images)


def group_features(features: Features, images: Tensor, latents: Tensor, groups: Sequence[int]) -> Tensor:
    """Features of the samples, arranged by group.

    Args:
        features: the feature model; it receives the latents if its attribute `reads_latents` is true, else the images.
        images: images [sample, channel, height, width] in [0, 1], in prompt-major order.
        latents: the latents of the images [sample, *latent].
        groups: (prompts, members).

    Returns:
        Features [prompt, member, feature].

    Raises:
        RewardError: `features` does not return one finite vector per sample.
    """
    found = features(latents if getattr(features, "reads_latents", False) else images)
    name = type(features).__name__
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
        returned = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RewardError(f"diversity: {name} returned {returned} for {len(images)} samples; allowed: a tensor [sample, feature]")
    if not bool(found.isfinite().all()):
        raise RewardError(f"diversity: {name} returned values that are not finite")
    return found.detach().float().unflatten(0, tuple(groups))
