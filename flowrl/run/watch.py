"""A monitor of a run that names slow calls of the user's parts."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowrl.core.errors import calls_in_progress

SLOW = 60.0
"""Seconds after which a call of a part is named on standard error."""


@contextmanager
def watched_calls(publish: Callable[[str], None] = lambda call: None) -> Iterator[None]:
    """A context in which a line on standard error names each call of a part that takes more than
    `SLOW` seconds. `publish` gets the name of the call in progress, or "", about once a second.
    """
    ended = threading.Event()

    def watch() -> None:
        named = published = None
        while not ended.wait(min(1.0, SLOW / 10)):
            current = next(iter(calls_in_progress()), None)
            if current != published:
                published = current
                publish(current[0] if current else "")
            if current and current != named and time.monotonic() - current[1] > SLOW:
                named = current
                print(f"{current[0]} has not returned for {SLOW:g} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
