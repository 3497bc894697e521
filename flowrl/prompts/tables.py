"""Prompts from Hugging Face datasets: on the Hub by name, or local folders and files. Needs the extra `datasets`."""

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}
"""Endings of the files that are read as datasets, besides those named with ``hf:``."""
COLUMNS = ("prompt", "text", "caption")
"""Where the prompts are, the first of these that there is, unless a column is named."""
PREFIX = "hf:"


def is_dataset(spec: str) -> bool:
    """Whether `spec` names a dataset: ``hf:...``, a folder, or a file with one of the endings `FORMATS`."""
    return spec.startswith(PREFIX) or Path(spec).suffix in FORMATS or Path(spec).is_dir()


def read_rows(spec: str) -> list[tuple[str, dict[str, Any]]]:
    """Text and metadata of every row of ``[hf:]NAME[:SPLIT[:COLUMN]]``.

    NAME is a dataset on the Hub, a folder (written by `save_to_disk`, or with data files) or a file (Parquet, Arrow, CSV, JSON
    and JSON lines). Without SPLIT: train, or the only split that there is; without COLUMN the first of `COLUMNS`. The other
    columns are metadata where they hold text, numbers or truth values, or lists and objects of them; pictures are not read.
    Raises `ConfigError` where the package is missing, or the dataset, split or column.
    """
    return [(text, json.loads(metadata)) for text, metadata in _rows(spec)]


@lru_cache(maxsize=8)
def _rows(spec: str) -> tuple[tuple[str, str], ...]:
    """Metadata as JSON, so that what is kept cannot be changed. An empty cell is an empty text."""
    name, split, column = _split(spec)
    found = _load(spec, name, split)
    names = found.column_names
    column = column or next((known for known in COLUMNS if known in names), "")
    if column not in names:
        wanted = f"no column {column!r}" if column else f"no column {', '.join(COLUMNS)}"
        raise ConfigError(
            f"prompts: {spec} has {wanted}; it has {', '.join(names)}: choose one as in {PREFIX}{name}:train:COLUMN"
        )
    if not _is_text(found.features[column]):
        raise ConfigError(f"prompts: {spec}: column {column!r} holds {found.features[column]}; allowed: text")
    kept = [other for other in names if other != column and _plain(found.features[other])]
    rows = found.select_columns([column, *kept])
    return tuple((row.pop(column) or "", json.dumps(_without_none(row))) for row in _each(spec, rows))


def _split(spec: str) -> tuple[str, str | None, str | None]:
    """Name, split and column; a local path may hold colons of its own."""
    text = spec.removeprefix(PREFIX)
    if text and Path(text).exists():
        return text, None, None
    name, *rest = text.split(":")
    if not name or len(rest) > 2:
        raise ConfigError(f"prompts = {spec!r} is not allowed: {PREFIX}NAME[:SPLIT[:COLUMN]]")
    return name, (rest[0] or None) if rest else None, (rest[1] or None) if len(rest) > 1 else None


def _load(spec: str, name: str, split: str | None) -> Any:
    """The dataset, one split of it."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        message = f"prompts: {spec} needs the package datasets; install it with: pip install -e '.[datasets]'"
        raise ConfigError(message) from error
    path = Path(name)
    try:
        if path.is_dir() and any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
        elif path.is_file():
            kind = "json" if path.suffix == ".jsonl" else FORMATS.get(path.suffix)
            if kind is None:
                raise ConfigError(f"prompts: {spec}: the ending {path.suffix!r} is not allowed: .jsonl, {', '.join(FORMATS)}")
            found = datasets.load_dataset(kind, data_files=name)
        else:
            found = datasets.load_dataset(name)
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds for what is not there or cannot be read
        first = (str(error).strip().splitlines() or [""])[0][:200]
        hint = "" if path.exists() else "; is the name right? The command line is offline unless HF_HUB_OFFLINE=0 is set"
        raise ConfigError(f"prompts: {spec} cannot be read as a dataset ({type(error).__name__}: {first}){hint}") from error
    if not isinstance(found, dict):
        if split is not None and str(found.split or "train") != split:
            raise ConfigError(f"prompts: {spec} has no split {split!r}; it is one table: leave the split out, or call it train")
        return found
    chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if chosen not in found:
        wanted = f"no split {split!r}" if split else "several splits"
        raise ConfigError(f"prompts: {spec} has {wanted}; it has {', '.join(map(str, found))}")
    return found[chosen]


def _each(spec: str, rows: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # damaged files show only now
        raise ConfigError(f"prompts: {spec} cannot be read to its end: {type(error).__name__}: {str(error)[:200]}") from error


def _is_text(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and getattr(feature, "dtype", "") in ("string", "large_string")


def _plain(feature: Any) -> bool:
    """Whether a column's values are text, numbers, truth values, or lists and objects of them."""
    if isinstance(feature, dict):
        return all(map(_plain, feature.values()))
    if isinstance(feature, list):
        return all(map(_plain, feature))
    kind = getattr(feature, "dtype", "")
    if type(feature).__name__ == "Value":
        return str(kind).rstrip("0123456789") in ("string", "large_string", "bool", "int", "uint", "float", "null")
    return type(feature).__name__ in ("List", "LargeList", "Sequence") and _plain(feature.feature)


def _without_none(value: Any) -> Any:
    """Objects without their empty entries: a table has every entry of any row in all rows."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
