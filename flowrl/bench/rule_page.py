"""Findings of a comparison of a rule with tuned baselines: a sentence per world, tables for a
terminal, and a page.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowrl.bench.arms import WORLDS, is_tuned, world_label
from flowrl.bench.evidence import Evidence, Line, curves, spent
from flowrl.bench.judging import (
    ALIKE,
    ALPHA,
    BARELY_BETTER,
    BARELY_WORSE,
    UNDECIDED,
    VERDICTS,
    Compare,
    Comparison,
    gain,
    judge_family,
)
from flowrl.bench.page import Document, Image, Table
from flowrl.bench.rule_figures import curves_figure, search_figure
from flowrl.bench.rule_headroom import Headroom, headroom, worlds_table
from flowrl.bench.rule_headroom import sentence as headroom_sentence
from flowrl.bench.rule_plan import ORACLE, Part
from flowrl.bench.statistics import SMALLEST, detectable
from flowrl.bench.tune import BUDGET, Tried, level
from flowrl.bench.tune import BUDGETS as SEARCHES
from flowrl.compare.bounds import Bound
from flowrl.compare.conclusion import joined
from flowrl.compare.target import CostRatio, cost_ratio
from flowrl.run.costs import STATED_NAME
from flowrl.run.statistics import mean

TITLE = " against tuned baselines"
"""The end of the page's title."""
BUDGETS = {
    "updates": "area",
    "evaluations": "reward at equal forwards",
    "stated seconds": "reward at equal stated seconds",
}
"""The measure at equal budgets; evaluations are forward equivalents, stated seconds those of the
stated model for the same work.
"""
AXES = {"updates": "updates", "evaluations": "forwards", "stated seconds": "stated seconds"}
"""The same budgets in `flowrl.bench.evidence.spent`."""
SHORT_WORDS = {
    ALIKE: "no difference",
    UNDECIDED: "undecided",
    BARELY_BETTER: "barely better",
    BARELY_WORSE: "barely worse",
}


@dataclass(frozen=True)
class Finding:
    """The rule minus a baseline at an equal budget. `visible`: the smallest difference that would
    have been found with a probability of 80% at this spread and number of seeds, at the strictest
    level of Holm's correction; `alone`: without it.
    """

    baseline: str
    budget: str
    comparison: Comparison
    visible: float
    alone: float


@dataclass(frozen=True)
class World:
    """The results in a world: the runs, the values at which every arm ran, the searches that were
    made here by arm, exact credit, and the findings.
    """

    part: Part
    evidence: Evidence
    values: Mapping[str, Mapping[str, float]]
    searches: Mapping[str, Sequence[Tried]] = field(default_factory=dict)
    bound: Bound | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """The world and the number of seeds in words."""
        return f"{world_label(self.part.world)}, {len(self.evidence.seeds)} seeds"

    @property
    def title(self) -> str:
        """`name` at the beginning of a sentence."""
        return self.name[0].upper() + self.name[1:]

    @property
    def gain(self) -> float:
        """The possible gain."""
        return gain(self.part.world, self.evidence)

    def headroom(self, rule: str) -> Headroom | None:
        """The headroom by the arms other than the rule."""
        runs = {arm: lines for arm, lines in self.evidence.runs.items() if arm != rule}
        return headroom(Evidence(runs, self.evidence.seeds), SMALLEST * self.gain, self.bound)

    def ratio(self, rule: str, baseline: str, budget: str) -> CostRatio:
        """The cost of the rule until a baseline's result, its mean final reward, divided by the
        baseline's own.
        """
        runs = self.evidence.runs
        both = (curves(runs[arm], AXES[budget]) for arm in (rule, baseline))
        return cost_ratio([(next(both), next(both))])

    def tells(self, rule: str) -> str:
        """Whether a rule can be judged here, in a sentence."""
        has_exact = self.part.world in ORACLE.worlds
        return headroom_sentence(world_label(self.part.world), self.headroom(rule), has_exact)

    def untuned(self, rule: str) -> list[str]:
        """The arms whose settings were not searched in this world."""
        searched = {rule} if self.part.world in WORLDS else set(self.evidence.runs)
        tuned = {
            arm: bool(self.part.budget) if arm in searched else is_tuned(self.part.world, arm)
            for arm in self.evidence.runs
        }
        return [arm for arm in tuned if not tuned[arm]]


