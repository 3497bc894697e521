"""Golden runs: the working tree must train to the same numbers, bit for bit, as a reference commit.

    python benchmarks/golden.py                         # everything, two minutes on one core
    python benchmarks/golden.py --cases "uniform-*"     # some cases, by pattern
    python benchmarks/golden.py --keep out              # keep all run folders and tables in out/

The script checks the reference commit out into a temporary git worktree. It then executes the same
`flowrl` commands with the reference's code and with the working tree's, each in one process with
one thread. It compares metrics, weights, checkpoints, samples, exported LoRAs and the tables
of every iteration: trajectories, log-probabilities, rewards, weights and advantages. Times are not
compared. The exit status is 1 if a command fails or a number differs, unless `MEANT` explains the
difference.

`golden_cases.py` describes the runs in the reference's terms, and `golden_sides.py` translates
them for the working tree. With `--keep`, the tables of a run's iteration are in
out/SIDE/CASE/tables/RUN/000001.safetensors, the commands in out/SIDE/jobs.json.
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

import golden_sides
import torch
from golden_cases import BUILD, Job, cases
from safetensors.torch import load_file, save_file
from torch import Tensor

Content = Mapping[str, Any]
COMPARED = ("metrics.jsonl", "samples.json", "trajectory.json", "summary.json", "*.safetensors")
SKIPPED_FILES = "untrained-*"  # of earlier versions
SKIPPED_KEYS = re.compile(r"seconds|phases|(^|/)time(/|$)|warnings/\d+/text")


# --- one side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the two trees (`name` is a key of `SIDES`), and where its run folders go."""

    name: str
    root: Path
    out: Path

    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this tree's packages and computes with one thread."""
        packages = map(str, [self.root, *sorted(self.root.glob("*/package"))])
        on = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONDONTWRITEBYTECODE")
        own = {**dict.fromkeys(on, "1"), "MPLBACKEND": "Agg"}
        return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(packages)}

    def python(self, *arguments: str, log: Path) -> None:
        """Run Python on this tree; its output goes to `log`."""
        where = {"cwd": self.out, "env": self.environment(), "stderr": subprocess.STDOUT}
        with open(log, "w") as file:
            subprocess.run([sys.executable, *arguments], stdout=file, check=False, **where)

    def run(self, chosen: Mapping[str, Sequence[Job]]) -> dict[str, str]:
        """Execute the commands of all chosen cases; what failed, as text by case."""
        translate, todo = golden_sides.SIDES[self.name].translate, []
        for case, job in ((case, job) for case, jobs in chosen.items() for job in jobs):
            out, copy = (str(self.out / case / name) for name in (job.name, job.copy))
            arguments = translate(job).arguments(out)
            copy = copy if job.copy else ""
            todo.append({"out": out, "arguments": arguments, "copy": copy, "pause": job.pause})
        jobs, log = self.out / "jobs.json", self.out / "log.txt"
        jobs.write_text(json.dumps(todo, indent=1))
        own = str(Path(__file__).resolve())
        self.python(own, "--side", self.name, str(self.root), str(jobs), log=log)
        path = self.out / "statuses.json"
        statuses = json.loads(path.read_text()) if path.exists() else {}
        failures = {}
        for case, done in chosen.items():
            found = {job.name: statuses.get(str(self.out / case / job.name)) for job in done}
            wrong = [job.name for job in done if found[job.name] != (130 if job.pause else 0)]
            if wrong:
                output = ending(log, str(self.out / case / wrong[0]))
                failed = f"{self.name}: {case}: {', '.join(wrong)} failed"
                failures[case] = f"{failed}; the output of {wrong[0]} ends:\n{output}"
        return failures


def ending(log: Path, name: str = "", lines: int = 12) -> str:
    """The last lines that the job in folder `name` printed; of the log if it never began."""
    text = log.read_text(errors="replace")
    own = text.partition(f"=== {name}\n")[2].partition("\n=== ")[0]
    return "\n".join(f"    {line}" for line in (own or text).splitlines()[-lines:])


