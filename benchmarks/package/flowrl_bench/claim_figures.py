"""The figures of the claims' page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.diagnostics.statistics import Estimate, interquartile_mean, level, profile
from flowrl_bench.claim_plots import Band, Effect, bands, effects, profiles
from flowrl_bench.document import Document, Picture
from flowrl_bench.evidence import column
from flowrl_bench.tables import TONES, WORLD_WORDS, Judged
from flowrl_bench.verdicts import Comparison, Needs

COLOURS = "Green: holds, or better. Orange: does not hold, or worse. Grey: undecided, or no difference that matters."
MARK = "A black mark is the share that the claim asks for at most."
REWARD, DENSITY, SHARE = "difference in reward", "difference in log-density", "share of the baseline's budget"
Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def add_pictures(page: Document, judged: Sequence[Judged]) -> None:
    """Effects of all claims and questions, learning curves of the three methods, profiles."""
    for title, name, asks in (("Claims at a glance", "claims", False), ("Open questions at a glance", "questions", True)):
        groups = _groups([j for j in judged if j.claim.asks == asks and j.claim.source != "self-test"])
        if any(groups.values()):
            page.heading(title)
            page.text(f"{COLOURS} Lines are 95% intervals; a dot alone is one seed. {'' if asks else MARK}".rstrip())
            page.blocks.append(Picture(name, effects(groups), "Effects with intervals"))
    curves = _method_curves(judged)
    if curves:
        page.heading("Learning curves of the three methods")
        page.text("Interquartile mean over seeds of the held-out reward, with its 95% interval at every evaluation.")
        page.blocks.append(
            Picture("curves", bands(curves, "updates (iterations)", "held-out reward"), "Learning curves with intervals")
        )
        marks = np.linspace(0, 1, 201)
        panels = {
            WORLD_WORDS[world]: {arm: profile(values, marks.tolist()).tolist() for arm, values in _areas(judged, world).items()}
            for world in ("mixture", "shapes")
        }
        page.text("How many runs reach a mean reward over training (performance profiles); tasks weigh alike.")
        page.blocks.append(
            Picture("profiles", profiles(marks.tolist(), panels, "mean reward over training"), "Performance profiles")
        )


def _groups(judged: Sequence[Judged]) -> dict[str, list[Effect]]:
    """Effects by the unit they are measured in; what is neither a reward, a log-density nor a share has no place here."""
    found: dict[str, list[Effect]] = {REWARD: [], DENSITY: [], SHARE: []}
    for one in judged:
        for comparison in one.verdict.comparisons if one.verdict else ():
            if "share of" in comparison.text:
                found[SHARE].append(_effect(one, comparison))
            elif " minus " in comparison.text:
                found[DENSITY if "log-density" in comparison.text else REWARD].append(_effect(one, comparison))
    return found


def _effect(judged: Judged, comparison: Comparison) -> Effect:
    found, (arms, _, label) = comparison.estimate, comparison.text.partition(": ")
    ends = (found.low, found.high) if math.isfinite(found.high) else (found.value, found.value)
    what = f"{arms}, {label.split()[0]}" if "share of" in label else arms
    where = "" if judged.world == "mixture" else " (images)"
    mark = judged.claim.rule.at_most if isinstance(judged.claim.rule, Needs) else None
    return Effect(f"{judged.claim.id}: {what}{where}", found.value, *ends, TONES[comparison.verdict], mark)


def _runs_of_methods(judged: Sequence[Judged], world: str) -> Runs:
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


def method_bands(runs: Runs) -> dict[str, Band]:
    """A band per arm, of its first task."""
    return {arm: _band(next(iter(tasks.values()))) for arm, tasks in runs.items()}


def _band(runs: Sequence[Mapping[str, Any]]) -> Band:
    table = np.array([column(run, "soft") for run in runs])
    found: list[Estimate] = [level([table[:, i]]) for i in range(table.shape[1])]
    middle = [float(interquartile_mean(table[:, i])) for i in range(table.shape[1])]
    low = [e.low if math.isfinite(e.low) else m for e, m in zip(found, middle, strict=True)]
    high = [e.high if math.isfinite(e.high) else m for e, m in zip(found, middle, strict=True)]
    return Band(column(runs[0], "iteration"), middle, np.clip(low, 0, 1).tolist(), np.clip(high, 0, 1).tolist())


def _areas(judged: Sequence[Judged], world: str) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    for one in judged:
        if one.claim.id in ("stepwise-updates", "tp-updates") and one.world == world and one.evidence:
            for arm in one.evidence.runs:
                found[arm] = one.evidence.values(arm, "area")
    return found
