"""Prompts from files: a prompt per line, JSON lines with metadata (such as GenEval's), or a Hugging
Face dataset.

Datasets (`hf(name=...)`, folders, .parquet, .arrow, .csv and .json files) need the extra
`datasets`.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from flowrl.core.errors import ConfigError, require
from flowrl.core.prompt import Prompt
from flowrl.io import require_new_file, write_bytes
from flowrl.parts.geneval import request_of
from flowrl.parts.prompt_lists import compositional_prompts, image_prompts, text_prompts
from flowrl.parts.specs import parse_spec
from flowrl.reading import parse_json, read_text

T = TypeVar("T")
SHOWN = 5
"""How many lines a message lists."""
GENERATORS: dict[str, Callable[[int], list[Prompt]]] = {
    "compositional": compositional_prompts,
    "text": text_prompts,
    "images": image_prompts,
}
DATASET = "hf("
DATASET_OPTIONS = ("name", "split", "column")
DATASET_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}
"""Suffixes of the files that are read as datasets by their path alone."""
TEXT_COLUMNS = ("prompt", "text", "caption")
"""Unless a column is named, the first of these that a dataset has contains the prompts."""


@dataclass(frozen=True)
class PromptFile:
    """The content of a file of prompts.

    Args:
        prompts: its prompts.
        remarks: what is allowed but may be a mistake (blank lines, repeated prompts), one sentence
            each; lines, or rows of a dataset, are counted from 1.
    """

    prompts: tuple[Prompt, ...]
    remarks: tuple[str, ...] = ()


def _listed(texts: Sequence[str], separator: str) -> str:
    """The first `SHOWN` texts, and how many more there are."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return separator.join(texts[:SHOWN]) + more


def prompts_from(source: str) -> list[Prompt]:
    """The prompts in the file `source`, or those of a generator, as in ``text[0:500]``: the first
    500 of its list.

    ``text[500:600]`` are the next 100, all different from the first 500, for example for
    evaluation. A generator's list is always the same (seed 0). Raises `ConfigError` for an unknown
    generator or an empty slice, and as `read_prompts` does for a file.
    """
    match = re.fullmatch(r"([\w-]+)\[(\d+):(\d+)\]", source)
    if match is None or Path(source).exists():
        return read_prompts(Path(source))
    name, start, end = match[1], int(match[2]), int(match[3])
    known = f"a file, or [START:END] with START below END of {', '.join(GENERATORS)}"
    require(name in GENERATORS and start < end, "prompts", source, known)
    return GENERATORS[name](end)[start:]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `load_prompts`, with a warning about repeated ones."""
    content = load_prompts(path)
    for remark in content.remarks:
        if "repeats" in remark:
            warnings.warn(remark, stacklevel=2)
    return list(content.prompts)


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts with their metadata as JSON lines that `load_prompts` reads.

    Args:
        path: the file, which must be new or have the same content.
        prompts: the prompts.

    Raises:
        ConfigError: the file cannot be written, or exists with different content.
    """
    text = "".join(
        json.dumps({**prompt.metadata, "prompt": prompt.text}, ensure_ascii=False) + "\n"
        for prompt in prompts
    )
    require_new_file(path, lambda data: data == text.encode(), "file")
    write_bytes(path, text.encode())


def load_prompts(path: Path) -> PromptFile:
    """The prompts of a text file (one per line; lines that start with # are comments), of a .jsonl
    file, or of a dataset.

    JSON lines are objects with an entry "prompt". Their other entries are the prompt's metadata; an
    entry "include" among them must be a request in GenEval's form (`flowrl.parts.geneval`). A
    dataset is ``hf(name=..., split=..., column=...)``, `name` being a name on the Hub, a folder
    (written by `save_to_disk`, or with data files) or a file. `split` defaults to train, or the
    only split; `column` to the first of `TEXT_COLUMNS`. Its other columns become metadata if they
    contain text, numbers, truth values, or lists and objects of these. Raises `ConfigError` that
    names the file and every bad line (the first five).
    """
    if str(path).startswith(DATASET) or path.suffix in DATASET_FORMATS or path.is_dir():
        return _collect(path, _dataset_prompts(str(path)), lambda prompt: prompt, "row")
    lines = read_text(path).removesuffix("\n").split("\n")  # splitlines would also cut at U+2028
    return _collect(path, lines, _from_json if path.suffix == ".jsonl" else _from_text, "line")


