"""One call of a `RemoteReward`: several requests at a time, each repeated until it is answered or the call gives up."""

import contextlib
import random
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from torch import Tensor

from flowrl.errors import RewardError
from flowrl.rewards.remote.connections import TOKEN_VARIABLE
from flowrl.rewards.remote.wire import Again, Answer, GiveUp, encode, read_answer, read_problem
from flowrl.types import Prompt

if TYPE_CHECKING:
    from flowrl.rewards.remote.client import RemoteReward

LONGEST_PAUSE = 20.0
"""Seconds between two attempts at most."""


class Call:
    """One call of `score` (or, with `parts`, of `parts`): a deadline, and an end for all requests where one of them gives up."""

    def __init__(self, reward: "RemoteReward", end: float, parts: bool = False) -> None:
        self.reward, self.end, self.parts = reward, end, parts
        self.stopped = threading.Event()
        self.chance = random.Random()

    def send_all(self, images: Tensor, prompts: Sequence[Prompt], pieces: list[slice]) -> list[Answer]:
        """Every piece's answer, in the order of `pieces`, `concurrency` requests at a time."""
        futures: list[Future[Answer]] = [Future() for _ in pieces]
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

    def send(self, images: Tensor, prompts: Sequence[Prompt]) -> Answer:
        """The answer to one request. Raises `RewardError` where it gives up."""
        import httpx

        files = encode(images, prompts, self.reward.images)
        form = httpx.Request("POST", self.reward.url, files=files)
        body, kind, began = form.read(), form.headers["Content-Type"], time.monotonic()
        for attempt in range(1, self.reward.retries + 2):
            try:
                return self._attempt(body, kind, len(prompts))
            except Again as problem:
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

    def _attempt(self, body: bytes, kind: str, count: int) -> Answer:
        """One request and its answer. Raises `Again` or `GiveUp`."""
        import httpx

        left = min(self.reward.timeout, max(self.end - time.monotonic(), 0.001))
        name = uuid.uuid4().hex
        address = self.reward.url.rstrip("/") + ("/v1/score?parts=true" if self.parts else "/v1/score")
        most = 65536 + (2048 if self.parts else 64) * count
        headers = {"Content-Type": kind, "X-Request-Id": name}
        stop = time.monotonic() + left
        try:
            client = self.reward._connections.client()
            with client.stream("POST", address, content=body, headers=headers, timeout=left) as answer:
                content = _bounded(answer.iter_raw(), most, stop)
        except httpx.TimeoutException as error:
            raise Again(f"no answer within {left:.0f} seconds") from error
        except (httpx.TransportError, httpx.StreamError) as error:
            if _distrusted(error):
                hint = "give the authority's, or the server's own if it signed itself, as certificate='ca.pem'"
                raise GiveUp(f"remote: the certificate of {self.reward.url} is not trusted ({error}); {hint}") from error
            raise Again(f"the connection failed ({type(error).__name__}: {error})") from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise GiveUp(f"remote: {self.reward.url} is no address: {error}") from error
        if answer.status_code != 200:
            raise self._refused(answer.status_code, answer.headers, content)
        return read_answer(content, name, count, self.reward.url, self.parts)

    def _refused(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        """What an answer without scores means."""
        code, message, retry = read_problem(content)
        passing = status in (408, 425, 429) or status >= 500 if retry is None else retry
        said = f"status {status}{f', {code}: {message}' if code else ''}"
        if passing:
            asked = headers.get("Retry-After", "")
            return Again(said, float(asked) if asked.isdecimal() and len(asked) < 6 else 0.0)
        hint = f"; set {TOKEN_VARIABLE} or token_file to the server's token" if status == 401 else ""
        hint = f"; lower remote's batch (now {self.reward.batch}) or raise the server's limits" if status == 413 else hint
        hint = "; ask for its total with remote instead of remote-sum" if code == "no_parts" else hint
        return GiveUp(f"remote: the reward server at {self.reward.url} refuses: {said}{hint}")


def _distrusted(error: BaseException | None) -> bool:
    """Whether a certificate that cannot be verified is behind `error`: no further attempt would help."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _bounded(chunks: Iterator[bytes], most: int, stop: float) -> bytes:
    """The whole answer. Raises `GiveUp` beyond `most` bytes and `Again` after the time `stop`."""
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > most:
            raise GiveUp(f"remote: the answer is larger than {most} bytes; is this a reward server?")
        if time.monotonic() > stop:
            raise Again("the answer came too slowly")
    return bytes(content)
