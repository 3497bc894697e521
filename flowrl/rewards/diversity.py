"""Diversity of the samples of one prompt: the mean distance of pairs in a feature space.

A policy that has collapsed to one high-scoring image per prompt keeps its score; its diversity
falls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.checks import checked
from flowrl.core.errors import RewardError, require
from flowrl.core.protocols import Features
from flowrl.rewards.images import Images


@checked
def pairwise_diversity(
    features: Float[Tensor, "prompt member feature"],
) -> Float[Tensor, " prompt"]:
    """D = 2 / (M (M - 1)) sum_{i<j} |f_i - f_j| over the M members of each prompt: the mean
    Euclidean distance of its pairs.

    Pairs of a sample with itself are excluded, so D is an unbiased estimate of E|f(X) - f(X')| for
    independent samples X, X' of the prompt (a U-statistic): its expectation does not depend on the
    number of samples. 0 if all samples are equal. Float64.
    """
    members = features.shape[1]
    require(members >= 2, "members", members, "2 or more: diversity compares pairs")
    return torch.stack([F.pdist(group).mean() for group in features.double().cpu()])


@dataclass(frozen=True)
class PixelFeatures:
    """The image's values, divided by the root of their number: distances are root mean square
    differences per value.

    They are 0 to 1 for images in [0, 1]; for the mixture world's points they are distances in the
    plane divided by sqrt(2).
    """

    def __call__(self, images: Images) -> Tensor:
        """[sample, channel x height x width]."""
        flat = images.detach().flatten(1).float()
        return flat / flat.shape[1] ** 0.5


@dataclass(frozen=True)
class LatentFeatures(PixelFeatures):
    """As `PixelFeatures`, for the latents before decoding."""

    reads_latents: ClassVar[bool] = True


def group_features(
    features: Features, images: Tensor, latents: Tensor, groups: Sequence[int]
) -> Tensor:
    """Features of the samples, arranged by group.

    Args:
        features: the feature model; it receives the latents if its attribute `reads_latents` is
            true, else the images.
        images: images [sample, channel, height, width] in [0, 1], in prompt-major order.
        latents: the latents of the images [sample, *latent].
        groups: (prompts, members).

    Returns:
        Features [prompt, member, feature].

    Raises:
        RewardError: `features` does not return one finite vector per sample.
    """
    inputs = latents if getattr(features, "reads_latents", False) else images
    vectors, name = features(inputs), getattr(features, "__name__", type(features).__name__)
    fits = isinstance(vectors, Tensor) and vectors.ndim == 2 and len(vectors) == len(images)
    if not fits or not bool(vectors.isfinite().all()):
        raise RewardError(
            f"diversity: {name} must return {len(images)} finite vectors, a tensor"
            f" [sample, feature], not {vectors!r:.100}"
        )
    return vectors.detach().float().unflatten(0, tuple(groups))
