"""One bad input in a process of its own: what must be true of how it is refused.

Refused clearly: one message that names what was wrong, exit code 2, no traceback, nothing written,
less than ten seconds.
"""

import hashlib
import importlib
import os
import pkgutil
import signal
import time
import traceback
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

from flowrl.cli.main import main
from flowrl.core.errors import OWN_PACKAGES

LIMIT = 10.0
"""Seconds after which a case hangs, or has started work; on a busy machine more."""


@dataclass(frozen=True)
class Case:
    """A command that must be refused with a message that contains one of the words `named`.

    `begins`: the fault may show after the work has begun, so exit code 1 and new files are allowed.
    """

    words: list[str]
    named: tuple[str, ...] = ("",)
    begins: bool = False


@cache
def preload() -> None:
    """Import what commands import when they run, once for all cases."""
    for package in OWN_PACKAGES:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def problem(case: Case, root: Path, log: Path) -> str:
    """Run the command in `root` in a forked process; what is wrong with its refusal, or ""."""
    preload()
    before, start = snapshot(root), time.monotonic()
    child = os.fork()
    if child == 0:
        _child(case.words, root, log)
    limit = LIMIT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    status = _wait(child, start + limit)
    return judged(case, status, log.read_text(errors="replace"), before, snapshot(root))


def _child(words: list[str], root: Path, log: Path) -> None:
    """The command; never returns."""
    os.setsid()
    os.chdir(root)
    # without this, `compare` waits for the fork server of the parent
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_fd = server._forkserver_alive_fd = None
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import sys

    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    code = 99
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    """The exit code; None if the process had to be ended."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def snapshot(root: Path) -> dict[str, str]:
    """A digest of every file, "-" for everything else, below `root`."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else "-"
        for path in sorted(root.rglob("*"))
    }


def judged(
    case: Case, status: int | None, output: str, before: dict[str, str], after: dict[str, str]
) -> str:
    """What is wrong with how an input was handled; "" if nothing is."""
    changed = sorted(set(before.items()) ^ set(after.items()))
    errors = output.count("flowrl: error:") + output.count("╭─")
    text = output.lower().replace("_", "-")
    wrong = {
        "hangs or starts work": status is None,
        "traceback": "Traceback" in output or "unexpected error" in output,
        "accepted": status == 0,
        f"exit code {status}": status != 2 and not (case.begins and status == 1),
        f"leaves {changed[:1]}": bool(changed) and not case.begins,
        f"{errors} messages": errors != 1,
        f"does not name {case.named}": not any(
            word.lower().replace("_", "-") in text for word in case.named
        ),
    }
    return next((what for what, is_so in wrong.items() if is_so), "")
