"""Verdicts and costs as tables."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flowrl_compare.statistics import mean

from flowrl.training.config import RunConfig
from flowrl_bench.arms import TASKS
from flowrl_bench.claims import GAINS, POINTS, SEEDS, UNIFORM, Arm, Claim, gains, make_run
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import MEASURES, Evidence, Line, column, spent
from flowrl_bench.leads import LEADS
from flowrl_bench.measurements import PHASES
from flowrl_bench.page import Table
from flowrl_bench.results_file import Lines
from flowrl_bench.suite import evidence
from flowrl_bench.verdicts import (
    ALIKE,
    BETTER,
    FAILS,
    HOLDS,
    UNDECIDED,
    WORSE,
    Comparison,
    Verdict,
    by_seed,
    judge_family,
)

ANSWERS = {
    HOLDS: "yes",
    FAILS: "no",
    UNDECIDED: UNDECIDED,
    BETTER: BETTER,
    WORSE: WORSE,
    ALIKE: ALIKE,
}
DEPENDS = "depends on the arm"
SYMBOLS = {
    BETTER: "▲",
    WORSE: "▼",
    ALIKE: "=",
    UNDECIDED: "?",
    HOLDS: "✓",
    FAILS: "✗",
    "yes": "✓",
    "no": "✗",
}
"""By verdict or answer; colours belong to methods."""
BRIEF = {UNDECIDED: "undecided", ALIKE: "no difference"}
"""Shorter words for tables that have a legend."""
MISSING = "too few runs yet"
SELF_TEST, MAIN, QUESTION, CLAIM = "self-test", "main comparison", "question", "claim"
"""The families of Holm's correction."""
_MAIN = frozenset(claim.id for claim in LEADS)
WORLD_NAMES = {"mixture": "2-D world", "shapes": "image world"}
COST_ARMS: dict[str, Arm] = {
    "uniform (no probe)": UNIFORM,
    "gains, one step": gains("probe=tweedie"),
    "gains, 5 substeps": GAINS,
    "gains, whole ODE": gains("probe=completion"),
    "turning points": POINTS,
}
"""One arm per probe."""


class Judged:
    """A claim in a world: its evidence and verdict (None if no seed is complete). Alone, the claim
    is a family of its own.
    """

    def __init__(self, claim: Claim, world: str, lines: Lines, seeds: tuple[int, ...] = ()) -> None:
        self.claim, self.world = claim, world
        self.evidence: Evidence | None = evidence(claim, world, lines, seeds or SEEDS[world])
        self.found: tuple[Comparison, ...] = (
            claim.rule.compare(self.evidence) if self.evidence else ()
        )
        self.verdict: Verdict | None = judge_family([self.found])[0] if self.evidence else None

    @property
    def label(self) -> str:
        """The verdict in words; for an open question, the answer that all its arms have."""
        if self.verdict is None:
            return MISSING
        if not self.claim.asks:
            return self.verdict.verdict
        answers = {ANSWERS[comparison.verdict] for comparison in self.verdict.comparisons}
        return answers.pop() if len(answers) == 1 else DEPENDS

    @property
    def seeds(self) -> int:
        """The number of seeds that all arms have."""
        return len(self.evidence.seeds) if self.evidence else 0


def judge_all(claims: Mapping[str, Claim], lines: Lines) -> list[Judged]:
    """Every claim in every world in which it is tested.

    The families are the main comparison (`flowrl_bench.leads`), the papers' claims, the other
    questions, and the self-test.
    """
    found = [Judged(claim, world, lines) for claim in claims.values() for world in claim.worlds]
    for kind in dict.fromkeys(map(family, found)):
        judge_together([one for one in found if family(one) == kind])
    return found


def family(one: Judged) -> str:
    """The name of a claim's family."""
    if one.claim.id in _MAIN:
        return MAIN
    if one.claim.source == SELF_TEST:
        return SELF_TEST
    return QUESTION if one.claim.asks else CLAIM


