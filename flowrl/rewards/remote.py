"""A reward behind a server: the client of `flowrl serve-reward`."""

import contextlib
import io
import json
import math
import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flowrl.errors import ConfigError, RewardError, require
from flowrl.rewards.pictures import to_pillow
from flowrl.types import Prompt

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "FLOWRL_REWARD_TOKEN"
LONGEST_PAUSE = 20.0
"""Seconds between two attempts at most."""


@dataclass(frozen=True)
class RemoteReward:
    """Scores from the reward server at `url` (docs/reward-server.md), in the order of the pictures.

    The pictures travel in requests of `batch`, `concurrency` of them at a time, over connections that are kept. An attempt
    fails where the server cannot be reached, answers with an error that may pass (500, 503, ...), says nothing for `timeout`
    seconds, or its answer is cut off; the next one follows after a pause of `backoff` seconds, doubled each time up to 20, less
    a random half. After `retries` repetitions of one request, or `deadline` seconds for the whole call, `score` raises one
    `RewardError`; the trainer then stops with its last checkpoint in place, and the run can be resumed when the server is back.
    Refusals that will not pass (a wrong token, a request too large, a prompt the reward does not know) and answers that break
    the contract (a wrong number of scores, NaN) raise it at once.

    `images`: "safetensors" sends float32, so that scores equal those in process; "png" sends 8 bits per channel, a fraction of
    the bytes. Metadata must be JSON; data classes in it become objects, tuples lists. The token comes from `token_file`, or from
    the environment variable FLOWRL_REWARD_TOKEN; there is no option for the token itself, because a run's record keeps its
    options. `certificate`: a file with the certificates (PEM) to trust instead of the system's.
    """

    url: str
    images: Literal["safetensors", "png"] = "safetensors"
    batch: int = 32
    concurrency: int = 4
    timeout: float = 120.0
    deadline: float = 900.0
    retries: int = 40
    backoff: float = 0.5
    token_file: str = ""
    certificate: str = ""
    _connections: "_Connections" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        good = isinstance(self.url, str) and self.url.startswith(("http://", "https://")) and "@" not in self.url
        require(good, "remote.url", self.url, "http://HOST:PORT or https://HOST:PORT")
        require(self.images in ("safetensors", "png"), "remote.images", self.images, "safetensors or png")
        for name in ("batch", "concurrency"):
            require(getattr(self, name) >= 1, f"remote.{name}", getattr(self, name), "1 or more")
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"remote.{name}", value, "a positive number of seconds")
        require(self.retries >= 0, "remote.retries", self.retries, "0 or more")
        require(math.isfinite(self.backoff) and self.backoff >= 0, "remote.backoff", self.backoff, "0 seconds or more")
        object.__setattr__(self, "_connections", _Connections(self))

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, channel, height, width] and as many prompts -> [sample], on the pictures' device. Raises `RewardError`."""
        if images.ndim != 4 or len(images) != len(prompts):
            raise RewardError(f"remote: got images {tuple(images.shape)} and {len(prompts)} prompts; allowed: as many of each")
        call = _Call(self, time.monotonic() + self.deadline)
        pieces = [slice(start, start + self.batch) for start in range(0, len(prompts), self.batch)]
        if len(pieces) <= 1:
            results = [call.send(images[piece], prompts[piece]) for piece in pieces]
        else:
            results = call.send_all(images, prompts, pieces)
        scores = [value for piece in results for value in piece]
        return torch.tensor(scores, dtype=torch.float32, device=images.device)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._connections.close()


class _GiveUp(RewardError):
    """An attempt failed in a way that another one will not mend."""


