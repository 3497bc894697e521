"""Verdicts and costs as tables."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flowrl_compare.statistics import mean

from flowrl.training.config import RunConfig
from flowrl_bench.arms import TASKS
from flowrl_bench.catalogue import PRIMARY
from flowrl_bench.claims import (
    GAINS,
    POINTS,
    SEEDS,
    SELF_TEST,
    UNIFORM,
    Arm,
    Claim,
    gains,
    make_run,
)
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import MEASURES, Evidence, Line, column, spent
from flowrl_bench.measurements import PHASES
from flowrl_bench.page import Table
from flowrl_bench.results_file import Lines
from flowrl_bench.suite import claim_runs
from flowrl_bench.verdicts import (
    ALIKE,
    BARELY_BETTER,
    BARELY_WORSE,
    BETTER,
    SECONDARY,
    UNDECIDED,
    WORSE,
    Comparison,
    by_seed,
    gain,
    judge_family,
)

SYMBOLS = {
    BETTER: "▲",
    BARELY_BETTER: "△",
    ALIKE: "=",
    BARELY_WORSE: "▽",
    WORSE: "▼",
    UNDECIDED: "?",
}
"""By verdict; colours belong to methods."""
BRIEF = {UNDECIDED: "undecided", ALIKE: "no difference"}
"""Shorter words for tables that have a legend."""
MISSING = "runs to be made"
WORLD_NAMES = {"mixture": "2-D world", "shapes": "image world"}
COST_ARMS: dict[str, Arm] = {
    "uniform (no probe)": UNIFORM,
    "gains, one step": gains("probe=tweedie"),
    "gains, 5 substeps": GAINS,
    "gains, whole ODE": gains("probe=completion"),
    "turning points": POINTS,
}
"""One arm per probe."""


@dataclass
class Judged:
    """A claim in a world: the comparisons of its rules, the primary one first, and the seeds that
    each has (0 and None without runs). `gain`: the possible gain in the world.
    """

    claim: Claim
    world: str
    evidence: Evidence | None
    gain: float
    comparisons: list[Comparison | None]
    seeds: list[int]

    @property
    def primary(self) -> Comparison | None:
        """The primary comparison; None without runs."""
        return self.comparisons[0]

    @property
    def label(self) -> str:
        """The verdict in words."""
        return self.primary.verdict if self.primary else MISSING


def compared(claim: Claim, world: str, lines: Lines, seeds: tuple[int, ...] = ()) -> Judged:
    """A claim in a world, not yet judged. Every rule has the seeds that its own arms share. The
    evidence covers the arms that have enough seeds.
    """
    runs = claim_runs(claim, world, lines, seeds or SEEDS[world])
    ready = [arm for arm in claim.arms if runs.evidence((arm,))]
    pooled = runs.evidence(ready) if ready else None
    evidences = [runs.evidence(rule.arms) for rule in claim.rules]
    size = next((gain(world, evidence) for evidence in (pooled, *evidences) if evidence), 0.0)
    comparisons = [
        rule.compare(evidence, size) if evidence else None
        for rule, evidence in zip(claim.rules, evidences, strict=True)
    ]
    counts = [len(evidence.seeds) if evidence else 0 for evidence in evidences]
    return Judged(claim, world, pooled, size, comparisons, counts)


def judge_all(
    claims: Mapping[str, Claim], lines: Lines, primary: Mapping[str, Sequence[str]] = PRIMARY
) -> list[Judged]:
    """Every claim in every world in which it is tested.

    A family is the primary outcomes of a world, each of them once; a self-test is its own family. A
    secondary comparison that is another claim's primary outcome gets its verdict.
    """
    judged = [compared(claim, world, lines) for claim in claims.values() for world in claim.worlds]
    tests = [[outcome] for outcome in judged if outcome.claim.source == SELF_TEST]
    for family in (
        *tests,
        *(
            [outcome for outcome in judged if outcome.world == w and outcome.claim.id in ids]
            for w, ids in primary.items()
        ),
    ):
        judge_together(judged, family)
    return judged


def judge_together(judged: Sequence[Judged], family: Sequence[Judged]) -> None:
    """Judge the primary outcomes of `family`, and give their verdicts to `judged`."""
    outcomes = {
        outcome.claim.outcome(outcome.world, outcome.claim.primary): outcome.primary
        for outcome in family
        if outcome.primary is not None
    }
    verdicts = dict(zip(outcomes, judge_family(list(outcomes.values())), strict=True))
    for outcome in judged:
        for index, (rule, comparison) in enumerate(
            zip(outcome.claim.rules, outcome.comparisons, strict=True)
        ):
            verdict = verdicts.get(outcome.claim.outcome(outcome.world, rule))
            if comparison and verdict:
                outcome.comparisons[index] = replace(comparison, adjusted=verdict.adjusted)


def marked(label: str) -> str:
    """A verdict with its symbol."""
    return f"{label} {SYMBOLS[label]}" if label in SYMBOLS else label


def shown(comparison: Comparison) -> str:
    """The number with its interval, and the corrected p-value of no difference if it is judged; a
    single seed has no interval.
    """
    signed, estimate = comparison.difference, comparison.estimate
    if not math.isfinite(estimate.high):
        return f"{estimate.value:{'+' if signed else ''}.3f} (one seed: no interval)"
    p = comparison.adjusted[0] if comparison.adjusted else math.nan
    return estimate.text(3, signed) + ("" if math.isnan(p) else f", p {_p_value(p)}")


def comparison_table(judged: Judged) -> Table:
    """The comparisons of a claim, then those on every task alone."""
    rows = [
        (rule.words(), c.text, str(seeds), shown(c), _won(c), marked(c.verdict))
        for rule, c, seeds in zip(judged.claim.rules, judged.comparisons, judged.seeds, strict=True)
        if c
    ]
    rows += [("-", c.text, "-", shown(c), _won(c), SECONDARY) for c in by_task(judged)]
    head = ("rule", "measured", "seeds", "here", "seeds won", "verdict")
    return Table(head, rows, ("rule", "measured", "verdict"))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _won(comparison: Comparison) -> str:
    return "-" if comparison.won is None else f"{100 * comparison.won:.0f}%"


def _p_value(adjusted: float) -> str:
    return "< .001" if adjusted < 1e-3 else f"{adjusted:.3f}"


def by_task(judged: Judged) -> list[Comparison]:
    """The claim's comparisons on every task alone, if several were pooled."""
    if judged.evidence is None:
        return []
    tasks = list(next(iter(judged.evidence.runs.values())))
    comparisons = []
    for task in tasks if len(tasks) > 1 else ():
        alone = Evidence(
            {arm: {task: lines[task]} for arm, lines in judged.evidence.runs.items()},
            judged.evidence.seeds,
        )
        rules = (rule for rule in judged.claim.rules if set(rule.arms) <= alone.runs.keys())
        rows = (rule.compare(alone, judged.gain) for rule in rules)
        comparisons += [replace(c, note=f"{c.note}, {task} alone") for c in rows]
    return comparisons


