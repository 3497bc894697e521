"""Prompt embeddings on disk, where other processes and later runs find them."""

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load, save

from flowrl.core.errors import DiskError
from flowrl.policies.embeddings import Row, is_finite
from flowrl.run.io import CACHE, refused
from flowrl.run.reading import read_bytes


@dataclass
class DiskStore:
    """A `flowrl.policies.embeddings.Store` in the folder that `place` returns, one file per prompt.
    At most `limit` embeddings are also in main memory.

    Raises `DiskError` if the disk is full, `ConfigError` if the folder cannot be written.
    """

    place: Callable[[], Path]
    limit: int
    _memory: dict[str, Row] = field(default_factory=dict)
    folder: Path = field(init=False)

    def prepare(self) -> str:
        """Choose the folder."""
        self.folder = self.place()
        return str(self.folder)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` without a file."""
        return [key for key in keys if not self._path(key).exists()]

    def require_room(self, size: float) -> None:
        """Raise `DiskError` unless `size` GB are free."""
        free = shutil.disk_usage(self.folder).free / 1e9
        if size > free:
            reason = f"{size:,.2f} GB needed, {free:,.2f} GB free"
            raise DiskError(self._no_room(reason))

    def get(self, key: str) -> Row | None:
        """The embedding of `key` from main memory or disk; None if its file is damaged, deleted
        or of an earlier version, which stored values that are not finite.
        """
        if key in self._memory:
            return self._memory[key]
        with suppress(OSError):
            data = read_bytes(self._path(key))
            intact = hashlib.sha256(data[32:]).digest() == data[:32]
            if intact and is_finite(row := load(data[32:])):
                self._keep(key, row)
                return row
        return None

    def put(self, key: str, row: Row) -> None:
        """Write safetensors after their hash, which shows a file that is damaged; without a flush
        to the disk, atomically.
        """
        path, data = self._path(key), save(dict(row))
        half = path.with_suffix(f".{platform.node()}-{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            half.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(half, path)
        except OSError as error:
            with suppress(OSError):
                half.unlink()
            raise refused(error, self._no_room(error.strerror or str(error))) from error
        self._keep(key, row)

    def _keep(self, key: str, row: Row) -> None:
        if len(self._memory) < self.limit:
            self._memory[key] = row

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.embedding"

    def _no_room(self, reason: str) -> str:
        place = f"{CACHE} (TMPDIR, if this folder is temporary) to a folder with enough space"
        return f"prompts cannot be stored in {self.folder}: {reason}; set {place}"
