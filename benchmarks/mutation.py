"""Mutation testing of the mathematics: does a test fail if flow/, samplers/, credit/ or losses/ are
changed?

    pip install cosmic-ray
    python benchmarks/mutation.py --workers 2            # resumable: lines in --out are not run again; takes hours on two cores
    python benchmarks/mutation.py --sample 300           # a random part
    python benchmarks/mutation.py --report               # writes benchmarks/results/mutation.md from the lines

cosmic-ray makes the mutants (one changed operator, number, constant or decorator each). Every
mutant is written into a copy of the library, and a forked process, which has imported torch and
pytest already, runs the tests of its package until one fails. Mutants that differ only in type
annotations are left out. A run past its time limit counts as killed.

This script does not use the pool of `flowrl.workers`: a worker must never import flowrl itself,
since beartype would take its classes for those of a mutant.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from flowrl.workers import usable_cores

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("flow", "samplers", "credit", "losses")
SHARED = ("test_settings.py", "test_doors.py", "testing/test_contracts.py")
TESTS = {
    "flow": (
        "flow/test_flow.py",
        "flow/test_mixture.py",
        "test_settings.py",
        "samplers/test_samplers.py",
        "losses/test_losses.py",
        "samplers/test_marginals.py",
        "samplers/test_convergence.py",
        "rollout/test_solvers.py",
    ),
    "samplers": (
        *SHARED,
        "samplers/test_samplers.py",
        "samplers/test_windows.py",
        "samplers/test_convergence.py",
        "samplers/test_marginals.py",
    ),
    "credit": (*SHARED, "credit/test_credit.py", "credit/test_credit_variants.py"),
    "losses": (*SHARED, "losses/test_losses.py", "losses/test_losses_variants.py"),
}
"""Test files by package."""
SELECT = {"samplers": "samplers", "credit": "credit_rules", "losses": "losses"}
"""The part of test_contracts that concerns a package."""
TIME_LIMIT = 180
BINARY = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Div",),
    "Div": ("Mul",),
    "Pow": ("Mul",),
    "FloorDiv": ("Div",),
    "Mod": ("Mul",),
    "BitAnd": ("BitOr",),
    "BitOr": ("BitAnd",),
}
COMPARISON = {
    "Lt": ("LtE", "Gt"),
    "Gt": ("GtE", "Lt"),
    "LtE": ("Lt",),
    "GtE": ("Gt",),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
OTHERS = (
    "AddNot",
    "NumberReplacer",
    "RemoveDecorator",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceFalseWithTrue",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceUnaryOperator_USub_UAdd",
    "ZeroIterationForLoop",
)


def operators() -> list[str]:
    """cosmic-ray's names of the mutations that are made."""
    pairs = [f"ReplaceBinaryOperator_{a}_{b}" for a, bs in BINARY.items() for b in bs]
    pairs += [f"ReplaceComparisonOperator_{a}_{b}" for a, bs in COMPARISON.items() for b in bs]
    return [f"core/{name}" for name in (*pairs, *OTHERS)]


class _Bare(ast.NodeTransformer):
    """Drops annotations and docstrings."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def bare(source: str) -> str:
    """The syntax tree without annotations, as text; module-level type aliases go too."""
    tree = _Bare().visit(ast.parse(source))
    aliases = ("Literal[", "Float[", "Bool[", "Callable[")
    tree.body = [
        n
        for n in tree.body
        if not (isinstance(n, ast.Assign) and ast.unparse(n.value).startswith(aliases))
    ]
    return ast.dump(tree)


def mutants() -> list[dict[str, str]]:
    """Every mutant: its file, operator, occurrence, changed line, and the mutated source."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    found = []
    for room in ROOMS:
        for path in sorted((ROOT / "flowrl" / room).glob("*.py")):
            source = path.read_text()
            plain = bare(source)
            for name in operators():
                operator, occurrence = get_operator(name)(), 0
                while (mutated := mutate_code(source, operator, occurrence)) is not None:
                    occurrence += 1
                    try:
                        if bare(mutated) == plain:
                            continue
                    except SyntaxError:  # the operator made no program, as with ** of a dictionary
                        continue
                    old, new = _difference(source, mutated)
                    place = f"{path.relative_to(ROOT)}: {old} -> {new}"
                    key = hashlib.sha256(f"{name} {occurrence} {mutated}".encode()).hexdigest()[:16]
                    found.append(
                        {
                            "key": key,
                            "room": room,
                            "file": str(path.relative_to(ROOT)),
                            "place": place,
                            "source": mutated,
                        }
                    )
    return found


def _difference(before: str, after: str) -> tuple[str, str]:
    """The first line that differs, in both."""
    a, b = before.splitlines(), after.splitlines()
    for number, (old, new) in enumerate(zip(a, b, strict=False), 1):
        if old != new:
            return f"line {number}: {old.strip()}", new.strip()
    return "", ""


PRELOADED = (
    "pytest",
    "hypothesis",
    "jaxtyping",
    "beartype",
    "einops",
    "safetensors.torch",
    "rich.table",
    "tyro",
    "matplotlib.figure",
    "peft",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
)

_copy: Path | None = None


