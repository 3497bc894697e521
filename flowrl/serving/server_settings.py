"""Settings of a reward server, and limits of its requests."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from flowrl.core.options import Count, Positive, checked_options

Bytes = Annotated[int, Ge(1)]
TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"
"""The environment variable with the token of a reward server."""


@checked_options
@dataclass(frozen=True)
class ServerLimits:
    """Bounds of a reward server. Raises `ConfigError` for one that is not positive and finite.

    Bodies that are being received and images that wait for their scores together take at most
    `memory_bytes`. Further requests are refused with a status that tells the client to retry (503).
    """

    body_bytes: Bytes = 256 * 2**20
    """Bytes of one request."""
    prompts_bytes: Bytes = 8 * 2**20
    """Bytes of the JSON list of prompts in one request."""
    samples: Count = 1024
    """Images in one request."""
    pixels: Count = 4096 * 4096
    """Height x width of one image."""
    memory_bytes: Bytes = 4 * 2**30
    """Bytes of all bodies and decoded images (float32) together."""
    queue: Count = 8192
    """Images that wait for their scores at the same time."""
    connections: Count = 512
    """Simultaneous open connections, and simultaneous requests. For a further connection, the one
    that has been idle longest is closed; a further request is refused with 503.
    """
    header_seconds: Positive = 10.0
    """Seconds from the connection (or the first byte of a later request) to the end of the
    request's headers.
    """
    body_seconds: Positive = 60.0
    """Seconds from the headers to the last byte of the body."""
    score_seconds: Positive = 300.0
    """Seconds from the last byte of the body to the scores, including the queue."""


@checked_options
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
    max_batch: Count = 64
    """Images in one call of the model, from one or several requests."""
    wait: Annotated[float, Ge(0), Le(60)] = 0.005
    """Seconds that an incomplete call waits for more requests."""
    merge: bool = True
    """Whether requests share calls. If not, scores do not depend on the traffic, not even in the
    last digit.
    """
    limits: ServerLimits = field(default_factory=ServerLimits)
