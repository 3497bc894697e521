"""CPU time of commands: this working tree against another commit, in pairs of fresh processes that take turns.

    python benchmarks/speed.py --base COMMIT                      # all rows, written to results/speed.json and .md
    python benchmarks/speed.py --base COMMIT --rows "flowrl env"  # some rows; the others of the file stay
    python benchmarks/speed.py --base COMMIT --quick              # two pairs of each row, printed only

CPU time is user and system time of the whole process tree, so that other work on the machine matters little. A new command is one
more entry of `COMMANDS`, anything else one of `ROWS`.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
PACKAGES = (".", "tutorials/package", "benchmarks/package")
ORIGIN = "import flowrl; print(flowrl.__file__)"


@dataclass(frozen=True)
class Row:
    """What is measured: the arguments of `python`, run in an empty folder, and the number of pairs."""

    arguments: tuple[str, ...]
    pairs: int = 5


HELPS = (
    "compare", "train", "evaluate", "sample", "parts", "presets", "prompts", "env", "bench", "explain", "pretrain",
    "serve-reward",
)  # fmt: skip
COMMANDS = (
    "", "--help", "--version", "env", "parts", "presets", "prompts check --file prompts.txt",
    *(f"{name} --help" for name in HELPS), "compare --preset tiny --out out", "compare --world mixture --out out",
)  # fmt: skip
ROWS: dict[str, Row] = {
    "import torch": Row(("-c", "import torch"), pairs=7),
    **{f"flowrl {line}".strip(): Row(("-m", "flowrl", *line.split())) for line in COMMANDS},
}
REFERENCE = "import torch"
"""The row that start-up is compared with."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one run."""

    cpu: float
    wall: float


def count_orphans() -> None:
    """Processes whose parent has ended become children of this one (Linux), so that `run` waits for and counts them too."""
    PR_SET_CHILD_SUBREAPER = 36
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("this needs Linux: prctl(PR_SET_CHILD_SUBREAPER) failed")


def run(tree: Path, row: Row) -> Cost:
    """Run a row with the code of `tree`. Ends the benchmark if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prompts.txt").write_text("a cat\na dog\n")
        started, errors = time.perf_counter(), Path(folder, "stderr")
        with errors.open("wb") as sink:
            words = [sys.executable, *row.arguments]
            process = subprocess.Popen(words, cwd=folder, env=environment(tree), stdout=subprocess.DEVNULL, stderr=sink)
        cpu, wall = 0.0, 0.0
        while True:
            try:
                number, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            cpu += used.ru_utime + used.ru_stime
            if number == process.pid:
                wall, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(words)} failed with the code of {tree}:\n{errors.read_text()[-2000:]}")
    return Cost(cpu, wall)


def environment(tree: Path) -> dict[str, str]:
    """The variables with which the code of `tree` is imported: compiled once, on one thread and without the network."""
    own = {"PYTHONPATH": os.pathsep.join(str(tree / place) for place in PACKAGES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


def check_origin(tree: Path) -> None:
    """End the benchmark unless `import flowrl` takes the code of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", ORIGIN]
        found = subprocess.run(
            words, cwd=folder, env=environment(tree), capture_output=True, text=True, check=True
        ).stdout.strip()
    if Path(found).resolve() != (tree / "flowrl" / "__init__.py").resolve():
        raise SystemExit(f"flowrl is imported from {found}, not from {tree}")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base").resolve()
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def measure(base: Path, row: Row, pairs: int) -> dict[str, list[list[float]]]:
    """(CPU, wall) seconds of `pairs` runs of both trees, which take turns; a first run of each only fills the caches."""
    trees = {"base": base, "new": ROOT}
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    for number in range(-1, pairs):
        for name in sorted(trees, reverse=number % 2 == 1):
            cost = run(trees[name], row)
            if number >= 0:
                found[name].append([round(cost.cpu, 3), round(cost.wall, 3)])
    return found


def report(record: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    rows, torch = record["rows"], record["rows"].get(REFERENCE)
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"Written by `python benchmarks/speed.py` ({record['hardware']}; {versions}).",
        "",
        "CPU seconds of the whole process tree: medians; new/base is the median over pairs, with the smallest and the largest. "
        f"The last column is the CPU time relative to that of `python -c '{REFERENCE}'`.",
        "",
        f"| row | base | new | new/base | wall, base | wall, new | pairs | commits | new/{REFERENCE} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        base, new = ([cpu for cpu, _ in row[side]] for side in ("base", "new"))
        ratios = [ours / theirs for ours, theirs in zip(new, base, strict=True)]
        cells = [
            f"`{name}`", f"{statistics.median(base):.2f}", f"{statistics.median(new):.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{statistics.median(wall for _, wall in row[side]):.1f}" for side in ("base", "new")),
            str(len(ratios)), f"{row['commits'][0]} {row['commits'][1]}",
            f"{statistics.median(new) / statistics.median(cpu for cpu, _ in torch['new']):.2f}" if torch else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="two pairs of each row; nothing is written")
    options = parser.parse_args(arguments)
    count_orphans()
    commits = [git("rev-parse", "--short", options.base), git("describe", "--always", "--dirty", "--exclude=*")]
    record: dict[str, Any] = {
        "command": "python benchmarks/speed.py --base COMMIT",
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, shared with other work",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "rows": {},
    }
    with worktree(options.base) as base:
        for tree in (base, ROOT):
            check_origin(tree)
        for name in options.rows:
            row = ROWS[name]
            found = {"commits": commits, **measure(base, row, 2 if options.quick else row.pairs)}
            print(report({**record, "rows": {name: found}}).splitlines()[-1], flush=True)
            kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not options.quick else record["rows"]
            record["rows"] = {known: {**kept, name: found}[known] for known in ROWS if known in {**kept, name: found}}
            if not options.quick:
                RESULTS.write_text(json.dumps(record, indent=1) + "\n")
                RESULTS.with_suffix(".md").write_text(report(record))
    print("\n" + report(record))


if __name__ == "__main__":
    main()
