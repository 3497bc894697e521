"""Atomic files (written to a temporary name, flushed to the disk, and renamed), and locks that name
their holder.
"""

import errno
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flowrl.core.errors import FULL, ConfigError, DiskError, FlowrlError, require
from flowrl.run.reading import read_bytes

CACHE = "FLOWRL_CACHE"
"""The environment variable with the folder of `cache_folder`."""
LOCK = ".lock"
"""The lock of a folder."""


def cache_folder() -> Path:
    """The folder of what runs share: `FLOWRL_CACHE`, or flowrl in `XDG_CACHE_HOME` (~/.cache); it
    may not exist yet.
    """
    usual = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(CACHE) or Path(usual, "flowrl")).absolute()


def write_json(path: Path, values: Any) -> None:
    """Write JSON atomically: a reader sees the old file or the complete new file.

    Args:
        path: the file.
        values: values that JSON can represent.

    Raises:
        OSError: the file cannot be written.
    """
    write_bytes(path, (json.dumps(values, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: write, fsync, rename, fsync the folder. A failed write leaves only
    the old file.

    Args:
        path: the file.
        data: its content.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.resolve().mkdir(parents=True, exist_ok=True)
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
    """Write all bytes and fsync.

    Args:
        path: the file.
        data: its content.

    Raises:
        OSError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_bytes(path: Path, data: bytes) -> None:
    """Write at the end of a file, which need not exist; the system writes it to the disk later."""
    with open(path, "ab") as file:
        file.write(data)


def flush_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, if the system can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(folder: Path, again: Callable[[], str]) -> Iterator[None]:
    """A context that turns the error of a full or read-only disk into a `DiskError` with a remedy.

    Args:
        folder: the folder that is written.
        again: the command to resume with; without a config.json in `folder`, the command of this
            process is shown.

    Raises:
        DiskError: the disk is full or read-only.
    """
    try:
        yield
    except FlowrlError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        # safetensors raises another class, with the error number in its text
        if number not in (*FULL, errno.EROFS) and "os error 28" not in str(error):
            raise
        path, reason = getattr(error, "filename", None) or folder, os.strerror(number or 28)
        command = again() if (folder / "config.json").exists() else command_line()
        message = f"disk: {path} cannot be written: {reason}. Free some space, then run: {command}"
        raise DiskError(message) from error


def refused(error: Exception, message: str) -> FlowrlError:
    """The error for a path that cannot be written: a `DiskError` if the disk is full, else a
    `ConfigError`.
    """
    return (DiskError if getattr(error, "errno", None) in FULL else ConfigError)(message)


@contextmanager
def file_lock(path: Path, work: str) -> Iterator[None]:
    """A context in which other processes cannot write a file; reading needs no lock.

    The lock is PATH.lock, which the operating system releases in any case when the process ends;
    PATH.lock.json names the holder and its `work`.

    Args:
        path: the file.
        work: description of the work, for the message of other processes.

    Raises:
        ConfigError: another process (named in the message) has the lock, or the folder cannot be
            written.
    """
    with _lock(path, f"{path}.lock", work):
        yield


@contextmanager
def folder_lock(folder: Path, work: str = "") -> Iterator[None]:
    """As `file_lock`, for all files in a folder.

    Args:
        folder: the folder, which is made if necessary.
        work: description of the work; empty for the command line.

    Raises:
        ConfigError: another process has the lock, or the folder cannot be written.
    """
    require_no_links(folder)
    with _lock(folder, str(folder / LOCK), work or command_line()):
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process has the `folder_lock`, or may have it if this one cannot find out."""
    path = folder / LOCK
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except OSError:  # also `Timeout`
        return True


IN_PLACE = (
    *(LOCK, "metrics.jsonl", "checkpoints", "experience", "failure", "samples", "tensorboard"),
    *("lora", "lora.new", "full", "full.new", "evaluation", "runs", "paper"),
)
"""What runs, comparisons and evaluations append to, and folders in which they write or delete. A
link of another name is replaced, or not touched.
"""


def require_no_links(folder: Path, names: Iterable[str] = IN_PLACE) -> None:
    """Raise `ConfigError` if an entry of `folder` with one of `names`, or a run of a comparison in
    it, is a link, through which files elsewhere would be written or deleted, or a pipe or a device.
    The folder itself may be a link.
    """
    for path in (*(folder / name for name in names), *folder.glob("runs/*")):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link; replace it with its target")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is a pipe or a device, not a regular file; remove it")


@contextmanager
def new_folder(
    folder: Path, kind: str, made: Callable[[Path], bool], kept: Callable[[], bool]
) -> Iterator[None]:
    """Lock a folder for a new run or report, and clean up after an error.

    If the block raises, its new files are removed, unless results are to be kept, or the disk
    failed and the run can be resumed.

    Args:
        folder: the folder.
        kind: "run", "report", ..., for the message.
        made: whether the content of a folder is of this kind, written by flowrl.
        kept: whether the folder has results to keep after an error.

    Raises:
        ConfigError: the folder has other content, which is left unchanged, or cannot be used.
    """
    _require_way(folder, "out")
    try:
        usable = not folder.is_file() and folder.resolve() != Path.cwd()
        require(usable, "out", str(folder), "a new or existing folder, but not the current one")
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        had_lock = (folder / LOCK).exists()
    except OSError as error:
        raise refused(error, f"out: {folder} cannot be used: {error.strerror}") from error
    try:
        with folder_lock(folder):
            before = {path.name for path in folder.iterdir()} | {LOCK}
            # of `write_bytes`, by a killed process
            halves = {name for name in before if re.fullmatch(r".+\.\d+\.tmp", name)}
            is_ours = not before - {LOCK, f"{LOCK}.json"} - halves or made(folder)
            need = f"a new folder, or an earlier {kind}; this one contains other files"
            require(is_ours, "out", str(folder), need)
            try:
                yield
            except BaseException as error:
                if not (kept() or (isinstance(error, OSError) and made(folder))):
                    for path in [path for path in folder.iterdir() if path.name not in before]:
                        is_folder = path.is_dir() and not path.is_symlink()
                        shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
                raise
    except BaseException:
        with suppress(OSError):
            if not had_lock and not kept():
                (folder / LOCK).unlink()
            for parent in missing:
                parent.rmdir()
        raise


def require_new_file(
    path: Path, made: Callable[[bytes], bool] = lambda data: False, option: str = "out"
) -> None:
    """Check at the start of a command that its result can be written; nothing is left on the disk.

    Args:
        path: the file.
        made: whether the content of an existing file is from this command and may be replaced.
        option: name of the option, for the message.

    Raises:
        ConfigError: `path` cannot be written, or exists with other content.
    """
    _require_way(path, option)
    try:
        replaceable = not path.exists() or (path.is_file() and made(read_bytes(path)))
        require(replaceable, option, str(path), "a new file, or one that this command wrote")
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        probe = parent / f"{path.name}.{os.getpid()}.tmp"
        try:
            write_file(probe, b"")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise refused(error, f"{option}: {path} cannot be written: {error.strerror}") from error


def _require_way(path: Path, option: str) -> None:
    """Raise `ConfigError` for a ".." after a folder that does not exist, which would be made."""
    ways = [place for place in (path, *path.parents) if place.name == ".."]
    need = "a path in which '..' follows existing folders only"
    require(all(map(os.path.isdir, ways)), option, str(path), need)


def command_line() -> str:
    """The command line of this process."""
    name = Path(sys.argv[0]).name
    return shlex.join(["flowrl" if name == "__main__.py" else name, *sys.argv[1:]])


@contextmanager
def _lock(path: Path, name: str, work: str) -> Iterator[None]:
    lock, holder = FileLock(name), Path(f"{name}.json")
    try:
        holder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        need = "wait until it has finished, or choose another --out"
        raise ConfigError(f"{path} is being written by {_holder(holder)}; {need}") from error
    except OSError as error:
        raise refused(error, f"{path} cannot be locked: {error.strerror}") from error
    try:
        who = {
            "process": os.getpid(),
            "machine": platform.node(),
            "work": work,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with suppress(OSError):  # a full disk must not keep the lock from working
            for half in holder.parent.glob(f"{holder.name}.*.tmp"):  # of a killed process
                half.unlink()
            write_json(holder, who)
        yield
    finally:
        try:
            with suppress(OSError):
                holder.unlink()
        finally:
            lock.release()


def _holder(path: Path) -> str:
    """The holder that `file_lock` has recorded."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        who = json.loads(path.read_text())
        return "process {process} on {machine} (`{work}`, since {since})".format_map(who)
    return "another process"
