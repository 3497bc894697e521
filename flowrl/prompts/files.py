"""Prompts from files: a prompt per line, JSON lines with metadata (such as GenEval's), or a Hugging Face dataset.

Datasets (`hf:NAME[:SPLIT[:COLUMN]]`, folders, .parquet, .arrow, .csv and .json files) need the extra `datasets`.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, require
from flowrl.io import require_new_file, write_bytes
from flowrl.prompt import Prompt
from flowrl.prompts.generate import compositional_prompts, image_prompts, text_prompts
from flowrl.prompts.geneval import request_of
from flowrl.reading import parse_json, read_text

SHOWN = 5
"""How many lines a message lists."""
GENERATORS: dict[str, Callable[[int], list[Prompt]]] = {
    "compositional": compositional_prompts,
    "text": text_prompts,
    "images": image_prompts,
}
DATASET_PREFIX = "hf:"
DATASET_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}
"""Suffixes of the files that are read as datasets without the prefix."""
TEXT_COLUMNS = ("prompt", "text", "caption")
"""Unless a column is named, the first of these that a dataset has contains the prompts."""


@dataclass(frozen=True)
class PromptFile:
    """The content of a file of prompts. For a dataset, lines are its rows, counted from 1.

    Args:
        path: the file.
        prompts: its prompts.
        lines: line number of every prompt.
        blank: numbers of the blank lines.
        repeated: pairs (line, earlier line with the same prompt).
        unit: "line" or "row", for messages.
    """

    path: Path
    prompts: tuple[Prompt, ...]
    lines: tuple[int, ...]
    blank: tuple[int, ...]
    repeated: tuple[tuple[int, int], ...]
    unit: str = "line"

    def remarks(self) -> list[str]:
        """Findings that are allowed but may be mistakes, one sentence each."""
        found = []
        if self.blank:
            numbers = ", ".join(map(str, self.blank[:SHOWN]))
            found.append(f"{self.path}: blank {self.unit}{'s' * (len(self.blank) > 1)} {numbers}{_more(self.blank)}")
        if self.repeated:
            pairs = "; ".join(f"{self.unit} {line} repeats {self.unit} {first}" for line, first in self.repeated[:SHOWN])
            found.append(f"{self.path}: {pairs}{_more(self.repeated)}; repeated prompts are drawn more often")
        return found


def prompts_from(source: str) -> list[Prompt]:
    """The prompts in the file `source`, or those of a generator, as in ``text[0:500]``: the first 500 of its list.

    ``text[500:600]`` are the next 100, all different from the first 500, for example for evaluation. A generator's list is always
    the same (seed 0). Raises `ConfigError` for an unknown generator or an empty slice, and as `read_prompts` does for a file.
    """
    match = re.fullmatch(r"([\w-]+)\[(\d+):(\d+)\]", source)
    if match is None or Path(source).exists():
        return read_prompts(Path(source))
    name, start, end = match[1], int(match[2]), int(match[3])
    if name not in GENERATORS:
        raise ConfigError(f"prompts: unknown generator {name!r} in {source}; allowed: {', '.join(GENERATORS)}, or a file")
    require(start < end, "prompts", source, "a slice [START:END] with START below END")
    return GENERATORS[name](end)[start:]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `load_prompts`, with a warning about repeated ones."""
    found = load_prompts(path)
    if found.repeated:
        warnings.warn(found.remarks()[-1], stacklevel=2)
    return list(found.prompts)


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts with their metadata as JSON lines that `load_prompts` reads.

    Args:
        path: the file, which must be new or have the same content.
        prompts: the prompts.

    Raises:
        ConfigError: the file cannot be written, or exists with different content.
    """
    text = "".join(json.dumps({**prompt.metadata, "prompt": prompt.text}, ensure_ascii=False) + "\n" for prompt in prompts)
    require_new_file(path, lambda data: data == text.encode(), "file")
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise ConfigError(f"prompts: {path} cannot be written: {error}") from error


def load_prompts(path: Path) -> PromptFile:
    """The prompts of a text file (one per line; lines that start with # are comments), of a .jsonl file, or of a dataset.

    JSON lines are objects with an entry "prompt". Their other entries are the prompt's metadata; an entry "include" among them
    must be a request in GenEval's form (`flowrl.prompts.geneval`). A dataset is NAME[:SPLIT[:COLUMN]], NAME being a name on the
    Hub, a folder (written by `save_to_disk`, or with data files) or a file. SPLIT defaults to train, or the only split; COLUMN
    to the first of `TEXT_COLUMNS`. Its other columns become metadata if they contain text, numbers, truth values, or lists and
    objects of these. Raises `ConfigError` that names the file and every bad line (the first five).
    """
    source = str(path)
    if source.startswith(DATASET_PREFIX) or path.suffix in DATASET_FORMATS or path.is_dir():
        rows = ((text, partial(_prompt, text.strip(), json.loads(metadata))) for text, metadata in _dataset_rows(source))
        return _collect(path, rows, "row")
    lines = read_text(path).removesuffix("\n").split("\n")  # splitlines would also cut at U+2028
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    return _collect(path, ((line, partial(parse, line)) for line in lines), "line")


def _collect(path: Path, lines: Iterable[tuple[str, Callable[[], Prompt | None]]], unit: str) -> PromptFile:
    """The prompts of lines (text, parser of its prompt; None is a comment). Raises `ConfigError` that lists the bad lines."""
    prompts: dict[int, Prompt] = {}
    blank, faults = [], []
    for number, (text, parse) in enumerate(lines, 1):
        if not text.strip():
            blank.append(number)
            continue
        try:
            prompt = parse()
        except ConfigError as error:
            faults.append(f"{unit} {number} {error}")
        else:
            if prompt is not None:
                prompts[number] = prompt
    if faults:
        raise ConfigError(f"prompts: {path}, {'; '.join(faults[:SHOWN])}{_more(faults)}")
    if not prompts:
        raise ConfigError(f"prompts: {path} contains no prompt{'; write one per line' if unit == 'line' else ''}")
    return PromptFile(path, tuple(prompts.values()), tuple(prompts), tuple(blank), _repeated(prompts), unit)


def _repeated(prompts: dict[int, Prompt]) -> tuple[tuple[int, int], ...]:
    """Lines whose prompt, metadata included, equals that of an earlier line, with that line."""
    first: dict[str, int] = {}
    pairs = []
    for number, prompt in prompts.items():
        earlier = first.setdefault(json.dumps([prompt.text, dict(prompt.metadata)], sort_keys=True), number)
        if earlier != number:
            pairs.append((number, earlier))
    return tuple(pairs)


def _more(things: list[str] | tuple[object, ...]) -> str:
    return f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""


def _prompt(text: str, metadata: dict[str, Any]) -> Prompt:
    """The prompt; a request in its metadata must follow GenEval's rules."""
    if "include" in metadata:
        request_of(metadata)
    return Prompt(text, metadata)


def _from_text(line: str) -> Prompt | None:
    return None if line.strip().startswith("#") else Prompt(line.strip())


def _from_json(line: str) -> Prompt:
    try:
        values = parse_json(line, finite=True)
    except json.JSONDecodeError as error:
        raise ConfigError(f'is no JSON object with an entry "prompt" ({error.msg} at column {error.colno})') from error
    except ValueError as error:
        raise ConfigError(f'is no JSON object with an entry "prompt" ({error})') from error
    text = values.pop("prompt", None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(text, str) or not text.strip():
        raise ConfigError('is no JSON object with an entry "prompt"')
    return _prompt(text, values)


@lru_cache(maxsize=8)
def _dataset_rows(spec: str) -> tuple[tuple[str, str], ...]:
    """Text and metadata of every row; metadata as JSON, so that cached rows cannot change. An empty cell is an empty text."""
    name, split, column = _parse_dataset_spec(spec)
    table = _load_dataset(spec, name, split)
    columns = table.column_names
    column = column or next((known for known in TEXT_COLUMNS if known in columns), "")
    if column not in columns:
        raise ConfigError(
            f"prompts: {spec} has no column {repr(column) if column else ', '.join(TEXT_COLUMNS)}; it has {', '.join(columns)}: "
            f"choose one as in {DATASET_PREFIX}{name}:train:COLUMN"
        )
    feature = table.features[column]
    if type(feature).__name__ != "Value" or feature.dtype not in ("string", "large_string"):
        raise ConfigError(f"prompts: {spec}: column {column!r} contains {feature}; allowed: text")
    kept = [other for other in columns if other != column and _is_plain(table.features[other])]
    try:
        rows = list(table.select_columns([column, *kept]))
    except Exception as error:  # the library detects damaged files only here
        raise ConfigError(f"prompts: {spec} cannot be read to its end: {type(error).__name__}: {str(error)[:200]}") from error
    return tuple((row.pop(column) or "", json.dumps(_without_none(row))) for row in rows)


def _parse_dataset_spec(spec: str) -> tuple[str, str, str]:
    """Name, split and column, "" if left out; a local path may contain colons."""
    text = spec.removeprefix(DATASET_PREFIX)
    if text and Path(text).exists():
        return text, "", ""
    name, *rest = text.split(":")
    if not name or len(rest) > 2:
        raise ConfigError(f"prompts = {spec!r} is not allowed; allowed: {DATASET_PREFIX}NAME[:SPLIT[:COLUMN]]")
    split, column = (*rest, "", "")[:2]
    return name, split, column


def _load_dataset(spec: str, name: str, split: str) -> Any:
    """One split of the dataset."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        message = f"prompts: {spec} needs the package datasets; install it with: pip install -e '.[datasets]'"
        raise ConfigError(message) from error
    path = Path(name)
    file_format = "json" if path.suffix == ".jsonl" else DATASET_FORMATS.get(path.suffix, "")
    if path.is_file() and not file_format:
        suffixes = ", ".join((".jsonl", *DATASET_FORMATS))
        raise ConfigError(f"prompts: {spec}: suffix {path.suffix!r} is not allowed; allowed: {suffixes}")
    # datasets takes a bare name for a reader of the current folder's files; version 4.0 unpickles
    # them for "pandas".
    known, allowed = path.exists() or "/" in name, f"{DATASET_PREFIX}OWNER/NAME, or a path"
    require(known, "prompts", spec, allowed)
    try:
        if path.is_dir() and any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
        elif path.is_file():
            found = datasets.load_dataset(file_format, data_files=name)
        else:
            found = datasets.load_dataset(str(path.resolve()) if path.exists() else name)
    except Exception as error:  # the library raises many kinds for files that are missing or damaged
        first = (str(error).strip().splitlines() or [""])[0][:200]
        hint = "" if path.exists() else "; is the name right? The command line is offline unless HF_HUB_OFFLINE=0 is set"
        raise ConfigError(f"prompts: {spec} cannot be read as a dataset ({type(error).__name__}: {first}){hint}") from error
    if not isinstance(found, dict):
        if split and str(found.split or "train") != split:
            raise ConfigError(f"prompts: {spec} has no split {split!r}; it is one table: leave the split out, or call it train")
        return found
    chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
    if chosen not in found:
        reason = f"no split {split!r}" if split else "several splits"
        raise ConfigError(f"prompts: {spec} has {reason}; it has {', '.join(map(str, found))}")
    return found[chosen]


def _is_plain(feature: Any) -> bool:
    """Whether a column's values are text, numbers, truth values, or lists and objects of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list):
        return all(map(_is_plain, feature))
    if type(feature).__name__ == "Value":
        return str(feature.dtype).rstrip("0123456789") in ("string", "large_string", "bool", "int", "uint", "float", "null")
    return type(feature).__name__ in ("List", "LargeList", "Sequence") and _is_plain(feature.feature)


def _without_none(value: Any) -> Any:
    """Objects without their empty entries: in a table every row has the entries of all rows."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
