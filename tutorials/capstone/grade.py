"""Grades a submission of the capstone: 80 of its 100 points, the others are for the report.

    python tutorials/capstone/grade.py FOLDER                      # on fresh seeds, printed
    python tutorials/capstone/grade.py FOLDER --first-seed 123456  # on the same seeds again

The folder has my_rule.py with the class MyRule, and prediction.yaml, whose SHA-256 is printed and
stored in FOLDER/prediction.sha256 before any run. The rule is tuned and compared in the 2-D world
by `flowrl bench rule`, with seeds that no published table uses, and then with its control
(control.py). The table of points is printed and written to FOLDER/grade-SEED/grade.md.
"""

import argparse
import hashlib
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Evidence
from flowrl.bench.judging import BETTER, WORSE, Compare, Comparison, judge_family
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.rule_bench import Bench
from flowrl.bench.rule_page import SHORT_WORDS, World, sentence
from flowrl.bench.rule_plan import Part
from flowrl.bench.suite import make_missing
from flowrl.core.errors import FlowrlError, require
from flowrl.core.protocols import Stateful
from flowrl.credit import Uniform, credit_of
from flowrl.run.parts.registry import build
from flowrl.testing.credit import CreditContract

VERDICTS = {"better": 1, "no difference": 0, "undecided": 0, "worse": -1}
"""Predictions, and the direction that each of them names; a difference too small to matter has
none.
"""
CONTROL = Path(__file__).with_name("control.py")
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


def committed(folder: Path) -> str:
    """SHA-256 of the prediction, stored in FOLDER/prediction.sha256 by the first call. Raises
    `ConfigError` if the prediction has changed since.
    """
    digest = hashlib.sha256((folder / "prediction.yaml").read_bytes()).hexdigest()
    stored = folder / "prediction.sha256"
    if not stored.exists():
        stored.write_text(f"{digest}  prediction.yaml\n")  # `sha256sum --check` reads it
    first = stored.read_text().split()[0]
    require(digest == first, "prediction", digest, f"that of the first grading, {first}")
    return digest


def alike(rule: Any) -> float:
    """The smallest |cosine| with uniform credit at a decision, on random values: 1 if the rule is
    uniform credit times a factor per decision. Decisions without credit do not count.
    """
    record = CreditContract(rule).records()[0]
    own, uniform = (credit_of(part, record).advantages.flatten(0, 1) for part in (rule, Uniform()))
    credited = own.norm(dim=0) > 0
    cosines = torch.cosine_similarity(own, uniform, dim=0)[credited].abs()
    return float(cosines.min()) if len(cosines) else 1.0


def contract(rule: Any) -> list[Points]:
    """Whether the rule keeps the promises of a credit rule, and is more than uniform credit times a
    factor per decision.
    """
    broken, cosine = "; ".join(CreditContract(rule).findings().broken), alike(rule)
    reason = f"smallest cosine of {cosine:.3f} with uniform credit at a decision"
    return [
        Points("contract", 0 if broken else 10, 10, broken or "every promise is kept"),
        Points("originality", 5 if cosine < 0.99 else 0, 5, reason),
    ]


def control_points(against: Comparison | None) -> Points:
    """The points for a rule that is better than its control at equal cost."""
    if against is None:
        return Points("control", 0, 20, "uniform credit times factors is its own control")
    reason = f"{against.verdict} at equal cost, {against.estimate.text(sign=True)}"
    return Points("control", 20 if against.verdict == BETTER else 0, 20, reason)


def against_control(bench: Bench, world: World, out: Path, workers: int) -> Comparison | None:
    """The rule minus its control, by mean reward over training; None if Ctrl-C paused the runs. The
    settings, seeds and estimates are those of the rule. A rule with memory has no such control, and
    is compared with tuned uniform credit at equal evaluations.
    """
    spec = bench.arm.settings["credit"]
    if isinstance(build("credit", spec, trust=True), Stateful):
        findings = (f for f in world.findings if f.baseline == "uniform")
        return next(f.comparison for f in findings if f.budget == "evaluations")
    own = world.part.arms(bench.arm, world.values[bench.name])[bench.name]
    runs = [run.replace(credit=f"{CONTROL}:Control(rule={spec})") for run in own]
    made = {config_id(run): run for run in runs}
    file = ResultsFile(out / "control.jsonl", trust=True)

    def label(key: str) -> str:
        return f"control, seed {made[key].seed}"

    if not make_missing(made, file, "grade.py", workers, label, print):
        return None
    lines = file.read()
    found = Evidence(
        {**world.evidence.runs, "control": [lines[key] for key in made]}, world.evidence.seeds
    )
    (judged,) = judge_family([Compare(bench.name, "control").compare(found, world.gain)])
    return judged


def comparison(
    rule: str, world: World, prediction: Mapping[str, Any], original: bool
) -> list[Points]:
    """The predictions against the measured differences from uniform credit, and the results. Only
    the predictions of an `original` rule earn points.
    """
    known = "" if original else "; no points, for uniform credit times factors"
    found = {
        finding.budget: finding.comparison
        for finding in world.findings
        if finding.baseline == "uniform"
    }
    points = []
    for budget in ("updates", "evaluations"):
        verdict = SHORT_WORDS.get(found[budget].verdict, found[budget].verdict)
        direction = VERDICTS.get(verdict, 0)
        hit = original and direction == VERDICTS[prediction[budget]]
        reason = f"predicted {prediction[budget]}, measured {verdict}{known}"
        points.append(Points(f"verdict at equal {budget}", 10 if hit else 0, 10, reason))
    low, high = prediction["difference"]
    measured, narrow = found["updates"].estimate, high - low <= WIDEST
    covered = original and narrow and low <= measured.value <= high
    reason = f"predicted {low:g} to {high:g}, measured {measured.text(sign=True)}{known}"
    if not narrow:
        reason += f"; the range is wider than {WIDEST:g}"
    lost = int(world.evidence.values(rule, "collapse").sum())
    falls = found["updates"].verdict == WORSE
    seeds = f"{lost} of {world.part.seeds} seeds collapsed"
    level = "worse" if falls else "not worse"
    return [
        *points,
        Points("size of the difference", 10 if covered else 0, 10, reason),
        Points("stability", 0 if lost else 5, 5, seeds),
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
    digest = committed(folder)
    print(f"SHA-256 of the prediction: {digest}", flush=True)
    rows = contract(build("credit", spec, trust=True))
    original = rows[-1].earned > 0
    out = folder / f"grade-{part.first_seed}"
    bench = Bench(spec, [part], out / "comparison", workers)
    if not bench.execute():
        return None
    (world,) = bench.worlds()
    rows += comparison(bench.name, world, prediction, original)
    against = against_control(bench, world, out, workers) if original else None
    if original and against is None:
        return None
    rows.append(control_points(against))
    words = f"{sentence(bench.name, world)}\n\nSHA-256 of the prediction: `{digest}`."
    text = table(rows, part, words)
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
