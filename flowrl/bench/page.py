"""The page of the claims, made from the results file alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.bench.claims import SEEDS, Claim
from flowrl.bench.costs import cost_table
from flowrl.bench.document import Document, Picture, Table
from flowrl.bench.evidence import Evidence, column
from flowrl.bench.history import EARLIER_RULES
from flowrl.bench.records import rules_hash
from flowrl.bench.runner import evidence
from flowrl.bench.statistics import Estimate, interquartile_mean, level, profile
from flowrl.bench.verdicts import ALIKE, BETTER, FAILS, HOLDS, UNDECIDED, WORSE, Comparison, Verdict
from flowrl.plots.claims import Band, Effect, bands, effects, profiles

TONES = {HOLDS: "good", BETTER: "good", FAILS: "bad", WORSE: "bad", ALIKE: "open", UNDECIDED: "open"}
ANSWERS = {HOLDS: "yes", FAILS: "no", UNDECIDED: UNDECIDED, BETTER: BETTER, WORSE: WORSE, ALIKE: ALIKE}
PILLS = {label: tone for verdict, tone in TONES.items() for label in (verdict, ANSWERS[verdict])}
MISSING = "no runs yet"
WORLD_WORDS = {"mixture": "2-D world", "shapes": "image world"}
Lines = Mapping[str, Mapping[str, Any]]


INTRODUCTION = (
    "Each claim of three papers, in our words, beside what happens in the built-in worlds: the same code, the same budgets, "
    "several seeds, intervals. A verdict is computed by a rule that was written before the runs; it speaks of these worlds, "
    "not of large models. Numbers are interquartile means with 95% intervals from a stratified bootstrap over seeds (tasks are "
    "the strata), widened for few seeds; runs of one seed share their prompts and noise, so differences are paired. Held-out "
    "prompts and their noise are the same for all runs: intervals speak of other seeds of training, not of other prompts."
)
COSTS = (
    "As measured, per rule: evaluations and reward calls of a trajectory, sequential calls and seconds of an iteration, and what "
    "a million evaluations (sampling, scoring and training) bought in reward over the whole run. Peak memory is that of a "
    "process which makes a run of two iterations and nothing else."
)
AGAIN = (
    "`flowrl bench claims` makes what is missing in the results file and this page; `flowrl bench claims --redo ID` makes one "
    "run again from its line and compares every number; `flowrl bench claims --only ID` runs a single claim. All runs are in "
    "the file, none is left out."
)


class Judged:
    """A claim in a world: its evidence and verdict (None where no seed is complete)."""

    def __init__(self, claim: Claim, world: str, lines: Lines, seeds: tuple[int, ...] = ()) -> None:
        self.claim, self.world = claim, world
        self.evidence: Evidence | None = evidence(claim, world, lines, seeds or SEEDS[world])
        self.verdict: Verdict | None = claim.rule.judge(self.evidence) if self.evidence else None

    @property
    def label(self) -> str:
        """The verdict in words; for an open question, its answer."""
        if self.verdict is None:
            return MISSING
        return ANSWERS[self.verdict.verdict] if self.claim.asks else self.verdict.verdict

    @property
    def seeds(self) -> int:
        """How many seeds all arms have."""
        return len(self.evidence.seeds) if self.evidence else 0


def judge_all(claims: Mapping[str, Claim], lines: Lines) -> list[Judged]:
    """Every claim in every world it is tried in."""
    return [Judged(claim, world, lines) for claim in claims.values() for world in claim.worlds]


def judged_table(claims: Mapping[str, Claim], lines: Lines, seeds: tuple[int, ...]) -> Table:
    """Verdicts of other claims than the catalogue's, on the 2-D world with `seeds`."""
    return _summary([Judged(claim, "mixture", lines, seeds) for claim in claims.values()], "verdict")


