"""Who of several processes is alive, and why one that is not has gone."""

import os
import sys
import threading
import time
from typing import Any

BEAT = 0.5
"""Seconds between two signs of life."""
MISSED = 3.0
"""Seconds of silence after which a process is named as the one that was lost, once a connection has broken."""
STUCK = 60.0
"""Seconds of silence of another process after which this one ends itself, in case it waits for it in vain."""
GRACE = 10.0
"""Seconds that a process has to stop by itself once another one has said that it failed."""


class Liveness:
    """Signs of life of `size` processes in the key-value store that they were set up with.

    A thread counts this process's key up and reads the others'. Broken connections make the survivors' collective calls fail;
    `blame` then says who it was. Where nothing fails and the survivors wait in vain (NCCL), the thread ends the process with a
    message, so that no run hangs.
    """

    def __init__(self, rank: int, size: int) -> None:
        from torch.distributed import distributed_c10d

        self.rank, self.size = rank, size
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store: Any = distributed_c10d._get_default_store()
        self.store = distributed_c10d.PrefixStore(f"flowrl-{attempt}", store.clone() if hasattr(store, "clone") else store)
        self.seen = {other: (-1, time.monotonic()) for other in range(size) if other != rank}
        self.store.set(f"beat-{rank}", "0")
        self.failed_since: float | None = None
        self.lost: str | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self.thread.start()

    def leave(self, failure: str | None = None) -> None:
        """Stop; the first `failure` told is what the others report."""
        self.over.set()
        self.thread.join()
        try:
            if failure is not None:
                self.store.compare_set("failure", "", failure)
            self.store.set(f"beat-{self.rank}", "left")
        except RuntimeError:
            return  # the store has gone with the process that kept it

    def blame(self) -> str:
        """The failure that was told, or else whose signs of life have stopped; waits a few seconds for it to show."""
        until = time.monotonic() + MISSED + 4 * BEAT
        while time.monotonic() < until:
            if self.lost is not None:
                return self.lost
            if (told := self._failure()) is not None:
                return told
            for other, (_, since) in self.seen.items():
                if time.monotonic() - since > MISSED:
                    return f"process {other} of {self.size} has died without a word"
            time.sleep(BEAT / 2)
        return "the connection between the processes broke, although all of them are alive"

    def _failure(self) -> str | None:
        try:
            return self.store.get("failure").decode() if self.store.check(["failure"]) else None
        except RuntimeError:
            self.lost = f"process 0 of {self.size}, or the launcher, which keeps the processes' common store, has gone"
            return self.lost

    def _watch(self) -> None:
        count = 0
        while not self.over.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat-{self.rank}", str(count))
                self._look()
            except RuntimeError:
                self.lost = f"process 0 of {self.size}, or the launcher, which keeps the processes' common store, has gone"
                self._end_after(GRACE)
                return

    def _look(self) -> None:
        now = time.monotonic()
        for other, (before, _) in list(self.seen.items()):
            key = f"beat-{other}"
            value = self.store.get(key).decode() if self.store.check([key]) else "-1"
            if value == "left":
                del self.seen[other]
            elif int(value) != before:
                self.seen[other] = (int(value), now)
            elif now - self.seen[other][1] > STUCK:
                self._end(f"process {other} of {self.size} has died without a word")
        if self.failed_since is None and self.store.check(["failure"]):
            self.failed_since = now
        if self.failed_since is not None and now - self.failed_since > GRACE:
            self._end(self._failure() or "")

    def _end_after(self, seconds: float) -> None:
        if not self.over.wait(seconds):
            self._end(self.lost or "")

    def _end(self, message: str) -> None:
        """From this thread: the main one is stuck."""
        print(f"flowrl: error: {message}; process {self.rank} ends itself", file=sys.stderr, flush=True)
        os._exit(1)
