"""Planted bugs: does a test fail if a known fault is put into the code?

    python benchmarks/planted_bugs.py --check                  # only validate the entries
    python benchmarks/planted_bugs.py --rooms credit losses    # print the table of some rooms
    python benchmarks/planted_bugs.py --workers 2              # all; writes benchmarks/results/planted_bugs.md

`benchmarks/planted_bugs/ROOM.yaml` holds a list of bugs, most of them faults that the history of
this repository has seen:

    - id: stepwise-joint-std             # unique
      meaning: what goes wrong, in terms of behaviour
      source: 1a2b3c4                    # the commit that mended this fault, or one of its kind; "" if invented
      file: flowrl/credit/stepwise.py    # or `edits: [{file, find, replace}, ...]` for several places
      find: |-                           # occurs exactly once; may start in the middle of a line
        ...
      replace: |-
        ...
      tests: [tests/credit/test_credit.py::test_x]    # fail with the bug; [] if no test is known

Every bug is planted in a copy of the tracked files. A forked process, which has imported torch and
pytest but never flowrl, runs the bug's tests. A run past the time limit counts as killed. A test
that cannot be collected kills nothing.
"""

import argparse
import compileall
import contextlib
import importlib
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BANK = Path(__file__).with_suffix("")
OUT = ROOT / "benchmarks/results/planted_bugs.md"
TIME_LIMIT = 180
"""Seconds per bug; longer in proportion if more processes run than there are cores."""
KEYS = {"id", "meaning", "source", "tests"}
EDIT = {"file", "find", "replace"}
PACKAGES = ("", "tutorials/package", "benchmarks", "tests")
PRELOADED = (
    *("torch", "pytest", "hypothesis", "jaxtyping", "beartype", "einops", "safetensors.torch"),
    *("rich.table", "tyro", "matplotlib.figure", "peft", "scipy.stats"),
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
)

Bug = dict[str, Any]
_copy = Path()


def load(folder: Path = BANK) -> list[Bug]:
    """All entries, with their room; a file that is not a list of mappings raises `ValueError`."""
    bugs: list[Bug] = []
    for path in sorted(folder.glob("*.yaml")):
        entries = yaml.safe_load(path.read_text()) or []
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise ValueError(f"{path.name}: not a list of mappings")
        bugs += [{**entry, "room": path.stem} for entry in entries]
    return bugs


def edits(bug: Bug) -> list[dict[str, str]]:
    """The bug's edits in order."""
    return bug["edits"] if "edits" in bug else [{key: bug[key] for key in sorted(EDIT)}]


def mistakes(bugs: list[Bug]) -> list[str]:
    """What is wrong with the form of the entries, one line per mistake."""
    counts = Counter(bug.get("id") for bug in bugs)
    return [
        f"{bug['room']}: {bug.get('id', 'entry without id')}: {mistake}"
        for bug in bugs
        for mistake in (*_wrong_fields(bug), *["id is not unique"] * (counts[bug.get("id")] > 1))
    ]


def _wrong_fields(bug: Bug) -> list[str]:
    expected = KEYS | ({"edits"} if "edits" in bug else EDIT)
    missing = sorted({*expected} - {*bug})
    missing += sorted({key for edit in bug.get("edits", ()) for key in EDIT - {*edit}})
    if missing:
        return [f"missing key {key}" for key in missing]
    errors = []
    for test in bug["tests"]:
        file, _, node = test.partition("::")
        name = node.partition("[")[0].rpartition("::")[2]
        path = ROOT / file
        if not (path.is_file() and re.search(rf"\b{re.escape(name)}\b", path.read_text())):
            errors.append(f"{file} has no {name}")
    return errors


def planted(bug: Bug, root: Path) -> dict[Path, str]:
    """The changed files' texts; `LookupError` if a text does not occur exactly once."""
    texts: dict[Path, str] = {}
    for edit in edits(bug):
        path = root / edit["file"]
        if not path.is_file():
            raise LookupError(f"{edit['file']} does not exist")
        text = texts.get(path) or path.read_text()
        count = text.count(edit["find"])
        if count != 1:
            raise LookupError(f"find occurs {count} times in {edit['file']}, not once")
        texts[path] = text.replace(edit["find"], edit["replace"])
    return texts


def unplantable(bug: Bug) -> str:
    """Why the bug cannot be planted, or nothing."""
    try:
        planted(bug, ROOT)
    except LookupError as error:
        return str(error)
    return ""


def _prepare(parent: Path) -> None:
    """In a worker: copy the tracked files and import everything that does not change."""
    global _copy
    torch = importlib.import_module("torch")
    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    _copy = Path(tempfile.mkdtemp(dir=parent)) / "copy"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (_copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, _copy / name)
    for package in ("flowrl", "tutorials/package"):
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(_copy / package, quiet=2, invalidation_mode=mode)


def _run(tests: list[str]) -> tuple[int | None, str]:
    """pytest's exit code in a fork, None at the time limit, and the error's line of its output."""
    output = _copy.parent / "output"
    child = os.fork()
    if child == 0:
        _run_pytest(tests, output)
    code = None
    end = time.monotonic() + TIME_LIMIT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    while code is None and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # also ends what the tests left running
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    lines = re.findall(r"^(?:/.*:\d+: |E +|ERROR:? )(.*)", output.read_text(errors="replace"), re.M)
    return code, lines[0] if lines else ""


