"""The application: POST /v1/score, GET /v1/info, /health, /metrics, /openapi.json and a page that shows it."""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from flowrl.errors import require
from flowrl.protocols import RewardModel
from flowrl.rewards.combine import WeightedSum
from flowrl.serving.access import Memory, Share, TokenCheck
from flowrl.serving.batching import Batcher, Scored
from flowrl.serving.limits import Limits, Refusal
from flowrl.serving.metrics import Metrics
from flowrl.serving.multipart import Parts
from flowrl.serving.page import describe
from flowrl.serving.payload import png_sizes, read_pngs, read_prompts, read_safetensors
from flowrl.serving.schema import ERRORS, SCORE_BODY, HealthAnswer, InfoAnswer, ScoreAnswer
from flowrl.types import Prompt

API_VERSION = "1.1"
logger = logging.getLogger("flowrl.reward_server")


@dataclass(frozen=True)
class Settings:
    """How a reward is served. An empty `token` serves requests to the loopback's names only, unless `any_host`."""

    name: str = "reward"
    """What clients are told that they talk to."""
    token: str = field(default="", repr=False)
    any_host: bool = False
    max_batch: int = 64
    """Pictures in one call of the model, from one or several requests."""
    wait: float = 0.005
    """Seconds that a call waits for more requests while it is not full."""
    merge: bool = True
    """Whether requests share calls. Off: scores cannot depend on the traffic, not even in the last digit."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        require(self.max_batch >= 1, "max_batch", self.max_batch, "1 or more")
        require(0 <= self.wait <= 60, "wait", self.wait, "0 to 60 seconds")


class RewardServer:
    """A reward model, the thread that calls it, and what requests to it have in common."""

    def __init__(self, reward: RewardModel, settings: Settings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self.memory = Memory(self.limits.memory_bytes)
        self.tokens = TokenCheck(settings.token, settings.any_host)
        self.components = _components(reward)
        self.batcher = Batcher(reward, self.metrics, settings.max_batch, settings.wait, self.limits.queue, settings.merge)

    def authorise(self, request: Request) -> None:
        """Raise `Refusal` unless the request may go on; its body has not been read yet."""
        headers = request.headers
        self.tokens.check(headers.get("authorization", "").encode("latin-1"), headers.get("host", "").encode("latin-1"))

    async def score(self, request: Request) -> dict[str, Any]:
        """Read the request, wait for its scores. Raises `Refusal`, or `ClientDisconnect` where nobody waits any more."""
        self.authorise(request)
        parts_wanted = self._wants_parts(request)
        with Share(self.memory) as share:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    parts = await self._body(request, share)
            except TimeoutError:
                message = f"the body took longer than {self.limits.body_seconds:g} seconds"
                raise Refusal(408, "slow_body", message, retry=True) from None
            images, prompts = await asyncio.to_thread(self._read, parts, share)
            scored = await self._wait(request, self.batcher.submit(images, prompts))
        found = {"scores": _nulls(scored.scores, scored.invalid), "invalid": scored.invalid}
        if parts_wanted:
            parts = {name: _nulls(values) for name, values in scored.parts.items()}
            found |= {"parts": parts, "weights": self.components}
        return found

    def _wants_parts(self, request: Request) -> bool:
        """Whether the components are asked for. Raises `Refusal` where there are none, or the word is no truth value."""
        word = request.query_params.get("parts", "false").lower()
        if word not in ("true", "false", "1", "0"):
            raise Refusal(422, "bad_query", "parts must be true or false")
        if word in ("true", "1") and self.components is None:
            raise Refusal(422, "no_parts", "this reward has no components: a weighted-sum has")
        return word in ("true", "1")

    async def _body(self, request: Request, share: Share) -> dict[str, list[bytes]]:
        limits = self.limits
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limits.body_bytes:
            raise Refusal(413, "body_too_large", f"the body has {announced[:20]} bytes; allowed: {limits.body_bytes}")
        allowed = {"prompts": 1, "safetensors": 1, "png": limits.samples}
        parts = Parts(request.headers.get("content-type", ""), allowed, {"prompts": limits.prompts_bytes})
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.body_bytes:
                raise Refusal(413, "body_too_large", f"the body has more than {limits.body_bytes} bytes")
            share.take(len(chunk))
            parts.write(chunk)
        return parts.finish()

    def _read(self, parts: dict[str, list[bytes]], share: Share) -> tuple[Tensor, Sequence[Prompt]]:
        """Images [sample, channel, height, width] and as many prompts."""
        limits, pngs, tensors = self.limits, parts["png"], parts["safetensors"]
        if not parts["prompts"]:
            raise Refusal(422, "no_prompts", "the part 'prompts' is missing: a JSON list, one object per picture")
        if bool(pngs) == bool(tensors):
            raise Refusal(422, "no_images", "pictures are needed either in parts 'png' or in one part 'safetensors'")
        prompts = read_prompts(parts["prompts"][0], limits)
        if pngs:
            width, height = png_sizes(pngs, limits)
            share.take(12 * len(pngs) * width * height)  # 3 floats per pixel
            images = read_pngs(pngs)
        else:
            share.take(4 * len(tensors[0]))  # a byte becomes at most a float
            images = read_safetensors(tensors[0], limits)
        if len(images) != len(prompts):
            raise Refusal(422, "wrong_count", f"{len(images)} pictures and {len(prompts)} prompts; allowed: as many of each")
        return images, prompts

    async def _wait(self, request: Request, future: "Future[Scored]") -> Scored:
        """The scores; or an end where the time is over or the client has gone."""
        scores = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            done, _ = await asyncio.wait({scores, gone}, timeout=self.limits.score_seconds, return_when="FIRST_COMPLETED")
            if scores in done:
                return scores.result()
            if gone in done:
                raise ClientDisconnect
            message = f"scoring took longer than {self.limits.score_seconds:g} seconds"
            raise Refusal(504, "slow_reward", message, retry=True)
        finally:
            gone.cancel()
            scores.cancel()  # what has not begun will not be scored

    def health(self) -> str:
        """ok, stuck or stopped."""
        if not self.batcher.alive:
            return "stopped"
        return "stuck" if self.batcher.busy_seconds > self.limits.score_seconds else "ok"


def _components(reward: RewardModel) -> dict[str, float] | None:
    """The weight of every component of a weighted sum; None for other rewards."""
    if not isinstance(reward, WeightedSum):
        return None
    return {name: float(reward.weights.get(name, 1.0)) for name in reward.models}


def _nulls(values: list[float], invalid: list[bool] | None = None) -> list[float | None]:
    """JSON has no NaN: null there, and where `invalid`."""
    marks = [False] * len(values) if invalid is None else invalid
    return [None if mark or math.isnan(value) else value for value, mark in zip(values, marks, strict=True)]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(reward: RewardModel, settings: Settings | None = None) -> FastAPI:
    """An ASGI application that serves `reward`. Its thread stops with the application's lifespan."""
    settings = settings or Settings()
    server = RewardServer(reward, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.batcher.close()

    title = f"flowrl reward server: {settings.name}"
    app = FastAPI(title=title, version=API_VERSION, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.server = server
    _add_handlers(app)
    _add_score(app, server)
    _add_state(app, server)
    return app


def _add_score(app: FastAPI, server: RewardServer) -> None:
    @app.post("/v1/score", response_model=ScoreAnswer, responses=ERRORS, openapi_extra=SCORE_BODY, summary="Score pictures")
    async def score(request: Request) -> JSONResponse:
        """Send one prompt per picture and the pictures; get one number per picture, in the same order.

        Where the reward cannot judge a picture its score is `null`, and `invalid` says true. `?parts=true` also gives the
        components of a weighted sum.

        `curl -F 'prompts=[{"text": "a red circle"}]' -F png=@picture.png -H "Authorization: Bearer TOKEN" URL/v1/score`
        """
        began, status = time.monotonic(), 499  # the client has gone
        try:
            found = await server.score(request)
            status = 200
            return JSONResponse({"request": _request_id(request), **found})
        except Refusal as refusal:
            status = refusal.status
            if status >= 500:
                logger.error("request %s: %s", _request_id(request), refusal.message, exc_info=refusal.__cause__)
            raise
        except ClientDisconnect:
            return _problem(Refusal(400, "gone", "the client has gone"))
        finally:
            server.metrics.request(status, time.monotonic() - began)


def _add_state(app: FastAPI, server: RewardServer) -> None:
    settings = server.settings

    @app.get("/health", response_model=HealthAnswer, responses={503: {"model": HealthAnswer}}, summary="Is it working?")
    async def health() -> JSONResponse:
        """Needs no token."""
        status = server.health()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/v1/info", response_model=InfoAnswer, responses={401: ERRORS[401]}, summary="What is served")
    async def info(request: Request) -> JSONResponse:
        """The reward and the limits."""
        server.authorise(request)
        found = {"reward": settings.name, "version": API_VERSION, "max_batch": settings.max_batch}
        components = {} if server.components is None else {"components": server.components}
        return JSONResponse({**found, **components, "limits": asdict(settings.limits)})

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: ERRORS[401]}, summary="Counters for Prometheus")
    async def metrics(request: Request) -> PlainTextResponse:
        """Requests by status, samples, sizes and seconds of the model's calls, queue and memory."""
        server.authorise(request)
        return PlainTextResponse(server.metrics.text(server.batcher.waiting, server.memory.used))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The OpenAPI description as a page that needs no network."""
        return HTMLResponse(
            describe(app.openapi()), headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        return _problem(refusal)

    @app.exception_handler(HTTPException)
    async def not_here(_: Request, error: HTTPException) -> JSONResponse:
        answer = _problem(Refusal(error.status_code, "no_such_endpoint", str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _problem(Refusal(500, "server_failed", f"the server failed: {type(error).__name__}", retry=True))


def _problem(refusal: Refusal) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(refusal.status)
    body = {"error": {"code": refusal.code, "message": refusal.message, "retry": refusal.retry}}
    return JSONResponse(body, refusal.status, headers)


def _request_id(request: Request) -> str:
    """The client's own id where it is harmless to print, else a new one."""
    given = request.headers.get("x-request-id", "")
    if not re.fullmatch(r"[\w.-]{1,64}", given, flags=re.ASCII):
        given = request.scope.setdefault("flowrl_request_id", secrets.token_hex(8))
    return given
