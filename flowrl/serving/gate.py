"""Admission of requests by their headers, before the body is received, for every path."""

import hashlib
import hmac
import ipaddress
import re
import socket

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flowrl.serving.batching import Metrics
from flowrl.serving.request import RequestError
from flowrl.serving.server_settings import ServerSettings
from flowrl.serving.wire_format import ErrorDetail, ErrorResponse

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d{1,5})?", flags=re.ASCII)
"""A Host header: a name or an address, and a port."""


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine: "localhost", 127.0.0.0/8 or ::1."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


class AccessCheck:
    """Authorisation of requests.

    With a token: compares the SHA-256 of bearer tokens in constant time, so that not even the
    token's length leaks.

    Without a token: a web page must not use the server through the browser of a user who can
    connect. The headers `Origin` and `Sec-Fetch-Site` exclude pages of other sites. The `Host`
    excludes a page whose name was rebound to this machine: it must be an address or name of the
    loopback. With `ServerSettings.any_host`, it may also be any address, a name without a dot, this
    machine's name, or one of `names`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._digest = hashlib.sha256(settings.token.encode()).digest() if settings.token else None
        self._any_host = settings.any_host
        self._names = {name.lower() for name in (*settings.names, socket.gethostname())}

    def check(self, headers: Headers) -> None:
        """Raise `RequestError` (401, 403 or 421) unless the request is authorised."""
        if self._digest is None:
            self._check_page(headers)
            return
        scheme, _, token = headers.get("authorization", "").encode("latin-1").partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        if scheme.lower() != b"bearer" or not same:
            message = "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
            raise RequestError(401, "wrong_token", message)

    def _check_page(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        match = HOST.fullmatch(host)
        if match is None or not self._serves(match[1].strip("[]")):
            message = "without a token only requests to the server's own address are served"
            raise RequestError(421, "wrong_host", message)
        origins = {origin.lower() for origin in headers.getlist("origin")}
        foreign = origins - {f"http://{host}", f"https://{host}"}
        if foreign or set(headers.getlist("sec-fetch-site")) - {"none", "same-origin"}:
            message = "without a token the server refuses requests from web pages"
            raise RequestError(403, "web_page", message)

    def _serves(self, name: str) -> bool:
        return is_loopback(name) or (
            self._any_host and (_is_address(name) or "." not in name or name in self._names)
        )


class Gate:
    """ASGI middleware that refuses requests with an ambiguous length, without access, or beyond the
    limit of simultaneous requests.

    `/health` is always served. Refused requests for scores are counted in `metrics`.

    Args:
        app: the application.
        settings: settings of the server.
        metrics: counters to update.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics
        self._access, self._most = AccessCheck(settings), settings.limits.connections
        self._underway = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or respond with a refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._admit(Headers(scope=scope), scope["path"])
        except RequestError as error:
            if scope["path"] == "/v1/score":
                self.metrics.count_request(error.status)
            await error_response(error)(scope, receive, send)
            return
        self._underway += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._underway -= 1

    def _admit(self, headers: Headers, path: str) -> None:
        """Raise `RequestError` unless the request is admitted."""
        # a proxy might find another end of the body
        if "transfer-encoding" in headers and "content-length" in headers:
            message = "the request has both Content-Length and Transfer-Encoding"
            raise RequestError(400, "two_lengths", message)
        if path == "/health":
            return
        self._access.check(headers)
        if self._underway >= self._most:
            message = f"{self._underway} requests are underway; allowed: {self._most}"
            raise RequestError(503, "busy", message, retry=True)


def error_response(error: RequestError) -> Response:
    """The response for `error`; after an ambiguous length the connection is closed."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status, {})
    headers |= {"Connection": "close"} if error.code == "two_lengths" else {}
    detail = ErrorDetail(code=error.code, message=error.message, retry=error.retry)
    body = ErrorResponse(error=detail)
    return Response(body.model_dump_json(), error.status, headers, "application/json")
