"""The text-to-image world: scenes of objects and glyphs on a lattice, rendered and verified."""

from flowrl.worlds.render import CELL, Jitter, render_cells
from flowrl.worlds.scene import (
    CELLS,
    CLASSES,
    COLOURS,
    GLYPHS,
    GRID,
    MAX_WORDS,
    MOOD_OBJECTS,
    OBJECTS,
    SHAPES,
    TASKS,
    VOCABULARY,
    Request,
    all_requests,
    glyph_class,
    object_class,
    tokenise,
)

__all__ = [
    "CELL",
    "CELLS",
    "CLASSES",
    "COLOURS",
    "GLYPHS",
    "GRID",
    "MAX_WORDS",
    "MOOD_OBJECTS",
    "OBJECTS",
    "SHAPES",
    "TASKS",
    "VOCABULARY",
    "Jitter",
    "Request",
    "all_requests",
    "glyph_class",
    "object_class",
    "render_cells",
    "tokenise",
]
