"""Atomic files (written to a temporary name, flushed to the disk, and renamed), and locks that name their holder."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flowrl.errors import ConfigError


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


@contextmanager
def file_lock(path: Path, work: str) -> Iterator[None]:
    """Keep other processes from writing `path` (a file or a folder) while the block runs; reading needs no lock.

    The lock is PATH.lock, which the operating system releases when the process ends, however it ends; PATH.lock.json names
    the holder and its `work`. Raises `ConfigError` that names the holder if another process has the lock, or the folder cannot
    be written.
    """
    lock, holder = FileLock(f"{path}.lock"), Path(f"{path}.lock.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"{path} is being written by {_holder(holder)}; wait until it has ended or choose another --out"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked ({error.strerror}); choose another --out") from error
    try:
        who = {"process": os.getpid(), "machine": platform.node(), "work": work, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk must not keep the lock from working
            write_json(holder, who)
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _holder(path: Path) -> str:
    """The holder that `file_lock` has written down."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        return f"process {found['process']} on {found['machine']} (`{found['work']}`, since {found['since']})"
    return "another process"
