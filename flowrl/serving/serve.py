"""Running the application with uvicorn: an open socket, slow and idle connections cut off, an orderly end."""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.errors import ConfigError, require
from flowrl.protocols import RewardModel
from flowrl.serving.app import Settings, create_app


@dataclass(frozen=True)
class Listener:
    """An open socket: where a server listens. Port 0 takes a free one. Raises `ConfigError` where that is not possible."""

    socket: socket.socket
    host: str

    @staticmethod
    def open(host: str, port: int) -> "Listener":
        """Bind and listen."""
        require(0 <= port <= 65535, "port", port, "0 to 65535")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return Listener(socket.create_server((host, port), family=family, backlog=512), host)
        except OSError as error:
            raise ConfigError(f"host and port: cannot listen at {host}:{port}: {error.strerror or error}") from error

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self.socket.getsockname()[1])

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def url(self, scheme: str = "http") -> str:
        """The address for clients."""
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's own address: "localhost", 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(
    reward: RewardModel, settings: Settings, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    """A uvicorn server, ready to run on the socket of a `Listener` in any thread."""
    limits = settings.limits
    protocol = type("LimitedProtocol", (HeaderLimit,), {"header_seconds": limits.header_seconds})
    config = uvicorn.Config(
        create_app(reward, settings),
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
        limit_concurrency=limits.connections,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    return uvicorn.Server(config)


def serve(
    reward: RewardModel, settings: Settings, listener: Listener, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Serve until the process is told to end (SIGINT, SIGTERM); requests under way get half a minute."""
    if not settings.token and not listener.loopback:
        require(settings.any_host, "token", "", "a token, or any_host=True to serve everyone who can reach this machine")
    make_server(reward, settings, certificate, key).run(sockets=[listener.socket])


GOODBYE_SECONDS = 1.0
"""How long a server that ends waits for the other side of an idle connection."""


class HeaderLimit(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which waits for ever for a request's headers, with a limit on that wait."""

    header_seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock. Answers go out at once: Nagle's algorithm would hold their second packet for 40 milliseconds."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = self.loop.call_later(self.header_seconds, self._late)

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the headers are complete; start it with the first bytes of another request."""
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting:
            self._stop()
        elif self._timer is None and self.conn.our_state is h11.IDLE:
            self._timer = self.loop.call_later(self.header_seconds, self._late)

    def shutdown(self) -> None:
        """Close an idle connection for good: over TLS the other side, idle too, would be waited for until it says goodbye."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """There are no websockets here."""
        self.send_400_response("Unsupported upgrade request.")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP. A request whose body turns into such has ended: the application cannot answer it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
