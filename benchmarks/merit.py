"""The merit of credit rules on trees and of cheap probes: agreement with the true advantage, cost,
and training runs.

    python benchmarks/merit.py              # agreement and cost of all rows; about 15 minutes on two cores
    python benchmarks/merit.py --train      # training runs of methods and probes; about 40 minutes on two cores
    python benchmarks/merit.py --report     # the tables and the figure again, from what is there
    python benchmarks/merit.py --quick --out FOLDER      # tiny sizes, to try the command

All of these go on where they were stopped. Results of single jobs are kept in runs/merit (`--work`)
until the tables are made, those of training runs are lines of merit-train.jsonl. Written are
results/merit.json, results/merit.md, docs/branching.md and its figure, with `--out` all in that
folder. Network evaluations (NFE) are per trajectory, without guidance.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl_bench.digest import code_digest
from flowrl_bench.merit import Job, jobs, read_sums, sizes, study
from flowrl_bench.merit_page import (
    MARGIN,
    NAMES,
    Cell,
    Judged,
    compact_table,
    credit_table,
    judged,
    not_applicable,
    recommendation,
    train_table,
    verdict_table,
    verdicts,
)
from flowrl_bench.merit_rows import WORLDS
from flowrl_bench.merit_train import SEEDS, learned, read_lines, train, train_jobs
from flowrl_bench.results_file import provenance
from flowrl_compare.style import save
from merit_figure import credit_figure

from flowrl.io import write_json

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "branching.md"
COMMANDS = "`python benchmarks/merit.py` and `python benchmarks/merit.py --train`"

KINDS = {
    "Methods": ("method",),
    "Probes of stepwise gains": ("probe", "ceiling"),
    "Rules on trees": ("tree rule",),
}

TEXT = """# Trees and cheap probes: all tables

This page has every row behind [the findings on trees and cheap probes](trees-and-probes.md): which estimates of a step's credit agree with the true
advantage, what they cost, and whether training with them works. {recommendation}

![Correlation with the true advantage before and after training](trees-and-probes/credit.png)

*How to read it.* Rows are methods; open points are the untrained policy, filled points the trained one, lines 95% intervals. The number is that of network evaluations per trajectory, update included.
All numbers are made by {commands}; commit {commit}; {hardware}. `benchmarks/results/merit.md` has the same tables with signs, slopes by step and milliseconds.

## How to read the tables

The truth of a decision is A* = V(child) - V(parent). V is the expected reward if the stochastic sampler continues, estimated by
{continuations} continuations of every distinct state. The *correlation* is that of credit and A* over all decisions, corrected
for the noise of the estimate of A*, with 95% intervals (bootstrap over groups). In a tree a decision counts once per member
behind it.

NFE are network evaluations per trajectory. *Merit* is correlation^2 / NFE, update included: at an equal budget the
signal-to-noise ratio of the gradient goes as its root. Trajectories of a tree share states, so a tree has fewer distinct
*decisions* per trajectory than the 5 of a plain group. The last column multiplies merit by their number. NFE, merit and the
last column are those of the shapes world after training.

"Before" is the untrained policy, "after" the one after the default number of iterations with uniform credit. {sizes}

## Which cheaper probes replace `Substeps(5)`

{verdicts}

The criteria are: at most half of the evaluations of Substeps(5) for sampling and probe; the lower end of the 95% interval of its
correlation minus that of Substeps(5), on the same trajectories, above -{margin}, before and after training in both worlds. In
training runs of both worlds: the interval of final minus base is above 0, no seed ends below its base, and the interval of
the final reward minus that of Substeps(5) is not wholly below 0.

## Agreement

{tables}

## Training

The default run of `flowrl compare` in each world, with each row's rule. The interval is that of the interquartile mean over
seeds, widened for their small number. Seconds are those of one core.

{training}

## Limits

- A worst seed far below the others has usually collapsed after it had learned: there is no penalty, and the learning rate stays
  as it is. With Completion and seed 9 the 2-D world's reward is above 0.95 from iteration 6 to 33 and 0.08 at the end
  (`flowrl train --world mixture --credit "stepwise-gain(probe=completion)" --seed 9 --eval-every 3`).
- Learning rate, clip and window are the defaults, which were tuned on uniform credit. The tables say whether a method learns
  with them, not which method is best when tuned.
