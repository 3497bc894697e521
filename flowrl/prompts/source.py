"""Prompts by name: a file, or a slice of a generator's endless list."""

import re
from collections.abc import Callable
from pathlib import Path

from flowrl.errors import ConfigError, require
from flowrl.prompts.files import read_prompts
from flowrl.prompts.generate import compositional_prompts, text_prompts
from flowrl.prompts.pictures import picture_prompts
from flowrl.types import Prompt

GENERATORS: dict[str, Callable[[int], list[Prompt]]] = {
    "compositional": compositional_prompts,
    "text": text_prompts,
    "pictures": picture_prompts,
}


def prompts_from(source: str) -> list[Prompt]:
    """The prompts in the file `source`, or those of a generator, as in ``text[0:500]``: the first 500 of its list.

    ``text[500:600]`` are the next 100, different from them: held-out prompts. A list is always the same (seed 0 of the
    generator). Raises `ConfigError` for an unknown generator or an empty slice, and what `read_prompts` raises for a file.
    """
    match = re.fullmatch(r"([\w-]+)\[(\d+):(\d+)\]", source)
    if match is None or Path(source).exists():
        return read_prompts(Path(source))
    name, start, end = match[1], int(match[2]), int(match[3])
    if name not in GENERATORS:
        raise ConfigError(f"prompts: unknown generator {name!r} in {source}; allowed: {', '.join(GENERATORS)}, or a file")
    require(start < end, "prompts", source, "a slice [START:END] with START below END")
    return GENERATORS[name](end)[start:]
