"""The page of the claims, made from the results file alone."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl_bench.claims import METHODS, Arm, Claim
from flowrl_bench.digest import rules_digest
from flowrl_bench.evidence import BUDGET, DENSITY, MEASURES, RATE, REWARD, Line, column
from flowrl_bench.page import Band, Document, Effect, Image, bands, effects, profiles
from flowrl_bench.post_hoc import CAVEATS, EARLIER_RULES, POST_HOC
from flowrl_bench.results_file import Lines
from flowrl_bench.statistics import mean, profile
from flowrl_bench.tables import (
    SELF_TEST,
    TONES,
    WORLD_NAMES,
    Judged,
    by_task,
    comparison_table,
    cost_table,
    count,
    judge_all,
    level_table,
    levels,
    summary,
)
from flowrl_bench.verdicts import Comparison

TITLE = "Tests of the papers' claims"
INTRODUCTION = (
    "The claims of three papers, in our words, tested in the built-in worlds with the same code, the same budgets and "
    "several seeds. Rules written before the runs compute the verdicts; the third paragraph lists later changes. Verdicts "
    "are about these worlds, not about large models. Numbers are means over seeds (tasks are averaged first) with 95% t "
    "intervals; p-values have Holm's correction over all claims, or over all questions. Runs of one seed share prompts and "
    "noise, so differences are paired. Held-out prompts and their noise are the same for all runs: the intervals cover the "
    "choice of training seeds, not of prompts. The verdict rules and the reasons for them are in `docs/verdicts.md`."
)
TERMS = (
    "Terms: *mean reward over training* is the held-out soft reward (0 to 1) of ODE samples with averaged weights, averaged "
    "over the piecewise linear learning curve. *Updates* are iterations of sampling and learning. *NFE* counts the network "
    "evaluations for sampling, scoring and the update. *Seconds* are processor time of one core with tiny networks; their "
    "ratios can differ for large models. The *ratio* of budgets compares the budgets at which two runs of a seed first reach "
    "common rewards. *Log-density* is that of samples under the data."
)
COSTS = (
    "Measured per rule: evaluations and reward calls of a trajectory, sequential network calls and seconds of an iteration, "
    "and the reward gained per million evaluations (sampling, scoring and training) over the whole run. A rule that "
    "converges early spends most of these without further gain. Peak memory is that of a process that makes two iterations "
    "of a run."
)
LEVEL = (
    "The cost of a reward level that all of these runs reach, at the default clip range and at one ten times as wide "
    "(means; ratios at common rewards of paired runs). This table was added post hoc."
)
AFTERWARDS = "Post hoc questions on existing runs: hints, not tests. No verdict above depends on them."
ARMS = "Arms are options of `flowrl train` (with `--world mixture --eval-every 2` in the 2-D world). Levels have no intervals."
AGAIN = (
    "FILE is the results file. `flowrl bench claims --out FILE` makes the missing runs and this page; `flowrl bench claims --out "
    "FILE --redo ID` repeats one run from its line and compares every number; `--only ID` runs a single claim. The file contains "
    "all runs; none is left out."
)
COLOURS = "Green: holds, or better. Orange: does not hold, or worse. Grey: undecided, or no difference that matters."
MARK = "A black mark is the largest fraction that the claim allows."
GROUPS = {
    "difference in reward": REWARD,
    "difference in log-density": DENSITY,
    "difference in collapse rate": RATE,
    "ratio of budgets": BUDGET,
}


def claims_page(judged: Sequence[Judged], lines: Lines, path: Path, memory: Sequence[Mapping[str, Any]] = ()) -> Document:
    """The whole page: summary, tables, figures, every rule and comparison, costs, and the commands to repeat it."""
    page = Document(TITLE)
    claims, questions = [j for j in judged if not j.claim.asks], [j for j in judged if j.claim.asks]
    later = [j for j in judge_all(POST_HOC, lines) if j.verdict is not None]  # a family of their own
    page.text(INTRODUCTION)
    page.text(TERMS)
    page.text(_provenance(lines, path))
    page.heading("Claims")
    page.text(count(claims))
    page.blocks.append(summary(claims, "verdict"))
    _caveats(page, claims)
    page.heading("Open questions")
    page.text("No paper reports these. *Better*, *worse* and *no difference* refer to the arm that is named first.")
    page.blocks.append(summary(questions, "answer"))
    _caveats(page, questions)
    if later:
        page.heading("Post hoc questions")
        page.text(AFTERWARDS)
        page.blocks.append(summary(later, "answer"))
    _add_figures(page, judged)
    page.heading("Costs")
    page.text(COSTS)
    page.blocks.append(cost_table(lines, memory=memory))
    prices = level_table(lines)
    if prices is not None:
        page.heading("Cost of a reward level")
        page.text(LEVEL)
        page.blocks.append(prices)
    page.heading("All rules and comparisons")
    page.text(ARMS)
    for one in (*judged, *later):
        _details(page, one)
    page.heading("Reproduction")
    page.text(AGAIN)
    return page


def _caveats(page: Document, judged: Sequence[Judged]) -> None:
    """The caveats of these claims; claims with the same one share a paragraph."""
    ids = [name for name in dict.fromkeys(j.claim.id for j in judged) if name in CAVEATS]
    if ids:
        page.text("Caveats:")
    for words in dict.fromkeys(CAVEATS[name] for name in ids):
        page.text(f"{', '.join(f'`{name}`' for name in ids if CAVEATS[name] == words)}: {words}")


def _details(page: Document, one: Judged) -> None:
    """A claim's rule, its arms, their values, and every comparison."""
    page.text(f"`{one.claim.id}` in the {WORLD_NAMES[one.world]}: {one.claim.rule.words()}. {_arms(one.claim)}")
    if one.verdict is not None:
        values = levels(one)
        if values:
            page.text(values)
        page.blocks.append(comparison_table((*one.verdict.comparisons, *by_task(one)), one.claim.asks))


