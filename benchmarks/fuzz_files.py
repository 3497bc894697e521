"""Damaged and hostile files, given to every reader of files: each must read the file or refuse it
by name.

    python benchmarks/fuzz_files.py [--inputs 10000] [--seed 0] [--only KIND] [--out FILE]

Valid files of a tiny run (`fuzz_cases`) are changed (`fuzz_mutations`) and read in one forked
process per kind of file. A reader must return, or raise a `FlowrlError` that names the file in at
most 2,000 characters, within 2 seconds of CPU time and 500 MB. It must run no code, import nothing
that the file names, and open no connection. Prints a table and exits 1 if there is a problem. The
same seed gives the same changes; the measured seconds in metrics.jsonl differ between runs.
"""

import argparse
import contextlib
import io
import multiprocessing
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_mutations as change
import torch
from fuzz_cases import KINDS, ROOT, Kind, make_seeds

from flowrl.core.errors import FlowrlError

TABLE = ROOT / "benchmarks" / "results" / "fuzz_files.md"
SECONDS, MEGABYTES, CHARACTERS, HANG = 2.0, 500, 2000, 20
EVENTS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
    "socket.getaddrinfo",
    "webbrowser.open",
}
"""Audit events that no reader may cause."""


@dataclass
class Found:
    """What the inputs of one kind led to."""

    accepted: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    memory: float = 0.0

    @property
    def tried(self) -> int:
        """All inputs."""
        return self.accepted + self.refused + len(self.problems)


class Watch:
    """Records forbidden audit events while it is on. Hooks cannot be removed, so there is one per
    process.
    """

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (
            event in EVENTS or (event == "import" and str(arguments[0]).startswith(change.CANARY))
        ):
            self.seen.append(f"{event} {arguments!r:.100}")


watch = cache(Watch)


class Hang(BaseException):
    """Raised in a reader that does not end."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """At most `MEGABYTES` more of address space, and `HANG` seconds."""

    def stop(*_: object) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, old = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, before[1]))
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(kind: Kind, path: Path, canary: Path, tally: Found) -> str:
    """Read the file and count it as accepted or refused; the problem, or ""."""
    problem, error = "", None
    started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch().on = True
    try:
        with (
            limits(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            kind.read(path)
    except FlowrlError as refusal:
        error = refusal
        if (kind.named or path.name) not in str(refusal):
            problem = f"the file is not named: {str(refusal)[:200]}"
        elif len(str(refusal)) > CHARACTERS:
            problem = f"a message of {len(str(refusal))} characters: {str(refusal)[:200]}"
    except Hang:
        problem = f"not done after {HANG} s"
    except BaseException as other:
        error = other
        place = traceback.extract_tb(other.__traceback__)[-1]
        frame = next(
            (
                f
                for f in reversed(traceback.extract_tb(other.__traceback__))
                if "/flowrl" in f.filename
            ),
            place,
        )
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        problem = f"{type(other).__name__}: {str(other)[:150]} ({where})"
    finally:
        watch().on = False
    seconds = time.process_time() - started
    tally.slowest = max(tally.slowest, seconds)
    tally.memory = max(
        tally.memory, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    )
    if seconds > SECONDS and not problem:
        problem = f"{seconds:.1f} s of CPU time"
    if watch().seen or canary.exists():
        problem = f"code was run or looked up: {'; '.join(watch().seen) or canary.name}"
        watch().seen.clear()
        canary.unlink(missing_ok=True)
    if not problem:
        tally.accepted += error is None
        tally.refused += error is not None
    return problem


def fuzz(kind: Kind, seeds: Path, inputs: int, seed: int) -> Found:
    """Read `inputs` changed files of a kind."""
    tally = Found()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        shutil.copytree(seeds, work)
        path, data = work / kind.place, (work / kind.place).read_bytes()
        others = [
            file.read_bytes()
            for file in sorted(seeds.rglob("*"))
            if file.is_file() and file.stat().st_size < 100_000
        ]
        with contextlib.chdir(work), importable(work):
            judge(kind, path, work / "CANARY", Found())  # imports and caches
            problem = judge(kind, path, work / "CANARY", Found())
            if problem or not path.is_file():
                return Found(problems=[f"the valid file: {problem}"])
            for number in range(inputs):
                put(path, data, others, kind, random.Random(f"{seed} {kind.name} {number}"))
                problem = judge(kind, path, work / "CANARY", tally)
                if problem:
                    tally.problems.append(f"input {number}: {problem}")
    return tally


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in `folder`, the canary among them, can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def put(path: Path, data: bytes, others: Sequence[bytes], kind: Kind, draw: random.Random) -> None:
    """Write the next input to `path`: changed bytes, or seldom no file, a folder, or a link to
    nothing.
    """
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    special = draw.random()
    if special < 0.005:
        path.mkdir()
    elif special < 0.01:
        path.symlink_to("nowhere")
    elif special > 0.015:  # else: no file
        path.write_bytes(
            change.spliced(data, others, draw) if special < 0.05 else kind.mutate(data, draw)
        )


def shared_out(inputs: int, kinds: Sequence[Kind] = KINDS) -> dict[str, int]:
    """How many of the inputs each kind gets."""
    total = sum(kind.share for kind in kinds)
    return {kind.name: max(1, round(inputs * kind.share / total)) for kind in kinds}


def forked(kind: Kind, seeds: Path, inputs: int, seed: int) -> Found:
    """`fuzz` in a process of its own, so that a crash of the interpreter is a problem like the
    others.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(fuzz(kind, seeds, inputs, seed)))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        return Found(problems=[f"the interpreter ended with exit code {process.exitcode}"])
    finally:
        process.join()


