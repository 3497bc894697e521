"""Prompts made from templates: GenEval's compositional requests, texts to render, and general
images.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

from flowrl.core.errors import require
from flowrl.core.prompt import Prompt
from flowrl.rewards.geneval_requests import COLOURS, OBJECTS, POSITIONS, TAGS, phrases

MAX_REPEATS = 20_000
"""After so many repeated prompts in a row no new ones are expected."""
NUMBERS = ("zero", "one", "two", "three", "four")
PLURALS = {
    "person": "people",
    "sheep": "sheep",
    "skis": "pairs of skis",
    "scissors": "pairs of scissors",
    "knife": "knives",
    "broccoli": "heads of broccoli",
    "computer mouse": "computer mice",
}
SCENES = phrases("""
    a street sign, a shop window, a chalkboard, a neon sign at night, a paper note on a desk, a
    T-shirt, a cup, a birthday cake, a book cover, a road sign in the desert, a cardboard box, a
    banner above a stage, a wooden door, a train ticket, a label on a jar
""")
WORDS = phrases("""
    OPEN, Welcome, Coffee, Market, Garden, Music, Fresh Bread, Exit, Library, Hello World, Night
    Train, Summer, Sale, River, Moonlight, Bakery, North, Station, Dream, Tea, Harbour, Stop,
    Silver, Theatre, Lucky, Sunday, Museum, Ocean, Jazz, Winter, Flowers, Hotel, Planet, Echo,
    Honey, Today
""")
SUBJECTS = phrases("""
    a red fox, an old fisherman, a grey cat, a young astronaut, a small robot, a barn owl, a baker,
    a white horse, a girl with an umbrella, a tortoise, a violinist, a lighthouse keeper, a golden
    retriever, a knight, a hummingbird, a street musician, an elephant, a gardener, a paper dragon,
    two children, a snow leopard, a clockmaker, a heron, a family of ducks, a wizard, a cyclist, a
    hedgehog, an old sailing ship, a steam locomotive, a hot-air balloon
""")
ACTIONS = phrases("""
    resting, in the morning light, seen from above, in the rain, waiting, surrounded by flowers, in
    the fog, at dusk, under a full moon, in strong wind, in a beam of light, far away, close up, in
    falling snow
""")
PLACES = phrases("""
    beside a mountain lake, in a quiet library, on a rooftop, in a pine forest, at a night market,
    on a stone bridge, in a greenhouse, by the sea, in a narrow alley, on a desert road, in a train
    station, in a field of wheat, in front of an old castle, on a frozen river, in a workshop full
    of tools, on a small island, in a crowded cafe, near a waterfall, in an orange grove, on a
    wooden pier
""")
STYLES = phrases("""
    photograph, watercolour, oil painting, ink drawing, woodcut, pencil sketch, children's book
    illustration, stained glass, pixel art, low-poly render, film still, pastel drawing, mosaic,
    travel poster, charcoal drawing
""")


def compositional_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Distinct prompts, alternating between GenEval's kinds, with the metadata that
    `rewards.GenEval` scores.

    The kinds are those of GenEval's generator (arXiv 2310.11513): one object, two, 2 to 4 of one, a
    colour, a position, two colours; "person" gets no colour. Plurals are English (GenEval's
    generator adds an s).

    Args:
        count: number of prompts.
        seed: seed of the draw.

    Returns:
        The prompts.

    Raises:
        ConfigError: the templates have fewer prompts.
    """
    draw = random.Random(seed)
    return distinct((_compositional(tag, draw) for tag in itertools.cycle(TAGS)), count)


def text_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Distinct prompts for a text in quotation marks on an object, which `rewards.OCR` scores.

    A text is one or two of `WORDS`, or a word with a number. The metadata contain the text as
    "text".

    Args:
        count: number of prompts.
        seed: seed of the draw.

    Returns:
        The prompts.

    Raises:
        ConfigError: the templates have fewer prompts.
    """
    draw = random.Random(seed)

    def prompt() -> Prompt:
        word, kind = draw.choice(WORDS), draw.randrange(3)
        text = (word, f"{word} {draw.randint(1, 99)}", f"{word} {draw.choice(WORDS)}")[kind]
        return Prompt(f'{draw.choice(SCENES)} that says "{text}"', {"tag": "text", "text": text})

    return distinct(iter(prompt, None), count)


def image_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Distinct prompts such as "a red fox in the fog on a stone bridge, watercolour", in an order
    drawn by `seed`.

    The first n prompts are the same for every larger `count`.

    Args:
        count: number of prompts, at most about 126,000.
        seed: seed of the order.

    Returns:
        The prompts.

    Raises:
        ConfigError: `count` is too large.
    """
    draw = random.Random(seed)

    def prompt() -> Prompt:
        words = " ".join(draw.choice(choices) for choices in (SUBJECTS, ACTIONS, PLACES))
        return Prompt(f"{words}, {draw.choice(STYLES)}", {"tag": "image"})

    return distinct(iter(prompt, None), count)


def distinct(source: Iterator[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of `source` with different texts. Raises `ConfigError` if there are
    fewer.
    """
    prompts: dict[str, Prompt] = {}
    repeats = 0
    while len(prompts) < count and repeats < MAX_REPEATS:
        prompt = next(source)
        repeats = repeats + 1 if prompt.text in prompts else 0
        prompts.setdefault(prompt.text, prompt)
    most = f"1 to about {len(prompts)}: the number of distinct prompts of this kind"
    require(1 <= count == len(prompts), "count", count, most)
    return list(prompts.values())


def _a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def plural(name: str) -> str:
    """The plural of an object's name."""
    return PLURALS.get(name) or (
        f"{name}es" if name.endswith(("s", "sh", "ch", "x")) else f"{name}s"
    )


def _compositional(tag: str, draw: random.Random) -> Prompt:
    """A prompt of one of GenEval's kinds with its request; the order of the draws is part of the
    result.
    """
    exclude: dict[str, Any] = {}
    if tag in ("single_object", "counting"):
        name, count = draw.choice(OBJECTS), draw.randint(2, 4) if tag == "counting" else 1
        text = _a(name) if count == 1 else f"{NUMBERS[count]} {plural(name)}"
        include = [{"class": name, "count": count}]
        exclude = {"exclude": [{"class": name, "count": count + 1}]} if tag == "counting" else {}
    elif tag == "position":
        (first, second), position = draw.sample(OBJECTS, 2), draw.choice(POSITIONS)
        text = f"{_a(first)} {position} {_a(second)}"
        include = [
            {"class": second, "count": 1},
            {"class": first, "count": 1, "position": [position, 0]},
        ]
    elif tag == "two_object":
        names = draw.sample(OBJECTS, 2)
        text, include = (
            " and ".join(map(_a, names)),
            [{"class": name, "count": 1} for name in names],
        )
    else:  # "person" gets no colour
        if tag == "colors":
            names, colours = [draw.choice(OBJECTS[1:])], [draw.choice(COLOURS)]
        else:
            names, colours = draw.sample(OBJECTS[1:], 2), draw.sample(COLOURS, 2)
        text = " and ".join(
            f"{_a(colour)} {name}" for name, colour in zip(names, colours, strict=True)
        )
        include = [
            {"class": name, "count": 1, "color": colour}
            for name, colour in zip(names, colours, strict=True)
        ]
    return Prompt(f"a photo of {text}", {"tag": tag, "include": include, **exclude})
