"""Atomic files: written beside their place, flushed to the disk, and renamed."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, values: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_bytes(path, (json.dumps(values, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write, fsync, rename, fsync the folder. A write that fails leaves the old file and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    flush_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write all bytes and fsync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut (where the system lets one open a folder)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
