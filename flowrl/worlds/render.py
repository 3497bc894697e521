"""Rendering of cell classes to pixels, with sub-pixel jitter and soft edges. Pure functions of
tensors.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from flowrl.worlds.scene import CLASSES, GLYPHS, GRID, OBJECTS

CELL = 16
SIZE = GRID * CELL
GLYPH_JITTER = 0.4
BACKGROUND = (0.97, 0.96, 0.93)
INK = (0.13, 0.14, 0.20)
PALETTE = {
    "red": (0.85, 0.20, 0.18),
    "green": (0.13, 0.60, 0.33),
    "blue": (0.16, 0.40, 0.80),
    "yellow": (0.96, 0.74, 0.10),
}

_BITMAPS = {
    "A": ".###.|#...#|#...#|#####|#...#|#...#|#...#",
    "C": ".####|#....|#....|#....|#....|#....|.####",
    "E": "#####|#....|#....|####.|#....|#....|#####",
    "H": "#...#|#...#|#...#|#####|#...#|#...#|#...#",
    "K": "#...#|#..#.|#.#..|##...|#.#..|#..#.|#...#",
    "L": "#....|#....|#....|#....|#....|#....|#####",
    "T": "#####|..#..|..#..|..#..|..#..|..#..|..#..",
    "X": "#...#|#...#|.#.#.|..#..|.#.#.|#...#|#...#",
    "2": ".###.|#...#|....#|..##.|.#...|#....|#####",
    "4": "...#.|..##.|.#.#.|#..#.|#####|...#.|...#.",
    "5": "#####|#....|####.|....#|....#|#...#|.###.",
    "7": "#####|....#|...#.|..#..|..#..|..#..|..#..",
}


@dataclass(frozen=True)
class Jitter:
    """Sub-pixel placement of each drawn cell.

    Args:
        x: horizontal offsets in pixels [cell].
        y: vertical offsets in pixels [cell].
        size: size factors [cell].
    """

    x: Tensor
    y: Tensor
    size: Tensor

    @staticmethod
    def none(count: int) -> "Jitter":
        """Everything centred at its nominal size."""
        return Jitter(torch.zeros(count), torch.zeros(count), torch.ones(count))

    @staticmethod
    def random(count: int, generator: torch.Generator) -> "Jitter":
        """Uniform offsets of up to one pixel and sizes of 92% to 108%."""
        u = torch.rand(3, count, generator=generator) * 2 - 1
        return Jitter(u[0], u[1], 1 + 0.08 * u[2])


def _coverage(kind: Tensor, jitter: Jitter) -> Tensor:
    """The fraction of each pixel that the figure covers, [cell, CELL, CELL]; `kind` 0..2 = shapes,
    3.. = glyphs.
    """
    axis = torch.arange(CELL) - (CELL - 1) / 2
    # glyphs are finer than shapes: they move less, to stay legible
    calm = torch.where(kind >= 3, GLYPH_JITTER, 1.0)
    size = (1 + calm * (jitter.size - 1))[:, None, None]
    x = (axis[None, None, :] - (calm * jitter.x)[:, None, None]) / size
    y = (axis[None, :, None] - (calm * jitter.y)[:, None, None]) / size
    x, y = torch.broadcast_tensors(x, y)
    circle = (x.square() + y.square()).sqrt() - 5.8
    square = torch.maximum(x.abs(), y.abs()) - 5.2
    triangle = torch.maximum(y - 4.6, (x.abs() * 1.9 - (y + 6.4)) / 2.15)
    inside = [(0.5 - distance).clamp(0, 1) for distance in (circle, square, triangle)]
    rows = [[[float(c == "#") for c in row] for row in _BITMAPS[g].split("|")] for g in GLYPHS]
    glyphs = F.interpolate(torch.tensor(rows)[:, None], scale_factor=4, mode="nearest")[:, 0]
    glyphs = F.pad(glyphs, (2, 2, 2, 2))
    grid = torch.stack([x / 6.0, y / 8.0], dim=-1)
    drawn = F.grid_sample(glyphs[(kind - 3).clamp(min=0)][:, None], grid, align_corners=False)[:, 0]
    shapes = torch.stack(inside, dim=1).gather(
        1, kind.clamp(max=2)[:, None, None, None].expand(-1, 1, CELL, CELL)
    )[:, 0]
    return torch.where((kind >= 3)[:, None, None], drawn, shapes)


def render_cells(classes: Tensor, jitter: Jitter) -> Tensor:
    """Pixels of single cells.

    Args:
        classes: cell classes [cell].
        jitter: offsets in pixels and size factors, each [cell].

    Returns:
        Pixels in [0, 1], [cell, 3, CELL, CELL].
    """
    colours = torch.tensor([PALETTE[colour] for colour, _ in OBJECTS] + [INK] * len(GLYPHS))
    kinds = torch.tensor([i % 3 for i in range(len(OBJECTS))] + [3 + i for i in range(len(GLYPHS))])
    index = (classes - 1).clamp(min=0)
    cover = _coverage(kinds[index], jitter) * (classes > 0)[:, None, None]
    shade = 1 - 0.18 * torch.linspace(-0.6, 1, CELL).clamp(min=0)[None, None, :, None]
    colour = colours[index][:, :, None, None] * shade
    background = torch.tensor(BACKGROUND)[None, :, None, None]
    return background + cover[:, None] * (colour - background)


def render(layouts: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Images: layouts [sample, 16] -> [sample, 3, SIZE, SIZE] in [0, 1]; jittered when a generator
    is given.
    """
    flat = layouts.reshape(-1)
    jitter = Jitter.none(len(flat)) if generator is None else Jitter.random(len(flat), generator)
    cells = render_cells(flat, jitter)
    return rearrange(cells, "(s r c) k h w -> s k (r h) (c w)", r=GRID, c=GRID)


def split_cells(images: Tensor) -> Tensor:
    """Cut images into cells: [sample, 3, SIZE, SIZE] -> [sample, 16, 3, CELL, CELL]."""
    return rearrange(images, "s k (r h) (c w) -> s (r c) k h w", r=GRID, c=GRID)


def template_bank() -> Tensor:
    """The empty cell, then every class at 9 placements, at half resolution: [1 + 9 (CLASSES - 1),
    3*64].
    """
    classes = torch.arange(CLASSES).repeat_interleave(9)
    offsets = torch.tensor([-0.7, 0.0, 0.7])
    x, y = torch.meshgrid(offsets, offsets, indexing="ij")
    jitter = Jitter(
        x.reshape(-1).repeat(CLASSES), y.reshape(-1).repeat(CLASSES), torch.ones(9 * CLASSES)
    )
    keep = (classes > 0) | (torch.arange(len(classes)) == 0)
    cells = render_cells(classes, jitter)[keep]
    return F.avg_pool2d(cells, 2).flatten(1)
