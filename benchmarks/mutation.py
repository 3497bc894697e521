"""Mutation testing: does a test fail if one operator, number or keyword of the mathematics changes?

    python benchmarks/mutation.py --sample 240    # a random sample; resumes from its results
    python benchmarks/mutation.py --wider         # its survivors again, also with other tests

The mutants of `flowrl/flow`, `samplers`, `credit` and `losses` are made from the syntax tree, one
change each; annotations and f-strings stay as they are. Each is tried like a planted bug
(planted_bugs.py) and survives if all tests pass. A sample consists of the mutants with the smallest
hashes, so most of it stays the same when code changes. Both commands write
benchmarks/results/mutation.jsonl and mutation.md; `equivalent_mutants.yaml` says why a survivor
does not show a missing test.
"""

import argparse
import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import yaml
from planted_bugs import ROOT, Bug, copies, try_bug

OUT = ROOT / "benchmarks/results/mutation.jsonl"
REASONS = Path(__file__).with_name("equivalent_mutants.yaml")
CONTRACTS = "tests/testing/test_contracts.py"
SHARED = ["tests/parts/test_settings.py", "tests/test_doors.py"]
SOLVERS = "tests/rollout/test_solvers.py"
TESTS = {
    "flow": (["tests/flow"], ["tests/samplers", "tests/losses", SOLVERS]),
    "samplers": (["tests/samplers", SOLVERS], [CONTRACTS, "-k", "sampler or solver or window"]),
    "credit": (["tests/credit"], ["tests/rollout/test_weights.py"], [CONTRACTS, "-k", "credit"]),
    "losses": (
        ["tests/losses"],
        ["tests/training/test_forward_losses.py"],
        [CONTRACTS, "-k", "loss"],
    ),
}
"""pytest's arguments by room; all runs but the first are for the option `--wider` only."""
OPERATORS: dict[type, tuple[type, ...]] = {
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,)},
    **{ast.Pow: (ast.Mult,), ast.FloorDiv: (ast.Div,), ast.Mod: (ast.Mult,)},
    **{ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
    **{ast.Lt: (ast.LtE, ast.Gt), ast.Gt: (ast.GtE, ast.Lt), ast.LtE: (ast.Lt,)},
    **{ast.GtE: (ast.Gt,), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,)},
    **{ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
}


def changes(node: ast.AST) -> list[tuple[str, Any]]:
    """The fields of a node that are changed, each with its new value."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            return [("op", new()) for new in OPERATORS.get(type(op), ())]
        case ast.Compare(ops=ops):
            pairs = [(i, new()) for i, op in enumerate(ops) for new in OPERATORS[type(op)]]
            return [("ops", [*ops[:i], new, *ops[i + 1 :]]) for i, new in pairs]
        case ast.Constant(value=bool(value)):
            return [("value", not value)]
        case ast.Constant(value=int(value) | float(value)):
            return [("value", value + 1), ("value", value - 1)]
        case ast.UnaryOp(op=op, operand=operand):  # applied twice, so as if it were not there
            return [("operand", ast.UnaryOp(op, operand))]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            compared = isinstance(test, ast.Compare) and len(test.ops) == 1
            return [] if compared else [("test", ast.UnaryOp(ast.Not(), test))]
        case ast.For():
            return [("iter", ast.List([]))]
        case ast.Call(keywords=rows):
            return [("keywords", rows[:i] + rows[i + 1 :]) for i in range(len(rows))]
        case ast.FunctionDef(decorator_list=rows) | ast.ClassDef(decorator_list=rows):
            return [("decorator_list", rows[:i] + rows[i + 1 :]) for i in range(len(rows))]
    return []


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without annotations and f-strings."""
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            left_out = field in ("annotation", "returns") or isinstance(child, ast.JoinedStr)
            if isinstance(child, ast.AST) and not left_out:
                yield from nodes(child)


def mutants_of(source: str) -> Iterator[tuple[str, str]]:
    """Every mutant's text, and `old line -> new line`."""
    tree = ast.parse(source)
    plain = ast.unparse(tree)
    seen = {plain}
    for node in nodes(tree):
        for field, value in changes(node):
            before = getattr(node, field)
            setattr(node, field, value)
            text = ast.unparse(tree)
            setattr(node, field, before)
            if text not in seen:
                seen.add(text)
                lines = zip(plain.splitlines(), text.splitlines(), strict=False)
                old, new = next(pair for pair in lines if pair[0] != pair[1])
                yield text, f"{old.strip()} -> {new.strip()}"


