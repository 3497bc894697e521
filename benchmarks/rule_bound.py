"""Exact credit on the seeds of `flowrl bench rule` in the 2-D world, for the dashed line of its pages.

    python benchmarks/rule_bound.py --out runs/rule-bound

Runs the arm "true advantages" at its tuned settings; it can be stopped and called again. Writes the
curves to flowrl/compare/bounds.json.
"""

import argparse
from pathlib import Path

from flowrl.bench.digest import config_id
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.rule_headroom import bound_among
from flowrl.bench.rule_plan import FULL
from flowrl.bench.suite import Suite
from flowrl.compare.bounds import ship

COMMAND = "python benchmarks/rule_bound.py"


def main() -> int:
    """Run what is missing, and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    part = FULL["mixture"]
    runs, file = part.exact(), ResultsFile(options.out / "results.jsonl")
    by_id = {config_id(run): run for run in runs}

    def progress(done: int, count: int, line: object) -> None:
        print(f"{done}/{count}", flush=True)

    if not Suite(by_id, file, by_id, COMMAND).execute(options.workers, progress):
        return 130
    bound = bound_among(runs, file.read(), COMMAND)
    assert bound is not None
    ship(runs[0].typed(), part.world, bound)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
