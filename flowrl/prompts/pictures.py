"""General prompts: a subject, what it does, where, and in which style."""

import random

from flowrl.prompts.generate import distinct
from flowrl.types import Prompt

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


def picture_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` distinct prompts such as "a red fox in the fog on a stone bridge, watercolour", in an order drawn by `seed`.

    The first n of a longer list are the list of n. Raises `ConfigError` where there are not as many (about 126,000).
    """
    draw = random.Random(seed)

    def one() -> Prompt:
        words = " ".join(draw.choice(choices) for choices in (SUBJECTS, ACTIONS, PLACES))
        return Prompt(f"{words}, {draw.choice(STYLES)}", {"tag": "picture"})

    return distinct(iter(one, None), count)