HEAD = ("file", "tried", "accepted", "refused", "problems", "slowest (s)", "memory (MB)")


def row(name: str, tally: Found) -> list[str]:
    numbers = (tally.tried, tally.accepted, tally.refused, len(tally.problems))
    return [name, *map(str, numbers), f"{tally.slowest:.2f}", f"{tally.memory:.0f}"]


def page(results: Mapping[str, Found], command: str) -> str:
    """The table in Markdown."""
    rows = [row(name, tally) for name, tally in results.items()]
    total = Found(
        sum(tally.accepted for tally in results.values()),
        sum(tally.refused for tally in results.values()),
        [problem for tally in results.values() for problem in tally.problems],
        max(tally.slowest for tally in results.values()),
        max(tally.memory for tally in results.values()),
    )
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows, row("all", total)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{TEXT}\nCommand: `{command}`.\n\n{table}\n"


TEXT = """# Damaged and hostile files

Each row is a kind of file that flowrl reads. A file is accepted if its reader returns, and refused if the reader raises a
`FlowrlError` that names the file. Everything else is a problem: another exception, a message without the file's name or of more
than 2,000 characters, more than 2 s of CPU time, more than 500 MB, code that runs, a process or a connection.
Changes that leave a valid file, such as another number, are accepted.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this text")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"write the table to this file (the committed one: {TABLE.relative_to(ROOT)})",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, results = shared_out(options.inputs), dict[str, Found]()
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder)
        make_seeds(seeds)
        for kind in (kind for kind in KINDS if options.only in kind.name):
            results[kind.name] = tally = forked(kind, seeds, counts[kind.name], options.seed)
            print("  ".join(row(kind.name, tally)), flush=True)
            for text, times in Counter(p.partition(": ")[2] for p in tally.problems).most_common(8):
                print(f"    {times} x {text}", flush=True)
    if options.out:
        command = f"python benchmarks/fuzz_files.py --inputs {options.inputs} --seed {options.seed}"
        options.out.write_text(page(results, command))
    return 1 if any(tally.problems for tally in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
