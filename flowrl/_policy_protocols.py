"""The protocols of policies, which `flowrl.protocols` exports."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from flowrl.types import Condition, ImagesOrVideos, Latents, PerSample, Prompt, Schedule


@runtime_checkable
class FlowPolicy(Protocol):
    """The owner of a network: a conditional velocity field with trainable parameters, a schedule, and a decoder."""

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
        """Images in [0, 1]; a video model's samples have a frame axis before the channels, with a single frame too."""
        ...

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        """Named trainable parameters, in a fixed order."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within this context `velocity` is the frozen base model's (adapters disabled)."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Within this context weights do not change: a policy may merge its adapters for speed. No gradients."""
        ...


@runtime_checkable
class OneNetwork(Protocol):
    """A policy all of whose trainable parameters are in one module, which `velocity` calls: the module can be compiled, and its
    weights can be sharded over processes, in place."""

    @property
    def velocity_network(self) -> torch.nn.Module:
        """The module; after it was sharded, `trainable` returns its new parameters."""
        ...


@runtime_checkable
class Guided(Protocol):
    """A policy with classifier-free guidance, for probes without it."""

    @property
    def guidance_scale(self) -> float:
        """The scale of `velocity`; 1: off, one forward pass per evaluation instead of two."""
        ...

    def guided(self, guidance: float) -> AbstractContextManager[None]:
        """Within this context the scale is `guidance`."""
        ...


@runtime_checkable
class BlockCache(Protocol):
    """A policy whose network is a stack of blocks that can be skipped, for probes with a block cache."""

    @property
    def blocks(self) -> int:
        """How many blocks an evaluation computes."""
        ...

    def block_cache(self) -> AbstractContextManager[Callable[[bool], None]]:
        """Within this context, calls of `velocity` after `switch(False)` compute the first block only and add to its output what
        the other blocks added in the last call after `switch(True)`, which had the same rows; it yields `switch`, at True."""
        ...


@runtime_checkable
class PromptEmbedding(Protocol):
    """A policy that embeds prompts with networks of their own and keeps the embeddings."""

    def warm(self, prompts: Sequence[Prompt]) -> None:
        """Embed `prompts` now, as many as are kept, so that these networks visit the device once, not at every iteration."""
        ...


@runtime_checkable
class Exportable(Protocol):
    """A policy whose trained weights other programs can read."""

    def save(self, folder: Path) -> None:
        """Write them to `folder`, replacing an older one when the new one is complete."""
        ...
