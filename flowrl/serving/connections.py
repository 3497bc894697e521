"""HTTP connections of the rewards with an endpoint, `remote` and `judge`: requests bounded in time
and size, without redirects.

Needs httpx and tenacity (`pip install -e '.[remote]'`), which are imported when a reward is first
used.
"""

import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, RewardError, require
from flowrl.run.reading import read_text, reading
from flowrl.serving.wire_format import TransientError

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

__all__ = ["PACKAGES", "Answer", "Connections", "Endpoints", "check_endpoint", "last_error"]

PACKAGES = ("httpx", "tenacity")
"""The packages of the extra `remote`."""
AVOIDED = 30.0
"""Seconds for which a server that failed gets no requests, if there is another one."""


def check_endpoint(name: str, url: str) -> None:
    """Check the address of a reward server before a run starts.

    Args:
        name: name of the reward, for the message.
        url: the address.

    Raises:
        ConfigError: `url` cannot be an endpoint, or the packages of the extra are not installed.
    """
    good = url.startswith(("http://", "https://")) and "@" not in url
    require(good, f"{name}.url", url, "http://HOST:PORT or https://HOST:PORT")
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{name} needs {', '.join(missing)}; install the extra with: pip install -e '.[remote]'"
        )


def last_error(state: "RetryCallState") -> BaseException | None:
    """The error of the last attempt, if it failed."""
    return state.outcome.exception() if state.outcome else None


@dataclass(frozen=True)
class Answer:
    """A complete response of any status.

    Args:
        status: HTTP status.
        headers: headers.
        content: body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def retry_after(self) -> float:
        """The pause that the server requests, in seconds; 0 without one. A date in Retry-After is
        ignored.
        """
        seconds = self.headers.get("Retry-After", "").strip()
        return float(seconds) if seconds.isdecimal() and len(seconds) < 6 else 0.0


class Connections:
    """The connection pool of a reward; a process that forks or unpickles the reward opens a new
    pool.

    A bearer token is sent with every request. Redirects are not followed, so it is sent only to
    `url`; the environment's proxies are not used.

    Args:
        name: name of the reward, for messages.
        url: address of the endpoint.
        limit: largest number of connections.
        variable: environment variable with the token.
        token_file: file with the token, instead of the variable.
        certificate: file with the trusted certificates (PEM); "" for the system's.
    """

    def __init__(
        self,
        name: str,
        url: str,
        limit: int,
        variable: str = "",
        token_file: str = "",
        certificate: str = "",
    ) -> None:
        self.url = url
        self._settings = (name, url, limit, variable, token_file, certificate)
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._process = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, self._settings

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str], seconds: float, max_bytes: int
    ) -> Answer:
        """The response to one request within `seconds`, of at most `max_bytes` bytes.

        Raises `TransientError` for temporary failures, and `RewardError` for an untrusted
        certificate, an invalid URL or a larger response.
        """
        import httpx

        name, url, *_ = self._settings
        ends = time.monotonic() + seconds
        try:
            request = {"content": body, "headers": headers, "timeout": seconds}
            with self.client().stream("POST", url.rstrip("/") + path, **request) as response:
                content = _read_bounded(response.iter_raw(), max_bytes, ends, name)
        except httpx.TimeoutException as error:
            raise TransientError(f"no response within {seconds:.0f} seconds") from error
        except (httpx.TransportError, httpx.StreamError) as error:
            if _is_certificate_error(error):
                raise RewardError(
                    f"{name}: the certificate of {url} is not trusted ({error}); pass"
                    " the certificate of its authority as certificate='ca.pem' or in SSL_CERT_FILE"
                ) from error
            reason = f"{type(error).__name__}: {error}"
            raise TransientError(f"the connection failed ({reason})") from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise RewardError(f"{name}: {url} is not a valid URL: {error}") from error
        return Answer(response.status_code, response.headers, content)

    def client(self) -> "httpx.Client":
        """The pool, opened at the first call in a process."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = _open_client(*self._settings), os.getpid()
            return self._client

    def close(self) -> None:
        """Close the pool of this process."""
        with self._lock:
            if self._client is not None and self._process == os.getpid():
                self._client.close()
            self._client = None


class Endpoints:
    """Servers of the same reward, which share its requests.

    Args:
        connections: the connections to each server.
    """

    def __init__(self, connections: Sequence[Connections]) -> None:
        self.connections, self._lock = connections, threading.Lock()
        self._open, self._avoided = [0] * len(connections), [0.0] * len(connections)

    @contextmanager
    def choose(self) -> Iterator[Connections]:
        """The connections for a request: to the server with the fewest open requests among those
        without a `TransientError` in the last `AVOIDED` seconds, or else to the one whose error is
        the oldest. The block's `TransientError` counts.
        """
        with self._lock:
            waits = [max(until - time.monotonic(), 0) for until in self._avoided]
            chosen = min(range(len(waits)), key=lambda n: (waits[n], self._open[n]))
            self._open[chosen] += 1
        try:
            yield self.connections[chosen]
            self._avoided[chosen] = 0.0
        except TransientError:
            self._avoided[chosen] = time.monotonic() + AVOIDED
            raise
        finally:
            with self._lock:
                self._open[chosen] -= 1

    def close(self) -> None:
        """Close the connections of this process."""
        for connections in self.connections:
            connections.close()


def _open_client(
    name: str, url: str, limit: int, variable: str, token_file: str, certificate: str
) -> "httpx.Client":
    import httpx

    headers = {"Accept-Encoding": "identity", "User-Agent": "flowrl"}
    token = os.environ.get(variable, "")
    if token_file:
        with reading(f"{name}.token_file"):
            token = read_text(Path(token_file).expanduser())
    if token.strip():
        headers["Authorization"] = f"Bearer {token.strip()}"
    trusted = False
    if url.startswith("https://"):  # reading the system's certificates is slow
        with reading(f"{name}.certificate: {certificate}"):
            trusted = ssl.create_default_context(cafile=certificate or None)
    limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
    return httpx.Client(
        headers=headers, verify=trusted, limits=limits, follow_redirects=False, trust_env=False
    )


def _is_certificate_error(error: BaseException | None) -> bool:
    """Whether a certificate that cannot be verified caused `error`, so that further attempts would
    fail, too.
    """
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_bounded(chunks: Iterator[bytes], max_bytes: int, ends: float, name: str) -> bytes:
    """The whole body. Raises `RewardError` beyond `max_bytes` bytes and `TransientError` after the
    monotonic time `ends`.
    """
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > max_bytes:
            raise RewardError(
                f"{name}: the response is larger than {max_bytes} bytes; is this the right server?"
            )
        if time.monotonic() > ends:
            raise TransientError("the response was too slow")
    return bytes(content)