def execute(side: str, root: Path, jobs: Path) -> None:
    """In the process of one side: run the commands in `jobs` one after the other.

    statuses.json gets their exit statuses. The tables of a training's iterations go to tables/ next
    to its folder; a comparison trains in other processes, which have none.
    """
    import flowrl

    found = Path(str(flowrl.__file__)).resolve()
    if not found.is_relative_to(root.resolve()):
        raise SystemExit(f"flowrl was imported from {found}, not from {root}")
    try:
        from flowrl.cli.main import main as flowrl_main
    except ModuleNotFoundError:  # the reference's commands were one module
        from flowrl.cli import main as flowrl_main

    tables: Path | None = None

    def save(iteration: int, found: Mapping[str, Tensor]) -> None:
        if tables is not None:
            tables.mkdir(parents=True, exist_ok=True)
            copies = {name: tensor.clone().contiguous() for name, tensor in found.items()}
            save_file(copies, tables / f"{iteration:06}.safetensors")

    golden_sides.SIDES[side].observe(save)
    statuses = {}
    for job in json.loads(jobs.read_text()):
        out, arguments = Path(job["out"]), job["arguments"]
        print(f"=== {out}\nflowrl {' '.join(arguments)}", flush=True)
        tables = out.parent / "tables" / out.name if arguments[0] == "train" else None
        out.parent.mkdir(exist_ok=True)
        if job["pause"]:
            os.environ["GOLDEN_PAUSE"] = str(out / "metrics.jsonl")
        try:
            if job["copy"]:
                shutil.copytree(job["copy"], out)
            statuses[str(out)] = flowrl_main(arguments)
        except SystemExit as error:
            statuses[str(out)] = error.code
        except Exception:
            traceback.print_exc()
            statuses[str(out)] = 1
        os.environ.pop("GOLDEN_PAUSE", None)
        jobs.with_name("statuses.json").write_text(json.dumps(statuses))