class _Again(Exception):
    """An attempt failed; `pause` is what the server asks for, in seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class _Connections:
    """The pool of connections of a `RemoteReward`; another one after a fork or a copy to another process."""

    def __init__(self, reward: RemoteReward) -> None:
        self._reward = reward
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._process = 0

    def client(self) -> "httpx.Client":
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._open(), os.getpid()
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None and self._process == os.getpid():
                self._client.close()
            self._client = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Connections, (self._reward,)

    def _open(self) -> "httpx.Client":
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("remote needs the package httpx; install it with: pip install 'flowrl-lab[server]'") from error
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


class _Call:
    """One call of `score`: a deadline, and an end for all requests where one of them gives up."""

    def __init__(self, reward: RemoteReward, end: float) -> None:
        self.reward, self.end = reward, end
        self.stopped = threading.Event()
        self.chance = random.Random()

    def send_all(self, images: Tensor, prompts: Sequence[Prompt], pieces: list[slice]) -> list[list[float]]:
        """Every piece's scores, in the order of `pieces`, `concurrency` requests at a time."""
        futures: list[Future[list[float]]] = [Future() for _ in pieces]
        todo = deque(zip(pieces, futures, strict=True))

        def work() -> None:
            while todo and not self.stopped.is_set():
                with contextlib.suppress(IndexError):  # another thread was faster
                    piece, future = todo.popleft()
                    try:
                        future.set_result(self.send(images[piece], prompts[piece]))
                    except BaseException as error:
                        future.set_exception(error)

        for _ in range(min(self.reward.concurrency, len(pieces))):  # daemons: an interrupted program need not wait for them
            threading.Thread(target=work, name="flowrl-remote", daemon=True).start()
        try:
            done, _ = wait(futures, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            self.stopped.set()

    def send(self, images: Tensor, prompts: Sequence[Prompt]) -> list[float]:
        """The scores of one request. Raises `RewardError` where it gives up."""
        import httpx

        files = _encode(images, prompts, self.reward.images)
        form = httpx.Request("POST", self.reward.url, files=files)
        body, kind, began = form.read(), form.headers["Content-Type"], time.monotonic()
        for attempt in range(1, self.reward.retries + 2):
            try:
                return self._attempt(body, kind, len(prompts))
            except _Again as problem:
                pause = self._pause(attempt, problem.pause)
                spent = time.monotonic() - began
                last = attempt > self.reward.retries or time.monotonic() + pause >= self.end
                if last:
                    raise RewardError(
                        f"remote: the reward server at {self.reward.url} gave no scores in {attempt} attempts over {spent:.0f} "
                        f"seconds; the last one: {problem}. Start it again, then resume the run from its last checkpoint"
                    ) from problem
                if self.stopped.wait(pause):
                    raise RewardError("remote: another request of this call has failed") from problem
        raise AssertionError("unreachable")

    def _pause(self, attempt: int, asked: float) -> float:
        longest = min(LONGEST_PAUSE, self.reward.backoff * 2 ** min(attempt - 1, 20))
        return max(longest * (0.5 + 0.5 * self.chance.random()), min(asked, LONGEST_PAUSE))

    def _attempt(self, body: bytes, kind: str, count: int) -> list[float]:
        """One request and its answer. Raises `_Again` or `_GiveUp`."""
        import httpx

        left = min(self.reward.timeout, max(self.end - time.monotonic(), 0.001))
        name = uuid.uuid4().hex
        address = self.reward.url.rstrip("/") + "/v1/score"
        headers = {"Content-Type": kind, "X-Request-Id": name}
        stop = time.monotonic() + left
        try:
            client = self.reward._connections.client()
            with client.stream("POST", address, content=body, headers=headers, timeout=left) as answer:
                content = _bounded(answer.iter_raw(), 65536 + 64 * count, stop)
        except httpx.TimeoutException as error:
            raise _Again(f"no answer within {left:.0f} seconds") from error
        except (httpx.TransportError, httpx.StreamError) as error:
            raise _Again(f"the connection failed ({type(error).__name__}: {error})") from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise _GiveUp(f"remote: {self.reward.url} is no address: {error}") from error
        if answer.status_code != 200:
            raise self._refused(answer.status_code, answer.headers, content)
        return _scores(content, name, count, self.reward.url)

    def _refused(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        """What an answer without scores means."""
        code, message, retry = _problem(content)
        passing = status in (408, 425, 429) or status >= 500 if retry is None else retry
        said = f"status {status}{f', {code}: {message}' if code else ''}"
        if passing:
            asked = headers.get("Retry-After", "")
            return _Again(said, float(asked) if asked.isdecimal() and len(asked) < 6 else 0.0)
        hint = f"; set {TOKEN_VARIABLE} or token_file to the server's token" if status == 401 else ""
        hint = f"; lower remote's batch (now {self.reward.batch}) or raise the server's limits" if status == 413 else hint
        return _GiveUp(f"remote: the reward server at {self.reward.url} refuses: {said}{hint}")


def _bounded(chunks: Iterator[bytes], most: int, stop: float) -> bytes:
    """The whole answer. Raises `_GiveUp` beyond `most` bytes and `_Again` after the time `stop`."""
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > most:
            raise _GiveUp(f"remote: the answer is larger than {most} bytes; is this a reward server?")
        if time.monotonic() > stop:
            raise _Again("the answer came too slowly")
    return bytes(content)


def _scores(content: bytes, name: str, count: int, url: str) -> list[float]:
    """The scores in an answer, checked: of this request, as many as pictures, all finite."""
    try:
        found = json.loads(content)
        request, scores = found["request"], found["scores"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Again(f"the answer cannot be read ({type(error).__name__}: {str(error)[:100]})") from error
    if request != name:
        raise _Again("the answer belongs to another request")
    if not isinstance(scores, list) or len(scores) != count:
        amount = len(scores) if isinstance(scores, list) else f"a {type(scores).__name__} of"
        raise _GiveUp(f"remote: the reward server at {url} sent {amount} scores for {count} pictures")
    for sample, value in enumerate(scores):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= torch.finfo(torch.float32).max:
            shown = repr(value)[:40]
            raise _GiveUp(f"remote: the reward server at {url} sent {shown} as score {sample} of {count}; scores must be finite")
    return [float(value) for value in scores]


def _problem(content: bytes) -> tuple[str, str, bool | None]:
    """Code, message and whether to try again (None: not said) of an answer that is an error."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(content)["error"]
        code, message, retry = error["code"], error["message"], error["retry"]
        return str(code)[:100], str(message)[:1000], retry if isinstance(retry, bool) else None
    return "", "", None


def _encode(images: Tensor, prompts: Sequence[Prompt], kind: str) -> list[tuple[str, tuple[str, bytes, str]]]:
    """The parts of a request."""
    listed = [{"text": prompt.text, "metadata": _plain(prompt.metadata, prompt, "metadata")} for prompt in prompts]
    parts = [("prompts", ("prompts.json", json.dumps(listed).encode(), "application/json"))]
    pixels = images.detach().cpu().float().contiguous()
    if not bool(torch.isfinite(pixels).all()):
        raise RewardError("remote: the images hold values that are not finite; they are not sent")
    if kind == "safetensors":
        from safetensors.torch import save

        return [*parts, ("safetensors", ("images.safetensors", save({"images": pixels}), "application/octet-stream"))]
    return [*parts, *(("png", (f"{i}.png", data, "image/png")) for i, data in enumerate(_pngs(pixels)))]


def _pngs(images: Tensor) -> list[bytes]:
    """[sample, 3 or 1, height, width] in [0, 1] as 8-bit PNG files: round(255 x)."""
    if images.shape[1] not in (1, 3):
        raise RewardError(f"remote: images='png' needs 1 or 3 channels, got {images.shape[1]}; use images='safetensors'")
    files = [io.BytesIO() for _ in images]
    for file, picture in zip(files, to_pillow(images), strict=True):
        picture.save(file, "PNG", compress_level=1)
    return [file.getvalue() for file in files]


def _plain(value: Any, prompt: Prompt, where: str) -> Any:
    """Metadata as JSON has it. Raises `RewardError` naming the prompt and the entry that JSON does not have."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), prompt, f"{where}.{f.name}") for f in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, prompt, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, prompt, f"{where}[{number}]") for number, entry in enumerate(value)]
    raise RewardError(
        f"remote: {where} of prompt {prompt.text!r} is {repr(value)[:60]} ({type(value).__name__}), which cannot be sent; "
        "allowed: text, finite numbers, true, false, null, lists, and objects of them"
    )


def _token(file: str) -> str:
    """The token from `file`, else from the environment; "" where there is none."""
    if not file:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"remote.token_file: {file} cannot be read: {error}") from error
