"""Which embeddings of prompts may be stored for other runs: those that the files of a pipeline and
the installed libraries make, and nothing that a program has replaced.
"""

import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape, glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrl.core.errors import require
from flowrl.policies.families import FAMILIES, Family
from flowrl.run.io import cache_folder, write_bytes
from flowrl.run.models.sources import Source
from flowrl.run.reading import read_bytes

OTHERS = {"transformer", "transformer_2", "vae", "scheduler"}
"""Components that do not embed prompts."""
LIBRARIES = (
    *("accelerate", "beartype", "diffusers", "flowrl", "huggingface_hub", "jaxtyping", "peft"),
    *("torch", "transformers"),
)
"""Packages whose functions may embed prompts."""
READ_AT_ONCE = 2**24
"""Bytes of a file whose hash is not stored."""


@dataclass(frozen=True)
class TextFiles:
    """The tokenizers and text encoders of a pipeline, and all else that determines an embedding:
    precision and number of tokens.
    """

    source: Source
    dtype: str
    tokens: int

    @property
    def place(self) -> Path | None:
        """The folder of the embeddings, named by a digest of their origin; None if code that is
        neither flowrl's nor of a library embeds prompts, whose changes no digest would show.
        """
        index, family, pipeline = self.source.index, self.source.family, self.source.kind
        parts = [index[name] for name in self._parts if index[name][0]]
        kinds = [getattr(import_module(library), name, None) for library, name in parts]
        own = type(family) not in FAMILIES.values()
        own = own or any(map(callable, vars(family).values()))
        if own or any(map(_replaced, [pipeline, type(family), *kinds])):
            return None
        libraries = [import_module(name).__version__ for name in ("diffusers", "transformers")]
        entries = [(name, value) for name, value in sorted(index.items()) if name[0] != "_"]
        entries = [entry for entry in entries if entry[0] not in self._others]
        code = [
            inspect.getsource(kind) for kind in type(family).__mro__ if kind in FAMILIES.values()
        ]
        known = [libraries, pipeline.__name__, code, self.dtype, self.tokens, entries]
        digest = hashlib.sha256(repr(known).encode())
        for path in self._files():
            single = path == self.source.file
            place = "single file" if single else path.relative_to(self.source.folder)
            digest.update(f"{place} {_hash_of(path)}\n".encode())
        name = f"{pipeline.__name__}-{self.dtype}-{self.tokens}-{digest.hexdigest()[:32]}"
        return cache_folder() / "prompts" / name

    @property
    def _others(self) -> set[str]:
        """The components that embed nothing; the image decoder encodes reference images."""
        return OTHERS - {"vae"} if self.source.family.images[1] else OTHERS

    @property
    def _parts(self) -> list[str]:
        """The tokenizers, text encoders and whatever else embeds prompts."""
        given = sorted(self.source.index.items())
        return [name for name, part in given if name not in self._others and isinstance(part, list)]

    def _files(self) -> Iterator[Path]:
        """All files of the parts. Raises `ConfigError` for weights elsewhere."""
        if self.source.file and {*self._parts} & {*self.source.in_file}:
            yield self.source.file
        for part in self._parts:
            place = self.source.folder / part
            found = glob(f"{escape(str(place))}/**", recursive=True, include_hidden=True)
            files = sorted(path for path in map(Path, found) if path.is_file())
            names = [str(path.relative_to(place)) for path in files]
            if part in self.source.family.encoders and files:
                merged = "adapter_config.json" not in names
                require(merged, f"model: {part}", "a LoRA", "merged weights (merge_and_unload)")
            for path in files:
                if ".safetensors.index." in path.name:
                    shards = {*json.loads(read_bytes(path))["weight_map"].values()}
                    require(shards <= {*names}, f"model: {path}", shards, f"files of {part}")
            yield from files


def _hash_of(path: Path) -> str:
    """SHA-256 of a file. That of a large file is stored under its place, size and times, so that
    the next run does not read it again.
    """
    status, place = path.stat(), str(path.resolve())
    times = status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
    key = hashlib.sha256(repr((place, status.st_size, *times)).encode()).hexdigest()
    known = cache_folder() / "hashes" / key
    large = status.st_size > READ_AT_ONCE
    try:
        if large and len(stored := read_bytes(known)) == 64:
            return stored.decode()
    except OSError:
        pass
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if large:
        write_bytes(known, digest.encode())
    return digest


