"""Settings of a reward server, and limits of its requests."""

import math
import ssl
from dataclasses import dataclass, field, fields
from pathlib import Path

from flowrl.core.errors import require

TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"
"""The environment variable with the token of a reward server."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of a reward server; each is positive and finite. Raises `ConfigError` otherwise.

    Bodies that are being received and images that wait for their scores together take at most
    `memory_bytes`. Further requests are refused with a status that tells the client to retry (503).
    """

    body_bytes: int = 256 * 2**20
    """Bytes of one request."""
    prompts_bytes: int = 8 * 2**20
    """Bytes of the JSON list of prompts in one request."""
    samples: int = 1024
    """Images in one request."""
    pixels: int = 4096 * 4096
    """Height x width of one image."""
    memory_bytes: int = 4 * 2**30
    """Bytes of all bodies and decoded images (float32) together."""
    queue: int = 8192
    """Images that wait for their scores at the same time."""
    connections: int = 512
    """Simultaneous open connections, and simultaneous requests. For a further connection, the one
    that has been idle longest is closed; a further request is refused with 503.
    """
    header_seconds: float = 10.0
    """Seconds from the connection (or the first byte of a later request) to the end of the
    request's headers.
    """
    body_seconds: float = 60.0
    """Seconds from the headers to the last byte of the body."""
    score_seconds: float = 300.0
    """Seconds from the last byte of the body to the scores, including the queue."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(
                math.isfinite(value) and value > 0,
                f"ServerLimits.{item.name}",
                value,
                "positive and finite",
            )


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a reward server.

    Without a `token` only requests to the names of the loopback are served, unless `any_host`.

    Args:
        token: the token that clients must send.
        any_host: without a token, also serve requests to other names.
        limits: bounds of the requests.

    Raises:
        ConfigError: `max_batch` or `wait` is out of range.
    """

    name: str = "reward"
    """The public name of the reward."""
    token: str = field(default="", repr=False)
    any_host: bool = False
    names: tuple[str, ...] = ()
    """With `any_host`: further names with a dot under which the server is reached."""
    max_batch: int = 64
    """Images in one call of the model, from one or several requests."""
    wait: float = 0.005
    """Seconds that an incomplete call waits for more requests."""
    merge: bool = True
    """Whether requests share calls. If not, scores do not depend on the traffic, not even in the
    last digit.
    """
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        require(self.max_batch >= 1, "max_batch", self.max_batch, "1 or more")
        require(0 <= self.wait <= 60, "wait", self.wait, "0 to 60 seconds")


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The server's TLS context. Raises `OSError` or `ValueError` for files that cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key, password="")
    return context