- Groups have 12 members, so the named trees do not have the papers' sizes.
- Merit treats decisions as independent. Leaves of a tree share ancestors, so it is an upper bound for trees.
- Probes without guidance need a model with guidance, and the block cache needs a transformer of diffusers.
"""


def sizes_text(quick: bool, looks: Mapping[str, int]) -> str:
    """How much was measured."""
    sizes_of_worlds = [
        f"{NAMES[world]}: {looks.get(world, 0)} look(s) of {size.prompts} prompts x {size.members}"
        " trajectories"
        for world, size in sizes(quick).items()
    ]
    return "; ".join(sizes_of_worlds) + "."


def write(
    folder: Path, page: Path, work: Path, wanted: list[Job], quick: bool, command: str
) -> None:
    """merit.json, merit.md, the page and its figure."""
    sums, lines = read_sums(work, wanted, quick), read_lines(folder / "merit-train.jsonl")
    if sums:
        cells, left_out = judged(sums), not_applicable(sums)
        probes = verdicts(cells, lines)
        made = {"command": command, "code": code_digest(), **provenance()}
        looks = {
            world: max(
                len(row["sums"])
                for (place, _), rows in sums.items()
                if place == world
                for row in rows.values()
            )
            for world in {place for place, _ in sums}
        }
        kept = record(cells, left_out, probes, lines, {**made, "looks": looks}, quick)
        write_json(folder / "merit.json", kept)
        figures = page.parent / "trees-and-probes"
        figures.mkdir(exist_ok=True)
        save(credit_figure(kept), figures / "credit.png", 120)
        training = "\n".join(train_table(lines))
        full = [full_text(cells, left_out), "## Training runs", training]
        (folder / "merit.md").write_text(
            "\n\n".join([f"# The merit of rules and probes\n\n{__doc__}", *full]) + "\n"
        )
        tables = "\n\n".join(
            f"### {title}\n\n" + "\n".join(compact_table(cells, left_out, kinds))
            for title, kinds in KINDS.items()
        )
        continuations = " (2-D world) or ".join(
            str(size.continuations) for size in sizes(quick).values()
        )
        page.write_text(
            TEXT.format(
                commands=COMMANDS,
                commit=made["commit"],
                hardware=made["hardware"],
                recommendation=recommendation(probes),
                verdicts="\n".join(verdict_table(probes)),
                margin=MARGIN,
                continuations=continuations,
                sizes=sizes_text(quick, looks),
                tables=tables,
                training=training,
            )
        )


def full_text(
    cells: Mapping[Cell, Sequence[Judged]], left_out: Mapping[tuple[str, str], str]
) -> str:
    """All columns of all cells."""
    parts = []
    for (world, stage), rows in cells.items():
        skipped = {name: why for (place, name), why in left_out.items() if place == world}
        for title, kinds in KINDS.items():
            parts += [
                f"## {title}: {NAMES[world]}, {stage} training",
                "\n".join(credit_table(rows, skipped, kinds)),
            ]
    return "\n\n".join(parts)


def record(
    cells: Mapping[Cell, Sequence[Judged]],
    left_out: Mapping[tuple[str, str], str],
    probes: Sequence[Any],
    lines: Mapping[Any, Mapping[str, Any]],
    made: Mapping[str, Any],
    quick: bool,
) -> dict[str, Any]:
    """What merit.json holds."""
    return {
        **made,
        "sizes": {world: asdict(size) for world, size in sizes(quick).items()},
        "margin": MARGIN,
        "cells": [
            {"world": world, "stage": stage, "rows": [entry.as_dict() for entry in rows]}
            for (world, stage), rows in cells.items()
        ],
        "not_applicable": [
            {"world": world, "row": row, "why": why} for (world, row), why in left_out.items()
        ],
        "verdicts": [{**asdict(entry), "recommended": entry.recommended} for entry in probes],
        "training": [{**asdict(entry), "learns": entry.learns} for entry in learned(lines)[0]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help="make the training runs")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the command; needs --out"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of training runs")
    parser.add_argument(
        "--looks",
        type=int,
        default=0,
        help="seeds of trajectories in each cell; 0: the world's default",
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--rows", nargs="+", default=[], help="of training runs; default: all")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the results; default: benchmarks/results"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs") / "merit",
        help="folder of the results of single jobs",
    )
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers are no results")
    command = shlex.join(
        ["python", "benchmarks/merit.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    folder, page = (
        options.out or HERE / "results",
        options.out / "branching.md" if options.out else PAGE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    wanted, done = list(jobs(options.quick, options.looks, tuple(options.worlds))), True

    def progress(count: int, number: int, what: str) -> None:
        print(f"{count}/{number} {what}", flush=True)

    if options.train:
        runs = train_jobs(options.seeds, options.rows, options.worlds)
        done = train(
            folder / "merit-train.jsonl", runs, options.workers, options.quick, command, progress
        )
    elif not options.report:
        done = study(options.work, wanted, options.workers, options.quick, progress)
    write(
        folder,
        page,
        options.work,
        list(jobs(options.quick, max(options.looks, 8))),
        options.quick,
        command,
    )
    return 0 if done else 130


if __name__ == "__main__":
    sys.exit(main())
