"""A monitor of a run that says what takes long, while it lasts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowrl.core.errors import calls_in_progress

SLOW = 30.0
"""Seconds after which a phase is slow."""
PHASES = {
    "loading": "loading",
    "prompts": "embedding prompts",
    "sizes": "measuring batch sizes",
    "evaluation": "evaluation",
    "rollout": "sampling",
    "decode": "decoding",
    "reward": "reward",
    "update": "update",
    "saving": "saving the checkpoint",
    "finishing": "writing the results",
}
"""The phases of a run, in words."""


def duration(seconds: float) -> str:
    """Seconds in words, as in "30 s" or "4 min"."""
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass
class _Phase:
    """A phase in progress, which is slow after `limit` seconds."""

    name: str
    remark: str = ""
    limit: float = SLOW
    since: float = field(default_factory=time.monotonic)


class Watch:
    """Says when a phase of a run takes long, and which call of a part it waits for.

    Args:
        tell: called, in another thread, with a line such as "reward: Score.score has not returned
            for 30 s". The first line of a phase comes after `SLOW` seconds, or after twice the
            longest time of this phase so far if that is more; the next ones after twice the time
            each.
        publish: called with the name of the part's call in progress, or "", about once a second.
        others: returns the calls in progress in other processes.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = lambda text: None,
        publish: Callable[[str], None] = lambda call: None,
        others: Callable[[], str] = lambda: "",
    ) -> None:
        self.tell, self.publish, self.others = tell, publish, others
        self._phase, self._longest = _Phase(""), dict[str, float]()

    def enter(self, phase: str, remark: str = "") -> None:
        """Begin a phase, of which a `remark` explains why it may take long; the current one
        continues.
        """
        last, longest = self._phase, self._longest
        if phase != last.name:
            longest[last.name] = max(time.monotonic() - last.since, longest.get(last.name, 0.0))
            self._phase = _Phase(phase, remark, max(SLOW, 2 * longest.get(phase, 0.0)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the phases are watched."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        published = ""
        while not ended.wait(min(1.0, SLOW / 10)):
            call, began = next(iter(calls_in_progress()), ("", 0.0))
            if call != published:
                published = call
                self.publish(call)
            phase, now = self._phase, time.monotonic()
            if now - phase.since > phase.limit:
                self.tell(self._text(phase, call, now - began))
                phase.limit *= 2

    def _text(self, phase: _Phase, call: str, lasted: float) -> str:
        name = PHASES.get(phase.name, phase.name)
        if call and lasted > phase.limit / 2:
            return f"{name}: {call} has not returned for {duration(min(phase.limit, lasted))}"
        remark = "; ".join(filter(None, [phase.remark, "" if call else self.others()]))
        return f"{name} has taken {duration(phase.limit)} so far{f' ({remark})' if remark else ''}"