def judged(rule: str, worlds: Sequence[World]) -> list[World]:
    """The worlds with findings: the rule against every baseline at every budget, one family over
    all worlds.
    """
    cases = [
        (world, baseline, budget)
        for world in worlds
        for baseline in world.part.baselines
        for budget in BUDGETS
    ]
    comparisons = [
        Compare(rule, baseline, BUDGETS[budget]).compare(world.evidence, world.gain)
        for world, baseline, budget in cases
    ]
    findings: dict[str, list[Finding]] = {world.part.world: [] for world in worlds}
    for (world, baseline, budget), comparison in zip(cases, judge_family(comparisons), strict=True):
        differences = world.evidence.differences(rule, baseline, BUDGETS[budget])
        spread = float(differences.std(ddof=1)) if len(differences) > 1 else math.inf
        visible, alone = (
            detectable(spread, len(differences), ALPHA / share) for share in (2 * len(cases), 1)
        )
        findings[world.part.world].append(Finding(baseline, budget, comparison, visible, alone))
    return [replace(w, findings=tuple(findings[w.part.world])) for w in worlds]


def sentence(rule: str, world: World) -> str:
    """The findings in a world; the cost until the first baseline's result; how many seeds of the
    rule collapsed; and, if a comparison is undecided, how small a difference would have been found.
    """
    patterns: dict[str, list[str]] = {}
    for baseline in dict.fromkeys(finding.baseline for finding in world.findings):
        findings = [finding for finding in world.findings if finding.baseline == baseline]
        parts = []
        for verdict in VERDICTS:
            budgets = [
                finding.budget for finding in findings if finding.comparison.verdict == verdict
            ]
            if budgets:
                parts.append(f"{verdict} at equal {joined(budgets)}")
        patterns.setdefault(", ".join(parts), []).append(baseline)
    answer = "; ".join(
        f"against {joined(baselines)}: {pattern}" for pattern, baselines in patterns.items()
    )
    lost = world.evidence.values(rule, "collapse")
    collapse = f" {rule} collapsed in {lost.sum():.0f} of {lost.size} seeds." if lost.sum() else ""
    first = world.part.baselines[0]
    ratio = world.ratio(rule, first, "evaluations").text()
    cost = f" Evaluations until {first}'s final reward, over those of {first} until then: {ratio}."
    return f"{world.title}. {rule} {answer}.{cost}{collapse}{_power(world)}"


def _power(world: World) -> str:
    """How small a difference would have been found; empty if every comparison is decided."""
    if all(finding.comparison.verdict != UNDECIDED for finding in world.findings):
        return ""
    visible, alone = (
        [getattr(finding, name) for finding in world.findings] for name in ("visible", "alone")
    )
    text = (
        f" Differences in mean reward of {_range(visible)} ({_range(alone)} without the correction)"
    )
    return f"{text} would have been found with a probability of 80%."


def _words(knob: str) -> str:
    return knob.replace("_", " ")


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def terminal(rule: str, worlds: Sequence[World]) -> str:
    """The findings and the arms of every world, in 80 columns."""
    lines: list[str] = []
    for world in worlds:
        lines += [f"{world.title}; rule minus baseline, mean reward over training at equal"]
        lines += [" " * 17 + "".join(f"{budget:<21}" for budget in BUDGETS).rstrip()]
        for baseline in world.part.baselines:
            cells = [f.comparison for f in world.findings if f.baseline == baseline]
            words = [SHORT_WORDS.get(c.verdict, c.verdict) for c in cells]
            texts = [f"{c.estimate.value:+.3f} {w}" for c, w in zip(cells, words, strict=True)]
            lines += [f"{baseline:<17}" + "".join(f"{cell:<21}" for cell in texts).rstrip()]
        lines += [f"cost of {rule[:30]} until a baseline's final reward, over the baseline's"]
        for baseline, cells in _ratio_rows(world, rule):
            lines += [f"{baseline:<17}" + "".join(f"{cell:<21}" for cell in cells).rstrip()]
        lines += [f"{'arm':<27}{'mean reward [95%]':<27}{'worst seed':<12}collapsed"]
        for arm in world.evidence.runs:
            name = arm if len(arm) < 27 else f"{arm[:23]}..."
            _, area, lost, worst = _arm_row(world, arm)
            lines += [f"{name:<27}{area:<27}{worst:<12}{lost}"]
        lines += [""]
    return "\n".join(lines[:-1])


def _ratio_rows(world: World, rule: str) -> list[tuple[str, list[str]]]:
    """By baseline, the ratios of costs at every budget as texts."""
    return [
        (baseline, [world.ratio(rule, baseline, budget).text() for budget in BUDGETS])
        for baseline in world.part.baselines
    ]


