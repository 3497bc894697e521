"""What differs between model families, as a protocol; `sd3` and `flux` are two, docs/model-families.md says how to add one."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Family(Protocol):
    """What differs between model families: the names of a pipeline's parts and how its transformer is called."""

    @property
    def pipeline(self) -> str:
        """The diffusers class that this family is for; `pipe` below is a pipeline of that class."""
        ...

    @property
    def encoders(self) -> tuple[str, ...]:
        """The attributes of its text encoders."""
        ...

    @property
    def text_tokens(self) -> int:
        """The usual length of its T5 prompts."""
        ...

    def latent_shape(self, pipe: Any, height: int, width: int) -> tuple[int, ...]:
        """Shape of one latent as the transformer sees it. Raises `ConfigError` for a size that the pipeline does not draw."""
        ...

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: tuple[int, ...], pipe: Any) -> None:
        """Place the pipeline's own grid of `steps` steps, resolution-dependent shift included, into `scheduler`."""
        ...

    def encode(self, pipe: Any, text: str, tokens: int, device: torch.device) -> Mapping[str, Tensor]:
        """The embeddings of one prompt, without a prompt axis."""
        ...

    def velocity(
        self, transformer: Any, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """v at `latent` [sample, *latent] in the network's precision; `timestep` = 1000 t [sample], `size` = height, width of the
        latent picture, `rows` the embeddings [sample, ...]."""
        ...

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Pixels [sample, 3, height, width] in about [-1, 1] from latents [sample, *latent] in the decoder's precision."""
        ...
