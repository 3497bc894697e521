"""Requests in the shapes world and images that satisfy them: prompts, layouts, training and
held-out sets.

An image is a 4x4 lattice of cells. A cell is empty, or contains an object (4 colours x 3 shapes) or
a glyph (12 letters and digits). A *layout* is an integer tensor [sample, 16] of cell classes: 0 =
empty, 1..12 = objects, 13..24 = glyphs.
"""

import itertools
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.core.types import Prompt

__all__ = [
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
    "Request",
    "all_requests",
    "glyph_class",
    "object_class",
    "tokenise",
]

GRID = 4
CELLS = GRID * GRID
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
GLYPHS = "ACEHKLTX2457"
NUMBERS = ("one", "two", "three", "four", "five")
RELATIONS = ("left", "right", "above", "below")
MOODS = ("calm", "lively")
MOOD_OBJECTS = {"calm": (4, 4), "lively": (8, 10)}
TASKS = ("compositional", "text", "preference")
MAX_WORDS = 5

OBJECTS = tuple(itertools.product(COLOURS, SHAPES))
CLASSES = 1 + len(OBJECTS) + len(GLYPHS)
VOCABULARY = (
    "",
    *COLOURS,
    *SHAPES,
    *NUMBERS,
    *RELATIONS,
    *MOODS,
    "and",
    "pattern",
    "text",
    *GLYPHS,
)


def object_class(colour: str, shape: str) -> int:
    """Cell class of an object: 1 + index in colours x shapes.

    Args:
        colour: one of the world's colours.
        shape: one of the world's shapes.

    Returns:
        The class, 1 or more; 0 is an empty cell.
    """
    return 1 + OBJECTS.index((colour, shape))


def glyph_class(glyph: str) -> int:
    """Cell class of a letter or digit."""
    return 1 + len(OBJECTS) + GLYPHS.index(glyph)


def tokenise(text: str) -> list[int]:
    """Word ids of a prompt, padded with 0 to `MAX_WORDS`. Quoted text becomes one token per
    character.

    Raises `ConfigError` naming a word outside the vocabulary.
    """
    words: list[str] = []
    for word in re.findall(r'"[^"]*"|[^\s"]+', text.strip()):
        if word.startswith('"'):
            words.extend(word.strip('"').upper())
        elif (word := word.lower()) != "of":
            words.append(word.removesuffix("s") if word[:-1] in SHAPES else word)
    known = VOCABULARY[1:]
    fits = 0 < len(words) <= MAX_WORDS and set(words) <= set(known)
    allowed = f"1 to {MAX_WORDS} words or characters of a text, of {', '.join(known)}"
    require(fits, "prompt", text, allowed)
    return [*map(VOCABULARY.index, words), *[0] * (MAX_WORDS - len(words))]


@dataclass(frozen=True)
class Request:
    """The content of a prompt.

    Args:
        kind: count, binding, position, text or preference; the other fields depend on it.
        objects: cell classes of the requested objects.
        number: requested number of objects.
        relation: relation of the first object to the second.
        text: requested glyphs.
        mood: requested mood of a pattern.
        colours: requested colours of a pattern.
    """

    kind: str
    objects: tuple[int, ...] = ()
    number: int = 1
    relation: str = ""
    text: str = ""
    mood: str = ""
    colours: tuple[str, ...] = ()

    @property
    def meaning(self) -> tuple[object, ...]:
        """A key that is equal for requests with the same images ("a left of b", "b right of a");
        used to split the sets.
        """
        objects, relation = self.objects, self.relation
        if relation in ("right", "below"):
            objects, relation = objects[::-1], {"right": "left", "below": "above"}[relation]
        if self.kind == "binding":
            objects = tuple(sorted(objects))
        look = (self.mood, frozenset(self.colours))
        return self.kind, objects, self.number, relation, self.text, look

    @property
    def palette(self) -> tuple[str, ...]:
        """The colours that the prompt names."""
        return self.colours or tuple(OBJECTS[k - 1][0] for k in self.objects)

    def prompt(self) -> Prompt:
        """The request in words, with itself as metadata for the verifier."""
        return Prompt(self.words(), {"request": self})

    def words(self) -> str:
        """The request in words."""
        if self.kind == "text":
            return f'text "{self.text}"'
        if self.kind == "preference":
            return f"{self.mood} {' and '.join(self.colours)} pattern"
        first, *others = [" ".join(OBJECTS[k - 1]) for k in self.objects]
        if self.kind == "count":
            return f"{NUMBERS[self.number - 1]} {first}{'s' if self.number > 1 else ''}"
        joint = {"": "and", "left": "left of", "right": "right of"}.get(
            self.relation, self.relation
        )
        return f"{first} {joint} {others[0]}"


