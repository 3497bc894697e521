"""The time that the unfinished jobs of a study need, by the pace of those that have finished."""

import time
from dataclasses import dataclass


@dataclass
class Pace:
    """Jobs that are `missing` when the work begins."""

    missing: int
    done: int = 0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def finished(self) -> str:
        """Count a job; the time that the others need, in words."""
        self.done += 1
        per_job = (time.monotonic() - self._started) / self.done
        return f"about {duration(per_job * (self.missing - self.done))} left"


def duration(seconds: float) -> str:
    """ "40 seconds", "12 minutes" or "3.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