def make_inputs(side: Side, inputs: Path) -> None:
    """Prompts and pipelines, made once by `side` and read by both."""
    (inputs / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    side.python("-c", BUILD, str(inputs), log=inputs / "log.txt")
    if not (inputs / "flux" / "model_index.json").exists():
        output = ending(inputs / "log.txt")
        raise SystemExit(f"the tiny pipelines could not be built; the log ends:\n{output}")


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A key whose values differ: in how many numbers, and the largest differences.

    NaN: not measurable.
    """

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
        patterns = golden_sides.MEANT
        meant = any(fnmatch.fnmatchcase(found.key, pattern) for pattern in patterns)
        (self.meant if meant else self.differences).append(found)

    def common(self, place: str, old: Content, new: Content) -> Iterator[tuple[str, Any, Any]]:
        """The entries that both sides have, with both values; the others are differences."""
        for name in dict.fromkeys((*old, *new)):
            if name in old and name in new:
                yield name, old[name], new[name]
            else:
                side = "working tree" if name in new else "reference"
                self.add(Difference(place + name, 1, f"only in the {side}"))

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.failures or not self.numbers:
            return "FAILED"
        if self.differences:
            return "DIFFERENT"
        return "equal, but for what is meant" if self.meant else "equal"


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, texts and nulls within nested JSON, by path, as in "evaluation/reward"."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{prefix}/{name}" if prefix else str(name))


def content(path: Path) -> dict[str, Any]:
    """What is compared of a file, by key: tensors of safetensors, other values without times."""
    if path.suffix == ".safetensors":
        return load_file(path)
    text = path.read_text()
    rows = list(map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text]))
    found = leaves(rows if path.suffix == ".jsonl" else rows[0])
    return {key: leaf for key, leaf in found if not SKIPPED_KEYS.search(key)}


def translated(key: str, kind: str) -> str:
    """The working tree's name for the reference's `key` in a file of that kind."""
    if kind == ".safetensors":
        return substituted(key, golden_sides.TENSORS)
    names = golden_sides.METRICS
    row, mark, rest = key.partition("/") if kind == ".jsonl" else ("", "", key)
    return row + mark + (names.get(rest) or "/".join(names.get(x, x) for x in rest.split("/")))


def substituted(text: str, table: Mapping[str, str]) -> str:
    """`text` after the replacements of `table`."""
    for pattern, replacement in table.items():
        text = re.sub(pattern, replacement, text)
    return text


def difference(key: str, old: Any, new: Any) -> Difference | None:
    """How two values differ; None if they are equal. NaN equals NaN.

    Integer tensors, such as a generator's state, have no size of a difference.
    """
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (old, new)):
        found = difference(key, *(torch.tensor(x, dtype=torch.float64) for x in (old, new)))
        return replace(found, text=f"{old!r} -> {new!r}") if found else None
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        same = type(old) is type(new) and old == new
        return None if same else Difference(key, 1, f"{old!r} -> {new!r}")
    if old.dtype != new.dtype or old.shape != new.shape:
        kinds = [f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") for x in (old, new)]
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
    paths = sorted({path for pattern in COMPARED for path in folder.rglob(pattern)})
    kept = [path for path in paths if not path.match(SKIPPED_FILES)]
    return {path.relative_to(folder).as_posix(): path for path in kept}


def compare_folders(old: Path, new: Path, case: str) -> Result:
    """All compared files of both folders. What only one of them has is a difference."""
    result = Result()
    before = {substituted(name, golden_sides.FILES): path for name, path in files(old).items()}
    for name, first, second in result.common(f"{case}/", before, files(new)):
        result.files += 1
        known = content(first)
        if name.startswith("tables/"):
            known = golden_sides.tables_in_current_terms(known)
        translation = {translated(key, second.suffix): x for key, x in known.items()}
        for key, *values in result.common(f"{case}/{name}:", translation, content(second)):
            result.numbers += values[0].numel() if isinstance(values[0], Tensor) else 1
            found = difference(f"{case}/{name}:{key}", *values)
            if found:
                result.add(found)
    return result


# --- report ---------------------------------------------------------------------------------------


def largest(values: Sequence[float]) -> str:
    """The largest of the values that could be measured."""
    known = [value for value in values if not math.isnan(value)]
    return f"{max(known):.1e}" if known else "-"


def print_report(results: Mapping[str, Result], shown: int = 20) -> None:
    """The table, and the first difference in each of `shown` files per case."""
    columns = ("case", "files", "numbers", "differences", "largest abs", "largest rel")
    print("\n{:<18}{:>6}{:>11}{:>13}{:>13}{:>13}  verdict".format(*columns))
    for case, result in results.items():
        every = [*result.differences, *result.meant]
        count = sum(one.count for one in every)
        absolute = largest([one.absolute for one in every])
        relative = largest([one.relative for one in every])
        sizes = f"{count:>13,}{absolute:>13}{relative:>13}"
        print(f"{case:<18}{result.files:>6}{result.numbers:>11,}{sizes}  {result.verdict}")
    for result in results.values():
        for failure in result.failures:
            print(f"\n{failure}")
        metrics_first = sorted(result.differences, key=lambda one: "/metrics.jsonl" not in one.key)
        grouped = groupby(metrics_first, lambda one: one.key.partition(":")[0])
        by_file = [(file, list(found)) for file, found in grouped]
        for file, found in by_file[:shown]:
            one, key = found[0], found[0].key.partition(":")[2]
            size = f" (abs {one.absolute:.1e}, rel {one.relative:.1e})"
            where = f"{len(found)} keys, first {key}: " if key else ""
            print(f"{file}: {where}{one.text}{'' if math.isnan(one.absolute) else size}")
        if len(by_file) > shown:
            print(f"... and {len(by_file) - shown} files more")
    meant = [one.key for result in results.values() for one in result.meant]
    for pattern, why in golden_sides.MEANT.items():
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commit = golden_sides.REFERENCE
    about = f"the reference commit, default {commit}"
    parser.add_argument("--reference", default=commit, metavar="COMMIT", help=about)
    known = list(cases(Path()))
    about = f"patterns of cases, default all: {', '.join(known)}"
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help=about)
    about = "keep the run folders and tables in DIR, which must not exist yet"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=about)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        name, *paths = options.side
        execute(name, *map(Path, paths))
        return 0
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} exists already")
    for pattern in options.cases:
        if not fnmatch.filter(known, pattern):
            parser.error(f"--cases: {pattern} matches none of {', '.join(known)}")
    chosen = [case for case in known if any(fnmatch.fnmatch(case, x) for x in options.cases)]
    root = Path(__file__).resolve().parents[1]
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        work = (options.keep or Path(scratch) / "runs").resolve()
        inputs = work / "inputs"
        with checked_out(root, options.reference, Path(scratch) / "reference") as reference:
            old = Side("reference", reference, work / "reference")
            new = Side("working tree", root, work / "current")
            for folder in (inputs, old.out, new.out):
                folder.mkdir(parents=True)
            if any("models" in case for case in chosen):
                make_inputs(old, inputs)
            jobs = {case: cases(inputs)[case] for case in chosen}
            count, failures = sum(map(len, jobs.values())), []
            for side in (old, new):
                began = time.perf_counter()
                failures.append(side.run(jobs))
                seconds = time.perf_counter() - began
                print(f"{side.name}: {count} commands, {seconds:.0f} s", flush=True)
        for case in chosen:
            results[case] = compare_folders(old.out / case, new.out / case, case)
            results[case].failures = [texts[case] for texts in failures if case in texts]
        print_report(results)
    return int(any(not result.verdict.startswith("equal") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
