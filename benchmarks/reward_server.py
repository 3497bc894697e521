"""A reward server under attack and under load.

    python benchmarks/reward_server.py                  # about six minutes; writes benchmarks/results/reward_server.*
    python benchmarks/reward_server.py --report         # the page again

Three parts, each against a server in a process of its own (`flowrl serve-reward`), over the loopback:

fuzz   10,000 requests made by Hypothesis: damaged PNG and safetensors files, wrong counts, shapes and types, bad JSON, damaged
       multipart bodies, other methods and paths, and bytes that are no HTTP. No answer may be an error of the server's own
       (status 500 and more), every refusal must be typed JSON, and the server must score correctly afterwards.
load   64 clients (threads of two processes), each with its own connection, one minute of requests of 1 to 8 pictures. A score
       encodes its sample and its client, so that a lost, repeated or swapped one shows.
kills  the same for half a minute, while the server is killed (SIGKILL) five seconds after every start and started again at once.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from flowrl import Prompt
from flowrl.rewards.remote import RemoteReward

RESULTS = Path(__file__).parent / "results" / "reward_server"
TOKEN = "a token for the benchmark"
REWARD = '''
from dataclasses import dataclass
import time
import torch


@dataclass(frozen=True)
class Echo:
    """The number that picture and metadata carry; -1 where they do not belong together."""

    seconds: float = 0.0

    def score(self, images, prompts):
        time.sleep(self.seconds)
        found = images.flatten(1).amax(1) * 2**24
        wanted = [prompt.metadata.get("sample") for prompt in prompts]
        told = torch.tensor([float(w) if isinstance(w, (int, float)) and abs(w) < 2**24 else -1.0 for w in wanted])
        return torch.where(found.round() == told, told, -1.0)
'''


def picture(number: int, height: int = 2, width: int = 4) -> torch.Tensor:
    """[1, 3, height, width] that carries a number below 2^24 exactly (height and width are powers of 2)."""
    return torch.full((1, 3, height, width), number / 2**24)


# --- requests that nobody should send -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One request: `raw` bytes for the socket, or method, path, headers and body. `wanted`: the scores if it is a good one."""

    method: str = "POST"
    path: str = "/v1/score"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes = b""
    wanted: tuple[float, ...] | None = None


BOUNDARY = "flowrl-fuzz"
NUMBERS = st.integers(0, 2**24 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def form(parts: list[tuple[str, bytes]]) -> bytes:
    pieces = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{n}"; filename="f"\r\n\r\n'.encode() + d for n, d in parts]
    return b"\r\n".join([*pieces, f"--{BOUNDARY}--\r\n".encode()])


def posted(parts: list[tuple[str, bytes]], wanted: tuple[float, ...] | None = None) -> Attempt:
    return Attempt(headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}, body=form(parts), wanted=wanted)


def listed(numbers: list[int]) -> bytes:
    return json.dumps([{"text": "p", "metadata": {"sample": n}} for n in numbers]).encode()


def good(numbers: list[int]) -> Attempt:
    images = save({"images": torch.cat([picture(n) for n in numbers])})
    return posted([("prompts", listed(numbers)), ("safetensors", images)], tuple(float(n) for n in numbers))


def png(height: int, width: int, mode: str, level: int) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height), level % 2 if mode == "1" else None).save(file, "PNG")
    return file.getvalue()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, cut out, put in or cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "truncate", "grow")))
        if kind == "flip" and found:
            found[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del found[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "truncate":
            del found[at:]
        elif len(found) >= 8:  # a length field
            found[at : at + 4] = draw(st.integers(0, 2**32 - 1)).to_bytes(4, "big")[: len(found) - at]
    return bytes(found)


@st.composite
def image_part(draw: st.DrawFn, count: int) -> list[tuple[str, bytes]]:
    """Pictures in one of many right and wrong ways."""
    height, width = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    kind = draw(st.sampled_from(("tensor", "damaged", "names", "header", "png", "damaged png", "bytes", "none", "both")))
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float64, torch.int64, torch.bool)
    shape = draw(st.sampled_from(((count, 3, height, width), (count, height), (), (0,), (1, 1, 1, 1, count))))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(dtypes)))
    if tensor.is_floating_point() and tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[0] = draw(st.sampled_from((float("nan"), float("inf"), -1.0, 1e30)))
    pngs = [("png", png(height + 1, width + 1, draw(st.sampled_from(("RGB", "L", "1", "RGBA", "P", "I;16"))), 1))] * count
    if kind == "tensor":
        return [("safetensors", save({"images": tensor}))]
    if kind == "damaged":
        return [("safetensors", draw(damaged(save({"images": tensor}))))]
    if kind == "names":
        return [("safetensors", save({draw(st.text(max_size=5)): tensor, "images": tensor.clone()}))]
    if kind == "header":
        claim = {"dtype": draw(st.sampled_from(("F32", "U8", "F8_E4M3", "C64", "F4", "??"))), "shape": draw(JSON)}
        claim["data_offsets"] = draw(st.lists(st.integers(-1, 2**64), min_size=2, max_size=2))
        head = json.dumps({"images": claim}).encode()
        return [("safetensors", len(head).to_bytes(8, "little") + head + draw(st.binary(max_size=64)))]
    if kind == "png":
        return pngs
    if kind == "damaged png":
        return [(name, draw(damaged(data))) for name, data in pngs]
    if kind == "bytes":
        return [(draw(st.sampled_from(("png", "safetensors", "pickle"))), draw(st.binary(max_size=64)))]
    return [] if kind == "none" else [*pngs, ("safetensors", save({"images": tensor}))]


