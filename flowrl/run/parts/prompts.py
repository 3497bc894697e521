"""Prompts: a prompt per line, JSON lines or tables with metadata (such as GenEval's) or images, a
folder of images, a Hugging Face dataset or a generator's list.
"""

import copy
import csv
import difflib
import hashlib
import io
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.core.prompt import Prompt, ReferenceImage, source_weights
from flowrl.rewards.geneval_requests import Clause, Request, request_of
from flowrl.run.io import cache_folder, require_new_file, write_bytes
from flowrl.run.parts.prompt_lists import compositional_prompts, image_prompts, text_prompts
from flowrl.run.parts.prompt_sources import Source
from flowrl.run.parts.specs import parse_spec
from flowrl.run.reading import parse_json, read_bytes, read_input, read_text

__all__ = [
    "Clause",
    "Request",
    "compositional_prompts",
    "image_prompts",
    "prompts_digest",
    "read_prompts",
    "request_of",
    "text_prompts",
    "write_prompts",
]

FEWEST = 16
"""Different prompts of which a run holds some out of training."""
SHOWN = 5
"""How many lines a message lists."""
GENERATORS: dict[str, Callable[..., list[Prompt]]] = {
    "compositional": compositional_prompts,
    "text": text_prompts,
    "images": image_prompts,
}
DATASET_OPTIONS = ("name", "split", "column", "image", "metadata")
DATASET_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""By suffix; other files are JSON."""
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
NO_LINES = (".json", ".yaml", ".yml", ".parquet", ".arrow", ".toml", ".xml")
"""Suffixes of files that are not read line by line."""
LINES = (
    "a text file with one prompt per line, a .jsonl file with one object per line, a .csv or .tsv"
    " file with a header, a folder of images with a .txt file each"
)
FIELDS = ("prompt", "text", "tag", "include", "exclude", "image", "weight", "vqa_list")
"""Fields of a prompt that flowrl and its rewards read (`ocr`, `geneval`, `soft-tifa`)."""
SOURCE = "prompt_source"
"""The field of `Prompt.source` in stored prompts."""
_SIZE = "--resolution, --width and --sizes are those of all prompts"
REFUSED = {
    "negative_prompt": "--negative-prompt is that of all prompts",
    "seed": "--seed is that of the run",
    **dict.fromkeys(("resolution", "width", "height"), _SIZE),
    "image": "hf(name=..., image=COLUMN) reads a column of images",
}
"""Fields of metadata whose names promise what flowrl does not do, with what does it."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of the images of a folder."""
TEXT_COLUMNS = ("prompt", "text", "caption")
"""Unless a column is named, the first of these that a file or dataset has contains the prompts."""


def read_prompts(source: Path | str) -> list[Prompt]:
    r"""The prompts of a text file (one per line; a line that starts with "# " is a comment, one
    that starts with ``\#`` a prompt that starts with #), of JSON lines (.jsonl, .ndjson), of a
    table (.csv, .tsv), of text on standard input (`-`), of a folder, of a dataset, or of a
    generator. Warnings name repeated prompts, which are drawn more often, and fields that flowrl
    does not read. Blank lines are left out.

    JSON lines are objects; the prompt is in the first of the fields `TEXT_COLUMNS` that the file
    has. A field "image" is the file to which the prompt refers, or a list of files, relative to the
    folder of the lines; "weight" is `Prompt.weight`. The other fields are the prompt's metadata; a
    field "include" among them must be a request in GenEval's form
    (`flowrl.rewards.geneval_requests`). Those in `REFUSED` must be empty.

    A table has a header, whose names are as the fields of JSON lines, in which empty cells are left
    out. The other cells become metadata as text.

    A folder has images, each with its prompt in a .txt file of the same name; or a file
    metadata.jsonl, whose lines have the image's "file_name" and the prompt.

    A dataset is ``hf(name=..., split=..., column=..., image=..., metadata=[...])``, `name` being a
    name on the Hub, a folder (written by `save_to_disk`, or with data files) or a file. `split`
    defaults to train, or the only split; `column` to the first of `TEXT_COLUMNS`. `image` is the
    column of the images to which the prompts refer. `metadata` names the columns that become
    metadata and the weight; by default all that contain text, numbers, truth values, or lists and
    objects of these.

    ``text[0:500]`` are the first 500 prompts of a generator's list, which is always the same (seed
    0); ``text[500:600]`` are the next 100, all different, for example for evaluation.

    Args:
        source: the file, the dataset or the part of a generator's list.

    Returns:
        The prompts.

    Raises:
        ConfigError: the file cannot be read; the message names it and every bad line (the first
            five). Or the dataset, the generator or its slice is not allowed, or a field of
            `REFUSED` is not empty.
    """
    generated = re.fullmatch(r"([\w-]+)\[(\d+):(\d+)\]", str(source))
    if generated and not Path(source).exists():
        name, start, end = generated[1], int(generated[2]), int(generated[3])
        known = f"a file, or [START:END] with START below END of {', '.join(GENERATORS)}"
        require(name in GENERATORS and start < end, "prompts", source, known)
        return GENERATORS[name](end)[start:]
    given = _rows(source)
    prompts, first = list[Prompt](), dict[str, int]()
    repeated, faults = list[str](), list[str]()
    unit = given.unit
    for number, row in enumerate(given.rows, given.first):
        try:
            prompt = given.parse(row)
            if "include" in prompt.metadata:
                request_of(prompt.metadata)
        except ConfigError as error:
            faults.append(f"{unit} {number} {error}")
            continue
        if prompt.text:
            prompts.append(prompt)
            key = json.dumps([prompt.key, dict(prompt.metadata)], sort_keys=True)
            if first.setdefault(key, number) != number:
                repeated.append(f"{unit} {number} repeats {unit} {first[key]}")
    if faults:
        raise ConfigError(f"prompts: {source}, {_listed(faults)}")
    if not prompts:
        raise ConfigError(f"prompts: {source} contains no prompt")
    _require_possible(source, prompts)
    for remark in filter(None, (_listed(repeated), _with_tabs(given), _unread(prompts))):
        warnings.warn(f"{source}: {remark}", stacklevel=2)
    return prompts


