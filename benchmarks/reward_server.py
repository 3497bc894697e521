"""A reward server under fuzzed requests, abuse and load.

    python benchmarks/reward_server.py                  # about six minutes; writes benchmarks/results/reward_server.*
    python benchmarks/reward_server.py --report         # writes the page again

Four parts, each against a server in a process of its own (`flowrl serve-reward`), over the
loopback:

fuzz   10,000 requests made by Hypothesis: damaged PNG and safetensors files, wrong counts, shapes and types, bad JSON, damaged
       multipart bodies, other methods and paths, and bytes that are no HTTP. No response may be an
       error of the server itself (status 500 and more), every refusal must be typed JSON, and the
       server must score correctly afterwards.
abuse  Requests that are refused: hundreds of thousands of prompts or tensors, JSON that is none, and two lengths in both orders.
       Each may cost at most .1 s of the server's processor time.
load   64 clients (threads of two processes), each with its own connection, one minute of requests of 1 to 8 images. A score
       encodes its sample and its client, so that a lost, repeated or swapped one is visible.
kills  the same for half a minute, while the server is killed (SIGKILL) five seconds after every
start and restarted at once.
"""

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl_bench.results_file import provenance
from server_fuzz import fuzz
from server_load import TOKEN, Server, abuse, load

from flowrl.workers import usable_cores

RESULTS = Path(__file__).parent / "results" / "reward_server"


def measure_fuzz(count: int, folder: Path) -> dict[str, Any]:
    server = Server(folder).start()
    began = time.monotonic()
    statuses = fuzz(server.url, TOKEN, count)
    result = {
        "requests": sum(statuses.values()),
        "seconds": round(time.monotonic() - began, 1),
        "by status": {
            str(status) if status else "no HTTP": number
            for status, number in sorted(statuses.items())
        },
        "answers of 500 and more": sum(
            number for status, number in statuses.items() if status >= 500
        ),
        "errors in the server's log": (folder / "log").read_text().count("Traceback"),
        "memory held afterwards, bytes": int(server.metrics()["flowrl_reward_memory_bytes"]),
    }
    server.end()
    return result


def measure_abuse(folder: Path) -> dict[str, Any]:
    server = Server(folder).start()
    try:
        return abuse(server)
    finally:
        server.end()


def measure_load(seconds: float, folder: Path, kill_every: float = 0.0) -> dict[str, Any]:
    server = Server(folder).start()
    result = load(server, 64, seconds, kill_every)
    if not kill_every:
        metrics = server.metrics()
        calls = metrics["flowrl_reward_batch_samples_count"]
        result["samples in a call of the model, mean"] = round(
            metrics["flowrl_reward_batch_samples_sum"] / calls, 1
        )
    server.end()
    return result


def page(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        "# A reward server under fuzzed requests, abuse and load",
        "",
        (__doc__ or "").partition("\n")[2].strip(),
        "",
        "<!-- figures -->",
        "",
    ]
    lines += [f"{record['hardware']}; {versions}.", ""]
    for title in (part for part in ("fuzz", "abuse", "load", "kills") if part in record["results"]):
        result = record["results"][title]
        lines += [f"| {title} | |", "|---|---|"]
        for name, value in result.items():
            cell = (
                ", ".join(f"{k}: {v:,}" for k, v in value.items())
                if isinstance(value, dict)
                else value
                if isinstance(value, str)
                else f"{value:,}"
            )
            lines.append(f"| {name} | {cell} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="fuzzed requests")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of load; half as many with kills"
    )
    parser.add_argument(
        "--only",
        choices=("fuzz", "abuse", "load", "kills"),
        help="measure one part again and keep the other results",
    )
    parser.add_argument(
        "--report", action="store_true", help="write the page from the results again"
    )
    options = parser.parse_args()
    path = RESULTS.with_suffix(".json")
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        measurements = {
            "fuzz": lambda: measure_fuzz(options.requests, Path(name)),
            "abuse": lambda: measure_abuse(Path(name)),
            "load": lambda: measure_load(options.seconds, Path(name)),
            "kills": lambda: measure_load(options.seconds / 2, Path(name), kill_every=5),
        }
        for part in () if options.report else (options.only,) if options.only else measurements:
            results[part] = {**measurements[part](), "commit": provenance()["commit"]}
            record = {
                "command": (
                    f"python benchmarks/reward_server.py --requests {options.requests} --seconds"
                    f" {options.seconds:g}"
                ),
                "versions": {
                    "python": platform.python_version(),
                    **{n: version(n) for n in ("fastapi", "uvicorn", "httpx", "tenacity", "torch")},
                },
                "hardware": (
                    f"{usable_cores()} cores of {platform.machine()}, shared by server, clients and"
                    " other work"
                ),
                "results": results,
            }
            path.write_text(json.dumps(record, indent=1) + "\n")
    text = page(json.loads(path.read_text()))
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