def _collect(
    path: Path, rows: Iterable[T], parse: Callable[[T], Prompt | None], unit: str
) -> PromptFile:
    """The prompts of the rows; a row without a text is blank. Raises `ConfigError` that lists the
    bad rows.
    """
    prompts, first = list[Prompt](), dict[str, int]()
    blank, repeated, faults = list[str](), list[str](), list[str]()
    for number, row in enumerate(rows, 1):
        try:
            prompt = parse(row)
            if prompt is not None and "include" in prompt.metadata:
                request_of(prompt.metadata)
        except ConfigError as error:
            faults.append(f"{unit} {number} {error}")
            continue
        if prompt is None:
            continue
        if not prompt.text:
            blank.append(str(number))
            continue
        prompts.append(prompt)
        key = json.dumps([prompt.text, dict(prompt.metadata)], sort_keys=True)
        if first.setdefault(key, number) != number:
            repeated.append(f"{unit} {number} repeats {unit} {first[key]}")
    if faults:
        raise ConfigError(f"prompts: {path}, {_listed(faults, '; ')}")
    if not prompts:
        raise ConfigError(f"prompts: {path} contains no prompt")
    remarks = [f"{path}: blank {unit}s {_listed(blank, ', ')}"] * bool(blank)
    if repeated:
        listed = _listed(repeated, "; ")
        remarks.append(f"{path}: {listed}; repeated prompts are drawn more often")
    return PromptFile(tuple(prompts), tuple(remarks))


def _from_text(line: str) -> Prompt | None:
    """The prompt in a line; None for a comment."""
    return None if line.strip().startswith("#") else Prompt(line.strip())


def _from_json(line: str) -> Prompt:
    """The prompt in a line of JSON."""
    if not line.strip():
        return Prompt("")
    try:
        values = parse_json(line, finite=True)
        text = values.pop("prompt")
        if text.strip():
            return Prompt(text, values)
        raise ValueError("the prompt is empty")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f'is no JSON object with an entry "prompt" ({error})') from error


def _dataset_prompts(spec: str) -> list[Prompt]:
    """The prompt in every row of ``hf(...)`` or of a path; an empty cell is a prompt without a
    text.
    """
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        message = (
            f"prompts: {spec} needs the package datasets; install it with: pip install -e"
            " '.[datasets]'"
        )
        raise ConfigError(message) from error
    options = parse_spec(spec, "prompts").options if spec.startswith(DATASET) else {"name": spec}
    name, split, column = (str(options.get(key, "")) for key in DATASET_OPTIONS)
    path = Path(name or ":")
    # datasets takes a bare name for a reader of the current folder's files; version 4.0 unpickles
    # them for "pandas".
    known = (path.exists() or "/" in name) and options.keys() <= set(DATASET_OPTIONS)
    allowed = "hf(name=OWNER/NAME, split=SPLIT, column=COLUMN), or a path instead of OWNER/NAME"
    require(known, "prompts", spec, allowed)
    try:
        if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            splits: Any = datasets.load_from_disk(name)
        elif path.is_file():
            splits = datasets.load_dataset(
                (DATASET_FORMATS | {".jsonl": "json"})[path.suffix], data_files=name
            )
        else:
            splits = datasets.load_dataset(str(path.resolve()) if path.exists() else name)
        if not isinstance(splits, dict):
            splits = {str(splits.split or "train"): splits}
        split = split or (
            "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else ""
        )
        require(
            split in splits,
            "split of prompts",
            split,
            f"one of {', '.join(map(str, splits))}, as in hf(name={name}, split=SPLIT)",
        )
        table = splits[split]
        column = column or next(
            (known for known in TEXT_COLUMNS if known in table.column_names), ""
        )
        texts = [
            key
            for key, feature in table.features.items()
            if getattr(feature, "dtype", "") in ("string", "large_string")
        ]
        require(
            column in texts,
            "column of prompts",
            column,
            f"one with text ({', '.join(texts)}), as in hf(name={name}, column=COLUMN)",
        )
        kept = [
            key for key, feature in table.features.items() if key == column or _is_plain(feature)
        ]
        rows = list(table.select_columns(kept))  # the library detects damaged files only here
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"prompts: {spec} cannot be read as a dataset ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}); is the name right? The command line is"
            " offline unless HF_HUB_OFFLINE=0 is set"
        ) from error
    return [Prompt((row.pop(column) or "").strip(), _without_none(row)) for row in rows]


def _is_plain(feature: Any) -> bool:
    """Whether a column's values are text, numbers, truth values, or lists and objects of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    kind = type(feature).__name__
    if kind in ("List", "LargeList"):
        return _is_plain(feature.feature)
    return kind == "Value" and bool(
        re.fullmatch(r"(large_)?string|bool|null|u?int\d+|float\d+", feature.dtype)
    )


def _without_none(value: Any) -> Any:
    """Objects without their empty entries: in a table every row has the entries of all rows."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
