"""The latent space of the shapes world: a small autoencoder that works cell by cell."""

import torch
from einops import rearrange
from torch import Tensor, nn


class CellAutoencoder(nn.Module):
    """Pictures [sample, 3, grid*cell, grid*cell] in [0, 1] <-> latents [sample, channels, grid, grid] of unit scale.

    Each cell is encoded on its own by a two-layer network. `shift` and `scale` [channels] bring the latents of the world's
    pictures to mean 0 and standard deviation 1, as a flow-matching model expects.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, channels: int, grid: int, cell: int, hidden: int = 128) -> None:
        super().__init__()
        pixels = 3 * cell * cell
        self.grid, self.cell = grid, cell
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.GELU(), nn.Linear(hidden, channels))
        self.decoder = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, pixels), nn.Sigmoid())
        self.register_buffer("shift", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))

    def encode_cells(self, cells: Tensor) -> Tensor:
        """[cell, 3, size, size] -> [cell, channels]."""
        return (self.encoder(cells.flatten(1)) - self.shift) / self.scale

    def decode_cells(self, latents: Tensor) -> Tensor:
        """[cell, channels] -> [cell, 3, size, size] in [0, 1]."""
        pixels = self.decoder(latents * self.scale + self.shift)
        return pixels.unflatten(1, (3, self.cell, self.cell))

    def encode(self, images: Tensor) -> Tensor:
        """Pictures to latents."""
        cells = rearrange(images, "s k (r h) (c w) -> (s r c) k h w", r=self.grid, c=self.grid)
        return rearrange(self.encode_cells(cells), "(s r c) z -> s z r c", r=self.grid, c=self.grid)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pictures."""
        cells = self.decode_cells(rearrange(latents, "s z r c -> (s r c) z"))
        return rearrange(cells, "(s r c) k h w -> s k (r h) (c w)", r=self.grid, c=self.grid)
