"""CPU seconds of commands: the working tree against another commit, in pairs that take turns.

    python benchmarks/speed.py --base COMMIT                       # all commands
    python benchmarks/speed.py --base COMMIT --only "train*" --pairs 2

A command's CPU time is the user and system time of its whole process tree (on Linux also of
workers that outlive it), so that other work on the machine matters little. The table has medians, and the median, smallest and largest ratio of the
pairs. A command that the base does not have has no ratio.
"""

import argparse
import compileall
import ctypes
import fnmatch
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from trees import PACKAGES, ROOT, environment, worktree

METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
COMMANDS = (
    "--help",
    "env",
    "parts",
    "presets",
    "train --help",
    "compare --help",
    "prompts check --file prompts.txt",
    *(f"train --preset tiny --world shapes --method {method} --out out" for method in METHODS),
    *(f"train --world mixture --iterations 5 --method {method} --out out" for method in METHODS),
    "compare --preset tiny --out out",
    "compare --world mixture --out out",
    "train --preset sd3.5-medium,flow-grpo,pickscore --plan",
)


def cpu_seconds(words: list[str], variables: dict[str, str]) -> float | None:
    """Of a command and its children, in an empty folder; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prompts.txt").write_text("a cat\na dog\n")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [sys.executable, *words], cwd=folder, env=variables, capture_output=True
        )
        with suppress(ChildProcessError):
            while True:  # the server of workers ends after the command, and is then our child
                os.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent if result.returncode == 0 else None


def row(name: str, pairs: list[tuple[float | None, ...]]) -> str:
    """A row of the table."""
    base, new = (
        [seconds for seconds in side if seconds is not None] for side in zip(*pairs, strict=True)
    )
    ratios = [after / before for before, after in pairs if before and after]
    cells = [f"{statistics.median(side):.2f}" if side else "failed" for side in (base, new)]
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    cells.append(f"{statistics.median(ratios):.2f} {spread}" if ratios else "-")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of commands")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    print("| command | base | new | new/base |\n|---|---|---|---|", flush=True)
    with worktree(options.base) as base:
        for tree in (base, ROOT):
            for package in PACKAGES:
                compileall.compile_dir(tree / package, quiet=2)
        sides = [environment(tree) for tree in (base, ROOT)]
        commands = {"import torch": ["-c", "import torch"]}
        commands |= {f"flowrl {line}": ["-m", "flowrl", *line.split()] for line in COMMANDS}
        for name in fnmatch.filter(commands, f"*{options.only}"):
            pairs = [
                tuple(cpu_seconds(commands[name], side) for side in sides)
                for _ in range(options.pairs)
            ]
            print(row(name, pairs), flush=True)


if __name__ == "__main__":
    main()