@st.composite
def prompt_part(draw: st.DrawFn, count: int) -> list[tuple[str, bytes]]:
    """Prompts in one of many right and wrong ways."""
    right = listed(list(range(count)))
    kind = draw(st.sampled_from(("right", "damaged", "json", "metadata", "deep", "twice", "none", "bytes")))
    if kind == "json":
        return [("prompts", json.dumps(draw(JSON)).encode())]
    if kind == "metadata":
        items = [{"text": draw(st.text(max_size=8)), "metadata": {"sample": draw(JSON)}} for _ in range(count)]
        return [("prompts", json.dumps(items).encode())]
    if kind == "deep":
        depth = draw(st.integers(1, 5000))
        return [("prompts", b'[{"text": "p", "metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}]")]
    if kind == "bytes":
        return [("prompts", draw(st.binary(max_size=64)))]
    right = draw(damaged(right)) if kind == "damaged" else right
    return [("prompts", right)] * {"twice": 2, "none": 0}.get(kind, 1)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """Any request: good, nearly good, and nothing of the kind."""
    kind = draw(st.sampled_from(("good", "parts", "parts", "parts", "body", "type", "endpoint", "raw")))
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
        media = draw(st.sampled_from(("multipart/form-data", "application/json", "application/x-pickle", "")))
        return Attempt(headers={"Content-Type": f"{media};{draw(word)}"}, body=draw(st.binary(max_size=128)))
    if kind == "endpoint":
        path = draw(st.sampled_from(("/v1/score", "/v1/info", "/metrics", "/health", "/docs", "/openapi.json", "/", "/v1/../x")))
        method = draw(st.sampled_from(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "POST")))
        return Attempt(method, path + draw(st.sampled_from(("", "?a=b", "%00", "%ff", "//"))), {"X-Request-Id": draw(word)})
    line = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    line += b"5\r\nhello\r\n0\r\n\r\n"
    return Attempt(raw=draw(damaged(line) | st.binary(min_size=1, max_size=200)))


def judge(attempt: Attempt, status: int, content: bytes) -> None:
    """Raise `AssertionError` unless the answer is one that the server may give to this request."""
    assert status < 500, (status, content, attempt)
    if attempt.wanted is not None:
        assert status == 200 and json.loads(content)["scores"] == list(attempt.wanted), (status, content, attempt)
    elif status >= 400 and attempt.method != "HEAD":
        error = json.loads(content)["error"]
        assert set(error) == {"code", "message", "retry"} and error["code"] and error["message"], content
    elif attempt.path == "/v1/score" and attempt.method == "POST" and status == 200:
        assert all(abs(value) < 2**24 for value in json.loads(content)["scores"])


def send_raw(host: str, port: int, data: bytes) -> None:
    """Bytes into a fresh connection; whatever comes back is read until it ends or pauses."""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(0.02)
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass


def fuzz(url: str, token: str, count: int) -> Counter[int]:
    """Send `count` requests; how often which status came (0: bytes that were no HTTP request). Raises where one is wrong."""
    seen: Counter[int] = Counter()
    address = httpx.URL(url)

    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=30) as client:

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
                send_raw(address.host, address.port or 80, attempt.raw)
                seen[0] += 1
                return
            answer = client.request(attempt.method, attempt.path, content=attempt.body, headers=attempt.headers)
            judge(attempt, answer.status_code, answer.content)
            seen[answer.status_code] += 1

        each()
        last = good([1, 2, 3])
        answer = client.request(last.method, last.path, content=last.body, headers=last.headers)
        judge(last, answer.status_code, answer.content)
    return seen