@dataclass(frozen=True)
class _Rows:
    """The rows of a file or a dataset, what they are called, and what makes a prompt of one."""

    rows: Sequence[Any]
    unit: str
    parse: Callable[[Any], Prompt]
    first: int = 1
    """The number of the first row."""


def _rows(source: Path | str) -> _Rows:
    if str(source).startswith("hf("):
        return _Rows(_dataset_prompts(str(source)), "row", copy.copy)  # as they are
    folder, suffix = Path(source), Path(source).suffix.lower()
    if folder.is_dir():
        if (lines := folder / "metadata.jsonl").is_file():
            return _json_rows(read_text(lines), folder, "file_name")
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
        return _Rows(files, "image", _from_picture)
    require(suffix not in NO_LINES, "prompts", str(source), f"{LINES}, or hf(name={source})")
    text = read_input() if str(source) == "-" else read_text(Path(source))
    if suffix in JSON_LINES:
        return _json_rows(text, folder.parent)
    if suffix in TABLES:
        return _table_rows(text, folder)
    return _Rows(_lines(text), "line", _from_text)


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")  # splitlines would also cut at U+2028


def _json_rows(text: str, folder: Path, files: str = "image") -> _Rows:
    rows = _lines(text)
    found = (key for key in TEXT_COLUMNS if any(re.search(rf'"{key}"\s*:', row) for row in rows))
    return _Rows(rows, "line", partial(_from_json, folder, next(found, TEXT_COLUMNS[0]), files))


def _table_rows(text: str, path: Path) -> _Rows:
    """The rows of a table; the first line that is not blank is the header."""
    start = text.lstrip().partition("\n")[0]
    between = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=start.count)
    rows, lines = csv.reader(io.StringIO(text, ""), delimiter=between, strict=True), list[Any]()
    try:
        lines += rows
    except csv.Error as error:
        hint = "a cell that begins with a quotation mark ends with one; double those within it"
        raise ConfigError(f"prompts: {path}, line {rows.line_num}: {error} ({hint})") from error
    number, header = next(((n, row) for n, row in enumerate(lines, 1) if row), (1, []))
    header = [name.strip() for name in header]
    column = next((name for name in TEXT_COLUMNS if name in header), "")
    allowed = (
        f"different names with one of {', '.join(TEXT_COLUMNS)}, as in prompt{between!r:.9}tag"
    )
    fits = column and len({*header}) == len(header)
    require(bool(fits), f"header of {path}", ", ".join(header)[:200], allowed)
    parse = partial(_from_cells, path.parent, column, header)
    return _Rows(lines[number:], "row", parse, number + 1)


def prompt_places(source: Path | str) -> list[str]:
    """The place of each prompt of `read_prompts` in its file or dataset, as in "line 3"; of a
    generator's list, its number.
    """
    if re.search(r"\[\d+:\d+\]$", str(source)) and not Path(source).exists():
        return [f"number {number}" for number in range(1, len(read_prompts(source)) + 1)]
    given = _rows(source)
    rows = enumerate(given.rows, given.first)
    return [f"{given.unit} {number}" for number, row in rows if given.parse(row).text]


