"""Prompts made from templates: GenEval's compositional requests, texts to render, and general images."""

import random
from collections.abc import Callable, Iterator, Sequence

from flowrl.errors import require
from flowrl.prompt import Prompt
from flowrl.prompts.geneval import COLOURS, OBJECTS, POSITIONS, TAGS

MAX_REPEATS = 20_000
"""After so many repeated prompts in a row no new ones are expected."""
NUMBERS = ("zero", "one", "two", "three", "four")
PLURALS = {
    "person": "people", "sheep": "sheep", "skis": "pairs of skis", "scissors": "pairs of scissors", "knife": "knives",
    "broccoli": "heads of broccoli", "computer mouse": "computer mice",
}  # fmt: skip
SCENES = (
    "a street sign", "a shop window", "a chalkboard", "a neon sign at night", "a paper note on a desk", "a T-shirt", "a cup",
    "a birthday cake", "a book cover", "a road sign in the desert", "a cardboard box", "a banner above a stage", "a wooden door",
    "a train ticket", "a label on a jar",
)  # fmt: skip
WORDS = (
    "OPEN", "Welcome", "Coffee", "Market", "Garden", "Music", "Fresh Bread", "Exit", "Library", "Hello World", "Night Train",
    "Summer", "Sale", "River", "Moonlight", "Bakery", "North", "Station", "Dream", "Tea", "Harbour", "Stop", "Silver",
    "Theatre", "Lucky", "Sunday", "Museum", "Ocean", "Jazz", "Winter", "Flowers", "Hotel", "Planet", "Echo", "Honey", "Today",
)  # fmt: skip
SUBJECTS = (
    "a red fox", "an old fisherman", "a grey cat", "a young astronaut", "a small robot", "a barn owl", "a baker", "a white horse",
    "a girl with an umbrella", "a tortoise", "a violinist", "a lighthouse keeper", "a golden retriever", "a knight",
    "a hummingbird", "a street musician", "an elephant", "a gardener", "a paper dragon", "two children", "a snow leopard",
    "a clockmaker", "a heron", "a family of ducks", "a wizard", "a cyclist", "a hedgehog", "an old sailing ship",
    "a steam locomotive", "a hot-air balloon",
)  # fmt: skip
ACTIONS = (
    "resting", "in the morning light", "seen from above", "in the rain", "waiting", "surrounded by flowers", "in the fog",
    "at dusk", "under a full moon", "in strong wind", "in a beam of light", "far away", "close up", "in falling snow",
)  # fmt: skip
PLACES = (
    "beside a mountain lake", "in a quiet library", "on a rooftop", "in a pine forest", "at a night market", "on a stone bridge",
    "in a greenhouse", "by the sea", "in a narrow alley", "on a desert road", "in a train station", "in a field of wheat",
    "in front of an old castle", "on a frozen river", "in a workshop full of tools", "on a small island", "in a crowded cafe",
    "near a waterfall", "in an orange grove", "on a wooden pier",
)  # fmt: skip
STYLES = (
    "photograph", "watercolour", "oil painting", "ink drawing", "woodcut", "pencil sketch", "children's book illustration",
    "stained glass", "pixel art", "low-poly render", "film still", "pastel drawing", "mosaic", "travel poster",
    "charcoal drawing",
)  # fmt: skip


def compositional_prompts(count: int, seed: int = 0, tags: Sequence[str] = TAGS) -> list[Prompt]:
    """Distinct prompts, alternating between GenEval's kinds, with the metadata that `rewards.GenEval` scores.

    The kinds are those of GenEval's generator (arXiv 2310.11513): one object, two, 2 to 4 of one, a colour, a position, two
    colours; "person" gets no colour. Plurals are English (GenEval's generator adds an s).

    Args:
        count: number of prompts.
        seed: seed of the draw.
        tags: the kinds, in the order in which they alternate.

    Returns:
        The prompts.

    Raises:
        ConfigError: a kind is unknown, or the templates have fewer prompts.
    """
    for tag in tags:
        require(tag in TAGS, "tags", tag, f"some of {', '.join(TAGS)}")
    require(len(tags) > 0, "tags", tuple(tags), f"some of {', '.join(TAGS)}")
    draw = random.Random(seed)

    def endless() -> Iterator[Prompt]:
        while True:
            for tag in tags:
                yield MAKERS[tag](draw)

    return distinct(endless(), count)