def judge_together(found: Sequence[Judged]) -> None:
    """Judge again, as one family."""
    judged = [one for one in found if one.verdict is not None]
    for one, verdict in zip(judged, judge_family([one.found for one in judged]), strict=True):
        one.verdict = verdict


def summary(judged: Sequence[Judged], last: str) -> Table:
    """A line per claim and world: its id and words, the verdict, and every comparison."""
    asks = bool(judged) and judged[0].claim.asks
    rows = []
    for one in judged:
        here = _measured(one.verdict.comparisons, one.claim.asks) if one.verdict else "-"
        source = () if asks else (f"{one.claim.source}: {one.claim.number}",)
        says = f"`{one.claim.id}` {one.claim.says}"
        rows.append(
            (says, marked(one.label), here, *source, WORLD_NAMES[one.world], str(one.seeds))
        )
    source = () if asks else ("source and its number",)
    head = ("question" if asks else "claim", last, "measured here", *source, "world", "seeds")
    return Table(head, rows, ("claim", "question", "source and its number", "measured here", last))


def marked(label: str) -> str:
    """A verdict or an answer with its symbol."""
    return f"{label} {SYMBOLS[label]}" if label in SYMBOLS else label


def _measured(found: Sequence[Comparison], asks: bool) -> str:
    """All comparisons in a cell: the measure once, then every arm, each with its own verdict if
    there are several.
    """
    parts: dict[str, list[str]] = {}
    for comparison in found:
        alone = (
            f" ({_alone(comparison, asks)})"
            if len(found) > 1 or comparison.verdict == FAILS
            else ""
        )
        parts.setdefault(comparison.label, []).append(
            f"{comparison.arms} {shown(comparison)}{alone}"
        )
    return ". ".join(f"{_capital(label)}: {'; '.join(rows)}" for label, rows in parts.items())


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _alone(comparison: Comparison, asks: bool) -> str:
    """A comparison's own verdict in a word or two, and the reason if a claim fails."""
    if asks:
        return BRIEF.get(comparison.verdict, ANSWERS[comparison.verdict])
    if comparison.verdict != FAILS:
        return {HOLDS: "holds", UNDECIDED: "undecided"}[comparison.verdict]
    return "does not hold: too small to matter" if comparison.size == ALIKE else "does not hold"


def shown(comparison: Comparison) -> str:
    """The number with its interval; a single seed has none."""
    signed, found = comparison.difference, comparison.estimate
    if math.isfinite(found.high):
        return found.text(3, signed) + (
            f", p {_p_value(comparison.adjusted)}" if not math.isnan(comparison.adjusted) else ""
        )
    return f"{found.value:{'+' if signed else ''}.3f} (one seed: no interval)"


def comparison_table(found: Sequence[Comparison], asks: bool) -> Table:
    """The comparisons behind a verdict; one without a verdict is no part of the rule."""
    rows = [
        (c.text, shown(c), _won(c), "-" if math.isnan(c.adjusted) else _judged(c, asks))
        for c in found
    ]
    return Table(("measured", "here", "seeds won", "alone"), rows, ("measured", "alone"))


def _judged(comparison: Comparison, asks: bool) -> str:
    return marked(ANSWERS[comparison.verdict] if asks else comparison.verdict)


def _won(comparison: Comparison) -> str:
    return "-" if comparison.won is None else f"{100 * comparison.won:.0f}%"


def _p_value(adjusted: float) -> str:
    return "< .001" if adjusted < 1e-3 else f"{adjusted:.3f}"


def by_task(judged: Judged) -> list[Comparison]:
    """The claim's comparisons on every task alone, if several were pooled; without verdicts, since
    no rule uses them.
    """
    if judged.evidence is None:
        return []
    tasks = list(next(iter(judged.evidence.runs.values())))
    found = []
    for task in tasks if len(tasks) > 1 else ():
        alone = Evidence(
            {arm: {task: lines[task]} for arm, lines in judged.evidence.runs.items()},
            judged.evidence.seeds,
        )
        found += [
            replace(c, note=f"{c.note}, {task} alone") for c in judged.claim.rule.compare(alone)
        ]
    return found


