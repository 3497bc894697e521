"""A reward that errs: noise, and a taste that nobody asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require
from flowrl.protocols import RewardModel
from flowrl.types import Prompt


@dataclass(frozen=True)
class NoisyReward:
    """R + `std` e + `bias` m, e standard normal, m the mean of the picture's values (a liking for bright pictures).

    The noise is a fixed pseudo-random function of the picture and `seed`: the same picture gets the same score, as from a
    deterministic but unreliable judge; scores do not depend on the batch, and a resumed run goes on with the same numbers.
    Two pictures that differ at all have practically independent noise. Raises `ConfigError` for a negative or infinite `std`.
    """

    model: RewardModel
    std: float = 0.0
    bias: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(math.isfinite(self.std) and self.std >= 0, "NoisyReward.std", self.std, "finite and 0 or more")
        require(math.isfinite(self.bias), "NoisyReward.bias", self.bias, "finite")

    @property
    def marks_invalid(self) -> bool:
        """Whether the model may mark samples invalid."""
        return bool(getattr(self.model, "marks_invalid", False))

    def score(self, images: Float[Tensor, "sample channel height width"], prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        noise = pseudo_normal(images, self.seed).to(images.device, torch.float32) if self.std > 0 else 0.0
        return self.model.score(images, prompts) + self.std * noise + self.bias * images.flatten(1).mean(1)


def pseudo_normal(images: Tensor, seed: int = 0) -> Float[Tensor, " sample"]:
    """A number per picture that looks drawn from N(0, 1), a function of the picture's values and `seed` only."""
    flat = images.detach().flatten(1).double().cpu()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.rand(flat.shape[1], 2, generator=generator, dtype=torch.float64) + 0.5
    first, second = (((flat @ directions).sin() * 43758.5453e3) % 1.0).unbind(1)
    radius = (-2.0 * (1.0 - first).clamp(min=1e-12).log()).sqrt()
    return radius * (2.0 * torch.pi * second).cos()
