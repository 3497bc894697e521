"""Counters of a reward server, in the text format that Prometheus reads."""

import threading
import time
from collections import Counter

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Thread-safe counts: requests by status, scored samples, calls of the model with their sizes and seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._requests: Counter[int] = Counter()
        self._sizes: Counter[float] = Counter()
        self._call_seconds: Counter[float] = Counter()
        self._request_seconds: Counter[float] = Counter()
        self._sums = {"samples": 0.0, "invalid": 0.0, "call": 0.0, "request": 0.0}

    def request(self, status: int, seconds: float) -> None:
        """A request for scores was answered."""
        with self._lock:
            self._requests[status] += 1
            self._sums["request"] += seconds
            self._request_seconds[_bucket(seconds, SECONDS_BUCKETS)] += 1

    def batch(self, size: int, seconds: float, invalid: int = 0) -> None:
        """The model scored `size` pictures, and marked `invalid` of them."""
        with self._lock:
            self._sums["samples"] += size
            self._sums["invalid"] += invalid
            self._sums["call"] += seconds
            self._sizes[_bucket(size, BATCH_BUCKETS)] += 1
            self._call_seconds[_bucket(seconds, SECONDS_BUCKETS)] += 1

    def text(self, waiting: int, memory: int) -> str:
        """Everything, with the samples that wait now and the bytes in use now."""
        with self._lock:
            lines = ["# TYPE flowrl_reward_requests_total counter"]
            lines += [f'flowrl_reward_requests_total{{status="{s}"}} {n}' for s, n in sorted(self._requests.items())]
            for name, kind, value in (
                ("samples_total", "counter", self._sums["samples"]),
                ("invalid_total", "counter", self._sums["invalid"]),
                ("uptime_seconds", "gauge", time.monotonic() - self._started),
                ("waiting_samples", "gauge", waiting),
                ("memory_bytes", "gauge", memory),
            ):
                lines += [f"# TYPE flowrl_reward_{name} {kind}", f"flowrl_reward_{name} {value:.15g}"]
            sums = self._sums
            lines += _histogram("batch_samples", BATCH_BUCKETS, self._sizes, sums["samples"])
            lines += _histogram("model_seconds", SECONDS_BUCKETS, self._call_seconds, sums["call"])
            lines += _histogram("request_seconds", SECONDS_BUCKETS, self._request_seconds, sums["request"])
        return "\n".join(lines) + "\n"


def _bucket(value: float, bounds: tuple[float, ...]) -> float:
    return next((bound for bound in bounds if value <= bound), float("inf"))


def _histogram(name: str, bounds: tuple[float, ...], counts: Counter[float], total: float) -> list[str]:
    """A histogram's lines: cumulative counts by upper bound, sum and count."""
    lines, seen = [f"# TYPE flowrl_reward_{name} histogram"], 0
    for bound in (*bounds, float("inf")):
        seen += counts[bound]
        shown = "+Inf" if bound == float("inf") else f"{bound:g}"
        lines.append(f'flowrl_reward_{name}_bucket{{le="{shown}"}} {seen}')
    return [*lines, f"flowrl_reward_{name}_sum {total:.15g}", f"flowrl_reward_{name}_count {seen}"]