def levels(judged: Judged) -> str:
    """The value of each arm by the measures that the rule compares, and that of the untrained
    policy.
    """
    if judged.evidence is None:
        return ""
    sentences = []
    for name in dict.fromkeys(comparison.measure for comparison in judged.found):
        start = MEASURES[name].start
        if name == "turning points over null":
            sentences.append(_density(judged.evidence))
        elif name != "early gains" and MEASURES[name].of is not None:
            chosen = [
                arm
                for arm in judged.evidence.runs
                if not name.startswith("sampler") or arm in judged.claim.samples
            ]
            arms = [f"{arm} {judged.evidence.values(arm, name).mean():.3f}" for arm in chosen]
            before = f"; before training {_start(judged.evidence, start):.3f}" if start else ""
            sentences.append(f"{_capital(MEASURES[name].label)}: {', '.join(arms)}{before}.")
    return " ".join(sentences)


def _start(found: Evidence, name: str) -> float:
    return float(
        np.mean(
            [
                [column(line, name)[0] for line in lines]
                for lines in next(iter(found.runs.values())).values()
            ]
        )
    )


def _density(found: Evidence) -> str:
    """Turning points per trajectory and those of random signs, before and after training."""
    parts = []
    for when in ("before", "after"):
        rows = [
            [line["samples"][when] for line in lines]
            for lines in next(iter(found.runs.values())).values()
        ]
        points, null = (
            np.array([[row[key] for row in task] for task in rows]).T for key in ("points", "null")
        )
        beyond = mean(by_seed(points - null))
        numbers = (
            f"{points.mean():.2f}, with random signs {null.mean():.2f} ({beyond.text(3, True)})"
        )
        parts.append(f"{when} training {numbers}")
    return f"Turning points per trajectory: {'; '.join(parts)}."


def cost_table(
    lines: Lines, arms: Mapping[str, Arm] = COST_ARMS, memory: Sequence[Mapping[str, Any]] = ()
) -> Table:
    """Means over all finished runs of each arm with the world's own settings; peak memory if it was
    measured.
    """
    head = (
        "world",
        "rule",
        "runs",
        "NFE/trajectory",
        "reward calls/trajectory",
        "network calls/iteration",
        *(f"s/iteration: {phase}" for phase in PHASES),
        "reward gained per million forward equivalents, whole run",
        "peak memory (MiB)",
    )
    rows = []
    by_settings: dict[str, list[Line]] = {}
    for line in lines.values():
        by_settings.setdefault(
            config_id(RunConfig.from_dict(line["config"], trust=True).replace(seed=0)), []
        ).append(line)
    for world, tasks in TASKS.items():
        for name, changes in arms.items():
            runs = by_settings.get(config_id(make_run(world, tasks[0], 0, changes)), [])
            peak = next(
                (
                    f"{m['peak_mib']:.0f}"
                    for m in memory
                    if m["world"] == world and m["arm"] == name
                ),
                "-",
            )
            if runs:
                rows.append((WORLD_NAMES[world], name, str(len(runs)), *_cost(runs), peak))
    return Table(head, rows)


def _cost(runs: Sequence[Line]) -> tuple[str, ...]:
    def mean(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(of(run["totals"]) for run in runs)

    iterations = runs[0]["config"]["iterations"]
    gained = [
        1e6 * (column(run, "soft")[-1] - column(run, "soft")[0]) / spent(run, "forwards")[-1]
        for run in runs
    ]
    return (
        f"{mean(lambda total: total['nfe'] / total['trajectories']):.1f}",
        f"{mean(lambda total: total['reward_calls'] / total['trajectories']):.1f}",
        f"{mean(lambda total: total['calls'] / iterations):.0f}",
        *(f"{statistics.fmean(run['phases'][phase] for run in runs):.3f}" for phase in PHASES),
        f"{statistics.fmean(gained):.2f}",
    )
