"""GenEval's requests: objects with numbers, colours and positions, in the form of its JSON lines.

A line is ``{"tag": ..., "include": [CLAUSE, ...], "exclude": [CLAUSE, ...], "prompt": ...}``; a clause
``{"class": "dog", "count": 2, "color": "red", "position": ["left of", 0]}``, color and position optional, the latter
relative to the object of an earlier clause. Source: GenEval (arXiv 2310.11513) and its public code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError

OBJECTS = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light", "fire hydrant",
    "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe",
    "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat",
    "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl",
    "banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote", "computer keyboard",
    "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear",
    "hair drier", "toothbrush",
)  # fmt: skip
"""COCO's 80 classes, with GenEval's names for mouse, remote and keyboard."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
ENTRIES = ("class", "count", "color", "position")
"""The entries that a clause may have; any other is refused, because it would not be scored."""
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


@dataclass(frozen=True)
class Clause:
    """A requested number of objects of a class, all with the same colour and position.

    Args:
        name: name of the class.
        count: number of objects, 1 or more.
        colour: colour of all of them; "": any.
        position: position relative to the objects of clause `target`; "": anywhere.
        target: index of an earlier clause.
    """

    name: str
    count: int = 1
    colour: str = ""
    position: str = ""
    target: int = 0


@dataclass(frozen=True)
class Request:
    """All clauses of `include` and none of `exclude`.

    Args:
        tag: the kind of request.
        include: the requested objects.
        exclude: clauses whose number of objects must not be reached.
    """

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()


def request_of(metadata: Mapping[str, Any]) -> Request:
    """The request in a prompt's metadata. Raises `ConfigError` that names the wrong entry and what is allowed."""
    include = _clauses(metadata, "include")
    if not include:
        raise ConfigError('"include" must be a list of one or more clauses such as {"class": "dog", "count": 1}')
    return Request(str(metadata.get("tag", "")), include, _clauses(metadata, "exclude"))


def _clauses(metadata: Mapping[str, Any], entry: str) -> tuple[Clause, ...]:
    found = metadata.get(entry, [])
    if not isinstance(found, list | tuple) or not all(isinstance(clause, Mapping) for clause in found):
        raise ConfigError(f'"{entry}" must be a list of clauses such as {{"class": "dog", "count": 1}}, not {found!r:.60}')
    return tuple(_clause(values, f"{entry}[{number}]", number) for number, values in enumerate(found))


def _clause(values: Mapping[str, Any], where: str, number: int) -> Clause:
    name, count, colour = values.get("class"), values.get("count", 1), values.get("color", "")
    unknown = sorted(str(key) for key in values if key not in ENTRIES)
    if unknown:
        raise ConfigError(f"{where}: {', '.join(unknown):.100} is not allowed: only {', '.join(ENTRIES)}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where}: "class" = {name!r:.60} is not allowed; allowed: the name of an object')
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f'{where}: "count" = {count!r:.60} is not allowed; allowed: 1 or more')
    if colour and colour not in COLOURS:
        raise ConfigError(f'{where}: "color" = {colour!r:.60} is not allowed; allowed: one of {", ".join(COLOURS)}')
    position = values.get("position")
    if position is None:
        return Clause(name, count, colour)
    fits = isinstance(position, list | tuple) and len(position) == 2 and position[0] in POSITIONS
    if not fits or not isinstance(position[1], int) or not 0 <= position[1] < number:
        allowed = f"[one of {', '.join(POSITIONS)}; the number of an earlier clause]"
        raise ConfigError(f'{where}: "position" = {position!r:.60} is not allowed; allowed: {allowed}')
    return Clause(name, count, colour, str(position[0]), int(position[1]))
