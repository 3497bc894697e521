"""Training pairs of the shapes world's base model: requests, and layouts that satisfy them or
not.
"""

import random
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

from flowrl.worlds.render import render_cells
from flowrl.worlds.scene import (
    CELLS,
    COLOURS,
    GLYPHS,
    GRID,
    MOOD_OBJECTS,
    OBJECTS,
    SHAPES,
    TASKS,
    Request,
    all_requests,
    glyph_class,
    object_class,
)


def random_jitter(count: int, generator: torch.Generator) -> Tensor:
    """Sub-pixel placements of `count` cells: uniform offsets in x and y of up to one pixel, and
    sizes of 92% to 108%.

    Args:
        count: number of cells.
        generator: source of the randomness.

    Returns:
        Offsets in x, offsets in y, and size factors, [3, cell].
    """
    x, y, size = torch.rand(3, count, generator=generator) * 2 - 1
    return torch.stack([x, y, 1 + 0.08 * size])


def render(layouts: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Images: layouts [sample, 16] -> [sample, 3, SIZE, SIZE] in [0, 1]; jittered when a generator
    is given.
    """
    count = layouts.numel()
    centred = torch.tensor([0.0, 0.0, 1.0])[:, None].expand(3, count)
    jitter = centred if generator is None else random_jitter(count, generator)
    cells = render_cells(layouts.flatten(), jitter)
    return rearrange(cells, "(s r c) k h w -> s k (r h) (c w)", r=GRID, c=GRID)


def draw_layout(request: Request, rng: random.Random) -> list[int]:
    """A random image that satisfies the request exactly: 16 cell classes."""
    cells = [0] * CELLS
    if request.kind == "text":
        start = rng.randrange(GRID - len(request.text) + 1) + GRID * rng.randrange(GRID)
        for offset, glyph in enumerate(request.text):
            cells[start + offset] = glyph_class(glyph)
    elif request.kind == "preference":
        low, high = MOOD_OBJECTS[request.mood]
        half = [r * GRID + c for r in range(GRID) for c in range(GRID // 2)]
        for cell in rng.sample(half, rng.randint(low // 2, high // 2)):
            mirror = cell - cell % GRID + GRID - 1 - cell % GRID
            cells[cell] = cells[mirror] = object_class(
                rng.choice(request.colours), rng.choice(SHAPES)
            )
    elif request.kind == "count":
        for cell in rng.sample(range(CELLS), request.number):
            cells[cell] = request.objects[0]
    else:
        first, second = rng.sample(range(CELLS), 2)
        while not holds(request.relation, first, second):
            first, second = rng.sample(range(CELLS), 2)
        cells[first], cells[second] = request.objects
    return cells


def holds(relation: str, first: int, second: int) -> bool:
    """Whether cell `first` is left of / right of / above / below cell `second` (any cells when the
    relation is empty).
    """
    rows, columns = (first // GRID, second // GRID), (first % GRID, second % GRID)
    return {
        "": True,
        "left": columns[0] < columns[1],
        "right": columns[0] > columns[1],
        "above": rows[0] < rows[1],
        "below": rows[0] > rows[1],
    }[relation]


def draw_wrong_layout(request: Request, rng: random.Random) -> list[int]:
    """The image of a pair with a careless caption: related to the request, random in its
    details.
    """
    if request.kind == "text":
        text = "".join(g if rng.random() < 0.5 else rng.choice(GLYPHS) for g in request.text)
        return draw_layout(Request("text", text=text), rng)
    if request.kind == "preference":
        cells = [0] * CELLS
        palette = [*request.colours, *rng.sample(COLOURS, 2)]
        for cell in rng.sample(range(CELLS), rng.randint(3, 11)):
            cells[cell] = object_class(rng.choice(palette), rng.choice(SHAPES))
        return cells
    if request.kind == "count":
        return draw_layout(Request("count", request.objects, rng.randint(1, 6)), rng)
    changed = list(request.objects)
    if rng.random() < (0.8 if request.kind == "binding" else 0.4):
        changed[rng.randrange(2)] = rng.randint(1, len(OBJECTS))
    return draw_layout(Request("binding", tuple(changed)), rng)


KIND_SHARES: dict[str, float] = {
    "count": 0.15,
    "binding": 0.1,
    "position": 0.4,
    "text": 0.2,
    "preference": 0.15,
}
"""Fractions of the training pairs; relations are the hardest to learn and get most."""


def draw_pair(
    rng: random.Random, requests: Mapping[str, list[Request]], wrong: Mapping[str, float]
) -> tuple[Request, list[int]]:
    """A training pair (request, layout): the kind by `KIND_SHARES`, a careless one with the kind's
    probability `wrong`.
    """
    kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
    request = rng.choice(requests[kind])
    return request, (draw_wrong_layout if rng.random() < wrong[kind] else draw_layout)(request, rng)


def requests_by_kind() -> dict[str, list[Request]]:
    """Every request, by kind. The base model is trained on all of them, held-out ones included, as
    on data from the web.
    """
    result: dict[str, list[Request]] = {}
    for task in TASKS:
        for request in all_requests(task):
            result.setdefault(request.kind, []).append(request)
    return result