def rule_page(rule: str, spec: str, worlds: Sequence[World], made: str) -> Document:
    """The page: the sentences, and per world the arms, the verdicts, learning curves, costs and the
    search.
    """
    page = Document(f"{rule}{TITLE}", kind=TITLE)
    for world in worlds:
        page.text(sentence(rule, world))
        page.text(world.tells(rule))
        if untuned := world.untuned(rule):
            page.text(
                f"Not tuned in the {world_label(world.part.world)}: {joined(untuned)}."
                f" {_untuned_note(rule, untuned)}"
            )
    for world in worlds:
        _section(page, rule, world)
    page.heading("Headroom")
    page.blocks.append(known_headroom(rule, worlds))
    page.text(
        "Headroom is the lead of exact credit over uniform credit in mean reward over training,"
        " both tuned; what exact values cost does not count. It indicates what a rule can gain, and"
        " is no strict bound. Without exact credit, the lead of the best baseline is the least that"
        " is known. A world cannot tell rules apart if the upper bound of the headroom is below the"
        " smallest difference that matters and exact credit never collapsed; it can if the headroom"
        " is at least twice that difference and its interval excludes 0."
    )
    for world in worlds:
        if world.bound is not None:
            page.text(
                f"The curves of exact credit in the {world_label(world.part.world)} were made by"
                f" `{world.bound.command}`."
            )
    page.heading("Method")
    page.text(
        "Every comparison pairs runs of one seed. Mean reward over training is the mean of the"
        " held-out learning curve up to the budget that both arms have spent: updates, network"
        f" evaluations (forward equivalents), or seconds of {STATED_NAME} for the same numbers of"
        " evaluations, decodes and scores, with guidance, by counted FLOPs. All"
        " comparisons of the rule on this page are one family with Holm's correction; the smallest"
        " difference that matters is 5% of what can be gained in the world (`docs/verdict.md`). A"
        " run collapsed if it ends more than 0.1 below its best reward, or more than 0.02 below its"
        " first."
    )
    page.text(
        f"The rule is `{spec}`. Its settings were searched as those of the baselines were (`flowrl"
        f" bench tune`, {SEARCHES['mixture']} runs per arm in the 2-D world and {BUDGET} in others;"
        " the tables of settings show how many the rule had), with seeds that no result has. Half"
        " of the runs repeat the two best settings. Evaluations are forward equivalents: an"
        " evaluation with a gradient counts three, decodes and reward calls count by their FLOPs."
    )
    page.text(f"Made by `{made}`.")
    return page


def known_headroom(rule: str, worlds: Sequence[World]) -> Table:
    """The headroom of the worlds as numbers, for the page, CSV and LaTeX."""
    return worlds_table({world_label(w.part.world): w.headroom(rule) for w in worlds})


def findings_table(worlds: Sequence[World]) -> Table:
    """The findings as numbers, for CSV and LaTeX."""
    head = ("world", "baseline", "budget", "verdict", "difference", "low", "high", "p", "seeds")
    rows = [
        (
            world_label(world.part.world),
            finding.baseline,
            finding.budget,
            finding.comparison.verdict,
            *(
                f"{getattr(finding.comparison.estimate, end):.4f}"
                for end in ("value", "low", "high")
            ),
            "" if math.isnan(finding.comparison.p) else f"{finding.comparison.p:.2g}",
            str(len(world.evidence.seeds)),
        )
        for world in worlds
        for finding in world.findings
    ]
    return Table(head, rows)


def _untuned_note(rule: str, untuned: Sequence[str]) -> str:
    """The settings of the untuned arms."""
    notes = ["The rule has the settings of uniform credit."] if rule in untuned else []
    return " ".join(
        [
            *notes,
            *(
                ["The untuned baselines have the start of the search's grid."]
                if set(untuned) - {rule}
                else []
            ),
        ]
    )


