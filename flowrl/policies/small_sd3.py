"""The built-in image policy: diffusers' SD3 transformer class at a size that a laptop can train."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from flowrl.core.errors import require
from flowrl.core.prompt import require_images
from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.policies.device import device_of
from flowrl.policies.lora import LORA_TARGETS, Adapters
from flowrl.policies.pipeline import computing_in, schedule_of

GRID, CELL, CHANNELS = 4, 16, 8
"""Cells per side of the image, pixels per side of a cell, and channels of the latent."""
TEXT_WIDTH = 64
"""Width of the word embeddings."""


class WordEncoder(nn.Module):
    """The text encoder: word and position embeddings and a small transformer; the pooled embedding
    is the mean.

    A word's output therefore depends on its role in the sentence (the subject of "left of", for
    example), as in CLIP and T5.
    """

    def __init__(self, vocabulary: int, words: int, dim: int = TEXT_WIDTH) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(words, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, 4, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        """[prompt, word] -> [prompt, word, dim]."""
        hidden = self.word(ids) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class CellAutoencoder(nn.Module):
    """Images [sample, 3, 64, 64] in [0, 1] <-> latents [sample, 8, 4, 4]
    of unit scale.

    A two-layer network encodes each cell separately. `shift` and `scale` [channels] give the
    latents of the world's images mean 0 and standard deviation 1, as a flow-matching model expects.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        pixels = 3 * CELL * CELL
        self.encoder = nn.Sequential(
            nn.Linear(pixels, hidden), nn.GELU(), nn.Linear(hidden, CHANNELS)
        )
        self.decoder = nn.Sequential(
            nn.Linear(CHANNELS, hidden), nn.GELU(), nn.Linear(hidden, pixels), nn.Sigmoid()
        )
        self.register_buffer("shift", torch.zeros(CHANNELS))
        self.register_buffer("scale", torch.ones(CHANNELS))

    def encode_cells(self, cells: Tensor) -> Tensor:
        """[cell, 3, size, size] -> [cell, channels]."""
        return (self.encoder(cells.flatten(1)) - self.shift) / self.scale

    def encode(self, images: Tensor) -> Tensor:
        """Images to latents."""
        cells = rearrange(images, "s k (r h) (c w) -> (s r c) k h w", r=GRID, c=GRID)
        return rearrange(self.encode_cells(cells), "(s r c) z -> s z r c", r=GRID, c=GRID)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to images."""
        rows = rearrange(latents, "s z r c -> (s r c) z") * self.scale + self.shift
        sizes = {"r": GRID, "c": GRID, "k": 3, "h": CELL}
        return rearrange(self.decoder(rows), "(s r c) (k h w) -> s k (r h) (c w)", **sizes)


class SmallSD3(nn.Module):
    """The networks of the shapes world: word encoder, `SD3Transformer2DModel`, cell autoencoder.

    Args:
        vocabulary: number of words.
        words: length of a prompt in words.
        shift: time shift of the scheduler (SD3.5: 3; small images need less).
        edits: whether the transformer also reads a reference image, whose latent is in more
            channels of its input (as in InstructPix2Pix, arXiv 2211.09800); without one they are 0.
    """

    def __init__(
        self, vocabulary: int, words: int, shift: float = 1.0, edits: bool = False
    ) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

        self.shift, self.edits = shift, edits
        self.words = WordEncoder(vocabulary, words)
        self.transformer = SD3Transformer2DModel(
            sample_size=GRID,
            patch_size=1,
            in_channels=(1 + edits) * CHANNELS,
            out_channels=CHANNELS,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            caption_projection_dim=2 * 32,
            pooled_projection_dim=TEXT_WIDTH,
            pos_embed_max_size=GRID,
        )
        self.autoencoder = CellAutoencoder()

    def velocity(
        self, latent: Tensor, timestep: Tensor, words: Tensor, reference: Tensor | None = None
    ) -> Tensor:
        """v at `latent` [sample, channel, grid, grid], `timestep` = 1000 t [sample], `words`
        [sample, word, dim], `reference` the latent of the reference image.
        """
        if self.edits:
            given = torch.zeros_like(latent) if reference is None else reference
            latent = torch.cat([latent, given], 1)
        return self.transformer(
            hidden_states=latent,
            encoder_hidden_states=words,
            pooled_projections=words.mean(1),
            timestep=timestep,
            return_dict=False,
        )[0]


class SmallSD3Policy:
    """`FlowPolicy` over a `SmallSD3` network with a PEFT LoRA adapter on its attention projections.

    The adapter starts at zero, so the policy starts as the base model. The reference is the network
    with the adapter disabled.

    Args:
        network: the networks with base weights.
        tokenise: turns a prompt's text into word ids.
        rank: rank of the LoRA.
        alpha: scale of the LoRA times its rank.
        seed: seed of the adapter.
        device: device of the network.
        dtype: precision of the network.
    """

    def __init__(
        self,
        network: SmallSD3,
        tokenise: Callable[[str], list[int]],
        rank: int = 8,
        alpha: float = 16.0,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = device_of(device)
        self.network = network.to(self.device).eval().requires_grad_(False)
        self.velocity_network: nn.Module = network.transformer
        self.hidden_layer: nn.Module = network.transformer.proj_out
        self.latent_shape = (CHANNELS, GRID, GRID)
        self.tokenise, self.dtype = tokenise, dtype
        euler: Any = import_module("diffusers").FlowMatchEulerDiscreteScheduler
        self._scheduler = euler(shift=network.shift)
        self._adapters = Adapters(network.transformer).add(rank, alpha, LORA_TARGETS, seed)

    def schedule(self, steps: int) -> Schedule:
        """The grid of diffusers' `FlowMatchEulerDiscreteScheduler`, float32."""
        self._scheduler.set_timesteps(steps)
        return schedule_of(self._scheduler, self.device)

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """Word embeddings [prompt, word, dim], and the latents of the reference images."""
        count, name = int(self.network.edits), "this world's network"
        require_images(prompts, count, count, name)
        ids = torch.tensor([self.tokenise(prompt.text) for prompt in prompts], device=self.device)
        with torch.no_grad():
            rows = {"words": self.network.words(ids)}
            if self.network.edits:
                pixels = [image.pixels() for prompt in prompts for image in prompt.images]
                side, sizes = GRID * CELL, {tuple(one.shape[1:]) for one in pixels}
                fits = sizes == {(side, side)}
                require(fits, "size of a reference image", sorted(sizes), f"{side} x {side}")
                rows["reference"] = self.network.autoencoder.encode(
                    torch.stack(pixels).to(self.device)
                )
            return Condition(rows)

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """v = eps - x_0 of the network, in float32; under autocast if the policy's dtype is
        narrower.
        """
        with computing_in(self.dtype, self.device):
            return self.network.velocity(latent, timestep, **condition.tensors).float()

    def decode(self, latent: Tensor) -> Tensor:
        """Images [sample, 3, 64, 64] in [0, 1]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and latent.requires_grad):
            return self.network.autoencoder.decode(latent)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The adapter's matrices by name."""
        return self._adapters.parameters()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The base model: adapters disabled, no gradients."""
        with torch.no_grad(), self._adapters.disabled():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients, and the adapter merged into the weights, so that a call costs as much as
        the base model's.
        """
        with torch.no_grad(), self._adapters.merged():
            yield
