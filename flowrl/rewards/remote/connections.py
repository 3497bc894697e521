"""The connections of a `RemoteReward`."""

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from flowrl.rewards.remote.client import RemoteReward

TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"


class Connections:
    """The pool of connections of a `RemoteReward`; another one after a fork or a copy to another process."""

    def __init__(self, reward: "RemoteReward") -> None:
        self._reward = reward
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._process = 0

    def client(self) -> "httpx.Client":
        """The pool, opened where it is not."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._open(), os.getpid()
            return self._client

    def close(self) -> None:
        """Close it."""
        with self._lock:
            if self._client is not None and self._process == os.getpid():
                self._client.close()
            self._client = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, (self._reward,)

    def _open(self) -> "httpx.Client":
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("remote needs the package httpx; install it with: pip install -e '.[server]'") from error
        import ssl

        reward = self._reward
        headers = {"Accept-Encoding": "identity", "User-Agent": "flowrl"}
        token = _token(reward.token_file)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:  # reading the system's certificates takes a while, and http has no use for them
            secure = reward.url.startswith("https://")
            trusted = ssl.create_default_context(cafile=reward.certificate or None) if secure else False
        except OSError as error:
            raise ConfigError(f"remote.certificate: {reward.certificate} cannot be read: {error}") from error
        limits = httpx.Limits(max_connections=reward.concurrency, max_keepalive_connections=reward.concurrency)
        return httpx.Client(headers=headers, verify=trusted, limits=limits, follow_redirects=False, trust_env=False)


def _token(file: str) -> str:
    """The token from `file`, else from the environment; "" where there is none."""
    if not file:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"remote.token_file: {file} cannot be read: {error}") from error
