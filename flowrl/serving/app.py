"""The application: POST /v1/score, GET /v1/info, /health, /metrics and /openapi.json."""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flowrl.core.protocols import AnyReward, RewardModel
from flowrl.rewards.combine import WeightedSum, require_single
from flowrl.rewards.contract import ComponentScores
from flowrl.serving.batching import Batcher, Metrics, is_transient
from flowrl.serving.gate import Gate, error_response
from flowrl.serving.openapi import ERRORS, SCORE_REQUEST, HealthResponse, InfoResponse
from flowrl.serving.request import MemoryBudget, RequestError, RequestMemory, read_request
from flowrl.serving.server_settings import ServerSettings
from flowrl.serving.wire_format import API_VERSION, ScoreResponse, encode_scores

logger = logging.getLogger(__name__)


class RewardServer:
    """A reward model, the thread that calls it, and the shared state of all requests.

    Args:
        reward: the reward model.
        settings: settings of the server.
    """

    def __init__(self, reward: AnyReward, settings: ServerSettings) -> None:
        reward = require_single(reward, "reward", settings.name)
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self.memory = MemoryBudget(self.limits.memory_bytes)
        self.weights = _component_weights(reward)
        self.batcher = Batcher(reward, self.metrics, settings)

    async def score(self, request: Request) -> bytes:
        """The body of the response. Raises `RequestError`, or `ClientDisconnect` if the client has
        disconnected.
        """
        weights = self._requested_weights(request)
        with RequestMemory(self.memory) as memory:
            images, prompts = await read_request(request, self.limits, memory)
            scores = await self._wait(request, self.batcher.submit(images, prompts))
        return encode_scores(_request_id(request), scores, weights)

    def _requested_weights(self, request: Request) -> dict[str, float] | None:
        """The weights of the components if the query requests them. Raises `RequestError` if the
        reward has none.
        """
        value = request.query_params.get("parts", "false")
        if value not in ("true", "false"):
            raise RequestError(422, "bad_query", "parts must be true or false")
        if value == "false":
            return None
        if self.weights is None:
            raise RequestError(
                422, "no_parts", "this reward has no components; only a weighted-sum has"
            )
        return self.weights

    async def _wait(self, request: Request, future: "Future[ComponentScores]") -> ComponentScores:
        """The scores. Raises `RequestError` (504) after the time limit, `ClientDisconnect` if the
        client has disconnected.
        """
        scores = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            done, _ = await asyncio.wait(
                {scores, gone}, timeout=self.limits.score_seconds, return_when="FIRST_COMPLETED"
            )
            if scores in done:
                return scores.result()
            if gone in done:
                raise ClientDisconnect
            message = f"scoring took longer than {self.limits.score_seconds:g} seconds"
            raise RequestError(504, "slow_reward", message, retry=True)
        finally:
            gone.cancel()
            scores.cancel()  # a queued job will not be scored

    def health(self) -> str:
        """ok, stuck or stopped."""
        if not self.batcher.alive:
            return "stopped"
        return "stuck" if self.batcher.busy_seconds > self.limits.score_seconds else "ok"


def _component_weights(reward: RewardModel) -> dict[str, float] | None:
    """The weight of every component of a weighted sum; None for other rewards."""
    if not isinstance(reward, WeightedSum):
        return None
    return {name: float(reward.weights.get(name, 1.0)) for name in reward.models}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(reward: AnyReward, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application that serves `reward`. Its thread stops with the application's lifespan.

    Args:
        reward: the reward model.
        settings: settings of the server; None for the defaults.

    Returns:
        The application.
    """
    settings = settings or ServerSettings()
    server = RewardServer(reward, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.batcher.close()

    paths: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="flowrl reward server", version=API_VERSION, lifespan=lifespan, **paths)
    app.state.server = server
    app.add_middleware(Gate, settings=settings, metrics=server.metrics)
    _add_error_handlers(app)
    _add_score(app, server)
    _add_status(app, server)
    return app


def _add_score(app: FastAPI, server: RewardServer) -> None:
    @app.post(
        "/v1/score",
        response_model=ScoreResponse,
        responses=ERRORS,
        openapi_extra=SCORE_REQUEST,
        summary="Score images",
    )
    async def score(request: Request) -> Response:
        """Send one prompt per image and the images; get one number per image, in the same order.

        If the reward cannot judge an image, its score is `null`, and `invalid` is true.
        `?parts=true` adds the components of a weighted sum.

        `curl -F 'prompts=[{"text": "a red circle"}]' -F png=@image.png -H "Authorization: Bearer
        TOKEN" URL/v1/score`
        """
        status = 499  # client disconnected
        try:
            body = await server.score(request)
            status = 200
            return Response(body, media_type="application/json")
        except RequestError as error:
            status = error.status
            raise _logged(request, error) from error.__cause__
        except ClientDisconnect:
            return error_response(RequestError(400, "gone", "the client disconnected"))
        finally:
            server.metrics.count_request(status)


def _add_status(app: FastAPI, server: RewardServer) -> None:
    settings = server.settings

    @app.get(
        "/health",
        response_model=HealthResponse,
        responses={503: {"model": HealthResponse}},
        summary="Is it working?",
    )
    async def health() -> JSONResponse:
        """Needs no token."""
        status = server.health()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get(
        "/v1/info",
        response_model=InfoResponse,
        responses={401: ERRORS[401]},
        summary="What is served",
    )
    async def info() -> JSONResponse:
        """The reward and the limits."""
        components = {} if server.weights is None else {"components": server.weights}
        return JSONResponse(
            {
                "reward": settings.name,
                "version": API_VERSION,
                "max_batch": settings.max_batch,
                **components,
                "limits": asdict(settings.limits),
            }
        )

    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={401: ERRORS[401]},
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        """Requests by status, samples, sizes and seconds of the model's calls, queue and memory."""
        text = server.metrics.text(server.batcher.waiting, server.memory.used)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_exception(_: Request, error: HTTPException) -> Response:
        refusal = RequestError(error.status_code, "no_such_endpoint", str(error.detail))
        response = error_response(refusal)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def server_failure(request: Request, error: Exception) -> Response:
        message = f"the server failed ({type(error).__name__})"
        failure = RequestError(500, "server_failed", message, is_transient(error))
        failure.__cause__ = error
        return error_response(_logged(request, failure))


def _logged(request: Request, error: RequestError) -> RequestError:
    """The error that the client receives: for a failure of the reward or the server, its class and
    an id.

    The text, which may contain paths and other internals, is logged under this id.
    """
    name, cause = _request_id(request), error.__cause__
    if error.status >= 500:
        logger.error("request %s: %s", name, error.message, exc_info=cause)
    elif error.code == "reward_refused":
        # repr: a prompt forges no lines
        logger.warning("request %s: %s: %s", name, error.message, repr(cause)[:2000])
    if not error.code.startswith(("reward_", "server_")):
        return error
    message = f"{error.message}; for the reason, see request {name} in the server's log"
    return RequestError(error.status, error.code, message, error.retry)


def _request_id(request: Request) -> str:
    """The client's id if it is safe to print, else a new one."""
    given = request.headers.get("x-request-id", "")
    if not re.fullmatch(r"[\w.-]{1,64}", given, flags=re.ASCII):
        given = request.scope.setdefault("flowrl_request_id", secrets.token_hex(8))
    return given
