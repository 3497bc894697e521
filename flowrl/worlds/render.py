"""Rendering of cell classes to pixels, with sub-pixel jitter and soft edges."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from flowrl.worlds.scene import CLASSES, GLYPHS, GRID, OBJECTS

__all__ = ["CELL", "render_cells"]

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


def _coverage(kind: Tensor, jitter: Tensor) -> Tensor:
    """The fraction of each pixel that the figure covers, [cell, CELL, CELL]; `kind` 0..2 = shapes,
    3.. = glyphs.
    """
    axis, is_glyph = torch.arange(CELL) - (CELL - 1) / 2, kind >= 3
    # glyphs are finer than shapes: they move less, to stay legible
    calm = torch.where(is_glyph, GLYPH_JITTER, 1.0)
    right, down, size = jitter
    left, top, size = (
        values[:, None, None] for values in (calm * right, calm * down, 1 + calm * (size - 1))
    )
    x = (axis[None, None, :] - left) / size
    y = (axis[None, :, None] - top) / size
    x, y = torch.broadcast_tensors(x, y)
    # signed distances to the outlines, in pixels
    circle = (x.square() + y.square()).sqrt() - 5.8
    square = torch.maximum(x.abs(), y.abs()) - 5.2
    triangle = torch.maximum(y - 4.6, (x.abs() * 1.9 - (y + 6.4)) / 2.15)
    inside = (0.5 - torch.stack([circle, square, triangle], dim=1)).clamp(0, 1)
    shapes = inside[torch.arange(len(kind)), kind.clamp(max=2)]
    rows = [[[float(c == "#") for c in row] for row in _BITMAPS[g].split("|")] for g in GLYPHS]
    glyphs = F.interpolate(torch.tensor(rows)[:, None], scale_factor=4, mode="nearest")
    glyphs = F.pad(glyphs, (2, 2, 2, 2))[(kind - 3).clamp(min=0)]
    grid = torch.stack([x / 6.0, y / 8.0], dim=-1)
    drawn = F.grid_sample(glyphs, grid, align_corners=False)[:, 0]
    return torch.where(is_glyph[:, None, None], drawn, shapes)


def render_cells(classes: Tensor, jitter: Tensor) -> Tensor:
    """Pixels of single cells.

    Args:
        classes: cell classes [cell].
        jitter: offsets in x and y in pixels, and size factors, [3, cell].

    Returns:
        Pixels in [0, 1], [cell, 3, CELL, CELL].
    """
    colours = torch.tensor([PALETTE[colour] for colour, _ in OBJECTS] + [INK] * len(GLYPHS))
    kinds = torch.tensor([i % 3 for i in range(len(OBJECTS))] + [3 + i for i in range(len(GLYPHS))])
    index = (classes - 1).clamp(min=0)
    cover = _coverage(kinds[index], jitter) * (classes > 0)[:, None, None]
    # darker towards the bottom
    shade = 1 - 0.18 * torch.linspace(-0.6, 1, CELL).clamp(min=0)[None, None, :, None]
    colour = colours[index][:, :, None, None] * shade
    background = torch.tensor(BACKGROUND)[None, :, None, None]
    return background + cover[:, None] * (colour - background)


def split_cells(images: Tensor) -> Tensor:
    """Cut images into cells: [sample, 3, SIZE, SIZE] -> [sample, 16, 3, CELL, CELL]."""
    return rearrange(images, "s k (r h) (c w) -> s (r c) k h w", r=GRID, c=GRID)


def template_bank() -> Tensor:
    """The empty cell, then every class at 9 placements, at half resolution: [1 + 9 (CLASSES - 1),
    3*64].
    """
    classes = torch.arange(CLASSES).repeat_interleave(9)
    offsets = torch.tensor([-0.7, 0.0, 0.7])
    places = torch.cartesian_prod(offsets, offsets, torch.ones(1)).T.repeat(1, CLASSES)
    cells = F.avg_pool2d(render_cells(classes, places), 2).flatten(1)
    return torch.cat([cells[:1], cells[9:]])
