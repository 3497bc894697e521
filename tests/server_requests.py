"""Requests to a reward server, good ones and some drawn by Hypothesis; checks of its responses."""

import contextlib
import io
import json
import re
import socket
from collections import Counter
from dataclasses import dataclass, field, replace

import httpx
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save


def numbered_image(number, height=2, width=4):
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
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
)
"""A request that ends at two places: it must be refused, and what follows must not be served."""
INTERNALS = re.compile(rb"/(home|root|tmp|usr|srv|var)/|site-packages|Traceback|\.py\b")
"""Signs of the server's own paths and code in a response."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
BYTES = st.binary(max_size=64)


def posted(parts, wanted=None):
    """A form with these parts."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"; filename="f"\r\n\r\n'
    pieces = [head.format(name).encode() + data for name, data in parts]
    return Attempt(
        headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"},
        body=b"\r\n".join([*pieces, f"--{BOUNDARY}--\r\n".encode()]),
        wanted=wanted,
    )


def listed(numbers):
    return json.dumps([{"text": "p", "metadata": {"sample": n}} for n in numbers]).encode()


def good(numbers):
    images = save({"images": torch.cat([numbered_image(n) for n in numbers])})
    return posted(
        [("prompts", listed(numbers)), ("safetensors", images)], tuple(map(float, numbers))
    )