def claims_page(judged: Sequence[Judged], lines: Lines, path: Path, memory: Sequence[Mapping[str, Any]] = ()) -> Document:
    """The whole page: summary, tables, figures, every rule and comparison, costs, and how to make it again."""
    page = Document("The papers' claims, tested")
    page.text(INTRODUCTION)
    page.text(_where(lines, path))
    page.heading("Claims")
    page.text(_count([j for j in judged if not j.claim.asks]))
    page.blocks.append(_summary([j for j in judged if not j.claim.asks], "verdict"))
    page.heading("Open questions")
    page.text("What no paper reports. Better, worse and no difference are about the first arm named; margins stand below.")
    page.blocks.append(_summary([j for j in judged if j.claim.asks], "answer"))
    _figures(page, judged, lines)
    page.heading("Cost")
    page.text(COSTS)
    page.blocks.append(cost_table(lines, memory=memory))
    page.heading("Every rule and comparison")
    for one in judged:
        page.text(f"`{one.claim.id}` in the {WORLD_WORDS[one.world]}: {one.claim.rule.words()}. {_arms(one.claim)}")
        if one.verdict is not None:
            page.blocks.append(comparison_table(one.verdict.comparisons, one.claim.asks))
    page.heading("Make it again")
    page.text(AGAIN)
    return page


def _where(lines: Lines, path: Path) -> str:
    if not lines:
        return "No run has finished yet."
    values = list(lines.values())
    commits = sorted({line["commit"] for line in values})
    machines = sorted({line["hardware"] for line in values})
    versions = ", ".join(f"{name} {number}" for name, number in values[0]["versions"].items())
    hours = sum(line["totals"]["seconds"] for line in values) / 3600
    kept = "; ".join(
        _rules_of(rules, sum(line["rules"] == rules for line in values)) for rules in sorted({line["rules"] for line in values})
    )
    return (
        f"{len(values)} runs ({hours:.1f} hours of one core in training) in `{path.name}`; commit {', '.join(commits)}; "
        f"{versions}; {'; '.join(machines)}; code `{values[0]['code']}`, rules `{rules_hash()}`: {kept}."
    )


def _rules_of(rules: str, runs: int) -> str:
    if rules == rules_hash():
        return f"{runs} runs were made under them"
    return f"{runs} under earlier ones, `{rules}` ({EARLIER_RULES.get(rules, 'how they differed is not recorded')})"


def _count(judged: Sequence[Judged]) -> str:
    total = {name: sum(j.label == name for j in judged) for name in (HOLDS, FAILS, UNDECIDED, MISSING)}
    return "; ".join(f"{count} {name}" for name, count in total.items() if count) + "."


def _shown(comparison: Comparison) -> str:
    """The number with its interval, which a single seed does not have; a share stays a share."""
    signed, found = " minus " in comparison.text, comparison.estimate
    return (
        found.text(3, signed)
        if math.isfinite(found.high)
        else f"{found.value:{'+' if signed else ''}.3f} (one seed: no interval)"
    )


def _summary(judged: Sequence[Judged], last: str) -> Table:
    """A line per claim and world, the verdict first."""
    asks = bool(judged) and judged[0].claim.asks
    rows = []
    for one in judged:
        found = one.verdict.main if one.verdict else None
        here = f"{_shown(found)} {found.text}" if found else "-"
        source = () if asks else (f"{one.claim.source}: {one.claim.number}",)
        rows.append((one.claim.says, one.label, here, *source, WORLD_WORDS[one.world], str(one.seeds)))
    source = () if asks else ("source and its number",)
    head = ("question" if asks else "claim", last, "measured here", *source, "world", "seeds")
    return Table(head, rows, ("claim", "question", "source and its number", "measured here", last), PILLS)


def comparison_table(found: Sequence[Comparison], asks: bool) -> Table:
    """The comparisons behind a verdict."""
    rows = [
        (c.text, _shown(c), "-" if c.probability is None else f"{c.probability:.2f}", ANSWERS[c.verdict] if asks else c.verdict)
        for c in found
    ]
    return Table(("measured", "here", "P(first beats second)", "alone"), rows, ("measured", "alone"), PILLS)


def _arms(claim: Claim) -> str:
    def told(changes: Mapping[str, Any]) -> str:
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items()) or "defaults"

    base = f" All: {told(claim.base)}." if claim.base else ""
    return "Arms: " + "; ".join(f"{arm}: `{told(changes)}`" for arm, changes in claim.arms.items()) + "." + base


