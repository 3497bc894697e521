"""Bad input, generated from the settings' own schema and tried on every command, file format and
the Python API.

    python benchmarks/hostile.py [--mutants SEED] [--only CLASS ...] [--out FILE] [--show N]

An input is handled *clearly* if there is exactly one message that names what was wrong, the exit
code is 2, nothing is written, no traceback is printed and it takes less than ten seconds. In Python
it is one `FlowrlError`. Every case runs in a process of its own (forked after the imports) in an
empty folder, which is compared with its copy afterwards. Writes a table of classes.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from pkgutil import walk_packages

from hostile_cases import Case, all_cases, make_sandbox
from hostile_mutants import drawn, mutants

from flowrl.core.errors import OWN_PACKAGES

LIMIT = 10.0
"""Seconds after which a case counts as hanging, or as having started work."""


def preload() -> None:
    """Import what commands import when they run, once for all cases."""
    for package in OWN_PACKAGES:
        for module in walk_packages(import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened: `problem` is empty if the input was handled clearly."""

    case: Case
    problem: str
    seconds: float
    output: str


def tried(case: Case, limit: float = LIMIT) -> Outcome:
    """Run one case in a child process and judge it."""
    with tempfile.TemporaryDirectory(
        prefix="flowrl-hostile-", ignore_cleanup_errors=True
    ) as folder:
        root, log = Path(folder) / "work", Path(folder) / "output"
        make_sandbox(root)
        case.prepare(root)
        before = snapshot(root)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(case, root, log)
        status = _wait(child, start, limit)
        seconds = time.monotonic() - start
        output = log.read_text(errors="replace")
        return Outcome(case, judged(case, status, output, before, snapshot(root)), seconds, output)


def _child(case: Case, root: Path, log: Path) -> None:
    """The case itself; never returns."""
    os.setsid()
    os.chdir(root)
    # the parent may have started a fork server; unless this process forgets it, `compare` waits
    # for a child that is not its own
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_fd = server._forkserver_alive_fd = None
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    code = 99
    try:
        code = case.run(root)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, start: float, limit: float) -> int | None:
    """The exit code; None if the case had to be ended."""
    while time.monotonic() - start < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def snapshot(root: Path) -> dict[str, str]:
    """A digest of every file and folder below `root`."""
    digests = {}
    for path in sorted(root.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        digests[str(path.relative_to(root))] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if regular else "-"
        )
    return digests


def judged(
    case: Case, status: int | None, output: str, before: dict[str, str], after: dict[str, str]
) -> str:
    """What is wrong with how an input was handled; "" if nothing is."""
    if status is None:
        return "hangs or starts work"
    if "Traceback" in output or "unexpected error" in output:
        return "traceback"
    if status == 0:
        return "accepted"
    if status != 2 and not (case.begins and status == 1):
        return f"exit code {status}"
    changed = sorted(set(before.items()) ^ set(after.items()))
    if changed and not case.begins:
        return f"leaves {changed[0][0]}"
    errors = output.count("flowrl: error:") + output.count("╭─")
    if errors != 1:
        return f"{errors} messages"
    text = output.lower().replace("_", "-")
    if not any(word.lower().replace("_", "-") in text for word in case.named):
        return "does not name " + " or ".join(case.named)
    return ""


def table(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """Per class: tried, clear, the slowest case, and what went wrong how often."""
    classes: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        classes[outcome.case.family].append(outcome)
    rows: list[dict[str, object]] = []
    for name, members in classes.items():
        problems = Counter(member.problem.split(" ")[0] for member in members if member.problem)
        rows.append(
            {
                "class": name,
                "tried": len(members),
                "clear": sum(not member.problem for member in members),
                "slowest_seconds": round(max(member.seconds for member in members), 1),
                "problems": dict(problems),
            }
        )
    return rows


def shown(rows: list[dict[str, object]]) -> str:
    """The table as text."""
    lines = [f"{'class':34s} {'tried':>6s} {'clear':>6s} {'slowest':>8s}  problems"]
    for row in rows:
        problems = ", ".join(f"{name} {count}" for name, count in dict(row["problems"]).items())  # type: ignore[call-overload]
        lines.append(
            f"{row['class']:34s} {row['tried']:6d} {row['clear']:6d} {row['slowest_seconds']:7.1f}s"
            f"  {problems}"
        )
    total, clear = (sum(int(str(row[key])) for row in rows) for key in ("tried", "clear"))
    return "\n".join([*lines, f"{'all':34s} {total:6d} {clear:6d}"])


def progress(cases: list[Case], try_one: Callable[[Case], Outcome]) -> Iterator[Outcome]:
    """Outcomes with a line for every hundred cases."""
    for number, case in enumerate(cases, start=1):
        yield try_one(case)
        if number % 100 == 0:
            print(f"{number}/{len(cases)}", file=sys.stderr, flush=True)


def main() -> int:
    """Try all cases, print the table; exit 1 if one input was not handled clearly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=(), help="classes to try")
    parser.add_argument("--out", type=Path, help="write the table into this JSON, by command")
    parser.add_argument("--show", type=int, default=20, help="print so many of the unclear cases")
    parser.add_argument(
        "--every", type=int, default=1, help="try every n-th case of each class only"
    )
    parser.add_argument(
        "--mutants", type=int, metavar="SEED", help="the cases of hostile_mutants instead"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="with --mutants: 300 drawn cases and no listed ones"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a case")
    args = parser.parse_args()
    if args.mutants is None:
        candidates = all_cases()
    elif args.drawn:
        candidates = drawn(args.mutants, specs=60, commands=90, files=60, calls=90)
    else:
        candidates = mutants(args.mutants)
    cases = [case for case in candidates if not args.only or case.family in args.only][
        :: args.every
    ]
    preload()
    outcomes = list(progress(cases, partial(tried, limit=args.limit)))
    unclear = [outcome for outcome in outcomes if outcome.problem]
    for outcome in unclear[: args.show]:
        tail = outcome.output.strip().splitlines()[-1:] or [""]
        print(f"{outcome.case.family} | {outcome.case.label} | {outcome.problem} | {tail[0][:200]}")
    rows = table(outcomes)
    print(shown(rows))
    if args.out:
        record = json.loads(args.out.read_text()) if args.out.exists() else {}
        words = [word for word in sys.argv[1:] if word not in ("--out", str(args.out))]
        record[shlex.join(["python", "benchmarks/hostile.py", *words])] = rows
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(unclear)


if __name__ == "__main__":
    sys.exit(main())
