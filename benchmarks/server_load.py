"""A reward server in a process of its own, and many clients whose scores identify their samples."""

import collections
import multiprocessing
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from server_fuzz import numbered_image

from flowrl import Prompt
from flowrl.serving.client import RemoteReward

TOKEN = "a token for the benchmark"
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
        found = images.flatten(1).amax(1) * 2**24
        wanted = [prompt.metadata.get("sample") for prompt in prompts]
        wanted_values = torch.tensor([float(w) if isinstance(w, (int, float)) and abs(w) < 2**24 else -1.0 for w in wanted])
        return torch.where(found.round() == wanted_values, wanted_values, -1.0)
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

    def metrics(self) -> dict[str, float]:
        """Its counters."""
        text = httpx.get(
            f"{self.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        ).text
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }


def one_client(number: int, reward: RemoteReward, end: float, record: dict[str, Any]) -> None:
    """Requests of 1 to 8 numbered images until `end`."""
    chance, count = random.Random(number), 0
    while time.monotonic() < end:
        size = chance.randint(1, 8)
        numbers = [(number * 2**18 + count + i) % 2**24 for i in range(size)]
        count += size
        began = time.monotonic()
        scores = reward.score(
            torch.cat([numbered_image(n) for n in numbers]),
            [Prompt("p", {"sample": n}) for n in numbers],
        )
        record["seconds"].append(time.monotonic() - began)
        record["samples"] += size
        record["wrong"] += sum(
            a != b for a, b in zip(scores.tolist(), map(float, numbers), strict=True)
        )


def many_clients(first: int, count: int, url: str, seconds: float, folder: str, pipe: Any) -> None:
    """Run `count` clients in threads of this process; send their records through the pipe."""
    torch.set_num_threads(1)
    record: dict[str, Any] = {"seconds": [], "samples": 0, "wrong": 0, "failed": 0}
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        mine: dict[str, Any] = {"seconds": [], "samples": 0, "wrong": 0}
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
    waits = sorted(second for record in records for second in record["seconds"])
    totals = collections.Counter(
        {name: sum(r[name] for r in records) for name in ("samples", "wrong", "failed")}
    )
    cuts = statistics.quantiles(waits, n=100)
    return {
        "clients": clients,
        "seconds": seconds,
        "kills": kills,
        "requests": len(waits),
        "samples": totals["samples"],
        "lost, repeated or swapped scores": totals["wrong"],
        "clients that gave up": totals["failed"],
        "requests per second": round(len(waits) / seconds, 1),
        "milliseconds, median": round(1000 * cuts[49], 1),
        "milliseconds, 99th percentile": round(1000 * cuts[98], 1),
        "milliseconds, longest": round(1000 * waits[-1], 1),
    }
