"""Who may ask, and how much memory all requests take together."""

import hashlib
import hmac
import threading

from flowrl.serving.limits import Refusal

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class TokenCheck:
    """Compares bearer tokens in constant time: SHA-256 of both, so that not even the length of the right one shows.

    Without a token (allowed on the loopback only) the request's Host must be the loopback by name, which keeps web pages from
    reaching the server by rebinding a name of theirs to 127.0.0.1.
    """

    def __init__(self, token: str, any_host: bool = False) -> None:
        self._digest = hashlib.sha256(token.encode()).digest() if token else None
        self._any_host = any_host

    def check(self, authorization: bytes, host: bytes) -> None:
        """Raise `Refusal` (401 or 421) unless the request may go on."""
        if self._digest is None:
            name = host.decode("latin-1").lower()
            name = name[: name.rfind(":")] if name.rpartition(":")[2].isdigit() and not name.endswith("]") else name
            if not self._any_host and name not in LOOPBACK_NAMES:
                raise Refusal(421, "wrong_host", f"without a token only {', '.join(sorted(LOOPBACK_NAMES))} are served")
            return
        scheme, _, given = authorization.partition(b" ")
        right = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self._digest)
        if scheme.lower() != b"bearer" or not right:
            raise Refusal(401, "wrong_token", "the token is missing or wrong; send it as Authorization: Bearer TOKEN")


class Memory:
    """Bytes that requests hold: `take` refuses (503) what would go beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Count `amount` bytes."""
        with self._lock:
            if self.used + amount > self.limit:
                raise Refusal(503, "busy", f"requests hold {self.used} bytes; allowed: {self.limit}", retry=True)
            self.used += amount

    def give(self, amount: int) -> None:
        """Bytes taken before are free again."""
        with self._lock:
            self.used -= amount


class Share:
    """What one request holds of a `Memory`; leaving the context gives everything back."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._held = memory, 0

    def take(self, amount: int) -> None:
        """Count `amount` more bytes. Raises `Refusal`: 413 where one request alone needs more than there is, else 503."""
        if self._held + amount > self._memory.limit:
            message = f"the request needs more than {self._memory.limit} bytes of memory; send fewer or smaller pictures"
            raise Refusal(413, "too_much_memory", message)
        self._memory.take(amount)
        self._held += amount

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.give(self._held)
        self._held = 0