def _provenance(lines: Lines, path: Path) -> str:
    if not lines:
        return "No run has finished yet."
    values = list(lines.values())
    commits = sorted({line["commit"] for line in values})
    machines = sorted({line["hardware"] for line in values})
    versions = ", ".join(f"{name} {number}" for name, number in values[0]["versions"].items())
    hours = sum(line["totals"]["seconds"] for line in values) / 3600
    rules = [line["rules"] for line in values]
    kept = "; ".join(_rules_of(digest, rules.count(digest)) for digest in sorted(set(rules)))
    return (
        f"{len(values)} runs ({hours:.1f} hours of one core in training) in `{path.name}`; commit {', '.join(commits)}; "
        f"{versions}; {'; '.join(machines)}; code `{values[0]['code']}`, rules `{rules_digest()}`: {kept}."
    )


def _rules_of(digest: str, runs: int) -> str:
    if digest == rules_digest():
        return f"{runs} runs were made under them"
    return f"{runs} runs under earlier ones, `{digest}` ({EARLIER_RULES.get(digest, 'the difference is not recorded')})"


def _arms(claim: Claim) -> str:
    def options(changes: Arm) -> str:
        return " ".join(f"--{name.replace('_', '-')} {_quoted(str(value))}" for name, value in changes.items()) or "defaults"

    base = f" All: {options(claim.base)}." if claim.base else ""
    return "Arms: " + "; ".join(f"{arm}: `{options(changes)}`" for arm, changes in claim.arms.items()) + "." + base


def _quoted(value: str) -> str:
    """For a shell; a value with single quotes gets double ones, which are easier to read than escapes."""
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)


