"""Requests to a reward server, good ones and others drawn by Hypothesis, and checks of its
responses.
"""

import contextlib
import json
import re
import socket
from collections import Counter
from dataclasses import dataclass, field

import httpx
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save


def numbered_image(number: int, height: int = 2, width: int = 4) -> torch.Tensor:
    """[1, 3, height, width] that carries a number below 2^24 exactly (height and width are powers
    of 2).
    """
    return torch.full((1, 3, height, width), number / 2**24)


@dataclass(frozen=True)
class Attempt:
    """One request: `raw` bytes for the socket, or method, path, headers and body. `wanted`: the
    scores if it is a good one.
    """

    method: str = "POST"
    path: str = "/v1/score"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes = b""
    wanted: tuple[float, ...] | None = None


BOUNDARY = "flowrl-fuzz"
TWO_LENGTHS = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding:"
    b" chunked\r\n\r\n"
)
TWO_LENGTHS += b"5\r\nhello\r\n0\r\n\r\n"
"""A request that ends at two places: it must be refused, and what follows must not be served."""
INTERNALS = re.compile(rb"/(home|root|tmp|usr|srv|var)/|site-packages|Traceback|\.py\b")
"""Signs of the server's own paths and code in a response."""
NUMBERS = st.integers(0, 2**24 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


def form(parts: list[tuple[str, bytes]]) -> bytes:
    pieces = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{n}"; filename="f"\r\n\r\n'.encode()
        + d
        for n, d in parts
    ]
    return b"\r\n".join([*pieces, f"--{BOUNDARY}--\r\n".encode()])


def posted(parts: list[tuple[str, bytes]], wanted: tuple[float, ...] | None = None) -> Attempt:
    return Attempt(
        headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"},
        body=form(parts),
        wanted=wanted,
    )


def listed(numbers: list[int]) -> bytes:
    return json.dumps([{"text": "p", "metadata": {"sample": n}} for n in numbers]).encode()


def good(numbers: list[int]) -> Attempt:
    images = save({"images": torch.cat([numbered_image(n) for n in numbers])})
    return posted(
        [("prompts", listed(numbers)), ("safetensors", images)], tuple(float(n) for n in numbers)
    )


