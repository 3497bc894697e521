"""Reading of files: JSON, YAML, text and safetensors with a checked content, and errors that name
the file and the place.
"""

import json
import math
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.composer import ComposerError

from flowrl.core.errors import CheckpointError, ConfigError, FlowrlError, require

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 50
"""Largest depth of lists and objects in a file."""
PICKLED = (".bin", ".pt", ".ckpt", ".pth")
"""Endings of weights that are pickles, which can contain code."""
DIGITS = 20
"""Largest number of digits of a whole number, with its sign: that of 64 bits."""


@contextmanager
def reading(path: Path | str, kind: type[FlowrlError] = ConfigError) -> Iterator[None]:
    """A context that converts errors in the content of the file `path` into a `kind` of error that
    names the file.
    """
    try:
        yield
    except FlowrlError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))[:100]
        raise kind(
            f"{path}: {f'{place}: ' if place else ''}{problem['msg']}, not {problem['input']!r:.60}"
        ) from error
    except OSError as error:
        raise kind(f"{path} cannot be read: {str(error.strerror or error)[:200]}") from error
    except Exception as error:
        raise kind(f"{path} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


LARGEST = 2**28
"""Largest number of bytes of a file that is read as a whole, but for weights."""


def read_bytes(path: Path | str, limit: int | None = LARGEST) -> bytes:
    """The content of a regular file; every file of the library is read here.

    A pipe or a device is not opened for reading, since it may have no end. Raises `ConfigError` for
    these and for a file of more than `limit` bytes, and `OSError` if the file cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is a pipe, a device or a folder, not a regular file")
        if limit is not None and status.st_size > limit:
            raise ConfigError(f"{path} has {status.st_size:,} bytes; allowed: {limit:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_input(seconds: float = 60.0) -> str:
    """The text on standard input, of at most `LARGEST` bytes. Raises `ConfigError` for more, for
    other than UTF-8, and if it does not end within `seconds`.
    """
    data, deadline = bytearray(), time.monotonic() + seconds
    while len(data) <= LARGEST:
        left = max(0.0, deadline - time.monotonic())
        ended = not select.select([sys.stdin], [], [], left)[0]
        require(not ended, "standard input", f"open for {seconds:g} s", "text that ends sooner")
        part = os.read(sys.stdin.fileno(), 2**16)
        if not part:
            with reading("standard input"):
                return data.decode("utf-8-sig")
        data += part
    raise ConfigError(f"standard input has more than {LARGEST:,} bytes")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark. Raises `ConfigError`."""
    with reading(path):
        return read_bytes(path).decode("utf-8-sig")


def read_json(path: Path, kind: Any = Any, error: type[FlowrlError] = ConfigError) -> Any:
    """The content of the JSON file at `path` as a `kind`: any type that pydantic checks, such as a
    data class. Raises `error`.
    """
    with reading(path, error):
        return as_kind(parse_json(read_bytes(path)), kind)


def is_json(data: bytes) -> bool:
    """Whether `data` is a JSON object."""
    try:
        return isinstance(parse_json(data), dict)
    except ValueError:
        return False


def as_kind(value: Any, kind: Any) -> Any:
    """A `value` from JSON as a `kind`; types are not converted, further entries are ignored. Raises
    `ValueError`.
    """
    return value if kind is Any else _adapter(kind).validate_json(json.dumps(value), strict=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def is_kind(value: Any, kind: Any) -> bool:
    """Whether `as_kind` accepts `value` as a `kind`."""
    try:
        as_kind(value, kind)
    except ValueError:
        return False
    return True


def parse_json(data: str | bytes, finite: bool = False) -> Any:
    """The JSON value in `data` (UTF-8, with or without a byte order mark). NaN and Infinity are
    allowed unless `finite`.

    Raises `ValueError` if `data` is not JSON, an object has an entry twice, the depth exceeds
    `DEPTH`, or a whole number has more than 64 bits or a text half a surrogate pair.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
    try:
        number = finite_number if finite else float
        value = json.loads(
            text,
            object_pairs_hook=once,
            parse_int=_whole,
            parse_float=number,
            parse_constant=number,
        )
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEPTH} levels") from error
    layer, levels = _inside([value]), 0
    while layer:
        levels += 1
        if levels > DEPTH:
            raise ValueError(f"nested deeper than {DEPTH} levels")
        layer = _inside(
            value for part in layer for value in (part.values() if isinstance(part, dict) else part)
        )
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with `pairs` of names and values. Raises `ValueError` for a name that is there
    twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated:.60} is set twice")
    return value


def _inside(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]


def finite_number(digits: str) -> float:
    """The number; `ValueError` for NaN, Infinity and what is as large."""
    if not math.isfinite(float(digits)):
        raise ValueError(f"{digits:.20} is not a number in JSON")
    return float(digits)


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"the whole number {digits[:DIGITS]}... has more than 64 bits")
    return int(digits)


def read_tensors(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> "dict[str, Tensor]":
    """The tensors of the safetensors file at `path`, which must contain floating-point tensors of
    the names and `shapes` (None: any size). Raises `CheckpointError`.
    """
    from safetensors.torch import load

    with reading(path, CheckpointError):
        tensors = load(read_bytes(path, None))
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        size = tuple(tensor.shape) if tensor is not None and tensor.is_floating_point() else ()
        fits = [allowed in (None, n) for allowed, n in zip(shape, size, strict=False)]
        if len(size) != len(shape) or not all(fits):
            actual = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            allowed = ", ".join("any" if count is None else str(count) for count in shape)
            raise CheckpointError(
                f"{path}: tensor {name!r} is {actual}; allowed: floating-point numbers [{allowed}]"
            )
    return tensors


def load_document(path: Path) -> tuple[Any, yaml.Node | None]:
    """The content of a YAML or JSON file, and the tree with its lines. Raises `ConfigError` with
    the place of an error.
    """
    if not os.path.exists(path):  # also False for a name that is too long
        raise ConfigError(f"config: the file {path} does not exist")
    text = read_text(path)
    if len(text) > LONGEST:
        raise ConfigError(
            f"config: {path} has {len(text):,} characters; allowed in a settings file: {LONGEST:,}"
        )
    if path.suffix == ".json":
        try:
            return parse_json(text), None
        except ValueError as error:
            raise ConfigError(f"config: {path} is not JSON: {error}") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_repeats(path, node)
        return (None if node is None else loader.construct_document(node)), node
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = str(problem or error)[:200]
        raise ConfigError(f"config: {path}{place} is not YAML: {problem}") from error


LONGEST = 100_000
"""Largest number of characters in a file of settings; PyYAML takes seconds for longer ones."""
NODES = 10_000
"""Largest number of values, names, lists and groups in a file of settings."""


class _Loader(yaml.SafeLoader):
    """A YAML loader with the numbers of YAML 1.2: ``1e-4`` is a number, which PyYAML reads as a
    text.

    At most `DEPTH` levels and `NODES` values; the values of an alias count at every use.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.level, self.nodes, self.sizes = 0, 0, dict[int, int]()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the tree."""
        mark, before = self.peek_event().start_mark, self.nodes
        is_alias = self.check_event(yaml.AliasEvent)
        self.level, self.nodes = self.level + 1, self.nodes + 1
        node = super().compose_node(parent, index) if self.level <= DEPTH else None
        self.level -= 1
        if is_alias and node is not None:
            # an alias inside its own value is endless
            self.nodes += self.sizes.get(id(node), NODES)
        self.sizes[id(node)] = self.nodes - before
        if node is None or self.nodes > NODES:
            limits = f"more than {DEPTH} levels, or {NODES:,} values including those of aliases"
            raise ComposerError(None, None, limits, mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
    list("-+0123456789."),
)


def _refuse_repeats(path: Path, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(getattr(key, "value", key))
            if name in seen:
                raise ConfigError(
                    f"config: {path}, line {key.start_mark.line + 1}: {name:.60} is set twice"
                )
            seen.add(name)
            _refuse_repeats(path, value)
    for inside in node.value if isinstance(node, yaml.SequenceNode) else ():
        _refuse_repeats(path, inside)
