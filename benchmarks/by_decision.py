"""What each decision of a trajectory did, from the value tables of runs with `--save-experience`.

    python benchmarks/by_decision.py FOLDER

FOLDER is that of a `flowrl compare`. The first table has the turning points (the consistent rule of
TP-GRPO) per trajectory, by decision and iteration. The second has, for the reward and for each part
of it that the experience contains, the mean absolute gain of every decision over the sum of all
decisions, in percent. Numbers are means over seeds with their standard errors; no network
evaluations.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from flowrl.credit import gains, turning_points


def read(folder: Path) -> dict[int, list[dict[str, Tensor]]]:
    """The experience of all runs, by iteration."""
    found: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
    for file in sorted(folder.glob("runs/*/experience/*.safetensors")):
        found[int(file.stem)].append(load_file(file))
    return dict(sorted(found.items()))


def cell(numbers: Sequence[float], digits: int) -> str:
    """Mean and standard error."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return f"{statistics.fmean(numbers):.{digits}f} ± {error:.{digits}f}"


def row(name: str, tables: Sequence[Tensor], digits: int, total: bool = False) -> str:
    """A line of a table: `tables` [decision] of the seeds, and their sums."""
    columns = list(zip(*(table.tolist() for table in tables), strict=True))
    cells = [cell(column, digits) for column in columns]
    if total:
        cells.append(cell([float(table.sum()) for table in tables], digits))
    return f"| {name} | " + " | ".join(cells) + " |"


def head(name: str, count: int, total: bool = False) -> str:
    """The head of a table with `count` decisions."""
    names = [name, *map(str, range(count)), *(["all"] if total else [])]
    return f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|"


def shares(values: Tensor) -> Tensor:
    """Mean absolute gain by decision, in percent of the sum."""
    size = gains(values).abs().mean(dim=(0, 1))
    return 100 * size / size.sum()


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    iterations = read(parser.parse_args(arguments).folder)
    if not iterations:
        parser.error("no experience below runs/: compare with --save-experience")
    count = next(iter(iterations.values()))[0]["values"].shape[-1] - 1
    print(head("iteration", count, total=True))
    for iteration, seeds in iterations.items():
        tables = [turning_points(seed["values"]).float().mean(dim=(0, 1)) for seed in seeds]
        print(row(str(iteration), tables, 2, total=True))
    first, *_ = iterations.values()
    parts = [name for name in first[0] if name == "values" or name.startswith("part.")]
    print("\n" + head("iterations, reward", count))
    for stage in dict.fromkeys((min(iterations), max(iterations))):
        for part in parts:
            name = part.removeprefix("part.").replace("values", "reward")
            tables = [shares(seed[part]) for seed in iterations[stage]]
            print(row(f"{stage}, {name}", tables, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
