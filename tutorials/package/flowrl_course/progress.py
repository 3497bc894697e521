"""One line of progress under a cell that takes long.

It is shown every few seconds, in a notebook only, and is gone when the cell has finished. It is
written to stderr, which the build does not store.
"""

import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")
PERIOD = 3.0
"""Seconds between two lines, and before the first one."""
WIDTH = 79

_state: dict[str, Any] = {"hooked": False, "last": 0.0, "visible": False}


def progress(items: Collection[Item], what: str) -> Iterator[Item]:
    """The items one by one, with a line such as "rule 2 of 5" now and then."""
    for number, item in enumerate(items, 1):
        tick(f"{what} {number} of {len(items)}")
        yield item


def tick(text: str) -> None:
    """Show `text` in place of the last line, unless that is less than `PERIOD` seconds old."""
    if not _state["hooked"] and not _hook():
        return
    if time.monotonic() - _state["last"] >= PERIOD:
        _write(text[:WIDTH].ljust(WIDTH))
        _state.update(last=time.monotonic(), visible=True)


def _hook() -> bool:
    """Let IPython restart the clock before every cell, and remove the line after it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return False
    shell.events.register("pre_run_cell", _start)
    shell.events.register("post_run_cell", _finish)
    _state["hooked"] = True
    _start()
    return True


def _start(*_: Any) -> None:
    _state.update(last=time.monotonic(), visible=False)


def _finish(*_: Any) -> None:
    if _state["visible"]:
        _write(" " * WIDTH + "\r")
    _state["visible"] = False


def _write(line: str) -> None:
    sys.stderr.write("\r" + line)
    sys.stderr.flush()
