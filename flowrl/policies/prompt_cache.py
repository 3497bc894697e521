"""Prompt embeddings: computed once, stored in main memory or on disk, and moved to the device when a network call needs them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from weakref import finalize

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.errors import ConfigError

Encode = Callable[[Sequence[str]], Iterable[Mapping[str, Tensor]]]
"""From texts to one mapping of named tensors per text, without a prompt axis; an iterator that embeds one text at a time."""


@dataclass
class PromptCache:
    """Embeddings by integer number, so that a `Condition` carries a number per sample instead of megabytes.

    `encode` embeds new texts; no text is embedded twice. The first `limit` embeddings are stored in main memory, later ones in a
    temporary folder (`TMPDIR`), which is deleted at the end. Those of the latest call are also on `device`, padded with zeros to
    a common shape, floating-point tensors in `dtype` (None: unchanged). `hits` and `misses` count texts. Raises `ConfigError` if
    the folder cannot be written.
    """

    encode: Encode
    device: torch.device
    limit: int
    dtype: torch.dtype | None = None
    hits: int = 0
    misses: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _stored: list[dict[str, Tensor] | Path] = field(default_factory=list)
    _folder: Path | None = None
    _near: dict[int, int] = field(default_factory=dict)
    _table: dict[str, Tensor] = field(default_factory=dict)
    _places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of `texts`; new texts are embedded."""
        self.warm(texts)
        chosen = [self._numbers[text] for text in texts]
        self._near, self._table = {}, {}
        self._bring(list(dict.fromkeys(chosen)))
        return chosen

    def warm(self, texts: Sequence[str]) -> None:
        """Embed those of `texts` that are new, in one call of `encode`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._numbers]
        for text, row in zip(new, self.encode(new) if new else (), strict=True):
            tensors = {name: tensor.detach().cpu() for name, tensor in row.items()}
            self._stored.append(tensors if len(self._stored) < self.limit else self._on_disk(tensors))
            self._numbers[text] = len(self._stored) - 1
        self.misses += len(new)
        self.hits += len(texts) - len(new)

    def rows(self, numbers: Tensor, among: frozenset[int] = frozenset()) -> dict[str, Tensor]:
        """The embeddings under `numbers` [sample], a tensor on the device; every result has [sample] as its first axis.

        `among` lists the numbers that may occur. If it is empty, they are read from the device, which synchronises with it.
        """
        needed = among or frozenset(numbers.tolist())
        self._bring([number for number in sorted(needed) if number not in self._near])
        index = self._places[numbers]
        return {name: table.index_select(0, index) for name, table in self._table.items()}

    def __len__(self) -> int:
        """The number of embeddings in main memory."""
        return min(self.limit, len(self._stored))

    def _bring(self, numbers: Sequence[int]) -> None:
        """Append rows to the tables on the device."""
        if not numbers:
            return
        start = len(self._near)
        self._near |= {number: start + i for i, number in enumerate(numbers)}
        stored = [self._stored[number] for number in numbers]
        rows = [load_file(row) if isinstance(row, Path) else row for row in stored]
        for name in rows[0]:
            parts = [row[name] for row in rows]
            alike = all(part.shape == parts[0].shape for part in parts)
            fresh = torch.stack(parts) if alike else _joined([part.unsqueeze(0) for part in parts])
            fresh = fresh.to(self.device, self.dtype if fresh.is_floating_point() else None)
            self._table[name] = _joined([self._table[name], fresh]) if name in self._table else fresh
        places = torch.zeros(len(self._stored), dtype=torch.int64)
        places[list(self._near)] = torch.tensor(list(self._near.values()))
        self._places = places.to(self.device)

    def _on_disk(self, tensors: Mapping[str, Tensor]) -> Path:
        """Write an embedding, and return its file."""
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="flowrl-prompts-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{len(self._stored)}.safetensors"
        try:
            save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"prompt_cache = {self.limit}: the embeddings of further prompts cannot be written to {self._folder} "
                f"({error}); set TMPDIR to a folder with more room, or a larger prompt_cache for more main memory"
            ) from error
        return path


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """`parts` [row, ...] as one tensor, padded with zeros at the end of all other axes to the largest size."""
    shape = torch.Size(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    return torch.cat([part if part.shape[1:] == shape else _padded(part, shape) for part in parts])


def _padded(part: Tensor, shape: torch.Size) -> Tensor:
    """`part` [row, ...] with zeros up to [row, *shape]."""
    whole = part.new_zeros(len(part), *shape)
    whole[tuple(map(slice, part.shape))] = part
    return whole