def mutants() -> list[Bug]:
    """The mutants of all rooms, in the random order of their hashes."""
    rows: list[Bug] = []
    counts: Counter[str] = Counter()
    for room in TESTS:
        for path in sorted((ROOT / "flowrl" / room).glob("*.py")):
            file, source = str(path.relative_to(ROOT)), path.read_text()
            for text, change in mutants_of(source):
                change = f"{file}: {change}"
                counts[change] += 1
                key = hashlib.sha256(f"{change} {counts[change]}".encode()).hexdigest()[:12]
                rows.append({"id": key, "room": room, "file": file, "change": change})
                rows[-1] |= {"find": source, "replace": text}
    return sorted(rows, key=lambda row: row["id"])


def outcome(mutant: Bug, wider: bool) -> str:
    """Killed or survived; a module that cannot be imported is killed."""
    runs = TESTS[mutant["room"]]
    for tests in (*runs, SHARED) if wider else runs[:1]:
        if try_bug(mutant | {"tests": tests})[0] != "survived":
            return "killed"
    return "survived"


def run(todo: list[Bug], wider: bool, workers: int) -> Iterator[dict[str, str]]:
    """A line per mutant, after every room's tests have passed without a mutation."""
    with copies(workers) as pool:
        for mutant in {mutant["room"]: mutant for mutant in todo}.values():
            unchanged = mutant | {"replace": ast.unparse(ast.parse(mutant["find"]))}
            if pool.submit(outcome, unchanged, wider).result() != "survived":
                raise SystemExit(f"mutation: tests of {mutant['room']} fail without a mutation")
        futures = {pool.submit(outcome, mutant, wider): mutant for mutant in todo}
        for future in as_completed(futures):
            line = {key: futures[future][key] for key in ("id", "room", "change")}
            yield line | {"outcome": future.result()}


def report(lines: list[dict[str, str]], total: int, reasons: dict[str, str]) -> str:
    """The page: the table of rooms, and the survivors with their reasons."""
    text = ["# Mutants killed", "", "Made by `python benchmarks/mutation.py`.", ""]
    text += [f"A random sample of {len(lines)} of {total} mutants; outcomes in mutation.jsonl.", ""]
    text += ["| room | mutants | killed | survived | equivalent survivors | fraction killed |"]
    text += ["|---|---|---|---|---|---|"]
    for room in (*TESTS, "all"):
        rows = [line for line in lines if room in ("all", line["room"])]
        survivors = [line["change"] for line in rows if line["outcome"] == "survived"]
        killed, known = len(rows) - len(survivors), sum(change in reasons for change in survivors)
        numbers = f"{len(rows)} | {killed} | {len(survivors)} | {known}"
        text.append(f"| {room} | {numbers} | {killed / max(1, len(rows)):.1%} |")
    text += ["", "## Survivors", ""]
    for change in sorted(line["change"] for line in lines if line["outcome"] == "survived"):
        text.append(f"- `{change}`: {reasons.get(change, 'no reason known')}")
    return "\n".join([*text, ""])


def main() -> None:
    """Run what has not been run, and write the page."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--sample", type=int, default=240, help="number of mutants of all rooms")
    wider = "try the survivors without a reason again, also with tests outside of their room"
    parser.add_argument("--wider", action="store_true", help=wider)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    reasons: dict[str, str] = yaml.safe_load(REASONS.read_text())
    everything = {mutant["id"]: mutant for mutant in mutants()}
    texts = options.out.read_text().splitlines() if options.out.exists() else []
    lines = {line["id"]: line for line in map(json.loads, texts) if line["id"] in everything}
    if options.wider:
        survivors = [line for line in lines.values() if line["outcome"] == "survived"]
        todo = [everything[line["id"]] for line in survivors if line["change"] not in reasons]
    else:
        chosen = list(everything.values())[: options.sample]
        todo = [mutant for mutant in chosen if mutant["id"] not in lines]
    try:
        for number, line in enumerate(run(todo, options.wider, options.workers), 1):
            lines[line["id"]] = line
            print(f"{number}/{len(todo)} {line['outcome']}: {line['change'][:160]}", flush=True)
            options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines.values()))
    finally:
        page = report(list(lines.values()), len(everything), reasons)
        options.out.with_suffix(".md").write_text(page)
        print(page.partition("## Survivors")[0])


if __name__ == "__main__":
    main()
