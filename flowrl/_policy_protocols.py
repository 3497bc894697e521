"""The protocols of policies, which `flowrl.protocols` exports."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from flowrl.types import Condition, ImagesOrVideos, Latents, PerSample, Prompt, Schedule


@runtime_checkable
class FlowPolicy(Protocol):
    """A network with its trainable parameters, as a conditional velocity field with a schedule and a decoder."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the sample axis."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        ...

    def schedule(self, steps: int) -> Schedule:
        """The time grid with `steps` transitions (for diffusers models: the scheduler's own)."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """The network's condition on the prompts, one row per prompt."""
        ...

    def velocity(self, latent: Latents, timestep: PerSample, condition: Condition) -> Latents:
        """The network's estimate of v = eps - x_0, with gradients to the trainable parameters.

        Args:
            latent: noisy latents [sample, *latent].
            timestep: the network's timestep [sample], from `Schedule.network_timesteps`.
            condition: embeddings of the prompts, one row per sample.

        Returns:
            Velocities [sample, *latent], float32.
        """
        ...

    def decode(self, latent: Latents) -> ImagesOrVideos:
        """Images in [0, 1]; samples of a video model always have a frame axis before the channels."""
        ...

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        """Named trainable parameters, in a fixed order."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within this context `velocity` is the frozen base model's (adapters disabled)."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Within this context weights do not change, so a policy may merge its adapters for speed. No gradients."""
        ...


@runtime_checkable
class OneNetwork(Protocol):
    """A policy with all trainable parameters in one module, which `velocity` calls.

    The module can be compiled, and its weights can be sharded over processes, in place.
    """

    @property
    def velocity_network(self) -> torch.nn.Module:
        """The module; after it was sharded, `trainable` returns its new parameters."""
        ...


@runtime_checkable
class Guided(Protocol):
    """A policy with classifier-free guidance, which probes can switch off."""

    @property
    def guidance_scale(self) -> float:
        """The scale of `velocity`; 1: off, one forward pass per evaluation instead of two."""
        ...

    def guided(self, guidance: float) -> AbstractContextManager[None]:
        """Within this context the scale is `guidance`."""
        ...


@runtime_checkable
class BlockCache(Protocol):
    """A policy whose network is a stack of blocks, for probes with a block cache."""

    @property
    def blocks(self) -> int:
        """Number of blocks of an evaluation."""
        ...

    def block_cache(self) -> AbstractContextManager[Callable[[bool], None]]:
        """Within this context `switch`, which it yields, selects what calls of `velocity` compute; it starts at True.

        After `switch(False)` they compute the first block only and add to its output what the other blocks added in the last call
        after `switch(True)`, which had the same rows.
        """
        ...


@runtime_checkable
class PromptEmbedding(Protocol):
    """A policy that embeds prompts by separate networks and caches the embeddings."""

    def warm(self, prompts: Sequence[Prompt]) -> None:
        """Embed `prompts` now, up to the size of the cache, so that these networks move to the device only once."""
        ...


@runtime_checkable
class Exportable(Protocol):
    """A policy that can export its trained weights for other programs."""

    def save(self, folder: Path) -> None:
        """Write the trained weights to `folder`, replacing an older one when the new one is complete."""
        ...
