"""Golden runs: the working tree must train to the same numbers, bit for bit, as a reference commit.

    python benchmarks/golden.py                                # everything, about two minutes on one core
    python benchmarks/golden.py --cases tiny resume            # some cases
    python benchmarks/golden.py --reference HEAD --keep out    # another reference commit; keep all run folders in out/

The script checks the reference commit out into a temporary git worktree. It then executes the same `flowrl` commands with the
reference's code and with the working tree's, each in its own process with one thread, and compares metrics, weights, checkpoints,
samples and exported LoRAs. Times are not compared. The exit status is 1 if a command fails or a number differs, unless `MEANT`
explains the difference.

The runs in `golden_cases.py` use the reference's names; the tables below translate renamed settings, metrics, tensors and files.
"""

import argparse
import fnmatch
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from golden_cases import BUILD, Job, cases
from safetensors.torch import load_file
from torch import Tensor

REFERENCE = "6704dec"

SETTINGS: dict[str, str] = {
    "members": "group_size", "steps": "num_steps", "updates": "minibatches", "lr": "learning_rate",
    "final_lr": "final_learning_rate", "clip": "clip_range", "grad_clip": "max_grad_norm", "ema": "ema_decay",
    "rank": "lora_rank", "alpha": "lora_alpha", "guidance": "guidance_scale", "text_tokens": "max_sequence_length",
    "eval_prompts": "eval_samples",
}  # fmt: skip
"""Settings (options without the dashes, `_` for `-`): the reference's name -> the working tree's."""
METRICS: dict[str, str] = {}
"""Keys of metrics.jsonl and of the other JSON files: a whole key such as "evaluation/reward", or one of its parts."""
TENSORS: dict[str, str] = {r"^optimiser\.": "optimizer."}
"""Names of tensors: regular expression -> replacement."""
FILES: dict[str, str] = {r"(checkpoints/\d+)/tensors(?=\.safetensors)": r"\1"}
"""Paths below a run's folder: regular expression -> replacement."""
MEANT: dict[str, str] = {
    "*/checkpoints/*.safetensors:loss_scale": "the loss scale is a plain value of the checkpoint",
    "*/metrics.jsonl:*/step_shares/*": "a new metric: each step's share of the policy term",
    "*/metrics.jsonl:*/ratio_distance": "a new metric: mean abs(ratio - 1)",
    "*/metrics.jsonl:*/zero_pairs": "a new metric: pairs of advantage 0, which are not evaluated",
    "*/metrics.jsonl:*/warnings/*": "a collapse warning needs a fall of 3 standard errors of an evaluation",
    "*/metrics.jsonl:*/ratio_noise_mean": "a new metric: mean abs(ratio - 1) before any update",
}
"""Intended differences: pattern of a key as the report prints it (`*` matches anything) -> reason."""

COMPARED = ("metrics.jsonl", "samples.json", "trajectory.json", "summary.json", "*.safetensors")
SKIPPED_FILES = "untrained-*"  # named after a hash of the settings; before.safetensors of each run has the same content
SKIPPED_KEYS = re.compile(r"seconds|phases|(^|/)time(/|$)|warnings/\d+/text")


# --- one side -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the two trees, where its run folders go, and what it calls the settings."""

    name: str
    root: Path
    out: Path
    names: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this tree's packages and computes with one thread."""
        packages = map(str, [self.root, *sorted(self.root.glob("*/package"))])
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONDONTWRITEBYTECODE"), "1")
        return {**os.environ, **single, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(packages)}

    def python(self, *arguments: str, log: Path) -> None:
        """Run Python on this tree; its output goes to `log`."""
        with open(log, "w") as file:
            command = [sys.executable, *arguments]
            subprocess.run(command, cwd=self.out, env=self.environment(), stdout=file, stderr=subprocess.STDOUT, check=False)

    def run(self, case: str, jobs: Sequence[Job]) -> list[str]:
        """Execute the commands of a case; what failed, as lines of text."""
        folder = self.out / case
        folder.mkdir()
        places = {job.name: str(folder / job.name) for job in jobs}
        todo = [
            {"out": place, "arguments": job.arguments(place, self.names), "copy": places.get(job.copy, ""), "pause": job.pause}
            for job, place in zip(jobs, places.values(), strict=True)
        ]
        (folder / "jobs.json").write_text(json.dumps(todo))
        self.python(str(Path(__file__).resolve()), "--side", str(self.root), str(folder / "jobs.json"), log=folder / "log.txt")
        statuses = folder / "statuses.json"
        found = json.loads(statuses.read_text()) if statuses.exists() else {}
        wrong = [job.name for job in jobs if found.get(job.name) != (130 if job.pause else 0)]
        output = ending(folder / "log.txt", wrong[0]) if wrong else ""
        return [f"{self.name}: {', '.join(wrong)} failed; the output of {wrong[0]} ends:\n{output}"] if wrong else []