def _require_possible(source: Path | str, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` for fields of `REFUSED`; an empty one asks for nothing."""
    for name, instead in REFUSED.items():
        given = [prompt for prompt in prompts if prompt.metadata.get(name) not in (None, "", [])]
        if given:
            way = "Remove the field, or rename it if a reward of yours reads it"
            if str(source).startswith("hf("):
                way = "List the columns to keep in hf(name=..., metadata=[...])"
            raise ConfigError(
                f"prompts: {source}: {len(given)} of {len(prompts)} prompts have a field {name!r}"
                f" ({given[0].metadata[name]!r:.60}), which flowrl does not read for each prompt:"
                f" {instead}. {way}"
            )


def _with_tabs(given: _Rows) -> str:
    if given.parse is not _from_text:
        return ""
    lines = sum("\t" in row.strip() for row in given.rows)
    text = f"{lines} lines have tabs, which are part of the prompts: columns are read from a .tsv"
    return f"{text} file with a header" if lines else ""


def read_sources(sources: Sequence[Source]) -> list[Prompt]:
    """The prompts of all sources. Raises `ConfigError` as `read_prompts` does."""
    prompts = list[Prompt]()
    for source in sources:
        found = read_prompts(source.place)
        prompts += [replace(one, source=source.name or one.source) for one in found]
    return with_shares(prompts, sources)


def with_shares(prompts: Sequence[Prompt], sources: Sequence[Source]) -> list[Prompt]:
    """The prompts of named sources, with weights whose sum over a source is the source's. Those
    that have it stay exactly as they are.
    """
    share = {source.name: source.weight for source in sources if source.name}
    total = source_weights(prompts)
    return [
        replace(one, weight=one.weight * share[one.source] / total[one.source])
        if one.source in share and not math.isclose(total[one.source], share[one.source])
        else one
        for one in prompts
    ]


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in an order in which the sources take turns, each as often as its weights say."""
    share, before = source_weights(prompts), Counter[str]()
    places = list[float]()
    for prompt in prompts:
        # rounded: equal shares may differ in their last digits
        places.append(round((before[prompt.source] + 0.5) / share[prompt.source], 6))
        before[prompt.source] += 1
    ordered = sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0])
    return [prompt for _, prompt in ordered]


def held_out(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that a run holds out of training for its evaluations: a tenth of those with
    different keys, 8 to 64, in an order that depends on the texts and images alone; none of fewer
    than `FEWEST`. So of each source.
    """
    held = list[Prompt]()
    for source in dict.fromkeys(prompt.source for prompt in prompts):
        different = {prompt.key: prompt for prompt in prompts if prompt.source == source}
        if (count := len(different)) >= FEWEST:
            ordered = sorted(different, key=lambda key: hashlib.sha256(key.encode()).digest())
            held += [different[key] for key in ordered[: min(max(count // 10, 8), 64)]]
    return held


def _unread(prompts: Sequence[Prompt]) -> str:
    """A remark on fields that no reward of flowrl reads, with what they may be meant to be."""
    counts = Counter(name for prompt in prompts for name in prompt.metadata if name not in FIELDS)
    texts = []
    for name, count in sorted(counts.items()):
        hint = f", did you mean {_meant(name)!r}?" if _meant(name) else ""
        texts.append(f"{name!r:.60} ({count} of {len(prompts)} prompts{hint})")
    own = "they are metadata, which only a reward of your own can read"
    return f"flowrl does not read the fields {_listed(texts, ', ')}: {own}" if texts else ""


def _meant(name: str) -> str:
    """The field of `FIELDS` that `name` resembles, or ""."""
    return next(iter(difflib.get_close_matches(name, FIELDS, 1, 0.75)), "")


def _listed(texts: Sequence[str], between: str = "; ") -> str:
    """The first `SHOWN` texts, and how many more there are."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return between.join(texts[:SHOWN]) + more


def _from_text(line: str) -> Prompt:
    """The prompt in a line; a comment is one without a text. Raises `ConfigError` for a line that
    may be either, and for JSON.
    """
    text = line.strip()
    if text.startswith("\\#"):
        return Prompt(text[1:])
    if re.match(r"#+(?!\S)", text):
        return Prompt("")
    if text.startswith("#"):
        need = f'write "# " for a comment, or \\{text[:40]} for a prompt'
        raise ConfigError(f'starts with "#": {need}')
    if _is_json(text):
        raise ConfigError("is JSON, which is read from a .jsonl file, one object per line")
    return Prompt(text)


def _is_json(text: str) -> bool:
    """Whether a line of text is an object or a list in JSON."""
    try:
        return text.startswith(("{", "[")) and isinstance(parse_json(text), dict | list)
    except ValueError:
        return False


def _from_json(folder: Path, name: str, files: str, line: str) -> Prompt:
    """The prompt in the field `name` of a line of JSON; its images are in `folder`."""
    if not line.strip():
        return Prompt("")
    try:
        values = parse_json(line, finite=True)
        for other in values if name != TEXT_COLUMNS[0] or name not in values else ():
            least = 0.9 if name in values else 0.75
            wanted = name if name not in values else TEXT_COLUMNS[0]
            if other != wanted and difflib.get_close_matches(other, [wanted], 1, least):
                raise ValueError(f"did you mean {wanted!r} by {other!r}?")
        return _from_fields(folder, name, files, values)
    except ConfigError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f'is not a JSON object with an entry "{name}" ({error})') from error


def _from_cells(folder: Path, name: str, header: Sequence[str], cells: Sequence[str]) -> Prompt:
    """The prompt in a row of a table; its images are in `folder`."""
    if not any(cells):
        return Prompt("")
    if len(cells) != len(header):
        need = "a cell with a comma needs quotation marks around it"
        raise ConfigError(f"has {len(cells)} cells and the header {len(header)}; {need}")
    values: dict[str, Any] = {key: cell for key, cell in zip(header, cells, strict=True) if cell}
    try:
        if "weight" in values:
            values["weight"] = float(values["weight"])
        return _from_fields(folder, name, "image", values)
    except ConfigError:
        raise
    except (ValueError, LookupError) as error:
        raise ConfigError(
            f"has no prompt in the column {name}, or a wrong weight ({error})"
        ) from error


def _from_fields(folder: Path, name: str, files: str, values: dict[str, Any]) -> Prompt:
    """The prompt of the fields `values`: the text in `name`, the images in `files`, the weight, and
    metadata. Raises `ConfigError` and the errors of wrong types and missing fields.
    """
    text = values.pop(name)
    if not text.strip():
        raise ValueError("the prompt is empty")
    given, weight = values.pop(files, None) or [], values.pop("weight", None)
    source = values.pop(SOURCE, "")
    images = [given] if isinstance(given, str) else given
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        raise TypeError(f"{files!r} is neither a file nor a list of files")
    found = tuple(ReferenceImage.of_file(folder / path, read_bytes) for path in images)
    return Prompt(text, values, found, 1 if weight in (None, "") else weight, str(source))


def _from_picture(path: Path) -> Prompt:
    """The prompt in the text file beside an image."""
    text = read_text(path.with_suffix(".txt")).strip()
    require(text != "", f"text in {path.with_suffix('.txt')}", text, "a prompt")
    return Prompt(text, images=(ReferenceImage.of_file(path, read_bytes),))


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts with their metadata as JSON lines that `read_prompts` reads.

    Args:
        path: the file, which must be new or have the same content.
        prompts: the prompts.

    Raises:
        ConfigError: the file cannot be written, or exists with different content.
    """
    prompts = list(prompts)
    in_files = all(image.path for prompt in prompts for image in prompt.images)
    require(in_files, "images of prompts", "in memory", "in files")
    lines = prompt_lines(prompts)
    require_new_file(path, lambda data: data == lines, "file")
    write_bytes(path, lines)


def prompt_lines(
    prompts: Iterable[Prompt],
    default: Callable[[Any], Any] | None = None,
    image: Callable[[ReferenceImage], str] = lambda image: str(image.path or image.sha256),
) -> bytes:
    """Prompts with their metadata as JSON lines; `default` as in `json.dumps`, `image` the text
    that stands for an image: by default its file, if it has one.
    """
    rows = (
        {**prompt.metadata, "prompt": prompt.text}
        | ({"image": [*map(image, prompt.images)]} if prompt.images else {})
        | ({"weight": prompt.weight} if prompt.weight != 1 else {})
        | ({SOURCE: prompt.source} if prompt.source else {})
        for prompt in prompts
    )
    return "".join(
        json.dumps(row, ensure_ascii=False, default=default) + "\n" for row in rows
    ).encode()


def _dataset_prompts(spec: str) -> list[Prompt]:
    """The prompt in every row of ``hf(...)``; an empty cell is a prompt without a text."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        install = "install it with: pip install -e '.[datasets]'"
        message = f"prompts: {spec} needs the package datasets; {install}"
        raise ConfigError(message) from error
    options = parse_spec(spec, "prompts").options
    name, split, column, pictures = (str(options.get(key, "")) for key in DATASET_OPTIONS[:4])
    path = Path(name)
    # datasets takes a bare name for a reader of the current folder's files; version 4.0 unpickles
    # them for "pandas".
    known = bool(name) and (path.exists() or "/" in name) and options.keys() <= {*DATASET_OPTIONS}
    allowed = (
        "hf(name=OWNER/NAME, split=SPLIT, column=COLUMN, image=COLUMN, metadata=[COLUMN, ...]), or"
        " a path instead of OWNER/NAME"
    )
    require(known, "prompts", spec, allowed)
    try:
        if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            splits: Any = datasets.load_from_disk(name)
        elif path.is_file():
            form = DATASET_FORMATS.get(path.suffix, "json")
            splits = datasets.load_dataset(form, data_files=name)
        else:
            splits = datasets.load_dataset(str(path.resolve()) if path.exists() else name)
        if not isinstance(splits, dict):
            splits = {str(splits.split or "train"): splits}
        usual = [*splits] if len(splits) == 1 else [key for key in splits if key == "train"]
        split = split or "".join(usual)
        allowed = f"one of {', '.join(map(str, splits))}, as in hf(name={name}, split=SPLIT)"
        require(split in splits, "split of prompts", split, allowed)
        table = splits[split]
        dtypes = {key: getattr(feature, "dtype", "") for key, feature in table.features.items()}
        texts = [key for key, dtype in dtypes.items() if dtype in ("string", "large_string")]
        column = column or next((key for key in TEXT_COLUMNS if key in table.features), "")
        allowed = f"one with text ({', '.join(texts)}), as in hf(name={name}, column=COLUMN)"
        require(column in texts, "column of prompts", column, allowed)
        plain = [key for key, feature in table.features.items() if _is_plain(feature)]
        kept = options.get("metadata", plain)
        allowed = f"a list of some of {', '.join(plain)}"
        fits = isinstance(kept, list) and {*kept} <= {*plain}
        require(fits, "metadata of prompts", kept, f"{allowed}, as in metadata=[COLUMN]")
        plain = [key for key in plain if key == column or key in kept]
        if pictures:
            shown = [
                key for key in table.features if isinstance(table.features[key], datasets.Image)
            ]
            allowed = f"one with images ({', '.join(shown)}), as in hf(name={name}, image=COLUMN)"
            require(pictures in shown, "image column of prompts", pictures, allowed)
            table, plain = (
                table.cast_column(pictures, datasets.Image(decode=False)),
                [*plain, pictures],
            )
        rows = list(table.select_columns(plain))  # the library detects damaged files only here
        images = [(_picture(row.pop(pictures)),) if pictures else () for row in rows]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"prompts: {spec} cannot be read as a dataset ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}); check the name. The command line works"
            " offline unless HF_HUB_OFFLINE=0 is set"
        ) from error
    prompts = list[Prompt]()
    for row, own in zip(rows, images, strict=True):
        weight = 1 if (weight := row.pop("weight", None)) is None else weight
        prompts.append(Prompt((row.pop(column) or "").strip(), _without_none(row), own, weight))
    return prompts


def _picture(cell: dict[str, Any]) -> ReferenceImage:
    """The image in a cell of a dataset; one without a file of its own gets one in the user's cache
    folder.
    """
    if not cell["bytes"]:
        return ReferenceImage.of_file(Path(cell["path"]), read_bytes)
    name = hashlib.sha256(cell["bytes"]).hexdigest()
    path = cache_folder() / "images" / name
    if not path.exists():
        write_bytes(path, cell["bytes"])
    return ReferenceImage.of_file(path, read_bytes)


def _is_plain(feature: Any) -> bool:
    """Whether a column's values are text, numbers, truth values, or lists and objects of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    kind = type(feature).__name__
    if kind in ("List", "LargeList"):
        return _is_plain(feature.feature)
    plain = r"(large_)?string|bool|null|u?int\d+|float\d+"
    return kind == "Value" and bool(re.fullmatch(plain, feature.dtype))


def _without_none(value: Any) -> Any:
    """Objects without their empty entries: in a table every row has the entries of all rows."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts, to which an order belongs."""
    lines = prompt_lines(prompts, lambda value: type(value).__name__, lambda image: image.sha256)
    return hashlib.sha256(lines).hexdigest()