class EmbeddingsFolder:
    """The folder of the embeddings of a pipeline's prompts, chosen for the first prompt: the stored
    one, or a temporary one (`TMPDIR`) if there is none, or if a program has since replaced a text
    encoder, a tokenizer or a method of the pipeline, or changed a tokenizer.

    Args:
        pipe: the pipeline.
        family: its model family.
        stored: returns the folder for what `pipe` has embedded since this object was made, None
            for none.
    """

    def __init__(self, pipe: Any, family: Family, stored: Callable[[], Path | None]) -> None:
        self.pipe, self.family, self.stored = pipe, family, stored
        self.used, self.tokenizers = _used(pipe, family), _tokenizers(pipe)
        self.chosen: Path | None = None
        self.temporary: TemporaryDirectory[str] | None = None

    def __call__(self) -> Path:
        """The folder. Raises `ConfigError` if something was replaced after the first prompt."""
        now = _used(self.pipe, self.family)
        pairs = [(name, now.get(name), self.used.get(name)) for name in {**self.used, **now}]
        replaced = [name for name, used, before in pairs if used is not before]
        if self.chosen is None:
            same = not replaced and _tokenizers(self.pipe) == self.tokenizers
            self.chosen, self.used, replaced = self.stored() if same else None, now, []
            if self.chosen is None:
                made = TemporaryDirectory(prefix="flowrl-prompts-", ignore_cleanup_errors=True)
                self.temporary, self.chosen = made, Path(made.name)
        need = "unchanged after the first prompt; make a new policy"
        require(not replaced, "parts of the pipeline that embed prompts", replaced, need)
        return self.chosen

    def require_same(self) -> None:
        """Raise `ConfigError` if the stored folder is not for what the encoders are now."""
        same = self.temporary is not None or self.stored() == self.chosen
        need = "unchanged after the policy was loaded; make a new policy"
        require(same, "files or code of the text encoders", "changed", need)


def _used(pipe: Any, family: Family) -> dict[str, object]:
    """What an instance of a pipeline and its family embed prompts with, besides their classes: text
    encoders, tokenizers, sizes, and methods that a program has replaced.
    """
    own = {name: value for name, value in vars(pipe).items() if name not in OTHERS}
    own = {name: value for name, value in own.items() if name[0] != "_" or callable(value)}
    return own | {f"family.{name}": value for name, value in vars(family).items()}


def _tokenizers(pipe: Any) -> list[str]:
    """The state of the tokenizers, without padding and truncation, which every call sets."""
    states = []
    for part in pipe.components.values():
        part = getattr(part, "tokenizer", part)  # of a processor
        if (backend := getattr(part, "backend_tokenizer", None)) is not None:
            parts = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
            states += [repr(part), hashlib.sha256(repr(parts).encode()).hexdigest()]
    return states


def _replaced(kind: Any) -> bool:
    """Whether a method in the modules of a class and its bases is neither of a library nor of
    Python, or a function there is not of an installed package.
    """
    origins = [find_spec(name) for name in LIBRARIES]
    roots = [str(Path(spec.origin).parent) for spec in origins if spec and spec.origin]
    roots += [sysconfig.get_path("stdlib"), "<frozen ", "<@beartype"]
    installed = [*roots, *(path for path in sys.path if path.endswith("-packages"))]
    for module in (sys.modules[base.__module__] for base in kind.__mro__):
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        classes = [one for one in classes if one.__module__ == module.__name__]
        if not _from(module, installed) or not all(_from(one, roots) for one in classes):
            return True
    return False


def _from(owner: Any, roots: Sequence[str]) -> bool:
    """Whether the functions of a module or class are in files of `roots`, or data classes'."""
    for name, value in vars(owner).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if (code := getattr(function, "__code__", None)) is not None:
            made = code.co_filename == "<string>" and name.startswith("__")
            if not made and not code.co_filename.startswith(tuple(roots)):
                return False
    return True