def _figures(page: Document, judged: Sequence[Judged], lines: Lines) -> None:
    """Effects of all claims, learning curves of the three methods, profiles."""
    differences = [
        _effect(j, c) for j in judged if j.verdict for c in [j.verdict.main] if " minus " in c.text and not j.claim.asks
    ]
    shares = [_effect(j, c) for j in judged if j.verdict for c in [j.verdict.main] if "share of" in c.text and not j.claim.asks]
    asked = [_effect(j, c) for j in judged if j.verdict and j.claim.asks for c in j.verdict.comparisons if " minus " in c.text]
    if differences or shares:
        page.heading("Claims at a glance")
        groups = {
            "difference in the measure of the claim (0: none)": differences,
            "share of the baseline's budget (1: as much)": shares,
        }
        page.blocks.append(Picture("claims", effects(groups), "Effects of all claims with intervals"))
    if asked:
        page.heading("Open questions at a glance")
        page.blocks.append(
            Picture("questions", effects({"difference from the arm it is compared with": asked}), "Effects with intervals")
        )
    curves = _method_curves(judged)
    if curves:
        page.heading("Learning curves of the three methods")
        page.text("Interquartile mean over seeds of the held-out reward, with its 95% interval at every evaluation.")
        page.blocks.append(
            Picture("curves", bands(curves, "updates (iterations)", "held-out reward"), "Learning curves with intervals")
        )
        levels = np.linspace(0, 1, 101)
        arms = {arm: profile(values, levels.tolist()).tolist() for arm, values in _profiles(judged).items()}
        page.text("How many runs reach a mean reward over training (performance profile), 2-D world.")
        page.blocks.append(
            Picture("profiles", profiles(levels.tolist(), arms, "mean reward over training"), "Performance profiles")
        )


def _effect(judged: Judged, comparison: Comparison) -> Effect:
    found = comparison.estimate
    finite = [value if math.isfinite(value) else found.value for value in (found.low, found.high)]
    name = comparison.text.partition(":")[0] if judged.claim.asks else judged.claim.id
    where = "" if judged.world == "mixture" else " (images)"
    text = f"{judged.claim.id}: {name}{where}" if judged.claim.asks else f"{name}{where}"
    verdict = comparison.verdict if judged.claim.asks or judged.verdict is None else judged.verdict.verdict
    return Effect(text, found.value, finite[0], finite[1], TONES[verdict])


def _runs_of_methods(judged: Sequence[Judged], world: str) -> dict[str, Mapping[str, Sequence[Mapping[str, Any]]]]:
    """Runs of uniform, stepwise and turning points by task, from the claims that have them."""
    found: dict[str, Mapping[str, Sequence[Mapping[str, Any]]]] = {}
    for one in judged:
        if one.claim.id in ("stepwise-updates", "tp-updates") and one.world == world and one.evidence:
            found |= one.evidence.runs
    return found


def _method_curves(judged: Sequence[Judged]) -> dict[str, dict[str, Band]]:
    panels: dict[str, dict[str, Band]] = {}
    for world in ("mixture", "shapes"):
        for arm, tasks in _runs_of_methods(judged, world).items():
            for task, runs in tasks.items():
                panels.setdefault(f"{WORLD_WORDS[world]}: {task}", {})[arm] = _band(runs)
    return panels


def method_bands(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Band]:
    """A band per arm, of its first task."""
    return {arm: _band(next(iter(tasks.values()))) for arm, tasks in runs.items()}


def _band(runs: Sequence[Mapping[str, Any]]) -> Band:
    table = np.array([column(run, "soft") for run in runs])
    found: list[Estimate] = [level([table[:, i]]) for i in range(table.shape[1])]
    middle = [float(interquartile_mean(table[:, i])) for i in range(table.shape[1])]
    low = [e.low if math.isfinite(e.low) else m for e, m in zip(found, middle, strict=True)]
    high = [e.high if math.isfinite(e.high) else m for e, m in zip(found, middle, strict=True)]
    return Band(column(runs[0], "iteration"), middle, np.clip(low, 0, 1).tolist(), np.clip(high, 0, 1).tolist())


def _profiles(judged: Sequence[Judged]) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    for one in judged:
        if one.claim.id in ("stepwise-updates", "tp-updates") and one.world == "mixture" and one.evidence:
            for arm in one.evidence.runs:
                found[arm] = one.evidence.values(arm, "area")
    return found
