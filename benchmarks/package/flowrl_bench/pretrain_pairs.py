"""Training pairs of the shapes world's base model: requests, and layouts that follow them or not."""

import random
from collections.abc import Mapping

from flowrl.worlds.shapes.scene import (
    CELLS,
    COLOURS,
    GLYPHS,
    OBJECTS,
    SHAPES,
    TASKS,
    Request,
    all_requests,
    draw_layout,
    object_class,
)


def draw_wrong_layout(request: Request, rng: random.Random) -> list[int]:
    """The image of a pair with a careless caption: related to the request, random in its details."""
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


KIND_SHARES: dict[str, float] = {"count": 0.15, "binding": 0.1, "position": 0.4, "text": 0.2, "preference": 0.15}
"""Fractions of the training pairs; relations are the hardest to learn and get most."""


def draw_pair(rng: random.Random, requests: Mapping[str, list[Request]], wrong: Mapping[str, float]) -> tuple[Request, list[int]]:
    """A training pair (request, layout): the kind by `KIND_SHARES`, a careless one with the kind's probability `wrong`."""
    kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
    request = rng.choice(requests[kind])
    return request, (draw_wrong_layout if rng.random() < wrong[kind] else draw_layout)(request, rng)


def requests_by_kind() -> dict[str, list[Request]]:
    """Every request, by kind. The base model is trained on all of them, held-out ones included, as on data from the web."""
    result: dict[str, list[Request]] = {}
    for task in TASKS:
        for request in all_requests(task):
            result.setdefault(request.kind, []).append(request)
    return result
