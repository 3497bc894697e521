"""The tables of docs/records.md, and a repeated run of a record.

    python benchmarks/records.py                   # write the tables
    python benchmarks/records.py --redo COMMIT     # repeat one run of one record

The tables come from the files of the tries (`flowrl bench record`), in records/WORLD. `--redo`
chooses record, task and seed by the hash of a commit, trains again, and fails if the rewards differ
by more than another processor's rounding explains.
"""

import argparse
import csv
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scipy import special

from flowrl.bench.contest import CONTESTS
from flowrl.bench.evidence import column
from flowrl.bench.measurements import measure
from flowrl.bench.record import BASELINE, Try, read_tries
from flowrl.bench.suite import ROUNDING, TOLERANCE, gaps
from flowrl.core.errors import FlowrlError
from flowrl.run.io import write_bytes
from flowrl.run.reading import read_text
from flowrl.run.statistics import Estimate

ROOT = Path(__file__).parents[1]
ARMS, COST = ROOT / "benchmarks/results/verdict-arms.csv", "until equal per second of SD3.5-Medium"
RECORDS, PAGE = ROOT / "benchmarks" / "records", ROOT / "docs" / "records.md"


def rows(tries: Sequence[Try], is_record: bool) -> Iterator[str]:
    """The lines of a table, newest first."""
    chosen = [known for known in reversed(tries) if known.accepted is is_record]
    tasks = list(chosen[0].runs) if chosen else []
    if not chosen:
        yield "None so far."
        return
    yield (
        f"| arm | cost over Flow-GRPO's | {' | '.join(tasks)} | over the record before |"
        " collapsed (record before) | search runs | date |"
    )
    yield f"|{'---|' * (6 + len(tasks))}"
    for known in chosen:
        each = " | ".join(known.ratio([task]).text() for task in tasks)
        own, other = known.collapsed
        yield (
            f"| **{known.name}**: {known.why} | **{known.ratio().text()}** | {each} | {known.before} |"
            f" {own} ({other}) of {sum(len(r.rewards) for r in known.runs.values())} |"
            f" {known.search_runs:,} | {known.date} |"
        )


def tables(world: str) -> str:
    """The tables of a world."""
    tries = read_tries(RECORDS, world)
    records, others = "\n".join(rows(tries, True)), "\n".join(rows(tries, False))
    return f"{records}\n\nTries that are no record:\n\n{others}"


def verdict_rows() -> Iterator[str]:
    """The arms of the verdict that reach Flow-GRPO's result on images at less than its cost, over
    the cost of the searched Flow-GRPO. The interval of the quotient of two independent estimates is
    Student's on the logarithm, with the sum of their squared errors and of their degrees of
    freedom.
    """
    (first,) = (known for known in read_tries(RECORDS, "images") if known.name == BASELINE)
    yield f"| arm of the verdict | cost over that of {first.name} |"
    yield "|---|---|"
    own, freedom = first.ratio(), len(first.seeds) - 1
    once, both = (float(special.stdtrit(df, 0.975)) for df in (freedom, 2 * freedom))
    with ARMS.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["world"] == "images"]
    ratios = {
        row["arm"]: [row[f"{COST}{end}"] for end in ("", " low", " high")]
        for row in found
        if row["task"] == "all" and not row[COST].startswith(">")
    }
    for arm, texts in sorted(ratios.items(), key=lambda pair: float(pair[1][0])):
        value, low, high = map(float, texts)
        if value >= 1:
            continue
        errors = [math.log(e.high / e.low) / 2 / once for e in (own, Estimate(value, low, high))]
        reach = math.exp(both * math.hypot(*errors))
        quotient = value / own.value
        other = Estimate(quotient, quotient / reach, quotient * reach)
        yield f"| {arm} | {other.text(2)} |"


def page() -> str:
    """The page with the tables of today's files."""
    text = read_text(PAGE)
    parts = {world: tables(world) for world in CONTESTS}
    for name, part in {**parts, "verdict": "\n".join(verdict_rows())}.items():
        begin, end = f"<!-- records {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def redo(commit: str) -> int:
    """Repeat the run that a commit's hash chooses; the exit status."""
    runs = [
        (known, task, place)
        for world in CONTESTS
        for known in read_tries(RECORDS, world)
        if known.accepted
        for task in known.runs
        for place in range(len(known.seeds))
    ]
    number = int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8])
    known, task, place = runs[number % len(runs)]
    config = known.contest.run(task, known.settings, known.seeds[place])
    print(f"{known.name}, {known.world}, {task}, seed {known.seeds[place]}", flush=True)
    measured = measure(config, lenient=True)
    assert measured is not None
    new = column(measured, "reward")
    early, final = gaps(known.runs[task].rewards[place], new)
    same = len(new) == len(known.runs[task].rewards[place])
    close = same and early <= ROUNDING and final <= TOLERANCE
    print(
        f"{early:.2g} apart in the first quarter of the evaluations, {final:.2g} in the last one;"
        f" allowed: {ROUNDING:g}, {TOLERANCE:g}"
    )
    return 0 if close else 1


def main() -> int:
    """Write the tables, or repeat a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--redo", metavar="COMMIT", default="", help="repeat a run of a record")
    options = parser.parse_args()
    if options.redo:
        return redo(options.redo)
    write_bytes(PAGE, page().encode())
    print(f"Wrote {PAGE}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlowrlError as error:
        sys.exit(f"error: {error}")
