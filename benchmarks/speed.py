"""CPU time of commands, iterations and options: this working tree against another commit, in pairs
that take turns.

    python benchmarks/speed.py --base COMMIT                      # all rows, written to results/speed.json and .md
    python benchmarks/speed.py --base COMMIT --rows "flowrl env"  # some rows; the others of the
    file stay
    python benchmarks/speed.py --base COMMIT --quick              # the five-minute version: one pair of each row, printed only

CPU time of a command is user and system time of the whole process tree, so that other work on the
machine matters little. Iterations are measured by phase in a process per tree, options of the
working tree with and without in one process (`speed_child.py`). Every process ends if it imports a
module of flowrl from another tree (`speed_origin/sitecustomize.py`). A new command is one more
entry of `COMMANDS`, anything else one of `ROWS`.
"""

import argparse
import compileall
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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
PACKAGES = (".", "tutorials/package", "benchmarks/package")
HERE = Path(__file__).resolve().parent
CHILD = str(HERE / "speed_child.py")


@dataclass(frozen=True)
class Row:
    """What is measured: the arguments of `python`, run in an empty folder, and the number of pairs.

    `inside`: the process prints CPU seconds of its parts as JSON, and each part becomes a row of
    the table; "pairs": it runs with the working tree only, and its parts are lists of pairs.
    """

    arguments: tuple[str, ...]
    pairs: int = 5
    inside: str = ""


HELPS = (
    "compare",
    "train",
    "evaluate",
    "sample",
    "parts",
    "presets",
    "prompts",
    "env",
    "bench",
    "explain",
    "pretrain",
    "serve-reward",
)
COMMANDS = (
    "",
    "--help",
    "--version",
    "env",
    "parts",
    "presets",
    "prompts check --file prompts.txt",
    *(f"{name} --help" for name in HELPS),
    "compare --preset tiny --out out",
    "compare --world mixture --out out",
)
ROWS: dict[str, Row] = {
    "import torch": Row(("-c", "import torch"), pairs=7),
    **{f"flowrl {line}".strip(): Row(("-m", "flowrl", *line.split())) for line in COMMANDS},
    "3 iterations, shapes": Row((CHILD, "iterations", "shapes", "3"), 5, "parts"),
    "5 iterations, mixture": Row((CHILD, "iterations", "mixture", "5"), 5, "parts"),
    "options": Row((CHILD, "options", "7"), 1, "pairs"),
}
SIDES = ("base", "new")
REFERENCE = "import torch"
"""The row that start-up is compared with."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, and what it printed if it measures inside."""

    cpu: float
    wall: float
    parts: dict[str, Any] = field(default_factory=dict)


class CommandError(Exception):
    """A command that is measured has failed."""


def count_orphans() -> None:
    """Processes whose parent has ended become children of this one (Linux), so that `run` waits for
    and counts them too.
    """
    PR_SET_CHILD_SUBREAPER = 36
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("this needs Linux: prctl(PR_SET_CHILD_SUBREAPER) failed")