def parse(text: str) -> Request:
    """The request that a prompt's words express; the inverse of `Request.words`. Raises
    `ConfigError` for other words.
    """
    ids = tokenise(text)
    words = [VOCABULARY[i] for i in ids if i]
    if words[0] == "text" and len(words) > 1 and set(words[1:]) <= set(GLYPHS):
        return Request("text", text="".join(words[1:]))
    request = _requests_by_ids().get(tuple(ids))
    if request is None:
        raise ConfigError(
            f"prompt {text!r} is not understood; write for example 'three red circles', 'red circle"
            " and blue square', 'red circle left of blue square', 'text \"K72\"' or 'calm red and"
            " blue pattern'"
        )
    return request


@cache
def _requests_by_ids() -> dict[tuple[int, ...], Request]:
    singles = [Request("count", (k,)) for k in range(1, 1 + len(OBJECTS))]
    requests = [*singles, *all_requests("compositional"), *all_requests("preference")]
    return {tuple(tokenise(request.words())): request for request in requests}


def all_requests(task: str) -> list[Request]:
    """Every request of a task, in a fixed order (texts: all of 2 and 3 glyphs without repeats in a
    row).
    """
    require(task in TASKS, "task", task, f"one of {', '.join(TASKS)}")
    classes = range(1, 1 + len(OBJECTS))
    if task == "text":
        strings = [s for n in (2, 3) for s in itertools.product(GLYPHS, repeat=n)]
        return [Request("text", text="".join(s)) for s in strings]
    if task == "preference":
        palettes = [(c,) for c in COLOURS] + list(itertools.permutations(COLOURS, 2))
        return [Request("preference", mood=m, colours=p) for m in MOODS for p in palettes]
    counts = [Request("count", (k,), n) for n in range(2, 6) for k in classes]
    pairs = list(itertools.permutations(classes, 2))
    bindings = [Request("binding", pair) for pair in pairs]
    positions = [Request("position", pair, relation=r) for pair in pairs for r in RELATIONS]
    return counts + bindings + positions


def split(task: str) -> dict[str, list[Request]]:
    """Train and held-out requests of a task: disjoint in words and in meaning, the same in every
    run.

    A quarter of every kind of request is held out. Kinds alternate, and kinds with fewer requests
    repeat theirs. Every kind then has the same weight (GenEval's score is the mean over its kinds),
    and any prefix is balanced.
    """
    rng = random.Random(f"flowrl shapes {task}")
    by_kind: dict[str, dict[object, list[Request]]] = {}
    for request in all_requests(task):
        by_kind.setdefault(request.kind, {}).setdefault(request.meaning, []).append(request)
    parts: dict[str, list[list[Request]]] = {"train": [], "heldout": []}
    for meanings in by_kind.values():
        groups = list(meanings.values())
        rng.shuffle(groups)
        cut = max(1, len(groups) // 4)
        for name, chosen in (("heldout", groups[:cut]), ("train", groups[cut:])):
            requests = [*itertools.chain(*chosen)]
            rng.shuffle(requests)
            parts[name].append(requests)
    return {
        name: [kind[i % len(kind)] for i in range(max(map(len, kinds))) for kind in kinds]
        for name, kinds in parts.items()
    }


def request_of(prompt: Prompt) -> Request:
    """The request in a prompt's metadata, or parsed from its words."""
    request: Any = prompt.metadata.get("request")
    return request if isinstance(request, Request) else parse(prompt.text)
