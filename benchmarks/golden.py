"""Golden runs: the working tree must train to the same numbers, bit for bit, as another commit.

    python benchmarks/golden.py                           # as HEAD; three minutes on one core
    python benchmarks/golden.py --reference main          # as any commit with these options
    python benchmarks/golden.py --cases "mixture*" --keep out

The reference is checked out into a temporary git worktree. The same `flowrl train` commands
(`golden_cases.py`) run with its code and with the working tree's, each in one process with one
thread. Metrics, weights, checkpoints, samples, trajectories and exported LoRAs are compared, times
are not. The exit status is 1 if a command fails or a number differs. With `--keep`, the runs are in
out/SIDE/CASE.
"""

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from golden_cases import CASES, make_inputs
from safetensors.torch import load_file
from torch import Tensor
from trees import ROOT, environment, worktree

COMPARED = ("metrics.jsonl", "samples.json", "trajectory.json", "summary.json", "*.safetensors")
SKIPPED_FILES = "untrained-*"  # of earlier versions
TIMES = re.compile(r"seconds|phases|(^|/)time(/|$)|warnings/\d+/text")


def execute(cases: list[str]) -> None:
    """In the process of one side, whose folder is the current one: run the commands of the cases."""
    from flowrl.cli.main import main as flowrl

    for case in cases:
        try:
            status = flowrl(["train", *CASES[case].split(), "--out", case])
        except SystemExit as error:
            status = error.code
        except Exception:
            traceback.print_exc()
            status = 1
        if status == 0:
            Path(case, "finished").touch()


def run_side(tree: Path, folder: Path, cases: list[str]) -> None:
    """Run the cases in `folder` with the code of `tree`; their output goes to log.txt."""
    words = [sys.executable, str(Path(__file__).resolve()), "--execute", *cases]
    with open(folder / "log.txt", "w") as log:
        subprocess.run(
            words, cwd=folder, env=environment(tree), stdout=log, stderr=log, check=False
        )


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, texts and nulls within nested JSON, by path, as in "evaluation/reward"."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{prefix}/{name}" if prefix else str(name))


def content(run: Path) -> dict[str, Any]:
    """What is compared of a run, as FILE:KEY: tensors, and other values without times."""
    compared: dict[str, Any] = {}
    for path in sorted({path for pattern in COMPARED for path in run.rglob(pattern)}):
        name = path.relative_to(run).as_posix()
        if path.match(SKIPPED_FILES):
            continue
        if path.suffix == ".safetensors":
            compared |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
            continue
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        values = leaves([json.loads(text) for text in texts])
        compared |= {f"{name}:{key}": value for key, value in values if not TIMES.search(key)}
    return compared


def difference(old: Any, new: Any) -> str:
    """How two values differ, in words; "" if they are equal bit for bit. NaN equals NaN."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        # a NaN differs from itself
        same = type(old) is type(new) and (old == new or (old != old and new != new))
        return "" if same else f"{old!r} -> {new!r}"
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"{old.dtype} {tuple(old.shape)} -> {new.dtype} {tuple(new.shape)}"
    unequal = (old != new) & ~(old.isnan() & new.isnan())
    if not unequal.any():
        return ""
    largest = float((old.double() - new.double())[unequal].abs().max())
    return f"{int(unequal.sum())} of {old.numel()} elements, by at most {largest:.1e}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the contents of two runs, metrics first."""
    texts = []
    for key in dict.fromkeys((*old, *new)):
        if key not in old or key not in new:
            texts.append(f"{key}: only in the {'working tree' if key in new else 'reference'}")
        elif text := difference(old[key], new[key]):
            texts.append(f"{key}: {text}")
    return sorted(texts, key=lambda text: not text.startswith("metrics.jsonl"))


def verdict(old: Path, new: Path) -> tuple[str, list[str]]:
    """Whether two runs are equal, DIFFERENT or FAILED, and the reasons."""
    failed = [run.as_posix() for run in (old, new) if not (run / "finished").exists()]
    if failed:
        return "FAILED", [f"{run} did not finish: see log.txt" for run in failed]
    before, after = content(old), content(new)
    reasons = differences(before, after)
    if not before:
        return "FAILED", ["there is nothing to compare"]
    return ("DIFFERENT" if reasons else f"equal, {len(before):,} values"), reasons


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", default="HEAD", metavar="COMMIT")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for all runs")
    parser.add_argument("--execute", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.execute:
        torch.set_num_threads(1)
        execute(options.execute)
        return 0
    chosen = [case for pattern in options.cases for case in fnmatch.filter(CASES, pattern)]
    if not chosen:
        parser.error(f"--cases: no case matches; known: {', '.join(CASES)}")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        work = options.keep or Path(scratch)
        sides = work / "reference", work / "working-tree"
        for side in sides:
            side.mkdir(parents=True)
        make_inputs(work)
        with worktree(options.reference) as reference:
            for tree, side in zip((reference, ROOT), sides, strict=True):
                run_side(tree, side, chosen)
        for case in chosen:
            word, reasons = verdict(*(side / case for side in sides))
            print(f"{case:<36} {word}", *reasons[:10], sep="\n    ", flush=True)
            verdicts.append(word)
            if word == "FAILED":
                print(*((side / "log.txt").read_text()[-2000:] for side in sides), sep="\n")
    return int(any(not word.startswith("equal") for word in verdicts))


if __name__ == "__main__":
    sys.exit(main())
