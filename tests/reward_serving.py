"""For the tests of the reward server: a server in a thread, a reward that counts its calls,
numbered images.
"""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

import httpx
import server_fuzz as fuzzing
import torch

from flowrl import Prompt
from flowrl.rewards import FunctionReward
from flowrl.serving import Listener, ServerSettings, make_server


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


@contextlib.contextmanager
def scripted(*script):
    """A server that answers its requests by `script` in turn: bytes to send, then the connection is
    closed; or a function of the request's id and the number of images that gives the scores as JSON
    text. Its last entry serves all further requests.
    """
    counts = []

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            while len(body) < int(headers[b"content-length"]):
                body += connection.recv(65536)
            number = len(counts)
            counts.append(number)
            step = script[min(number, len(script) - 1)]
            name = next(
                line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id")
            )[14:].decode()
            if callable(step):
                text = step(name)
                step = (
                    f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection:"
                    f" close\r\n\r\n{text}".encode()
                )
            if isinstance(step, float):
                time.sleep(step)
                return
            connection.sendall(step)

    def listen():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", counts
        listener.shutdown(socket.SHUT_RDWR)
