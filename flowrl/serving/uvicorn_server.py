"""The application under uvicorn: an open socket, limits on slow and idle connections, an orderly
shutdown.
"""

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.core.errors import ConfigError, require
from flowrl.core.protocols import RewardModel
from flowrl.serving.app import create_app
from flowrl.serving.gate import is_loopback
from flowrl.serving.server_settings import ServerSettings


@dataclass(frozen=True)
class Listener:
    """An open socket on which a server listens.

    Args:
        socket: the socket.
        host: the address or name.
    """

    socket: socket.socket
    host: str

    @staticmethod
    def open(host: str, port: int) -> "Listener":
        """Bind and listen; port 0 selects a free port. Raises `ConfigError` on failure."""
        require(0 <= port <= 65535, "port", port, "0 to 65535")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return Listener(socket.create_server((host, port), family=family, backlog=512), host)
        except (OSError, ValueError) as error:  # ValueError: not a name, such as 300 letters
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"host, port: cannot listen at {host}:{port}: {reason}") from error

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


def make_server(
    reward: RewardModel,
    settings: ServerSettings,
    certificate: Path | None = None,
    key: Path | None = None,
) -> uvicorn.Server:
    """A uvicorn server for the socket of a `Listener`, which can run in any thread.

    Args:
        reward: the reward model.
        settings: settings of the server.
        certificate: file of the TLS certificate; None for HTTP.
        key: file of the certificate's private key.

    Returns:
        The server, not yet running.
    """
    limits = settings.limits
    bounds = {"header_seconds": limits.header_seconds, "most_connections": limits.connections}
    protocol = type("BoundedProtocol", (LimitedProtocol,), bounds)
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
        # also accepted at once; closing idle connections in between stays within the usual limit of
        # 1024 files
        backlog=128,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    return uvicorn.Server(config)


def serve(
    reward: RewardModel,
    settings: ServerSettings,
    listener: Listener,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve until the process receives SIGINT or SIGTERM; running requests then have half a minute
    to finish.

    Args:
        reward: the reward model.
        settings: settings of the server.
        listener: the open socket.
        certificate: file of the TLS certificate; None for HTTP.
        key: file of the certificate's private key.
    """
    if not settings.token and not listener.loopback:
        allowed = "a token, or any_host=True to serve everyone who can reach this machine"
        require(settings.any_host, "token", "", allowed)
    make_server(reward, settings, certificate, key).run(sockets=[listener.socket])


CLOSE_SECONDS = 1.0
"""Seconds that a stopping server waits for the peer of an idle connection to close."""


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the headers of a request, and a limit on
    connections.

    uvicorn's `limit_concurrency` refuses requests because of idle connections; here these are
    closed instead.
    """

    header_seconds = 10.0
    most_connections = 512
    _active = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer. Turn off Nagle's algorithm, which would delay the second packet of a
        response by 40 ms.
        """
        super().connection_made(transport)
        self._make_room()
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = self.loop.call_later(self.header_seconds, self._time_out)

    def data_received(self, data: bytes) -> None:
        """Stop the timer when the headers are complete; start it with the first bytes of another
        request.
        """
        self._active = self.loop.time()
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting:
            self._stop_timer()
        elif self._timer is None and self.conn.our_state is h11.IDLE:
            self._timer = self.loop.call_later(self.header_seconds, self._time_out)

    def shutdown(self) -> None:
        """Close an idle connection at once: over TLS, a clean close would wait for the peer, which
        is idle, too.
        """
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(CLOSE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP. If they are in the body of a request, that request has
        ended without a response.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """If there are too many connections, close the one without a request that has been idle
        longest.
        """
        self._active = self.loop.time()
        if len(self.connections) <= self.most_connections:
            return
        others: Any = self.connections - {self}
        idle = [other for other in others if other.cycle is None or other.cycle.response_complete]
        if idle:
            silent = min(idle, key=lambda other: other._active)
            self.connections.discard(silent)
            silent.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
