"""What a reward server accepts, and how long it waits."""

import math
from dataclasses import dataclass, fields

from flowrl.errors import require


@dataclass(frozen=True)
class Limits:
    """Bounds of a reward server; each is positive and finite. Raises `ConfigError` for others.

    Memory: bodies that are being read and pictures that wait for their scores together take at most `memory_bytes`; beyond
    it, requests are told to come back (503).
    """

    body_bytes: int = 256 * 2**20
    """Bytes of one request."""
    prompts_bytes: int = 8 * 2**20
    """Bytes of the JSON list of prompts in one request."""
    samples: int = 1024
    """Pictures in one request."""
    pixels: int = 4096 * 4096
    """Height x width of one picture."""
    memory_bytes: int = 4 * 2**30
    """Bytes of all bodies and decoded pictures (float32) at one time."""
    queue: int = 8192
    """Pictures that wait for their scores at one time."""
    connections: int = 512
    """Open connections at one time; `uvicorn` refuses more with 503."""
    header_seconds: float = 10.0
    """From the connection (or the first byte of a later request) to the end of the request's headers."""
    body_seconds: float = 60.0
    """From the headers to the last byte of the body."""
    score_seconds: float = 300.0
    """From the body's last byte to the scores, waiting included."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(math.isfinite(value) and value > 0, f"Limits.{item.name}", value, "positive and finite")


class Refusal(Exception):
    """A request that is answered with an error: HTTP `status`, a `code` for programs, a sentence for people.

    `retry` tells the client whether the same request may succeed later.
    """

    def __init__(self, status: int, code: str, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry = status, code, message, retry
