"""Prompts from files: a line each, or JSON lines with metadata, GenEval's among them."""

import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, require
from flowrl.prompts.generate import compositional_prompts, picture_prompts, text_prompts
from flowrl.prompts.geneval import request_of
from flowrl.prompts.tables import is_dataset, read_rows
from flowrl.types import Prompt

SHOWN = 5
"""How many lines a message names."""


@dataclass(frozen=True)
class PromptFile:
    """What a file holds: its prompts with their line numbers, the blank lines, and lines that repeat an earlier one.

    Of a dataset the lines are its rows, counted from 1 (`unit`).
    """

    path: Path
    prompts: tuple[Prompt, ...]
    lines: tuple[int, ...]
    blank: tuple[int, ...]
    repeated: tuple[tuple[int, int], ...]
    """(line, the line that it repeats)."""
    unit: str = "line"

    def remarks(self) -> list[str]:
        """What is allowed but may be a mistake, a sentence each."""
        found = []
        if self.blank:
            found.append(f"{self.path}: blank {_lines(self.blank, self.unit)}")
        if self.repeated:
            told = "; ".join(f"{self.unit} {line} repeats {self.unit} {first}" for line, first in self.repeated[:SHOWN])
            found.append(f"{self.path}: {told}{_more(self.repeated)}; repeated prompts are drawn more often")
        return found


def load_prompts(path: Path) -> PromptFile:
    """The prompts of a text file, a line each (lines that start with # are left out), of a .jsonl file, or of a dataset.

    JSON lines are objects with an entry "prompt"; their other entries are the prompt's metadata, and where these have an entry
    "include" it must be a request as GenEval writes them (`flowrl.prompts.geneval`). Datasets are ``hf:NAME[:SPLIT[:COLUMN]]``,
    folders, .parquet, .arrow, .csv and .json files (`flowrl.prompts.tables`). Raises `ConfigError` that names the file and
    every bad line (the first five).
    """
    if is_dataset(str(path)):
        return _from_dataset(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")  # splitlines would also cut at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: {path} cannot be read: {error}") from error
    read = _from_json if path.suffix == ".jsonl" else _from_text
    return _collect(path, ((line, lambda line=line: read(line)) for line in lines), "line", "; write one a line")


def _from_dataset(path: Path) -> PromptFile:
    """The rows of a dataset; those with an empty text are left out, as blank lines are."""
    rows = read_rows(str(path))
    return _collect(path, ((text, lambda text=text, data=data: _checked(text.strip(), data)) for text, data in rows), "row", "")


def _collect(path: Path, lines: Iterable[tuple[str, Callable[[], Prompt | None]]], unit: str, advice: str) -> PromptFile:
    """The prompts of lines: (text, how to make its prompt; None: a comment). Raises what is wrong with any of them."""
    prompts: dict[int, Prompt] = {}
    blank, faults = [], []
    for number, (text, make) in enumerate(lines, 1):
        if not text.strip():
            blank.append(number)
            continue
        try:
            prompt = make()
        except ConfigError as error:
            faults.append(f"{unit} {number} {error}")
        else:
            if prompt is not None:
                prompts[number] = prompt
    if faults:
        raise ConfigError(f"prompts: {path}, {'; '.join(faults[:SHOWN])}{_more(faults)}")
    if not prompts:
        raise ConfigError(f"prompts: {path} holds no prompt{advice}")
    return PromptFile(path, tuple(prompts.values()), tuple(prompts), tuple(blank), _repeated(prompts), unit)


def _checked(text: str, metadata: dict[str, Any]) -> Prompt:
    """The prompt; its request, where its metadata hold one, must be one that GenEval's rules know."""
    if "include" in metadata:
        request_of(metadata)
    return Prompt(text, metadata)


def _from_text(line: str) -> Prompt | None:
    return None if line.strip().startswith("#") else Prompt(line.strip())


def _repeated(prompts: dict[int, Prompt]) -> tuple[tuple[int, int], ...]:
    """Lines whose prompt, metadata included, is that of an earlier line, with that line."""
    first: dict[str, int] = {}
    repeated = []
    for number, prompt in prompts.items():
        earlier = first.setdefault(json.dumps([prompt.text, dict(prompt.metadata)], sort_keys=True), number)
        if earlier != number:
            repeated.append((number, earlier))
    return tuple(repeated)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `load_prompts`; warns of repeated ones."""
    found = load_prompts(path)
    if found.repeated:
        warnings.warn(found.remarks()[-1], stacklevel=2)
    return list(found.prompts)


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts with their metadata as JSON lines that `load_prompts` reads. Raises `ConfigError` where it cannot."""
    text = "".join(json.dumps({**prompt.metadata, "prompt": prompt.text}, ensure_ascii=False) + "\n" for prompt in prompts)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompts: {path} cannot be written: {error}") from error


def _from_json(line: str) -> Prompt:
    try:
        values = json.loads(line, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ConfigError(f'is no JSON object with an entry "prompt" ({error.msg} at column {error.colno})') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'is no JSON object with an entry "prompt" ({error})') from error
    text = values.pop("prompt", None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(text, str) or not text.strip():
        raise ConfigError('is no JSON object with an entry "prompt"')
    return _checked(text, values)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _lines(numbers: tuple[int, ...], unit: str) -> str:
    word = unit if len(numbers) == 1 else f"{unit}s"
    return f"{word} {', '.join(map(str, numbers[:SHOWN]))}{_more(numbers)}"


def _more(things: list[str] | tuple[object, ...]) -> str:
    return f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""


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