def levels(judged: Judged) -> str:
    """Each arm's value of the measures that the rules compare, and the untrained policy's."""
    if judged.evidence is None:
        return ""
    sentences = []
    for name in dict.fromkeys(rule.measure for rule in judged.claim.rules):
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


def _start(evidence: Evidence, name: str) -> float:
    return float(
        np.mean(
            [
                [column(line, name)[0] for line in lines]
                for lines in next(iter(evidence.runs.values())).values()
            ]
        )
    )


def _density(evidence: Evidence) -> str:
    """Turning points per trajectory and those of random signs, before and after training."""
    phrases = []
    for stage in ("before", "after"):
        rows = [
            [line["samples"][stage] for line in lines]
            for lines in next(iter(evidence.runs.values())).values()
        ]
        points, null = (
            np.array([[row[key] for row in task] for task in rows]).T for key in ("points", "null")
        )
        beyond = mean(by_seed(points - null))
        numbers = (
            f"{points.mean():.2f}, with random signs {null.mean():.2f} ({beyond.text(3, True)})"
        )
        phrases.append(f"{stage} training {numbers}")
    return f"Turning points per trajectory: {'; '.join(phrases)}."


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
            config_id(RunConfig.from_dict(line["config"]).replace(seed=0)), []
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
    def mean(measure: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(measure(run["totals"]) for run in runs)

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
