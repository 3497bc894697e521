"""Prompt embeddings: computed once, stored in main memory and on disk, and moved to the device when
a network call needs them.
"""

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrl.core.errors import DiskError, TrainingError
from flowrl.run.distributed import Distributed
from flowrl.run.io import CACHE, refused
from flowrl.run.reading import read_bytes

Row = Mapping[str, Tensor]
Encode = Callable[[Sequence[str]], Iterable[Row]]
"""From texts to one mapping of named tensors per text, without a prompt axis; an iterator that
embeds a few texts at a time.
"""
REPORT_EVERY = 10.0
"""Seconds between two reports of progress."""


@dataclass
class PromptCache:
    """Embeddings by integer number, so that a `Condition` carries a number per sample instead of
    megabytes.

    `encode` embeds new texts. Embeddings are in the folder that `place` returns, one file per text,
    where other processes and later runs find them; a damaged or deleted file is made again. At most
    `limit` of them are also in main memory, and those of the latest call on `device`, padded with
    zeros at the end of their first axis to a common length. Floating-point tensors have `dtype`.
    Raises `DiskError` if the disk is full, `ConfigError` if the folder cannot be written.
    """

    encode: Encode
    device: torch.device
    limit: int
    dtype: torch.dtype
    place: Callable[[], Path]
    _numbers: dict[str, int] = field(default_factory=dict)
    _memory: dict[str, Row] = field(default_factory=dict)
    _on_device: frozenset[int] = frozenset()
    folder: Path = field(init=False)

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of `texts`; new texts are embedded."""
        self.warm(texts)
        numbers = [self._numbers[text] for text in texts]
        self._bring(frozenset(numbers))
        return numbers

    def warm(
        self,
        texts: Sequence[str],
        distributed: Distributed = Distributed(),
        report: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        """Embed those of `texts` that are not on disk. Processes that lack
        the same texts divide them, so all of `distributed` must call this with the same texts.

        `report` is called with {"phase": "prompts", "prompts": a line of progress}.
        """
        self.folder = self.place()
        new = [text for text in dict.fromkeys(texts) if text not in self._numbers]
        missing = self._missing(new)
        # again if processes do not see each other's files
        while any(lacking := distributed.gather(missing)):
            peers = [rank for rank, other in enumerate(lacking) if other == missing]
            share = missing[peers.index(distributed.rank) :: len(peers)]
            with distributed.shared_errors():
                reported = -REPORT_EVERY
                for done, row in enumerate(self._embedded(share), 1):
                    size = sum(tensor.nbytes for tensor in row.values()) * len(missing) / 1e9
                    if done == 1:
                        self._require_room(size)
                    if done == len(share) or time.monotonic() - reported >= REPORT_EVERY:
                        reported = time.monotonic()
                        line = f"{done:,} of {len(share):,} prompts embedded"
                        if len(peers) > 1:
                            line += f" by each of {len(peers)} processes"
                        line += f" ({len(missing):,} new ones, {size:,.2f} GB in {self.folder})"
                        report({"phase": "prompts", "prompts": line})
            missing = self._missing(missing)
        self._numbers |= {text: n for n, text in enumerate(new, len(self._numbers))}

    def rows(self, numbers: Tensor, among: frozenset[int] = frozenset()) -> dict[str, Tensor]:
        """The embeddings under `numbers` [sample], a tensor on the device; every result has
        [sample] as its first axis.

        `among` lists the numbers that may occur. If it is empty, they are read from the device,
        which synchronises with it.
        """
        needed = among or frozenset(numbers.tolist())
        if not needed <= self._on_device:  # a condition of an earlier call
            self._bring(self._on_device | needed)
        index = self._places[numbers]
        return {name: table.index_select(0, index) for name, table in self._table.items()}

    def _bring(self, numbers: frozenset[int]) -> None:
        """Fill the tables on the device."""
        known = list(self._numbers)
        texts = [known[number] for number in numbers]
        stored = {text: self._stored(text) for text in texts}
        lost = [text for text, row in stored.items() if row is None]
        stored |= dict(zip(lost, self._embedded(lost), strict=True))
        rows: list[Any] = [stored[text] for text in texts]
        self._table = {}
        for name in rows[0]:
            table = pad_sequence([row[name] for row in rows], batch_first=True)
            self._table[name] = table.to(self.device)
        places = torch.zeros(len(known), dtype=torch.int64)
        places[list(numbers)] = torch.arange(len(numbers))
        self._places, self._on_device = places.to(self.device), numbers

    def _missing(self, texts: Sequence[str]) -> list[str]:
        return [text for text in texts if not self._path(text).exists()]

    def _embedded(self, texts: Sequence[str]) -> Iterator[Row]:
        """Embed and store `texts`, one after the other."""
        for text, given in zip(texts, self.encode(texts) if texts else (), strict=True):
            # a copy, not a view of a batch
            row = {
                name: tensor.detach()
                .to("cpu", self.dtype if tensor.is_floating_point() else None)
                .clone(memory_format=torch.contiguous_format)
                for name, tensor in given.items()
            }
            if not _is_finite(row):
                what = f"the text encoder's embedding of {text!r} has values that are not finite"
                raise TrainingError(f"{what}; use bfloat16 or float32, or check its weights")
            self._write(text, row)
            yield self._kept(text, row)

    def _kept(self, text: str, row: Row) -> Row:
        if len(self._memory) < self.limit:
            self._memory[text] = row
        return row

    def _path(self, text: str) -> Path:
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.embedding"

    def _write(self, text: str, row: Row) -> None:
        """Write safetensors after their hash, which shows a file that is damaged; without a flush
        to the disk, atomically.
        """
        path, data = self._path(text), save(dict(row))
        half = path.with_suffix(f".{platform.node()}-{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            half.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(half, path)
        except OSError as error:
            with suppress(OSError):
                half.unlink()
            raise refused(error, self._no_room(error.strerror or str(error))) from error

    def _require_room(self, size: float) -> None:
        free = shutil.disk_usage(self.folder).free / 1e9
        if size > free:
            reason = f"{size:,.2f} GB needed, {free:,.2f} GB free"
            raise DiskError(self._no_room(reason))

    def _no_room(self, reason: str) -> str:
        place = f"{CACHE} (TMPDIR, if this folder is temporary) to a folder with enough space"
        return f"prompts cannot be stored in {self.folder}: {reason}; set {place}"

    def _stored(self, text: str) -> Row | None:
        """The embedding of `text` from main memory or disk; None if its file is damaged, deleted
        or of an earlier version, which stored values that are not finite.
        """
        if text in self._memory:
            return self._memory[text]
        with suppress(OSError):
            data = read_bytes(self._path(text))
            if hashlib.sha256(data[32:]).digest() == data[:32] and _is_finite(
                row := load(data[32:])
            ):
                return self._kept(text, row)
        return None


def _is_finite(row: Row) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in row.values())