def ending(log: Path, name: str = "", lines: int = 12) -> str:
    """The last lines that the job `name` printed; of the whole log if the job never began."""
    text = log.read_text(errors="replace")
    own = text.partition(f"=== {name}\n")[2].partition("\n=== ")[0]
    return "\n".join(f"    {line}" for line in (own or text).splitlines()[-lines:])


def execute(root: Path, jobs: Path) -> None:
    """In the process of one side: run the commands in `jobs` one after the other; statuses.json gets their exit statuses."""
    import flowrl

    found = Path(str(flowrl.__file__)).resolve()
    if not found.is_relative_to(root.resolve()):
        raise SystemExit(f"flowrl was imported from {found}, not from {root}")
    from flowrl.cli import main as flowrl_main

    statuses = {}
    for job in json.loads(jobs.read_text()):
        out = Path(job["out"])
        print(f"=== {out.name}\nflowrl {' '.join(job['arguments'])}", flush=True)
        if job["pause"]:
            os.environ["GOLDEN_PAUSE"] = str(out / "metrics.jsonl")
        try:
            if job["copy"]:
                shutil.copytree(job["copy"], out)
            statuses[out.name] = flowrl_main(job["arguments"])
        except SystemExit as error:
            statuses[out.name] = error.code
        except Exception:
            traceback.print_exc()
            statuses[out.name] = 1
        os.environ.pop("GOLDEN_PAUSE", None)
    jobs.with_name("statuses.json").write_text(json.dumps(statuses))


def make_inputs(side: Side, inputs: Path) -> None:
    """Prompts and pipelines, made once by `side` and read by both."""
    (inputs / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    side.python("-c", BUILD, str(inputs), log=inputs / "log.txt")
    if not (inputs / "flux" / "model_index.json").exists():
        raise SystemExit(f"the tiny pipelines could not be built; the log ends:\n{ending(inputs / 'log.txt')}")


# --- the comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A key whose values differ: in how many numbers, and the largest differences (NaN: not measurable)."""

    key: str
    count: int
    text: str
    absolute: float = math.nan
    relative: float = math.nan


@dataclass
class Result:
    """What a case's comparison found."""

    files: int = 0
    numbers: int = 0
    differences: list[Difference] = field(default_factory=list)
    meant: list[Difference] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, found: Difference) -> None:
        """Sort a difference into the intended and the unintended ones."""
        meant = any(fnmatch.fnmatchcase(found.key, pattern) for pattern in MEANT)
        (self.meant if meant else self.differences).append(found)

    def common(self, place: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """The entries that both sides have, with both values; the others are differences."""
        for name in dict.fromkeys((*old, *new)):
            if name in old and name in new:
                yield name, old[name], new[name]
            else:
                self.add(Difference(place + name, 1, f"only in the {'working tree' if name in new else 'reference'}"))

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.failures or not self.numbers:
            return "FAILED"
        if self.differences:
            return "DIFFERENT"
        return "equal, but for what is meant" if self.meant else "equal"


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, texts and nulls within nested JSON, by path: "evaluation/reward", "mean_abs_gain/0"."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{prefix}/{name}" if prefix else str(name))


def content(path: Path) -> dict[str, Any]:
    """What is compared of a file, by key: numbers and texts of JSON without times, tensors of safetensors."""
    if path.suffix == ".safetensors":
        return load_file(path)
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    return {key: leaf for key, leaf in leaves(rows) if not SKIPPED_KEYS.search(key)}


def translated(key: str, kind: str) -> str:
    """The working tree's name for the reference's `key` in a file of that kind."""
    if kind == ".safetensors":
        return substituted(key, TENSORS)
    row, mark, rest = key.partition("/") if kind == ".jsonl" else ("", "", key)
    return row + mark + (METRICS.get(rest) or "/".join(METRICS.get(part, part) for part in rest.split("/")))


def substituted(text: str, table: Mapping[str, str]) -> str:
    """`text` after the replacements of `table`."""
    for pattern, replacement in table.items():
        text = re.sub(pattern, replacement, text)
    return text