def _add_figures(page: Document, judged: Sequence[Judged]) -> None:
    """Effects of all claims and questions, learning curves of the three methods, and performance profiles."""
    for title, name, asks in (("Claims at a glance", "claims", False), ("Open questions at a glance", "questions", True)):
        groups = _effects([j for j in judged if j.claim.asks == asks and j.claim.source != SELF_TEST])
        if any(groups.values()):
            page.heading(title)
            page.text(f"{COLOURS} Lines are 95% intervals; a dot alone is one seed. {'' if asks else MARK}".rstrip())
            drawn = effects(groups, {title: 1.0 for title, unit in GROUPS.items() if unit == BUDGET})
            page.blocks.append(Image(name, drawn, "Effects with intervals"))
    by_method = {world: _runs_of_methods(judged, world) for world in WORLD_NAMES}
    if not any(by_method.values()):
        return
    page.heading("Learning curves of the three methods")
    page.text("Mean over seeds of the held-out reward, with its 95% interval at every evaluation.")
    panels: dict[str, dict[str, Band]] = {}
    for world, arms in by_method.items():
        for arm, tasks in arms.items():
            for task, runs in tasks.items():
                panels.setdefault(f"{WORLD_NAMES[world]}: {task}", {})[arm] = band(runs)
    curves = bands(panels, "updates (iterations)", "held-out reward")
    page.blocks.append(Image("curves", curves, "Learning curves with intervals"))
    marks = np.linspace(0, 1, 201).tolist()
    area = MEASURES["area"].of
    assert area is not None
    shares = {
        WORLD_NAMES[world]: {
            arm: profile([[area(run) for run in runs] for runs in tasks.values()], marks).tolist() for arm, tasks in arms.items()
        }
        for world, arms in by_method.items()
    }
    page.text("Fraction of runs that reach a mean reward over training (performance profiles); tasks have equal weight.")
    page.blocks.append(Image("profiles", profiles(marks, shares, "mean reward over training"), "Performance profiles"))


def _effects(judged: Sequence[Judged]) -> dict[str, list[Effect]]:
    """Effects by unit; measures of other units are left out."""
    found: dict[str, list[Effect]] = {title: [] for title in GROUPS}
    for one in judged:
        for comparison in one.verdict.comparisons if one.verdict else ():
            for title, unit in GROUPS.items():
                if MEASURES[comparison.measure].unit == unit and (comparison.difference or unit == BUDGET):
                    found[title].append(_effect(one, comparison))
    return found


def _effect(judged: Judged, comparison: Comparison) -> Effect:
    found = comparison.estimate
    ends = (found.low, found.high) if math.isfinite(found.high) else (found.value, found.value)
    what = comparison.arms + ("" if comparison.difference else f", {comparison.label.split()[0]}")
    where = "" if judged.world == "mixture" else " (images)"
    mark = comparison.null if MEASURES[comparison.measure].unit == BUDGET and comparison.null != 1 else None
    return Effect(f"{judged.claim.id}: {what}{where}", found.value, *ends, TONES[comparison.verdict], mark)


def _runs_of_methods(judged: Sequence[Judged], world: str) -> dict[str, Mapping[str, Sequence[Line]]]:
    """Runs of the three methods by task, from the claims that have them."""
    found: dict[str, Mapping[str, Sequence[Line]]] = {}
    for one in judged:
        if one.claim.id in ("stepwise-updates", "tp-updates") and one.world == world and one.evidence:
            found |= one.evidence.runs
    return {arm: found[arm] for arm in METHODS if arm in found}


def band(runs: Sequence[Line]) -> Band:
    """The learning curve of several seeds with its interval."""
    table = np.array([column(run, "soft") for run in runs])
    found = [mean(values) for values in table.T]
    middle = [estimate.value for estimate in found]
    low = [e.low if math.isfinite(e.low) else m for e, m in zip(found, middle, strict=True)]
    high = [e.high if math.isfinite(e.high) else m for e, m in zip(found, middle, strict=True)]
    return Band(column(runs[0], "iteration"), middle, np.clip(low, 0, 1).tolist(), np.clip(high, 0, 1).tolist())
