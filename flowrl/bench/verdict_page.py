"""The charts of the verdict, and its numbers as rows of two tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flowrl.bench.judging import (
    ALIKE,
    BARELY_BETTER,
    BARELY_WORSE,
    BETTER,
    WORSE,
    Comparison,
)
from flowrl.bench.statistics import SMALLEST
from flowrl.bench.verdict import (
    CONTROLS,
    PER_EVALUATION,
    PER_SECOND,
    PER_UPDATE,
    QUESTIONS,
    Question,
    Verdicts,
)
from flowrl.bench.verdict_runs import CAMPAIGNS, ORACLE, UNIFORM, Study
from flowrl.compare.target import CostRatio
from flowrl.run.costs import STATED_NAME
from flowrl.run.report.style import COLOURS, INK, SOFT
from flowrl.run.statistics import Estimate

NAMES = {
    UNIFORM: "Flow-GRPO",
    "uniform, 10 groups": "Flow-GRPO, 10 prompts",
    "uniform, 8 groups": "Flow-GRPO, 8 prompts",
    "uniform, 6 groups": "Flow-GRPO, 6 prompts",
    ORACLE: "exact values",
    "uniform, larger groups": "Flow-GRPO, more samples",
    "noise-weighted": "weights by noise",
    "stepwise gains": "Stepwise-Flow-GRPO",
    "turning points": "TP-GRPO",
    "turning points, not the first": "TP-GRPO, not the first step",
    "turning points at random steps": "TP-GRPO, random points",
    "increments alone": "DenseGRPO",
    "tempflow-grpo": "TempFlow-GRPO",
    "granular-grpo": "Granular-GRPO",
    "rsm": "RSM",
    "branch-grpo": "BranchGRPO",
    "tree-grpo": "TreeGRPO",
    "diffusion-nft": "DiffusionNFT",
    "awm": "AWM",
    "dgpo": "DGPO",
    "v-grpo": "V-GRPO",
    "fdfo": "FDFO",
    "epg": "EPG",
    "step-nft": "pi-StepNFT",
    "calibrated values": "calibrated values (ours)",
}
"""The arms by the names of the papers."""
BUDGETS = {
    PER_UPDATE: "update",
    PER_EVALUATION: "forward equivalent",
    PER_SECOND: f"second of {STATED_NAME}",
}
SHADES = {
    BETTER: COLOURS["tp-grpo"],
    BARELY_BETTER: COLOURS["tp-grpo"],
    WORSE: COLOURS["stepwise-flow-grpo"],
    BARELY_WORSE: COLOURS["stepwise-flow-grpo"],
    ALIKE: INK,
}
"""Colours of verdicts; the others are `SOFT`."""
RANGE = 0.2, 4.0
"""Ratios of costs that are drawn."""
PANELS = {"points": "synthetic", "images": "images"}


def named(arm: str) -> str:
    """An arm by the name of its paper."""
    return NAMES.get(arm, arm)


def _rows(axes: Axes, arms: Sequence[str], title: str) -> None:
    """A panel with a row per arm."""
    axes.set_yticks(range(len(arms)), [named(arm) for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e6ea", linewidth=0.8)


def _ratio(axes: Axes, ratio: CostRatio, place: int, shade: str) -> None:
    """A ratio with its interval; of an arm that does not arrive, what it is more than."""
    if math.isfinite(ratio.value):
        ends = max(ratio.low, RANGE[0]), min(ratio.high, RANGE[1])
        axes.plot(ends, [place, place], color=shade, linewidth=2, solid_capstyle="butt")
        axes.plot(ratio.value, place, "o", color=shade)
    elif ratio.more < RANGE[1]:
        axes.plot(ratio.more, place, ">", color=SOFT, markerfacecolor="white")


def costs_figure(verdicts: Verdicts, title: str) -> Figure:
    """The cost of every arm until Flow-GRPO's result as a multiple of Flow-GRPO's, in seconds of
    the stated model: by task, and the geometric mean, by which arms are sorted.
    """
    arms = [arm for arm in verdicts.arms if arm not in (UNIFORM, ORACLE)]
    means = {arm: verdicts.ratio(arm, PER_SECOND) for arm in arms}
    arms.sort(key=lambda arm: (math.isinf(means[arm].value), means[arm].value, means[arm].more))
    panels = {"all tasks": (), **{task: (task,) for task in verdicts.pairs}}
    figure = Figure(figsize=(10.5, 1.5 + 0.27 * len(arms)), layout="constrained")
    every = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (label, tasks) in zip(every, panels.items(), strict=True):
        axes.axvline(1, color=INK, linewidth=1)
        for place, arm in enumerate(arms):
            ratio = verdicts.ratio(arm, PER_SECOND, tasks) if tasks else means[arm]
            sure = ratio.high < 1 or ratio.low > 1
            shade = COLOURS["tp-grpo" if ratio.value < 1 else "stepwise-flow-grpo"]
            _ratio(axes, ratio, place, shade if sure else SOFT)
        axes.set_xscale("log")
        axes.set_xlim(*RANGE)
        axes.set_xticks([0.25, 0.5, 1, 2], ["¼", "½", "1", "2"])
        axes.minorticks_off()
        _rows(axes, arms, label)
    figure.suptitle(title, fontsize=12)
    marks = [
        Line2D([], [], color=COLOURS["tp-grpo"], marker="o", linewidth=2, label="cheaper"),
        Line2D(
            [], [], color=COLOURS["stepwise-flow-grpo"], marker="o", linewidth=2, label="dearer"
        ),
        Line2D([], [], color=SOFT, marker="o", linewidth=2, label="interval contains 1"),
        Line2D(
            [],
            [],
            color=SOFT,
            marker=">",
            markerfacecolor="white",
            linestyle="",
            label="not reached when its runs end: more than this",
        ),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, verdicts: Verdicts, arms: Sequence[str], title: str) -> None:
    answers = {(q.arm, q.budget, q.than): c for q, c in verdicts.answers()}
    axes.axvspan(-100 * SMALLEST, 100 * SMALLEST, color="#eef0f3", zorder=0)
    axes.axvline(0, color=INK, linewidth=1)
    for place, arm in enumerate(arms):
        budget = PER_UPDATE if arm == ORACLE else PER_SECOND
        answer = answers.get((arm, budget, UNIFORM))
        shade, face = SOFT, "white"
        lead = verdicts.lead(arm, UNIFORM, budget) if arm in verdicts.arms else None
        if answer is not None:
            shade = face = SHADES.get(answer.verdict, SOFT)
        if lead is None:
            axes.text(0, place, " unknown", va="center", fontsize=8, color=SOFT)
            continue
        axes.plot([100 * lead.low, 100 * lead.high], [place, place], color=shade, linewidth=2)
        marker = "D" if arm == ORACLE else "o"
        axes.plot(100 * lead.value, place, marker, color=shade, markerfacecolor=face)
    _rows(axes, arms, title)


def leads_figure(worlds: Mapping[str, Verdicts]) -> Figure:
    """The lead of every arm with a verdict at equal seconds, and that of exact values at equal
    updates; shaded: differences that do not matter.
    """
    first = next(iter(worlds.values()))
    arms = [q.arm for q in QUESTIONS if q.budget == PER_SECOND and q.arm in first.arms]
    arms += [q.arm for q in CONTROLS if q.than == UNIFORM and q.arm in first.arms]
    arms.sort(key=lambda arm: -first.lead(arm, UNIFORM, PER_SECOND).value)
    rows = [ORACLE, *arms]
    figure = Figure(figsize=(3.2 + 3.2 * len(worlds), 1.6 + 0.3 * len(rows)), layout="constrained")
    (panels,) = figure.subplots(1, len(worlds), squeeze=False, sharex=True, sharey=True)
    for axes, (name, verdicts) in zip(panels, worlds.items(), strict=True):
        tasks = len(verdicts.pairs)
        title = f"{PANELS[name]}, {tasks} tasks, {verdicts.seeds} seeds"
        _draw(axes, verdicts, rows, title)
    figure.suptitle(f"Lead over Flow-GRPO at equal cost ({STATED_NAME}), %", fontsize=12)
    marks = [
        *(
            Line2D([], [], color=SHADES[verdict], marker="o", linewidth=2, label=verdict)
            for verdict in (BETTER, WORSE)
        ),
        Line2D([], [], color=INK, marker="o", linewidth=2, label="too small to matter"),
        Line2D([], [], color=SOFT, marker="o", linewidth=2, label="undecided"),
        Line2D([], [], color=SOFT, marker="o", mfc="white", label="control, added later"),
        Line2D(
            [],
            [],
            color=COLOURS["tp-grpo"],
            marker="D",
            linestyle="",
            label="exact values: at equal updates",
        ),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _percent(lead: Estimate, name: str = "lead") -> dict[str, str]:
    """A lead with its interval, in percent of what can be gained."""
    ends = {name: lead.value, f"{name} low": lead.low, f"{name} high": lead.high}
    return {label: f"{100 * value:.2f}" for label, value in ends.items()}


def _ends(ratio: CostRatio, name: str) -> dict[str, str]:
    """A ratio of costs with its interval; of an arm that does not arrive, what it is more than."""
    if math.isinf(ratio.value):
        return {name: f"> {ratio.more:.3f}", f"{name} low": "", f"{name} high": ""}
    ends = {name: ratio.value, f"{name} low": ratio.low, f"{name} high": ratio.high}
    return {label: f"{value:.3f}" for label, value in ends.items()}


def _asked(question: Question, answer: Comparison) -> dict[str, str]:
    lead, (p, outside) = answer.estimate, answer.adjusted or (float("nan"),) * 2
    return {
        "arm": named(question.arm),
        "than": named(question.than),
        "at equal": BUDGETS[question.budget],
        **_percent(lead),
        "p, difference": f"{p:.4f}",
        "p, margin": f"{outside:.4f}",
        "seeds won": f"{answer.won:.2f}",
        "verdict": answer.verdict if lead.p == lead.p else "no verdict: too few seeds",
    }


def question_rows(worlds: Mapping[str, Verdicts]) -> Iterator[dict[str, str]]:
    """A row per question, with its verdict, and per control, which has none (`SECONDARY`). All
    controls but the last were asked after the first runs in two dimensions had been seen.
    """
    for name, verdicts in worlds.items():
        for question, answer in (*verdicts.answers(), *verdicts.controls()):
            yield {"world": name, **_asked(question, answer)}


def arm_rows(worlds: Mapping[str, tuple[Verdicts, Study]]) -> Iterator[dict[str, Any]]:
    """A row per arm, averaged over tasks ("all") and in every task: mean and final reward,
    collapsed runs, the cost until Flow-GRPO's result ("until equal") and the cost of an update as
    multiples of Flow-GRPO's, the leads over it, and the searched settings.
    """
    for name, (verdicts, study) in worlds.items():
        chosen = study.values()
        for task in ("all", *verdicts.pairs):
            for arm in verdicts.arms:
                summary = verdicts.arm(arm, () if task == "all" else (task,))
                ratios: dict[str, str] = {}
                for budget, ratio in summary.ratios.items():
                    ratios |= _ends(ratio, f"until equal per {BUDGETS[budget]}")
                leads: dict[str, str] = {}
                for budget, lead in summary.leads.items():
                    leads |= _percent(lead, f"lead per {BUDGETS[budget]}")
                settings = chosen.get((task, arm), {})
                yield {
                    "world": name,
                    "task": task,
                    "arm": named(arm),
                    "mean": f"{summary.mean:.4f}",
                    "final": f"{summary.final:.4f}",
                    "collapsed": summary.collapses,
                    "runs": summary.runs,
                    **{f"cost per {BUDGETS[b]}": f"{c:.3f}" for b, c in summary.costs.items()},
                    **ratios,
                    **leads,
                    "settings": ", ".join(f"{knob}={value:g}" for knob, value in settings.items()),
                }


def summary(worlds: Mapping[str, Verdicts]) -> str:
    """A line per arm that reaches Flow-GRPO's result, cheapest first, and a line per question."""
    lines = list[str]()
    for name, verdicts in worlds.items():
        found = {arm: verdicts.ratio(arm, PER_SECOND) for arm in verdicts.arms if arm != UNIFORM}
        for arm, ratio in sorted(found.items(), key=lambda entry: entry[1].value):
            if math.isfinite(ratio.value):
                lines.append(
                    f"{CAMPAIGNS[name].label}: {named(arm)}, cost until Flow-GRPO's result divided"
                    f" by Flow-GRPO's: {ratio.text()}"
                )
    return "\n".join(
        lines
        + [
            f"{CAMPAIGNS[row['world']].label}: {row['arm']} against {row['than']}, per"
            f" {row['at equal']}: {row['lead']}% [{row['lead low']}, {row['lead high']}];"
            f" {row['verdict']}"
            for row in question_rows(worlds)
        ]
    )
