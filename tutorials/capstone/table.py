"""Ranks submissions of the capstone by the cost until Flow-GRPO's result, on fixed seeds.

    python tutorials/capstone/table.py FOLDER FOLDER...    # about a minute each on a core

It is the quick mode of `flowrl bench record --world points` (docs/records.md): two tasks of the 2-D
world, four seeds, half of the budget, at the settings of Flow-GRPO. Below 1 is cheaper than
Flow-GRPO. Finished runs are kept in `--out`. A rule is Python code, which is executed.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from flowrl.bench.record import QUICK_TASKS, Runner, ranked
from flowrl.core.errors import FlowrlError

HERE = Path(__file__).parent


def table(folders: list[Path], records: Path, runner: Runner) -> str | None:
    """The table as Markdown; None if Ctrl-C paused the runs."""
    arms = {str(folder): {"credit": f"{folder / 'my_rule.py'}:MyRule"} for folder in folders}
    hashes = {
        str(folder): hashlib.sha256((folder / "prediction.yaml").read_bytes()).hexdigest()[:8]
        for folder in folders
    }
    rows = ranked(arms, records, runner)
    if rows is None:
        return None
    tasks = QUICK_TASKS[runner.world]
    head = ["submission", "cost over Flow-GRPO's", *tasks, "collapsed", "prediction's SHA-256"]
    lines = [head, ["---"] * len(head)]
    for name, ratio, each, fallen in rows:
        numbers = [ratio.text(), *(each[task].text() for task in tasks), str(fallen)]
        lines.append([name, *numbers, hashes.get(name, "")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Rank submissions of the capstone.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of submissions")
    parser.add_argument("--out", type=Path, default=Path("runs/capstone"), help="for the runs")
    parser.add_argument("--workers", type=int, default=0, help="parallel runs; 0 = one per core")
    options = parser.parse_args()
    runner = Runner("points", options.out, "table.py", options.workers)
    try:
        text = table(options.folders, HERE.parents[1] / "benchmarks" / "records", runner)
    except FlowrlError as error:
        sys.exit(f"error: {error}")
    print(text or "Paused; the same command continues.")


if __name__ == "__main__":
    main()
