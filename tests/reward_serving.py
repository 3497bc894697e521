"""For the tests of the reward server: a server in a thread, a reward that counts its calls,
numbered images.
"""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

import httpx
import server_requests as fuzzing
import torch

from flowrl import Prompt
from flowrl.rewards import FunctionReward
from flowrl.serving import Listener, ServerSettings, make_server

TOKEN = "a token of the tests"
REWARD = '''
from dataclasses import dataclass
import time
import torch


@dataclass(frozen=True)
class Echo:
    """The number that image and metadata carry; -1 if the two differ."""

    seconds: float = 0.0

    def score(self, images, prompts):
        time.sleep(self.seconds)
        numbers = images.flatten(1).amax(1) * 2**24
        wanted = [prompt.metadata.get("sample") for prompt in prompts]
        wanted_values = torch.tensor([float(w) if isinstance(w, (int, float)) and abs(w) < 2**24 else -1.0 for w in wanted])
        return torch.where(numbers.round() == wanted_values, wanted_values, -1.0)
'''


@dataclass
class Function:
    """A reward from a function; counts its calls and the images in each."""

    function: object = None

    def __post_init__(self):
        self.sizes = []

    def score(self, images, prompts):
        self.sizes.append(len(images))
        assert len(images) == len(prompts)
        return (
            images.flatten(1).amax(1) if self.function is None else self.function(images, prompts)
        )


def echo(images, prompts):
    """The number in the image, if the prompt names the same one, else -1."""
    numbers = (images.flatten(1).amax(1) * 2**24).round()
    named = torch.tensor([float(prompt.metadata["sample"]) for prompt in prompts])
    return torch.where(numbers == named, numbers, -1.0)


@contextlib.contextmanager
def served(reward, settings=None, certificate=None, key=None):
    """A server in a thread; gives its address and its state."""
    listener = Listener.open("127.0.0.1", 0)
    server = make_server(reward, settings or ServerSettings(), certificate, key)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener.socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield listener.url(), server.config.app.state.server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def numbered(numbers):
    return torch.cat([fuzzing.numbered_image(n) for n in numbers]), [
        Prompt("p", {"sample": n}) for n in numbers
    ]


def post(url, attempt, **options):
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        return client.request(
            attempt.method,
            attempt.path,
            content=attempt.body,
            headers={**attempt.headers, **options},
        )


def get(url, path):
    return httpx.get(url + path, trust_env=False)


def connected(url):
    """A socket to the server."""
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)


def raw_request(attempt):
    """The bytes of a request to score."""
    head = "POST /v1/score HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: {attempt.headers['Content-Type']}\r\n"
    return f"{head}Content-Length: {len(attempt.body)}\r\n\r\n".encode() + attempt.body


def refused(answer, status, code):
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert set(error) == {"code", "message", "retry"}
    return error["message"]


def unsure(images, prompts):
    """Cannot judge images whose number is a multiple of three."""
    numbers = echo(images, prompts)
    return torch.where(numbers % 3 == 0, torch.nan, numbers)


def marking(function):
    return FunctionReward(function, marks_invalid=True)


def raw(status, body=b"", **headers):
    """An HTTP response."""
    fields = {"Content_Length": len(body), "Connection": "close"} | headers
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


@dataclass(frozen=True)
class Received:
    """A request to a `scripted` server; names of headers are in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


def received(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return Received(first.split()[1], headers, body)


@contextlib.contextmanager
def scripted(*script):
    """A server that answers its requests by `script` in turn; the last entry serves all further
    requests.

    An entry is bytes to send before the connection is closed, JSON text, seconds to wait before the
    connection is closed without an answer, or a function of the request that returns one of these.
    """
    counts = []

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            request = received(connection)
            step = script[min(len(counts), len(script) - 1)]
            counts.append(len(counts))
            content = step(request) if callable(step) else step
            if isinstance(content, float):
                time.sleep(content)
            else:
                connection.sendall(
                    raw(200, content.encode()) if isinstance(content, str) else content
                )

    def listen():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", counts
        listener.shutdown(socket.SHUT_RDWR)