def difference(key: str, old: Any, new: Any) -> Difference | None:
    """How two values differ; None if they are equal. NaN equals NaN. Integer tensors, such as a generator's state, have no size
    of a difference."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)):
        found = difference(key, torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64))
        return replace(found, text=f"{old!r} -> {new!r}") if found else None
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return None if type(old) is type(new) and old == new else Difference(key, 1, f"{old!r} -> {new!r}")
    if old.dtype != new.dtype or old.shape != new.shape:
        kinds = [f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.") for tensor in (old, new)]
        return Difference(key, max(old.numel(), new.numel()), " -> ".join(kinds))
    unequal = (old != new) & ~(old.isnan() & new.isnan())
    count = int(unequal.sum())
    found = Difference(key, count, f"{count} of {old.numel()} elements")
    if count == 0 or not old.is_floating_point():
        return found if count else None
    before, after = old[unequal].double(), new[unequal].double()
    absolute = (before - after).abs().nan_to_num(math.inf)
    relative = (absolute / before.abs().maximum(after.abs())).nan_to_num(math.inf)
    return replace(found, absolute=float(absolute.max()), relative=float(relative.max()))


def files(folder: Path) -> dict[str, Path]:
    """The compared files below `folder` by relative path."""
    found = {path.relative_to(folder).as_posix(): path for pattern in COMPARED for path in folder.rglob(pattern)}
    return {name: path for name, path in sorted(found.items()) if not path.match(SKIPPED_FILES)}


def compare_folders(old: Path, new: Path, case: str) -> Result:
    """All compared files of both folders. What only one of them has is a difference."""
    result = Result()
    before = {substituted(name, FILES): path for name, path in files(old).items()}
    for name, first, second in result.common(f"{case}/", before, files(new)):
        result.files += 1
        translation = {translated(key, second.suffix): value for key, value in content(first).items()}
        for key, *values in result.common(f"{case}/{name}:", translation, content(second)):
            result.numbers += values[0].numel() if isinstance(values[0], Tensor) else 1
            found = difference(f"{case}/{name}:{key}", *values)
            if found:
                result.add(found)
    return result


# --- report ---------------------------------------------------------------------------------------------------------------


def largest(values: Sequence[float]) -> str:
    """The largest of the values that could be measured."""
    known = [value for value in values if not math.isnan(value)]
    return f"{max(known):.1e}" if known else "-"


def print_report(results: Mapping[str, Result], shown: int = 20) -> None:
    """The table, and the first difference in each of `shown` files per case."""
    print(f"\n{'case':<18}{'files':>6}{'numbers':>10}{'differences':>13}{'largest abs':>13}{'largest rel':>13}  verdict")
    for case, result in results.items():
        every = [*result.differences, *result.meant]
        count = sum(one.count for one in every)
        sizes = f"{largest([one.absolute for one in every]):>13}{largest([one.relative for one in every]):>13}"
        print(f"{case:<18}{result.files:>6}{result.numbers:>10,}{count:>13,}{sizes}  {result.verdict}")
    for result in results.values():
        for failure in result.failures:
            print(f"\n{failure}")
        metrics_first = sorted(result.differences, key=lambda one: "/metrics.jsonl" not in one.key)
        by_file = [(file, list(found)) for file, found in groupby(metrics_first, lambda one: one.key.partition(":")[0])]
        for file, found in by_file[:shown]:
            one, key = found[0], found[0].key.partition(":")[2]
            size = "" if math.isnan(one.absolute) else f" (abs {one.absolute:.1e}, rel {one.relative:.1e})"
            print(f"{file}: {f'{len(found)} keys, first {key}: ' if key else ''}{one.text}{size}")
        if len(by_file) > shown:
            print(f"... and {len(by_file) - shown} files more")
    meant = [one.key for result in results.values() for one in result.meant]
    for pattern, why in MEANT.items():
        print(f"\nmeant: {pattern} ({len(fnmatch.filter(meant, pattern))} keys): {why}")


@contextmanager
def checked_out(repository: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The files of `commit` in `folder`, as a git worktree that is removed afterwards."""
    git = ["git", "-C", str(repository), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", default=REFERENCE, metavar="COMMIT", help=f"the reference commit, default {REFERENCE}")
    parser.add_argument("--cases", nargs="+", choices=list(cases(Path())), default=list(cases(Path())), help="default: all")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders in DIR, which must not exist yet")
    parser.add_argument("--side", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        execute(*options.side)
        return 0
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} exists already")
    root = Path(__file__).resolve().parents[1]
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        work = (options.keep or Path(scratch) / "runs").resolve()
        inputs = work / "inputs"
        with checked_out(root, options.reference, Path(scratch) / "reference") as reference:
            sides = [Side("reference", reference, work / "reference", {}), Side("working tree", root, work / "current", SETTINGS)]
            for folder in (inputs, *(side.out for side in sides)):
                folder.mkdir(parents=True)
            if "sd3" in options.cases:
                make_inputs(sides[0], inputs)
            for case in options.cases:
                began = time.perf_counter()
                failures = [failure for side in sides for failure in side.run(case, cases(inputs)[case])]
                results[case] = compare_folders(sides[0].out / case, sides[1].out / case, case)
                results[case].failures = failures
                print(f"{case}: {results[case].verdict} ({time.perf_counter() - began:.0f} s)", flush=True)
    print_report(results)
    return int(any(result.failures or result.differences or not result.numbers for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