def run(tree: Path, row: Row) -> Cost:
    """Run a row with the code of `tree`. Raises `CommandError` if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prompts.txt").write_text("a cat\na dog\n")
        started, errors = time.perf_counter(), Path(folder, "stderr")
        with errors.open("wb") as sink, Path(folder, "stdout").open("wb") as shown:
            words = [sys.executable, *row.arguments]
            process = subprocess.Popen(
                words, cwd=folder, env=environment(tree), stdout=shown, stderr=sink
            )
        cpu, wall = 0.0, 0.0
        while True:
            try:
                number, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            cpu += used.ru_utime + used.ru_stime
            if number == process.pid:
                wall, process.returncode = (
                    time.perf_counter() - started,
                    os.waitstatus_to_exitcode(status),
                )
        if process.returncode != 0:
            raise CommandError(
                f"{' '.join(words)} failed with the code of {tree}:\n{errors.read_text()[-2000:]}"
            )
        parts = json.loads(Path(folder, "stdout").read_text()) if row.inside else {}
    return Cost(cpu, wall, parts)


def environment(tree: Path) -> dict[str, str]:
    """The variables with which the code of `tree` is imported: compiled before, on one thread and
    without the network.
    """
    places = [str(HERE / "speed_origin"), *(str(tree / place) for place in PACKAGES)]
    own = {
        "PYTHONPATH": os.pathsep.join(places),
        "FLOWRL_TREE": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | own


def check_origin(tree: Path, other: Path) -> None:
    """End the benchmark unless the processes of `tree` refuse the code of `other`."""
    with tempfile.TemporaryDirectory() as folder:
        words, places = [sys.executable, "-c", "import flowrl"], environment(other)["PYTHONPATH"]
        for path, code in ((environment(tree)["PYTHONPATH"], 0), (places, 97)):
            found = subprocess.run(
                words,
                cwd=folder,
                env={**environment(tree), "PYTHONPATH": path},
                capture_output=True,
                text=True,
            )
            if found.returncode != code:
                raise SystemExit(
                    f"import flowrl for {tree} ended with {found.returncode}, not {code}:"
                    f" {found.stderr[-500:]}"
                )


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
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def measure(base: Path, name: str, row: Row, pairs: int) -> dict[str, dict[str, list[list[float]]]]:
    """(CPU, wall) seconds of both trees, which take turns, by row of the table; of the base none if
    its command fails.
    """
    if row.inside == "pairs":
        parts = {f"{name}: {part}": pairs for part, pairs in run(ROOT, row).parts.items()}
        return {
            part: {side: [[pair[i]] * 2 for pair in pairs] for i, side in enumerate(SIDES)}
            for part, pairs in parts.items()
        }
    trees, found = (
        dict(zip(SIDES, (base, ROOT), strict=True)),
        dict[str, dict[str, list[list[float]]]](),
    )
    for number in range(pairs):
        for side in sorted(trees, reverse=number % 2 == 1):  # the base first in the first pair
            try:
                cost = run(trees[side], row)
            except CommandError as error:
                if side == "new" or number:
                    raise SystemExit(str(error)) from error
                print(str(error).splitlines()[0], flush=True)  # a command that the base has not
                del trees["base"]
                continue
            costs = {f"{name}: {part}": [cpu, cpu] for part, cpu in cost.parts.items()} or {
                name: [cost.cpu, cost.wall]
            }
            for part, values in costs.items():
                found.setdefault(part, {each: [] for each in SIDES})[side].append(
                    [round(value, 4) for value in values]
                )
    return found


def report(record: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    rows, torch = record["rows"], record["rows"].get(REFERENCE)
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"Written by `{record['command']}` ({record['hardware']}; {versions}).",
        "",
        (
            "CPU seconds, of commands those of the whole process tree: medians; new/base is the"
            " median over pairs, with the smallest and the largest. Without a base the command"
            " does not exist there. Options: base is without, new with the option. The last column"
            f" compares start-up with `python -c '{REFERENCE}'`."
        ),
        "",
        (
            "| row | base | new | new/base | wall, base | wall, new | pairs | commits |"
            f" new/{REFERENCE} |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        base, new = ([cpu for cpu, _ in row[side]] for side in SIDES)
        ratios = [ours / theirs for ours, theirs in zip(new, base, strict=False)]
        inside, digits = name not in ROWS, 3 if name not in ROWS else 2
        walls = [
            "" if inside or not row[side] else f"{statistics.median(w for _, w in row[side]):.1f}"
            for side in SIDES
        ]
        cells = [
            name if inside else f"`{name}`",
            f"{statistics.median(base):.{digits}f}" if base else "none",
            f"{statistics.median(new):.{digits}f}",
            (
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if ratios
                else ""
            ),
            *walls,
            str(len(new)),
            f"{row['commits'][0]} {row['commits'][1]}",
            (
                f"{statistics.median(new) / statistics.median(cpu for cpu, _ in torch['new']):.2f}"
                if torch and not inside
                else ""
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ordered(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the table in the order of `ROWS`."""
    return {
        name: rows[name]
        for known in ROWS
        for name in rows
        if name == known or name.startswith(f"{known}: ")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(ROWS),
        metavar="ROW",
        default=list(ROWS),
        help=", ".join(ROWS),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one pair of each row, about five minutes; nothing is written",
    )
    parser.add_argument(
        "--pairs", type=int, default=0, help="pairs of each row instead of its own number"
    )
    options = parser.parse_args(arguments)
    count_orphans()
    commits = [
        git("rev-parse", "--short", options.base),
        git("describe", "--always", "--dirty", "--exclude=*"),
    ]
    record: dict[str, Any] = {
        "command": f"python benchmarks/speed.py --base {commits[0]}",
        "hardware": (
            f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, shared with other work"
        ),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "rows": {},
    }
    if options.quick:
        print(
            "Five-minute version: one pair of each row. Single ratios vary by a tenth or more.",
            flush=True,
        )
    with worktree(options.base) as base:
        for tree, other in ((base, ROOT), (ROOT, base)):
            check_origin(tree, other)
            for place in PACKAGES:
                compileall.compile_dir(tree / place, quiet=2)
        for name in options.rows:
            row, began = ROWS[name], time.monotonic()
            pairs = 1 if options.quick else options.pairs or row.pairs
            found = {
                part: {"commits": commits, **both}
                for part, both in measure(base, name, row, pairs).items()
            }
            print(
                "\n".join(report({**record, "rows": found}).splitlines()[6:]),
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            kept = (
                json.loads(RESULTS.read_text())["rows"]
                if RESULTS.exists() and not options.quick
                else record["rows"]
            )
            record["rows"] = ordered({**kept, **found})
            if not options.quick:
                RESULTS.write_text(json.dumps(record, indent=1) + "\n")
                RESULTS.with_suffix(".md").write_text(report(record))
    print("\n" + report(record))


if __name__ == "__main__":
    main()
