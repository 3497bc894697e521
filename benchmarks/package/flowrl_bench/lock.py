"""One process at a time works on a results file; reading needs no lock."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def held(path: Path, work: str) -> Iterator[None]:
    """Hold `path` while the block runs, by a file PATH.lock beside it that says who does `work`. `ConfigError`: another one does.

    The operating system lets go of the lock of a process that has ended, however it ended; where it has no such locks, the
    file alone is the lock, and one that was left behind is to be deleted by hand (the error says so).
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(lock) if fcntl else _created(lock)
    except OSError as error:
        raise ConfigError(f"results: {path} cannot be locked ({error.strerror}); choose another --out") from error
    if handle is None:
        gone = "" if fcntl else f", or delete {lock} if that process is gone"
        hint = f"wait until it has ended or choose another --out{gone}"
        raise ConfigError(f"results: {path} is being written by {_holder(lock)}; {hint}")
    try:
        who = {"process": os.getpid(), "machine": platform.node(), "work": work, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # it is held also where the disk is full
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(who).encode())
        yield
    finally:
        if fcntl:
            with suppress(OSError):
                lock.unlink()
            os.close(handle)
        else:  # Windows does not delete open files
            os.close(handle)
            with suppress(OSError):
                lock.unlink()


def _locked(lock: Path) -> int | None:
    """An open file with the system's lock on it, and which is still the one at `lock`: its last holder removes it. None: held."""
    assert fcntl is not None
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(lock)):
                    return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _created(lock: Path) -> int | None:
    """The lock file, made by this process. None: it is there."""
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None


def _holder(lock: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(lock.read_text())
        return f"process {told['process']} on {told['machine']} (`{told['work']}`, since {told['since']})"
    return "another process"