def text_prompts(count: int, seed: int = 0, words: Sequence[str] = WORDS, scenes: Sequence[str] = SCENES) -> list[Prompt]:
    """Distinct prompts for a text in quotation marks on an object, which `rewards.OCR` scores.

    A text is one or two of `words`, or a word with a number. The metadata contain the text as "text".

    Args:
        count: number of prompts.
        seed: seed of the draw.
        words: words of the texts.
        scenes: objects that bear a text.

    Returns:
        The prompts.

    Raises:
        ConfigError: the templates have fewer prompts.
    """
    require(len(words) > 0 and len(scenes) > 0, "words, scenes", (len(words), len(scenes)), "one or more of each")
    draw = random.Random(seed)

    def endless() -> Iterator[Prompt]:
        while True:
            word, kind = draw.choice(words), draw.randrange(3)
            text = (word, f"{word} {draw.randint(1, 99)}", f"{word} {draw.choice(words)}")[kind]
            yield Prompt(f'{draw.choice(scenes)} that says "{text}"', {"tag": "text", "text": text})

    return distinct(endless(), count)


def image_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Distinct prompts such as "a red fox in the fog on a stone bridge, watercolour", in an order drawn by `seed`.

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

    def one() -> Prompt:
        words = " ".join(draw.choice(choices) for choices in (SUBJECTS, ACTIONS, PLACES))
        return Prompt(f"{words}, {draw.choice(STYLES)}", {"tag": "image"})

    return distinct(iter(one, None), count)


def distinct(source: Iterator[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of `source` with different texts. Raises `ConfigError` if there are fewer."""
    require(count >= 1, "count", count, "1 or more")
    found: dict[str, Prompt] = {}
    repeats = 0
    while len(found) < count and repeats < MAX_REPEATS:
        prompt = next(source)
        repeats = repeats + 1 if prompt.text in found else 0
        found.setdefault(prompt.text, prompt)
    require(len(found) == count, "count", count, f"at most about {len(found)}: there are no more different prompts of this kind")
    return list(found.values())


def _a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def plural(name: str) -> str:
    """The plural of an object's name."""
    if name in PLURALS:
        return PLURALS[name]
    return f"{name}es" if name.endswith(("s", "sh", "ch", "x")) else f"{name}s"


def _single(draw: random.Random) -> Prompt:
    name = draw.choice(OBJECTS)
    return Prompt(f"a photo of {_a(name)}", {"tag": "single_object", "include": [{"class": name, "count": 1}]})


def _two(draw: random.Random) -> Prompt:
    first, second = draw.sample(OBJECTS, 2)
    include = [{"class": first, "count": 1}, {"class": second, "count": 1}]
    return Prompt(f"a photo of {_a(first)} and {_a(second)}", {"tag": "two_object", "include": include})


def _counting(draw: random.Random) -> Prompt:
    name, number = draw.choice(OBJECTS), draw.randint(2, 4)
    include, exclude = [{"class": name, "count": number}], [{"class": name, "count": number + 1}]
    text = f"a photo of {NUMBERS[number]} {plural(name)}"
    return Prompt(text, {"tag": "counting", "include": include, "exclude": exclude})


def _colour(draw: random.Random) -> Prompt:
    name, colour = draw.choice(OBJECTS[1:]), draw.choice(COLOURS)
    include = [{"class": name, "count": 1, "color": colour}]
    return Prompt(f"a photo of {_a(colour)} {name}", {"tag": "colors", "include": include})


def _position(draw: random.Random) -> Prompt:
    (first, second), position = draw.sample(OBJECTS, 2), draw.choice(POSITIONS)
    include = [{"class": second, "count": 1}, {"class": first, "count": 1, "position": [position, 0]}]
    return Prompt(f"a photo of {_a(first)} {position} {_a(second)}", {"tag": "position", "include": include})


def _two_colours(draw: random.Random) -> Prompt:
    names, colours = draw.sample(OBJECTS[1:], 2), draw.sample(COLOURS, 2)
    include = [{"class": name, "count": 1, "color": colour} for name, colour in zip(names, colours, strict=True)]
    text = " and ".join(f"{_a(colour)} {name}" for name, colour in zip(names, colours, strict=True))
    return Prompt(f"a photo of {text}", {"tag": "color_attr", "include": include})


MAKERS: dict[str, Callable[[random.Random], Prompt]] = {
    "single_object": _single,
    "two_object": _two,
    "counting": _counting,
    "colors": _colour,
    "position": _position,
    "color_attr": _two_colours,
}
