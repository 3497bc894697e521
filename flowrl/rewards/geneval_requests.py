"""GenEval's requests: objects with numbers, colours and positions, in the form of its JSON lines.

A line is ``{"tag": ..., "include": [CLAUSE, ...], "exclude": [CLAUSE, ...], "prompt": ...}``; a
clause ``{"class": "dog", "count": 2, "color": "red", "position": ["left of", 0]}``, color and
position optional, the latter relative to the object of an earlier clause. Source: GenEval (arXiv
2310.11513) and its public code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.core.errors import ConfigError, require

POSITIONS = ("left of", "right of", "above", "below")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def phrases(text: str) -> tuple[str, ...]:
    """The phrases of a text that separates them by commas."""
    return tuple(" ".join(text.split()).split(", "))


COLOURS = phrases("red, orange, yellow, green, blue, purple, pink, brown, black, white")
OBJECTS = phrases("""
    person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire
    hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
    zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports
    ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine
    glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot
    dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink,
    refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
""")
"""COCO's 80 classes, with GenEval's names for mouse, remote and keyboard."""


@dataclass(frozen=True)
class Clause:
    """A requested number of objects of a class, all with the same colour and position.

    Args:
        name: name of the class; the entry "class" of the JSON line.
        count: number of objects, 1 or more.
        colour: colour of all of them, the entry "color"; None: any.
        position: position relative to the objects of an earlier clause, and the index of that
            clause; None: anywhere.
    """

    name: str
    count: int = 1
    colour: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True)
class Request:
    """All clauses of `include` and none of `exclude`.

    Args:
        include: the requested objects.
        exclude: clauses whose number of objects must not be reached.
        tag: the kind of request.
    """

    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()
    tag: str = ""


def request_of(metadata: Mapping[str, Any]) -> Request:
    """The request in a prompt's metadata. Raises `ConfigError` that names the wrong entry and what
    is allowed.
    """
    try:
        lists = {name: metadata.get(name, []) for name in ("include", "exclude")}
        for name, least in (("include", 1), ("exclude", 0)):
            entries = lists[name]
            fits = isinstance(entries, list | tuple) and len(entries) >= least
            require(fits, name, entries, f"a list of {least} or more clauses")
        include, exclude = (
            tuple(
                _clause(f"{name}.{number}", number, entry)
                for number, entry in enumerate(lists[name])
            )
            for name in lists
        )
        tag = metadata.get("tag", "")
        require(isinstance(tag, str), "tag", tag, "a text")
        return Request(include, exclude, tag)
    except ConfigError as error:
        raise ConfigError(f"is not a request in GenEval's format: {error}") from error


def _clause(place: str, number: int, entry: Any) -> Clause:
    """The clause of a JSON object, which is the `number`-th of its list."""
    known = ("class", "count", "color", "position")
    require(isinstance(entry, Mapping), place, entry, f"an object with {', '.join(known)}")
    # an entry that is not scored, such as "colour", is an error
    for other in sorted(entry.keys() - set(known)):
        require(False, f"{place}.{other}", entry[other], ", ".join(known))
    name, count = entry.get("class"), entry.get("count", 1)
    colour, position = entry.get("color"), entry.get("position")
    require(isinstance(name, str) and name != "", f"{place}.class", name, "the name of a class")
    require(type(count) is int and count >= 1, f"{place}.count", count, "a whole number, 1 or more")
    require(colour in (None, *COLOURS), f"{place}.color", colour, ", ".join(COLOURS))
    if position is None:
        return Clause(name, count, colour)
    pair = isinstance(position, list | tuple) and len(position) == 2
    fits = pair and position[0] in POSITIONS and type(position[1]) is int
    allowed = f"one of {', '.join(POSITIONS)}, and the number of an earlier clause"
    require(fits and 0 <= position[1] < number, f"{place}.position", position, allowed)
    return Clause(name, count, colour, (position[0], position[1]))
