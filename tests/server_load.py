"""A reward server in a process of its own, and many clients whose scores identify their samples."""

import collections
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save
from server_requests import TWO_LENGTHS, Attempt, listed, numbered_image, posted, send_raw

from flowrl import Prompt
from flowrl.serving.client import RemoteReward

TOKEN = "a token for the benchmark"
MOST = 0.1
"""Seconds of processor time that a request may cost before it is refused."""
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
class Server:
    """`flowrl serve-reward` in a process of its own; a restarted server has the same port."""

    folder: Path
    port: int = 0
    seconds: float = 0.0
    """Duration of a call of the reward."""
    process: subprocess.Popen[str] | None = None

    def start(self) -> "Server":
        """Start it and wait until it listens."""
        reward, token = self.folder / "echo.py", self.folder / "token"
        reward.write_text(REWARD)
        token.write_text(TOKEN)
        spec = f"{reward}:Echo(seconds={self.seconds})"
        words = ["serve-reward", spec, "--port", str(self.port), "--token-file", str(token)]
        command = [sys.executable, "-m", "flowrl", *words]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, f"the server did not start: {line!r}"
        self.port = int(line.partition("http://127.0.0.1:")[2].partition(" ")[0])
        return self

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)


def one_client(number: int, reward: RemoteReward, end: float, record: dict[str, Any]) -> None:
    """Requests of 1 to 8 numbered images until `end`."""
    chance, count = random.Random(number), 0
    while time.monotonic() < end:
        size = chance.randint(1, 8)
        numbers = [(number * 2**18 + count + i) % 2**24 for i in range(size)]
        count += size
        scores = reward.score(
            torch.cat([numbered_image(n) for n in numbers]),
            [Prompt("p", {"sample": n}) for n in numbers],
        )
        record["samples"] += size
        record["wrong"] += sum(
            a != b for a, b in zip(scores.tolist(), map(float, numbers), strict=True)
        )


def many_clients(first: int, count: int, url: str, seconds: float, folder: str, pipe: Any) -> None:
    """Run `count` clients in threads of this process; send their records through the pipe."""
    torch.set_num_threads(1)
    record: dict[str, Any] = {"samples": 0, "wrong": 0, "failed": 0}
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        mine: dict[str, Any] = {"samples": 0, "wrong": 0}
        try:
            one_client(
                number, RemoteReward(url, token_file=f"{folder}/token", backoff=0.2), end, mine
            )
        except Exception as error:
            record["failed"] += 1
            print(f"client {number}: {error}", file=sys.stderr)
        with lock:
            for name, value in mine.items():
                record[name] += value

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(first + i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(record)


def load(server: Server, clients: int, seconds: float, kill_every: float = 0.0) -> dict[str, Any]:
    """Requests of `clients` clients for `seconds`; `kill_every` so many seconds the server is
    killed and restarted.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    began, kills = time.monotonic(), 0
    half = clients // 2
    workers = [
        context.Process(
            target=many_clients,
            args=(i * half, half, server.url, seconds, str(server.folder), there),
        )
        for i in range(2)
    ]
    for worker in workers:
        worker.start()
    while kill_every and time.monotonic() < began + seconds:
        time.sleep(kill_every)
        server.end(signal.SIGKILL)
        server.start()
        kills += 1
    records = [here.recv() for _ in workers]
    for worker in workers:
        worker.join()
    totals = collections.Counter(
        {name: sum(r[name] for r in records) for name in ("samples", "wrong", "failed")}
    )
    return {**totals, "kills": kills}


def abuses() -> dict[str, Attempt]:
    """Requests that must be refused before they cost work, by name."""
    image = ("safetensors", save({"images": numbered_image(1)}))
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"a{number}": entry for number in range(300_000)}).encode()
    tensors = ("safetensors", len(header).to_bytes(8, "little") + header)
    prompts = {
        "500,000 empty prompts": b"[" + b",".join([b'{"text":""}'] * 500_000) + b"]",
        "1,900,000 empty texts": b"[" + b",".join([b'""'] * 1_900_000) + b"]",
        "NaN": b'[{"text": "p", "metadata": {"sample": NaN}}]',
        "a key twice": b'[{"text": "p", "text": "q"}]',
        "5,000 levels": b'[{"text": "p", "metadata": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}]",
    }
    lengths = TWO_LENGTHS.split(b"\r\n")
    lengths[2:4] = lengths[3:1:-1]
    return {
        **{name: posted([("prompts", data), image]) for name, data in prompts.items()},
        "300,000 empty tensors": posted([("prompts", listed([1])), tensors]),
        "Content-Length, Transfer-Encoding": Attempt(raw=TWO_LENGTHS),
        "Transfer-Encoding, Content-Length": Attempt(raw=b"\r\n".join(lengths)),
    }


def processor_seconds(process: int) -> float:
    """Processor time of a process and its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def abuse(server: Server, repeats: int = 10) -> dict[str, str]:
    """What the server answers to each of `abuses`, and its processor time per request."""
    assert server.process is not None
    results = {}
    for name, attempt in abuses().items():
        before = processor_seconds(server.process.pid)
        for _ in range(repeats):
            if attempt.raw:
                received = send_raw("127.0.0.1", server.port, attempt.raw, pause=2.0)
                status, body = int(received.split()[1]), received.partition(b"\r\n\r\n")[2]
            else:
                headers = {**attempt.headers, "Authorization": f"Bearer {TOKEN}"}
                url = f"{server.url}{attempt.path}"
                answer = httpx.post(
                    url, content=attempt.body, headers=headers, trust_env=False, timeout=60
                )
                status, body = answer.status_code, answer.content
            code = json.loads(body)["error"]["code"]
            assert 400 <= status < 500, (name, status, body)
        seconds = (processor_seconds(server.process.pid) - before) / repeats
        size = len(attempt.raw or attempt.body) / 2**20
        results[name] = f"{status} {code}; {size:.1f} MiB, {seconds:.3f} s of processor time"
        assert seconds <= MOST, (name, seconds)
    return results