def _section(page: Document, rule: str, world: World) -> None:
    """A world's tables and figure."""
    page.heading(world.title)
    arms = world.evidence.runs
    first = world.part.baselines[0]
    head = ("arm", "mean reward over training", "collapsed", "worst seed")
    page.blocks.append(Table(head, [_arm_row(world, arm) for arm in arms]))
    head = (
        "the rule minus",
        "at equal",
        "verdict",
        "difference",
        "p",
        "seeds won",
        "visible with 80% power",
        "without correction",
    )
    page.blocks.append(Table(head, [_finding_row(finding) for finding in world.findings]))
    page.text(
        "The cost of the rule until a baseline's result, its mean final reward, divided by the"
        " baseline's own cost (> 0.39: not reached when the runs ended, at 0.39):"
    )
    rows = [(baseline, *cells) for baseline, cells in _ratio_rows(world, rule)]
    page.blocks.append(Table(("until the result of", *BUDGETS), rows))
    caption = (
        f"Learning curves at equal updates, network evaluations and seconds of {STATED_NAME},"
        f" {world.name}"
    )
    file = f"rule-{re.sub(r'[^a-z0-9]+', '-', world.part.world.lower())}"
    page.blocks.append(Image(file, curves_figure(arms, world.bound), caption))
    dashed = " Dashed: exact credit, at the cost of uniform credit." if world.bound else ""
    page.text(f"{caption}: the mean over seeds, and the band of its 95% interval.{dashed}")
    page.text("The settings of every arm:")
    page.blocks.append(_settings(world, rule))
    if world.searches:
        caption = f"Scores of the runs of the search, {world_label(world.part.world)}"
        page.blocks.append(Image(f"{file}-search", search_figure(world.searches), caption))
        page.text(
            f"{caption} (mean held-out reward over training, or the last one if it is lower)."
            " Open: the seeds of every setting; filled: further seeds; coloured: the chosen"
            " setting. The dotted line is the number that chooses: the lower of mean and lower"
            " quartile over its further seeds."
        )
    for arm, settings in world.searches.items():
        page.text(f"The settings that the search for {arm} tried:")
        page.blocks.append(_search_table(settings))
    base, rows = _cost(arms[first]), []
    for arm, lines in arms.items():
        costs = _cost(lines)
        ratios = [f"{cost / reference:.2f}" for cost, reference in zip(costs, base, strict=True)]
        nfe, stated, seconds = costs
        rows.append((arm, f"{nfe:.0f}", f"{stated:.1f}", f"{seconds:.3f}", *ratios))
    units = ("evaluations", f"seconds of {STATED_NAME}", "processor seconds")
    page.text(f"Costs of every arm, also as multiples of those of {first}:")
    head = (*(f"{u} per update" for u in units), *(f"{u} over {first}'s" for u in units))
    page.blocks.append(Table(("arm", *head), rows))


def _search_table(settings: Sequence[Tried]) -> Table:
    """The settings of a search with their scores."""
    seeds = max(len(trial.first) for trial in settings)
    first_column = "first seed" if seeds == 1 else f"mean of the first {seeds} seeds"
    head = (first_column, "further seeds", "mean or quartile", "range", "chosen")
    rows = []
    for trial in settings:
        more = [*trial.further.values()]
        cells = [f"{np.mean([*trial.first.values()]):.3f}", str(len(more)), "-", "-"]
        if more:
            cells[2:] = [f"{level(more):.3f}", _range(more)]
        values = [f"{value:g}" for value in trial.values.values()]
        rows.append((*values, *cells, "yes" if trial.chosen else ""))
    return Table((*map(_words, settings[0].values), *head), rows)


def _arm_row(world: World, arm: str) -> tuple[str, ...]:
    area, lost = world.evidence.values(arm, "area"), world.evidence.values(arm, "collapse")
    return arm, mean(area).text(), f"{lost.sum():.0f} of {lost.size}", f"{area.min():.3f}"


def _settings(world: World, rule: str) -> Table:
    """The settings of every arm."""
    knobs = list(dict.fromkeys(knob for values in world.values.values() for knob in values))
    untuned = world.untuned(rule)
    rows = [
        (
            arm,
            *(f"{values[knob]:g}" if knob in values else "-" for knob in knobs),
            "no" if arm in untuned else "yes",
        )
        for arm, values in world.values.items()
    ]
    return Table(("arm", *map(_words, knobs), "tuned"), rows)


def _finding_row(finding: Finding) -> tuple[str, ...]:
    c = finding.comparison
    won = f"{100 * c.won:.0f}%"
    p = "-" if math.isnan(c.p) else "< .001" if c.p < 1e-3 else f"{c.p:.3f}"
    visible = (f"{finding.visible:.3f}", f"{finding.alone:.3f}")
    return finding.baseline, finding.budget, c.verdict, c.estimate.text(3, True), p, won, *visible


def _cost(lines: Sequence[Line]) -> tuple[float, ...]:
    """Forward equivalents, seconds of the stated model, and processor seconds per update."""
    updates = sum(spent(line, "updates")[-1] for line in lines)
    axes = ("forwards", "stated seconds", "seconds")
    return tuple(sum(spent(line, axis)[-1] for line in lines) / updates for axis in axes)
