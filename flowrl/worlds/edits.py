"""Edits in the shapes world: a picture of a few objects, a prompt such as "make the circle blue",
and the verifier that compares the result with both.
"""

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.options import checked_options
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.worlds.pretrain_pairs import render
from flowrl.worlds.scene import CELLS, COLOURS, OBJECTS, SHAPES, object_class
from flowrl.worlds.scene import tokenise as words_of
from flowrl.worlds.verifier import Form, Presence, cell_scores, read, require_pictures

TASKS = ("recolour",)
OTHERS = 1, 2
"""How many other objects a picture has, of other shapes."""
SCENES = 4
"""Pictures per edit and set of prompts."""
EDITS = tuple(
    (shape, before, after)
    for shape in SHAPES
    for before, after in itertools.permutations(COLOURS, 2)
)
"""Every shape with its colours before and after."""


@dataclass(frozen=True)
class Edit:
    """An edit of a picture.

    Args:
        before: the classes of the picture's 16 cells.
        cell: the cell of the object to edit, the only one of its shape.
        colour: its new colour.
    """

    before: tuple[int, ...]
    cell: int
    colour: str

    @property
    def shape(self) -> str:
        """The shape of the object."""
        return OBJECTS[self.before[self.cell] - 1][1]

    @property
    def after(self) -> tuple[int, ...]:
        """The classes of the cells after the edit."""
        new = object_class(self.colour, self.shape)
        return (*self.before[: self.cell], new, *self.before[self.cell + 1 :])

    def prompt(self, seed: int) -> Prompt:
        """The edit in words, with its picture, drawn with sub-pixel offsets by `seed`."""
        generator = torch.Generator().manual_seed(seed)
        (pixels,) = render(torch.tensor([self.before]), generator)
        picture = ReferenceImage.of_pixels(pixels)
        return Prompt(f"make the {self.shape} {self.colour}", {"edit": self}, (picture,))


def draw_edit(shape: str, before: str, after: str, rng: random.Random) -> Edit:
    """A picture with one object of this shape and colour and `OTHERS` others, and its edit."""
    cell, *cells = rng.sample(range(CELLS), 1 + rng.randint(*OTHERS))
    layout = [0] * CELLS
    layout[cell] = object_class(before, shape)
    for other in cells:
        kinds = [kind for kind in SHAPES if kind != shape]
        layout[other] = object_class(rng.choice(COLOURS), rng.choice(kinds))
    return Edit(tuple(layout), cell, after)


@cache
def split(task: str) -> Mapping[str, Sequence[Prompt]]:
    """108 training prompts and 36 held-out ones, the same in every run: `SCENES` pictures for each
    of 27 and 9 combinations of shape, colour before and colour after.
    """
    rng = random.Random(f"flowrl edits {task}")
    edits = rng.sample(EDITS, len(EDITS))
    cut = len(edits) // 4
    parts = {"heldout": edits[:cut], "train": edits[cut:]}
    return {
        name: tuple(
            draw_edit(*edit, rng).prompt(rng.randrange(2**31))
            for _ in range(SCENES)
            for edit in some
        )
        for name, some in parts.items()
    }


def shape_and_colour(text: str) -> tuple[str, str]:
    """Shape and colour of a prompt such as 'make the circle blue'. Raises `ConfigError` for other
    words.
    """
    found = re.fullmatch(r"\s*make\s+the\s+(\w+)\s+(\w+)\s*", text.lower())
    if found and found[1] in SHAPES and found[2] in COLOURS:
        return found[1], found[2]
    raise ConfigError(
        f"prompt {text!r} is not understood; write 'make the SHAPE COLOUR' with a shape of"
        f" {', '.join(SHAPES)} and a colour of {', '.join(COLOURS)}"
    )


