"""GenEval's requests: objects with numbers, colours and positions, in the form of its JSON lines.

A line is ``{"tag": ..., "include": [CLAUSE, ...], "exclude": [CLAUSE, ...], "prompt": ...}``; a
clause ``{"class": "dog", "count": 2, "color": "red", "position": ["left of", 0]}``, color and
position optional, the latter relative to the object of an earlier clause. Source: GenEval (arXiv
2310.11513) and its public code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, Strict, TypeAdapter

from flowrl.core.errors import require
from flowrl.reading import reading

Colour = Literal[
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
]
Position = Literal["left of", "right of", "above", "below"]
COLOURS, POSITIONS = get_args(Colour), get_args(Position)
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def phrases(text: str) -> tuple[str, ...]:
    """The phrases of a text that separates them by commas."""
    return tuple(" ".join(text.split()).split(", "))


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

    # An entry that is not scored, such as "colour", is an error.
    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(alias="class", min_length=1)]
    count: Annotated[int, Strict(), Field(ge=1)] = 1
    colour: Annotated[Colour | None, Field(alias="color")] = None
    position: tuple[Position, Annotated[int, Strict(), Field(ge=0)]] | None = None


@dataclass(frozen=True)
class Request:
    """All clauses of `include` and none of `exclude`.

    Args:
        include: the requested objects.
        exclude: clauses whose number of objects must not be reached.
        tag: the kind of request.
    """

    include: Annotated[tuple[Clause, ...], Field(min_length=1)]
    exclude: tuple[Clause, ...] = ()
    tag: str = ""


@cache
def _adapter() -> TypeAdapter[Request]:
    return TypeAdapter(Request)


def request_of(metadata: Mapping[str, Any]) -> Request:
    """The request in a prompt's metadata. Raises `ConfigError` that names the wrong entry and what
    is allowed.
    """
    with reading("is not a request in GenEval's format"):
        request = _adapter().validate_python(dict(metadata))
        for number, clause in enumerate(request.include):
            earlier = clause.position is None or clause.position[1] < number
            require(
                earlier,
                f"include.{number}.position",
                clause.position,
                "the number of an earlier clause",
            )
    return request