# --- load -----------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """`flowrl serve-reward` in a process of its own, on one port for life."""

    folder: Path
    port: int = 0
    seconds: float = 0.0
    """How long the reward takes."""
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
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)

    def metrics(self) -> dict[str, float]:
        """Its counters."""
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False).text
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def one_client(number: int, reward: RemoteReward, end: float, record: dict[str, Any]) -> None:
    """Requests of 1 to 8 numbered pictures until `end`."""
    chance, count = random.Random(number), 0
    while time.monotonic() < end:
        size = chance.randint(1, 8)
        numbers = [(number * 2**18 + count + i) % 2**24 for i in range(size)]
        count += size
        began = time.monotonic()
        scores = reward.score(torch.cat([picture(n) for n in numbers]), [Prompt("p", {"sample": n}) for n in numbers])
        record["seconds"].append(time.monotonic() - began)
        record["samples"] += size
        record["wrong"] += sum(a != b for a, b in zip(scores.tolist(), map(float, numbers), strict=True))


def many_clients(first: int, count: int, url: str, seconds: float, folder: str, pipe: Any) -> None:
    """`count` clients in threads of this process; their records go through the pipe."""
    torch.set_num_threads(1)
    record: dict[str, Any] = {"seconds": [], "samples": 0, "wrong": 0, "failed": 0}
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        mine: dict[str, Any] = {"seconds": [], "samples": 0, "wrong": 0}
        try:
            one_client(number, RemoteReward(url, token_file=f"{folder}/token", backoff=0.2), end, mine)
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
    """What `clients` clients see in `seconds`; with `kill_every` the server is killed and started again that often."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    began, kills = time.monotonic(), 0
    half = clients // 2
    workers = [
        context.Process(target=many_clients, args=(i * half, half, server.url, seconds, str(server.folder), there))
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
    totals = collections.Counter({name: sum(r[name] for r in records) for name in ("samples", "wrong", "failed")})
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


# --- the record -----------------------------------------------------------------------------------------------------


def measure_fuzz(count: int, folder: Path) -> dict[str, Any]:
    server = Server(folder).start()
    began = time.monotonic()
    seen = fuzz(server.url, TOKEN, count)
    found = {
        "requests": sum(seen.values()),
        "seconds": round(time.monotonic() - began, 1),
        "by status": {str(status) if status else "no HTTP": number for status, number in sorted(seen.items())},
        "answers of 500 and more": sum(number for status, number in seen.items() if status >= 500),
        "errors in the server's log": (folder / "log").read_text().count("Traceback"),
        "memory held afterwards, bytes": int(server.metrics()["flowrl_reward_memory_bytes"]),
    }
    server.end()
    return found


def measure_load(seconds: float, folder: Path, kill_every: float = 0.0) -> dict[str, Any]:
    server = Server(folder).start()
    found = load(server, 64, seconds, kill_every)
    if not kill_every:
        metrics = server.metrics()
        calls = metrics["flowrl_reward_batch_samples_count"]
        found["samples in a call of the model, mean"] = round(metrics["flowrl_reward_batch_samples_sum"] / calls, 1)
    server.end()
    return found


def page(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# A reward server under attack and under load",
        "",
        (__doc__ or "").partition("\n")[2].strip(),
        "",
        "<!-- figures -->",
        "",
    ]
    lines += [f"{record['hardware']}; {versions}.", ""]
    for title in (part for part in ("fuzz", "load", "kills") if part in record["results"]):
        found = record["results"][title]
        lines += [f"| {title} | |", "|---|---|"]
        for name, value in found.items():
            shown = (
                ", ".join(f"{k}: {v:,}" for k, v in value.items())
                if isinstance(value, dict)
                else value
                if isinstance(value, str)
                else f"{value:,}"
            )
            lines.append(f"| {name} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="fuzzed requests")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load; half of it with kills")
    parser.add_argument("--only", choices=("fuzz", "load", "kills"), help="measure one part again, keep the others")
    parser.add_argument("--report", action="store_true", help="write the page from the results again")
    options = parser.parse_args()
    path = RESULTS.with_suffix(".json")
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        parts = {
            "fuzz": lambda: measure_fuzz(options.requests, Path(name)),
            "load": lambda: measure_load(options.seconds, Path(name)),
            "kills": lambda: measure_load(options.seconds / 2, Path(name), kill_every=5),
        }
        for part in () if options.report else (options.only,) if options.only else parts:
            words = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
            results[part] = {**parts[part](), "commit": commit}
            record = {
                "command": f"python benchmarks/reward_server.py --requests {options.requests} --seconds {options.seconds:g}",
                "versions": {
                    "python": platform.python_version(),
                    **{n: version(n) for n in ("fastapi", "uvicorn", "httpx", "torch")},
                },
                "hardware": f"{os.cpu_count()} cores of {platform.machine()}, shared by server, clients and other work",
                "results": results,
            }
            path.write_text(json.dumps(record, indent=1) + "\n")
    text = page(json.loads(path.read_text()))
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