def png(height: int, width: int, mode: str, level: int) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height), level % 2 if mode == "1" else None).save(file, "PNG")
    return file.getvalue()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, cut out, put in or cut off."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(mutated) - 1, 0)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "truncate", "grow")))
        if kind == "flip" and mutated:
            mutated[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del mutated[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            mutated[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "truncate":
            del mutated[at:]
        elif len(mutated) >= 8:  # a length field
            mutated[at : at + 4] = draw(st.integers(0, 2**32 - 1)).to_bytes(4, "big")[
                : len(mutated) - at
            ]
    return bytes(mutated)


@st.composite
def image_part(draw: st.DrawFn, count: int) -> list[tuple[str, bytes]]:
    """Images in one of many right and wrong ways."""
    height, width = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    kind = draw(
        st.sampled_from(
            ("tensor", "damaged", "names", "header", "png", "damaged png", "bytes", "none", "both")
        )
    )
    dtypes = (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.float64,
        torch.int64,
        torch.bool,
    )
    shape = draw(
        st.sampled_from(((count, 3, height, width), (count, height), (), (0,), (1, 1, 1, 1, count)))
    )
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(dtypes)))
    if tensor.is_floating_point() and tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[0] = draw(st.sampled_from((float("nan"), float("inf"), -1.0, 1e30)))
    pngs = [
        (
            "png",
            png(
                height + 1,
                width + 1,
                draw(st.sampled_from(("RGB", "L", "1", "RGBA", "P", "I;16"))),
                1,
            ),
        )
    ] * count
    if kind == "tensor":
        return [("safetensors", save({"images": tensor}))]
    if kind == "damaged":
        return [("safetensors", draw(damaged(save({"images": tensor}))))]
    if kind == "names":
        return [
            ("safetensors", save({draw(st.text(max_size=5)): tensor, "images": tensor.clone()}))
        ]
    if kind == "header":
        claim = {
            "dtype": draw(st.sampled_from(("F32", "U8", "F8_E4M3", "C64", "F4", "??"))),
            "shape": draw(JSON),
        }
        claim["data_offsets"] = draw(st.lists(st.integers(-1, 2**64), min_size=2, max_size=2))
        head = json.dumps({"images": claim}).encode()
        return [
            ("safetensors", len(head).to_bytes(8, "little") + head + draw(st.binary(max_size=64)))
        ]
    if kind == "png":
        return pngs
    if kind == "damaged png":
        return [(name, draw(damaged(data))) for name, data in pngs]
    if kind == "bytes":
        return [
            (draw(st.sampled_from(("png", "safetensors", "pickle"))), draw(st.binary(max_size=64)))
        ]
    return [] if kind == "none" else [*pngs, ("safetensors", save({"images": tensor}))]


@st.composite
def prompt_part(draw: st.DrawFn, count: int) -> list[tuple[str, bytes]]:
    """Prompts in one of many right and wrong ways."""
    right = listed(list(range(count)))
    kind = draw(
        st.sampled_from(("right", "damaged", "json", "metadata", "deep", "twice", "none", "bytes"))
    )
    if kind == "json":
        return [("prompts", json.dumps(draw(JSON)).encode())]
    if kind == "metadata":
        items = [
            {"text": draw(st.text(max_size=8)), "metadata": {"sample": draw(JSON)}}
            for _ in range(count)
        ]
        return [("prompts", json.dumps(items).encode())]
    if kind == "deep":
        depth = draw(st.integers(1, 5000))
        return [
            ("prompts", b'[{"text": "p", "metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}]")
        ]
    if kind == "bytes":
        return [("prompts", draw(st.binary(max_size=64)))]
    right = draw(damaged(right)) if kind == "damaged" else right
    return [("prompts", right)] * {"twice": 2, "none": 0}.get(kind, 1)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """Any request: valid, nearly valid, or no HTTP at all."""
    kind = draw(
        st.sampled_from(("good", "parts", "parts", "parts", "body", "type", "endpoint", "raw"))
    )
    count = draw(st.integers(1, 3))
    fine = good(draw(st.lists(NUMBERS, min_size=1, max_size=4)))
    if kind == "good":
        return fine
    if kind == "parts":
        return posted(draw(st.permutations([*draw(prompt_part(count)), *draw(image_part(count))])))
    if kind == "body":
        return Attempt(headers=fine.headers, body=draw(damaged(fine.body)))
    word = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40)
    if kind == "type":
        media = draw(
            st.sampled_from(("multipart/form-data", "application/json", "application/x-pickle", ""))
        )
        return Attempt(
            headers={"Content-Type": f"{media};{draw(word)}"}, body=draw(st.binary(max_size=128))
        )
    if kind == "endpoint":
        path = draw(
            st.sampled_from(
                (
                    "/v1/score",
                    "/v1/info",
                    "/metrics",
                    "/health",
                    "/openapi.json",
                    "/",
                    "/v1/../x",
                )
            )
        )
        method = draw(
            st.sampled_from(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "POST"))
        )
        return Attempt(
            method,
            path + draw(st.sampled_from(("", "?a=b", "%00", "%ff", "//"))),
            {"X-Request-Id": draw(word)},
        )
    return Attempt(
        raw=draw(st.just(TWO_LENGTHS) | damaged(TWO_LENGTHS) | st.binary(min_size=1, max_size=200))
    )


def judge(attempt: Attempt, status: int, content: bytes) -> None:
    """Raise `AssertionError` unless the response is one that is allowed for this request."""
    assert status < 500, (status, content, attempt)
    if attempt.wanted is not None:
        assert status == 200 and json.loads(content)["scores"] == list(attempt.wanted), (
            status,
            content,
            attempt,
        )
    elif status >= 400 and attempt.method != "HEAD":
        error = json.loads(content)["error"]
        assert set(error) == {"code", "message", "retry"} and error["code"] and error["message"], (
            content
        )
        assert not INTERNALS.search(content), (content, attempt)
    elif attempt.path == "/v1/score" and attempt.method == "POST" and status == 200:
        assert all(abs(value) < 2**24 for value in json.loads(content)["scores"])


def send_raw(host: str, port: int, data: bytes, pause: float = 0.02) -> bytes:
    """Send bytes over a new connection. Returns the response until it ends or pauses."""
    received = b""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(pause)
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(4096):
                received += chunk
    return received


def fuzz(url: str, token: str, count: int) -> Counter[int]:
    """Send `count` requests and count the statuses (0: bytes that are no HTTP request). Raises at
    the first wrong response.
    """
    seen: Counter[int] = Counter()
    address = httpx.URL(url)

    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30
    ) as client:

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(attempts())
        def each(attempt: Attempt) -> None:
            if sum(seen.values()) >= count:
                return
            if attempt.raw:
                received = send_raw(address.host, address.port or 80, attempt.raw)
                refused = received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
                assert attempt.raw != TWO_LENGTHS or received == b"" or refused, received
                seen[0] += 1
                return
            answer = client.request(
                attempt.method, attempt.path, content=attempt.body, headers=attempt.headers
            )
            judge(attempt, answer.status_code, answer.content)
            seen[answer.status_code] += 1

        each()
        last = good([1, 2, 3])
        answer = client.request(last.method, last.path, content=last.body, headers=last.headers)
        judge(last, answer.status_code, answer.content)
    return seen
