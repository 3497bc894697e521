"""The merit of credit rules on trees and of cheap probes: agreement with the true advantage, cost, and training runs.

python benchmarks/merit.py --train      # training runs; resumable
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl_bench.merit_rows import WORLDS
from flowrl_bench.merit_train import SEEDS, train, train_jobs

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="make training runs instead")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the command")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--rows", nargs="+", default=[])
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    command = "python benchmarks/merit.py " + shlex.join(sys.argv[1:] if arguments is None else list(arguments))

    def progress(done: int, jobs: int, what: str) -> None:
        print(f"{done}/{jobs} {what}", flush=True)

    path = options.out / "merit-train.jsonl"
    jobs = train_jobs(options.seeds, options.rows, options.worlds)
    return 0 if train(path, jobs, options.workers, options.quick, command, progress) else 130


if __name__ == "__main__":
    sys.exit(main())