def _run_pytest(tests: list[str], output: Path) -> None:
    """In the fork: run the tests in the copy; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(_copy)
        paths = [str(_copy / package) for package in PACKAGES]
        outside = [p for p in sys.path if not Path(p or ".").resolve().is_relative_to(ROOT)]
        sys.path[:] = paths + outside
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths[:4]), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        pytest = importlib.import_module("pytest")
        base = f"--basetemp={_copy.parent / 'tmp'}"
        quiet = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", "--tb=line", base]
        code = int(pytest.main([*quiet, *tests]))
    finally:
        os._exit(code)


def _failing(tests: list[str]) -> list[str]:
    """The tests that fail without a bug."""
    if _run(tests)[0] == 0:
        return []
    return [test for test in tests if _run([test])[0] != 0]


def try_bug(bug: Bug) -> tuple[str, str]:
    """Outcome and reason: killed, survived, or neither."""
    texts = planted(bug, _copy)
    original = {path: path.read_text() for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        code, line = _run(bug["tests"])
    finally:
        for path, text in original.items():
            path.write_text(text)
    if code is None:
        return "killed", f"time limit of {TIME_LIMIT} s"
    return {0: "survived", 1: "killed"}.get(code, "no result"), line or f"pytest exit code {code}"


@contextlib.contextmanager
def copies(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, each with a copy of the tracked files, for `try_bug`."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as parent,
        ProcessPoolExecutor(workers, context, _prepare, (Path(parent),)) as pool,
    ):
        yield pool


def outcomes(bugs: list[Bug], workers: int) -> tuple[dict[str, str], list[str]]:
    """The outcome of every bug by its id, and the tests that fail without a bug."""
    result = {bug["id"]: "not plantable" for bug in bugs if unplantable(bug)}
    result |= {bug["id"]: "no test" for bug in bugs if not bug["tests"] and bug["id"] not in result}
    todo = [bug for bug in bugs if bug["id"] not in result]
    files: dict[str, list[str]] = {}
    for test in sorted({test for bug in todo for test in bug["tests"]}):
        files.setdefault(test.partition("::")[0], []).append(test)
    broken: list[str] = []
    with copies(workers) as pool:
        for failing in pool.map(_failing, files.values()):
            broken += failing
            for test in failing:
                print(f"fails without a bug: {test}", flush=True)
        futures = {pool.submit(try_bug, bug): bug["id"] for bug in todo}
        for number, future in enumerate(as_completed(futures), 1):
            outcome, reason = future.result()
            result[futures[future]] = outcome
            line = f"{number}/{len(todo)} {outcome}: {futures[future]}: {reason[:160]}"
            print(line, flush=True)
    return result, broken


COLUMNS = ("killed", "survived", "not plantable", "no result", "no test")


def table(bugs: list[Bug], result: dict[str, str]) -> list[str]:
    """The lines of the table of rooms; rooms in the order of their files."""
    lines = [f"| room | bugs | {' | '.join(COLUMNS)} |", "|" + "---|" * (2 + len(COLUMNS))]
    for room in (*dict.fromkeys(bug["room"] for bug in bugs), "all"):
        counts = Counter(result[bug["id"]] for bug in bugs if room in ("all", bug["room"]))
        numbers = " | ".join(str(counts[column]) for column in COLUMNS)
        lines.append(f"| {room} | {counts.total()} | {numbers} |")
    return lines


def report(bugs: list[Bug], result: dict[str, str]) -> str:
    """The page: the table of rooms, and a line per bug."""
    lines = ["# Planted bugs", "", "Made by `python benchmarks/planted_bugs.py`.", ""]
    lines += table(bugs, result)
    room = ""
    for bug in bugs:
        if bug["room"] != room:
            room = bug["room"]
            lines += ["", f"## {room}", "", "| bug | meaning | outcome | tests |"]
            lines += ["|---|---|---|---|"]
        tests = "<br>".join(f"`{test}`" for test in bug["tests"]).replace("|", "\\|")
        meaning = " ".join(bug["meaning"].split()).replace("|", "\\|")
        lines.append(f"| {bug['id']} | {meaning} | {result[bug['id']]} | {tests} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Validate, run, print the table and write the page."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--rooms", nargs="+", default=None, help="only these files of the bank")
    parser.add_argument("--ids", nargs="+", default=None, help="only these bugs")
    parser.add_argument("--workers", type=int, default=2)
    out = "page to write (default: results/planted_bugs.md, after a run over all bugs)"
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--check", action="store_true", help="only validate the entries")
    options = parser.parse_args()
    try:
        bugs = load()
        errors = mistakes(bugs)
    except (ValueError, yaml.YAMLError) as error:
        sys.exit(f"planted bugs: {error}")
    choices = {"rooms": {bug["room"] for bug in bugs}, "ids": {bug.get("id") for bug in bugs}}
    for option, names in choices.items():
        errors += [f"--{option}: no {n}" for n in getattr(options, option) or () if n not in names]
    if options.check and not errors:
        reasons = {f"{bug['room']}: {bug['id']}": unplantable(bug) for bug in bugs}
        errors = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if errors:
        sys.exit("\n".join(errors))
    if options.check:
        print(f"{len(bugs)} bugs, {sum(bool(bug['tests']) for bug in bugs)} with tests")
        return
    rooms, ids = options.rooms or choices["rooms"], options.ids or choices["ids"]
    chosen = [bug for bug in bugs if bug["room"] in rooms and bug["id"] in ids]
    result, broken = outcomes(chosen, options.workers)
    print("\n".join(table(chosen, result)))
    if options.out or len(chosen) == len(bugs):
        (options.out or OUT).write_text(report(chosen, result))
    if broken or any(result[bug["id"]] != "killed" for bug in chosen if bug["tests"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