def png(width, height, mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG", **options)
    return file.getvalue()


@st.composite
def damaged(draw, data):
    """Bytes written over, cut out, put in or cut off."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at, some = draw(st.integers(0, len(mutated))), draw(st.binary(min_size=1, max_size=16))
        end = draw(st.sampled_from((at, at + 1, at + len(some), len(mutated))))
        mutated[at:end] = draw(st.sampled_from((some, some[: end - at], b"")))
    return bytes(mutated)


def claimed(dtype, shape, offsets, data):
    """A file of safetensors whose header is whatever it says."""
    claim = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    head = json.dumps({"images": claim}).encode()
    return len(head).to_bytes(8, "little") + head + data


DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float64, torch.bool


def image_parts(count):
    """Images in one of many right and wrong ways."""
    sizes, few = st.integers(0, 5), st.integers(1, 6)
    shapes = st.sampled_from(((count, 5), (), (0,), (1, 1, 1, 1, count)))
    tensors = st.builds(
        lambda shape, number, dtype: torch.full(shape, number).to(dtype),
        shapes | st.tuples(st.just(count), st.just(3), sizes, sizes),
        st.sampled_from((0.0, 0.0, float("nan"), float("inf"), -1.0, 1e30)),
        st.sampled_from(DTYPES),
    )
    files = tensors.map(lambda tensor: save({"images": tensor}))
    two = st.builds(
        lambda name, tensor: save({name: tensor, "images": tensor.clone()}),
        st.text(max_size=5),
        tensors,
    )
    ends = st.lists(st.integers(-1, 2**64), min_size=2, max_size=2)
    types = st.sampled_from(("F32", "U8", "F8_E4M3", "C64", "F4", "??"))
    claims = st.builds(claimed, types, JSON, ends, BYTES)
    pictures = st.builds(png, few, few, st.sampled_from(("RGB", "L", "1", "RGBA", "P", "I;16")))
    by_name = {
        "safetensors": files | files.flatmap(damaged) | two | claims | BYTES,
        "png": pictures | pictures.flatmap(damaged) | BYTES,
        "pickle": BYTES,
    }
    one = st.one_of(*(st.tuples(st.just(name), data) for name, data in by_name.items()))
    repeated = one.map(lambda part: [part] * (count if part[0] == "png" else 1))
    return repeated | repeated | st.lists(one, max_size=2)


def prompt_parts(count):
    """Prompts in one of many right and wrong ways."""
    right = listed(range(count))
    item = st.fixed_dictionaries({"text": st.text(max_size=8), "metadata": st.just({}) | JSON})
    others = JSON | st.lists(item, min_size=count, max_size=count)
    deep = b'[{"text": "p", "metadata": {"a": %b%b}}]'
    data = st.one_of(
        st.just(right),
        damaged(right),
        others.map(lambda values: json.dumps(values).encode()),
        st.integers(1, 5000).map(lambda depth: deep % (b"[" * depth, b"]" * depth)),
        BYTES,
    )
    return st.builds(
        lambda part, times: [("prompts", part)] * times, data, st.sampled_from("1120").map(int)
    )


def forms(count):
    both = st.tuples(prompt_parts(count), image_parts(count)).map(lambda two: [*two[0], *two[1]])
    return both.flatmap(st.permutations).map(posted)


FINE = st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=4).map(good)
FORMS = st.integers(1, 3).flatmap(forms)
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40)
MEDIA = st.sampled_from(("multipart/form-data", "application/json", "application/x-pickle", ""))
PATHS = ("/v1/score", "/v1/info", "/metrics", "/health", "/openapi.json", "/", "/v1/../x")
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "POST")
ATTEMPTS = st.one_of(
    FINE,
    *[FORMS] * 3,
    FORMS.map(lambda made: replace(made, body=made.body.replace(b'; filename="f"', b""))),
    FINE.flatmap(lambda fine: damaged(fine.body)).map(lambda body: replace(posted([]), body=body)),
    st.builds(
        lambda media, word, body: Attempt(headers={"Content-Type": f"{media};{word}"}, body=body),
        MEDIA,
        WORDS,
        BYTES,
    ),
    st.builds(
        lambda method, path, end, word: Attempt(method, path + end, {"X-Request-Id": word}),
        st.sampled_from(METHODS),
        st.sampled_from(PATHS),
        st.sampled_from(("", "?a=b", "%00", "%ff", "//")),
        WORDS,
    ),
    st.builds(
        lambda raw: Attempt(raw=raw),
        st.just(TWO_LENGTHS) | damaged(TWO_LENGTHS) | st.binary(min_size=1, max_size=200),
    ),
)
"""Any request: valid, nearly valid, or no HTTP at all."""


def judge(attempt, status, content):
    """Raise `AssertionError` unless the response is one that is allowed for this request."""
    assert status < 500, (status, content, attempt)
    if attempt.wanted is not None:
        scores = json.loads(content).get("scores")
        assert (status, scores) == (200, list(attempt.wanted)), (content, attempt)
    elif status >= 400 and attempt.method != "HEAD":
        error = json.loads(content)["error"]
        assert set(error) == {"code", "message", "retry"} and error["code"] and error["message"], (
            content
        )
        assert not INTERNALS.search(content), (content, attempt)
    elif attempt.path == "/v1/score" and attempt.method == "POST" and status == 200:
        assert all(abs(value) < 2**24 for value in json.loads(content)["scores"])


def send_raw(host, port, data):
    """Send bytes over a new connection. Returns the response until it ends or pauses."""
    received = b""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(0.02)
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(4096):
                received += chunk
    return received


def fuzz(url, token, count):
    """Send `count` requests and count the statuses (0: bytes that are no HTTP request). Raises at
    the first wrong response.
    """
    seen, address = Counter(), httpx.URL(url)
    options = dict(headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30)

    def ask(attempt):
        answer = client.request(
            attempt.method, attempt.path, content=attempt.body, headers=attempt.headers
        )
        judge(attempt, answer.status_code, answer.content)
        return answer.status_code

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(ATTEMPTS)
    def each(attempt):
        if seen.total() >= count:
            return
        if not attempt.raw:
            seen[ask(attempt)] += 1
            return
        received = send_raw(address.host, address.port, attempt.raw)
        refused = received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
        assert attempt.raw != TWO_LENGTHS or received == b"" or refused, received
        seen[0] += 1

    with httpx.Client(base_url=url, **options) as client:
        each()
        ask(good([1, 2, 3]))
    return seen