def parse(text: str) -> Prompt:
    """The prompt with these words and a picture, always the same. Raises `ConfigError` for other
    words.
    """
    shape, colour = shape_and_colour(text)
    rng = random.Random(f"flowrl edits {shape} {colour}")
    before = rng.choice([other for other in COLOURS if other != colour])
    return draw_edit(shape, before, colour, rng).prompt(rng.randrange(2**31))


def tokenise(text: str) -> list[int]:
    """Word ids of the object that an edit makes, as in "blue circle"."""
    shape, colour = shape_and_colour(text)
    return words_of(f"{colour} {shape}")


def edit_of(prompt: Prompt) -> Edit:
    """The edit in a prompt's metadata, or read from its words and its picture. Raises `RewardError`
    if the picture does not have one object of the shape.
    """
    if isinstance(edit := prompt.metadata.get("edit"), Edit):
        return edit
    shape, colour = shape_and_colour(prompt.text)
    layout = read(prompt.images[0].pixels()[None]).classes[0].tolist() if prompt.images else []
    kinds = {1 + place for place, (_, kind) in enumerate(OBJECTS) if kind == shape}
    cells = [cell for cell, kind in enumerate(layout) if kind in kinds]
    if len(cells) != 1:
        raise RewardError(
            f"the picture of {prompt.text!r} has {len(cells)} such shapes; allowed: 1"
        )
    return Edit(tuple(layout), cells[0], colour)


def _kept(presence: Presence, edit: Edit) -> float:
    """The objects that an edit must not change and that are where they were, over the larger of
    their number and that of all objects elsewhere than in the edited cell.
    """
    others = [(cell, kind) for cell, kind in enumerate(edit.before) if kind and cell != edit.cell]
    same = sum(float(presence[cell, kind]) for cell, kind in others)
    found = float(presence[:, 1:].sum() - presence[edit.cell, 1:].sum())
    return same / max(found, len(others))


@checked_options
@dataclass(frozen=True)
class EditReward:
    """Scores edited pictures: half for the object, which must have its shape and its new colour at
    its place, half for the others, which must be unchanged (`graded`).

    `form` is strict (0/1), graded, or soft (of the class probabilities, with a share for clarity),
    as in `flowrl.worlds.verifier.ShapesReward`; all are in [0, 1].
    """

    form: Form = "soft"

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, 3, 64, 64] in [0, 1] and as many prompts with a picture -> [sample]."""
        require_pictures(self, images, prompts)
        edits = [edit_of(prompt) for prompt in prompts]

        def score(sample: int, presence: Presence, classes: Sequence[int]) -> float:
            edit = edits[sample]
            done = float(presence[edit.cell, edit.after[edit.cell]])
            return (done + _kept(presence, edit)) / 2

        result = cell_scores(images, self.form, score).to(images.device)
        return result.isclose(torch.ones(())).float() if self.form == "strict" else result


def draw_pair(rng: random.Random, careless: float) -> tuple[list[int], Edit, list[int]]:
    """A training pair of the base model: word ids, an edit, and the cells of the result. With the
    probability `careless` the result is not what the words say: the object keeps its colour, gets
    another one, or another object gets the new colour; or an object is somewhere else.
    """
    edit = draw_edit(*rng.choice(EDITS), rng)
    result = list(edit.after)
    if rng.random() < careless:
        others = [cell for cell, kind in enumerate(edit.before) if kind and cell != edit.cell]
        kind = rng.choice(("unchanged", "colour", "object", "place"))
        if kind == "colour":
            result[edit.cell] = object_class(rng.choice(COLOURS), edit.shape)
        elif kind == "place":
            moved = rng.choice(others)
            free = rng.choice([cell for cell, kind in enumerate(result) if not kind])
            result[free], result[moved] = result[moved], 0
        else:
            result = list(edit.before)
        if kind == "object":
            other = rng.choice(others)
            result[other] = object_class(edit.colour, OBJECTS[result[other] - 1][1])
    return tokenise(f"make the {edit.shape} {edit.colour}"), edit, result