def _prepare() -> None:
    """In a worker: a copy of the library and its tests, and one import of everything that does not
    change (never flowrl).
    """
    global _copy
    import importlib

    import torch

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    _copy = Path(tempfile.mkdtemp(prefix="flowrl-mutants-"))
    shutil.copytree(ROOT / "flowrl", _copy / "flowrl")
    shutil.copytree(ROOT / "tests", _copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", _copy)


def _try(mutant: dict[str, str]) -> dict[str, str | float]:
    """Killed, survived or timeout."""
    assert _copy is not None
    target = _copy / mutant["file"]
    original = target.read_text()
    started = time.monotonic()
    try:
        target.write_text(mutant["source"])
        child = os.fork()
        if child == 0:
            _run_tests(_copy, mutant["room"])
        outcome = "timeout"
        while time.monotonic() - started < TIME_LIMIT:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                outcome = "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
                break
            time.sleep(0.05)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    finally:
        target.write_text(original)
    record: dict[str, str | float] = {key: mutant[key] for key in ("key", "room", "file", "place")}
    return {**record, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)}


def _run_tests(copy: Path, room: str) -> None:
    """In the forked child: pytest over the room's tests; never returns."""
    import pytest

    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        sys.dont_write_bytecode = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
        for name in TESTS[room]:
            chosen = ["-k", SELECT[room]] if name.endswith("test_contracts.py") else []
            skip = [
                "--deselect",
                "tests/test_doors.py::test_parts_conform_to_their_protocols_statically",
            ]
            code = int(pytest.main([*quiet, *skip, *chosen, f"tests/{name}"]))
            if code != 0:
                break
    finally:
        os._exit(code)


def read(path: Path) -> list[dict[str, str]]:
    """Outcomes written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


REASONS = Path(__file__).with_name("mutation_reasons.json")
"""Reasons why a survivor does not show a missing test, by its place."""


def report(out: Path, lines: list[dict[str, str]], known: set[str]) -> None:
    """Write the table of rooms and the list of survivors."""
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = [line for line in lines if line["key"] in known]
    text = [
        "# Mutants killed",
        "",
        "Made by `python benchmarks/mutation.py --report`; outcomes in mutation.jsonl.",
        "",
    ]
    text += [
        "| package | mutants | killed | timed out | survived | fraction killed |",
        "|---|---|---|---|---|---|",
    ]
    for room in (*ROOMS, "all"):
        counts = Counter(line["outcome"] for line in lines if room in ("all", line["room"]))
        total = sum(counts.values())
        share = (counts["killed"] + counts["timeout"]) / max(1, total)
        text.append(
            f"| {room} | {total} | {counts['killed']} | {counts['timeout']} | {counts['survived']}"
            f" | {share:.1%} |"
        )
    missing = len(known) - len(lines)
    rest = (
        f"{missing} of {len(known)} mutants have not been run; those that were are the first of a"
        " fixed random order."
    )
    text += ["", rest if missing else "Every mutant was run.", "", "## Survivors", ""]
    for line in sorted((x for x in lines if x["outcome"] == "survived"), key=lambda x: x["place"]):
        text.append(f"- `{line['place']}`: {reasons.get(line['place'], 'no reason known')}")
    out.write_text("\n".join([*text, ""]))
    print("\n".join(text[4:12]))


def unchanged_passes() -> bool:
    """Whether the tests of every room pass in a worker's surroundings without any mutation."""
    _prepare()
    for room in ROOMS:
        path = sorted((ROOT / "flowrl" / room).glob("*.py"))[-1]
        same = {
            "key": "",
            "room": room,
            "file": str(path.relative_to(ROOT)),
            "place": "",
            "source": path.read_text(),
        }
        if _try(same)["outcome"] != "survived":
            print(f"the tests of {room} fail without a mutation", flush=True)
            return False
    return True


def main() -> None:
    """Run what has not been run, or write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutation.jsonl")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--room", choices=ROOMS, default=None)
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        help="run only the first N of all mutants in a fixed random order",
    )
    parser.add_argument(
        "--again", action="store_true", help="run survivors again (after tests were added)"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    everything = mutants()
    random.Random(0).shuffle(everything)
    lines = read(options.out)
    if options.report:
        report(options.out.with_suffix(".md"), lines, {m["key"] for m in everything})
        return
    done = {line["key"] for line in lines if not (options.again and line["outcome"] == "survived")}
    chosen = everything[: options.sample] if options.sample else everything
    todo = [m for m in chosen if m["key"] not in done and options.room in (None, m["room"])]
    print(f"{len(everything)} mutants, {len(todo)} to run", flush=True)
    if not unchanged_passes():
        sys.exit(1)
    kept = {line["key"]: line for line in lines if line["key"] in done}
    options.out.write_text("".join(json.dumps(line) + "\n" for line in kept.values()))
    counts: Counter[str] = Counter()
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.workers, mp_context=context, initializer=_prepare) as pool,
        open(options.out, "a") as file,
    ):
        for future in as_completed([pool.submit(_try, mutant) for mutant in todo]):
            line = future.result()
            file.write(json.dumps(line) + "\n")
            file.flush()
            counts[str(line["outcome"])] += 1
            number = counts.total()
            if line["outcome"] == "survived" or number % 25 == 0:
                left = (time.monotonic() - started) / number * (len(todo) - number)
                shown = line["place"] if line["outcome"] == "survived" else ""
                print(
                    f"{number}/{len(todo)} {dict(counts)} {left / 60:.0f} min left {shown}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
