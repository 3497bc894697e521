"""Grades a submission of the capstone: 80 of its 100 points, the others are for the report.

    python tutorials/capstone/grade.py FOLDER                      # on fresh seeds, printed
    python tutorials/capstone/grade.py FOLDER --first-seed 123456  # on the same seeds again

The folder has my_rule.py with the class MyRule, and prediction.yaml. The rule is tuned and compared
in the 2-D world by `flowrl bench rule`, with seeds that no published table uses. The table of
points is printed and written to FOLDER/grade-SEED/grade.md.
"""

import argparse
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl.bench.judging import WORSE
from flowrl.bench.rule_bench import Bench
from flowrl.bench.rule_page import SHORT_WORDS, World, sentence
from flowrl.bench.rule_plan import Part
from flowrl.core.errors import FlowrlError, require
from flowrl.credit import Uniform, credit_of
from flowrl.run.parts.registry import build
from flowrl.testing.credit import CreditContract

VERDICTS = {"better": 1, "no difference": 0, "undecided": 0, "worse": -1}
"""Predictions, and the direction that each of them names; a difference too small to matter has
none.
"""
WIDEST = 0.1
"""The widest predicted range of the difference that earns points, in mean reward."""


@dataclass(frozen=True)
class Points:
    """A row of the table: what is graded, the points earned, the points possible, the reason."""

    subject: str
    earned: int
    possible: int
    reason: str


def predicted(path: Path) -> dict[str, Any]:
    """The prediction; raises `ConfigError` for a missing or an impossible one."""
    require(path.is_file(), "prediction", str(path), "a file written before the comparison")
    found = yaml.safe_load(path.read_text())
    for budget in ("updates", "evaluations"):
        require(
            found.get(budget) in VERDICTS, budget, found.get(budget), f"one of {list(VERDICTS)}"
        )
    low, high = found.get("difference", (None, None))
    numbers = all(isinstance(value, int | float) for value in (low, high))
    require(numbers and low <= high, "difference", [low, high], "two numbers, the smaller first")
    require(bool(found.get("hypothesis")), "hypothesis", "", "one sentence")
    return found


def contract(rule: Any) -> list[Points]:
    """Whether the rule keeps the promises of a credit rule, and differs from uniform credit."""
    contract = CreditContract(rule)
    broken = "; ".join(contract.findings().broken)
    record = contract.records()[0]
    own, uniform = (credit_of(part, record).advantages.flatten() for part in (rule, Uniform()))
    alike = float(torch.cosine_similarity(own, uniform, dim=0))
    return [
        Points("contract", 0 if broken else 15, 15, broken or "every promise is kept"),
        Points(
            "originality",
            5 if alike < 0.99 else 0,
            5,
            f"cosine of {alike:.3f} with uniform credit on random values",
        ),
    ]


def comparison(rule: str, world: World, prediction: Mapping[str, Any]) -> list[Points]:
    """The predictions against the measured differences from uniform credit, and the results."""
    found = {
        finding.budget: finding.comparison
        for finding in world.findings
        if finding.baseline == "uniform"
    }
    points = []
    for budget in ("updates", "evaluations"):
        verdict = SHORT_WORDS.get(found[budget].verdict, found[budget].verdict)
        direction = VERDICTS.get(verdict, 0)
        hit = direction == VERDICTS[prediction[budget]]
        reason = f"predicted {prediction[budget]}, measured {verdict}"
        points.append(Points(f"verdict at equal {budget}", 15 if hit else 0, 15, reason))
    low, high = prediction["difference"]
    measured, narrow = found["updates"].estimate, high - low <= WIDEST
    covered = low <= measured.value <= high and narrow
    reason = f"predicted {low:g} to {high:g}, measured {measured.text(sign=True)}"
    if not narrow:
        reason += f"; the range is wider than {WIDEST:g}"
    lost = int(world.evidence.values(rule, "collapse").sum())
    falls = found["updates"].verdict == WORSE
    seeds = f"{lost} of {world.part.seeds} seeds collapsed"
    level = "worse" if falls else "not worse"
    return [
        *points,
        Points("size of the difference", 10 if covered else 0, 10, reason),
        Points("stability", 0 if lost else 10, 10, seeds),
        Points("learning", 0 if falls else 10, 10, f"{level} than uniform credit"),
    ]


def table(rows: list[Points], seeds: Part, words: str) -> str:
    """The points as Markdown."""
    total = Points("sum", sum(r.earned for r in rows), sum(r.possible for r in rows), "")
    lines = [f"| {r.subject} | {r.earned} of {r.possible} | {r.reason} |" for r in [*rows, total]]
    return "\n".join(
        [
            f"Seeds {seeds.first_seed} to {seeds.first_seed + seeds.seeds - 1}. {words}",
            "",
            "| graded | points | reason |",
            "|---|---|---|",
            *lines,
        ]
    )


def grade(folder: Path, part: Part, workers: int) -> str | None:
    """The table of points of a submission; None if Ctrl-C paused the comparison."""
    prediction, spec = predicted(folder / "prediction.yaml"), f"{folder / 'my_rule.py'}:MyRule"
    rows = contract(build("credit", spec, trust=True))
    out = folder / f"grade-{part.first_seed}"
    bench = Bench(spec, [part], out / "comparison", workers)
    if not bench.execute():
        return None
    (world,) = bench.worlds()
    rows += comparison(bench.name, world, prediction)
    text = table(rows, part, sentence(bench.name, world))
    (out / "grade.md").write_text(text + "\n")
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Grade a submission of the capstone.")
    parser.add_argument("folder", type=Path, help="the folder with my_rule.py and prediction.yaml")
    parser.add_argument(
        "--first-seed", type=int, help="the first seed of the comparison; default: drawn at random"
    )
    parser.add_argument("--seeds", type=int, default=10, help="seeds per arm (default: 10)")
    parser.add_argument("--budget", type=int, default=36, help="runs of the search (default: 36)")
    parser.add_argument("--workers", type=int, default=0, help="parallel runs; 0 = one per core")
    options = parser.parse_args()
    first = options.first_seed
    first = 10_000 + secrets.randbelow(10**9) if first is None else first
    print(f"first seed {first}", flush=True)
    try:
        text = grade(
            options.folder,
            Part("mixture", options.budget, options.seeds, first_seed=first),
            options.workers,
        )
    except FlowrlError as error:
        sys.exit(f"error: {error}")
    print(text or f"Paused; continue with --first-seed {first}")


if __name__ == "__main__":
    main()
