"""The pages of the main comparison: its chart, and every number behind it."""

from collections.abc import Mapping, Sequence

from flowrl_compare.costs import STATED, STATED_NAME
from flowrl_compare.statistics import BELOW_START, COLLAPSE
from flowrl_compare.style import COLOURS, INK, SOFT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flowrl_bench.headroom import MARGIN, HeadroomStudy
from flowrl_bench.page import Document, Image, Table, dot_plot_axes
from flowrl_bench.tune import chosen_settings
from flowrl_bench.verdict import (
    CAMPAIGNS,
    CONTROLS,
    EXACT,
    PER_EVALUATION,
    PER_SECOND,
    PER_UPDATE,
    QUESTIONS,
    UNIFORM,
    Verdicts,
)
from flowrl_bench.verdicts import (
    ALIKE,
    BARELY_BETTER,
    BARELY_WORSE,
    BETTER,
    WORSE,
    Comparison,
)

TITLE = "Verdict: every number"
NAMES = {
    UNIFORM: "Flow-GRPO",
    "uniform, 10 groups": "Flow-GRPO, 10 prompts",
    "uniform, 8 groups": "Flow-GRPO, 8 prompts",
    "uniform, 6 groups": "Flow-GRPO, 6 prompts",
    EXACT: "exact values",
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
    PER_SECOND: "second",
}
SHADES = {
    BETTER: COLOURS["tp-grpo"],
    BARELY_BETTER: COLOURS["tp-grpo"],
    WORSE: COLOURS["stepwise-flow-grpo"],
    BARELY_WORSE: COLOURS["stepwise-flow-grpo"],
    ALIKE: INK,
}
"""Colours of verdicts; the others are `SOFT`."""
PANELS = {"points": "synthetic", "images": "images"}
MARKS = {"better": COLOURS["tp-grpo"], "worse": COLOURS["stepwise-flow-grpo"]}
ALT = "Lead of each method over Flow-GRPO at equal cost, with intervals, in both worlds"


def named(arm: str) -> str:
    """An arm by the name of its paper."""
    return NAMES.get(arm, arm)


def _draw(axes: Axes, verdicts: Verdicts, arms: Sequence[str], title: str) -> None:
    answers = {(q.arm, q.budget, q.than): c for q, c in verdicts.answers()}
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="#eef0f3", zorder=0)
    axes.axvline(0, color=INK, linewidth=1)
    for place, arm in enumerate(arms):
        budget = PER_UPDATE if arm == EXACT else PER_SECOND
        answer = answers.get((arm, budget, UNIFORM))
        shade, face = SOFT, "white"
        lead = verdicts.lead(arm, UNIFORM, budget) if arm in verdicts.arms else None
        if answer is not None:
            shade = face = SHADES.get(answer.verdict, SOFT)
        if lead is None:
            axes.text(0, place, " unknown", va="center", fontsize=8, color=SOFT)
            continue
        axes.plot([100 * lead.low, 100 * lead.high], [place, place], color=shade, linewidth=2)
        marker = "D" if arm == EXACT else "o"
        axes.plot(100 * lead.value, place, marker, color=shade, markerfacecolor=face)
    dot_plot_axes(axes, [named(arm) for arm in arms], title)


def leads_figure(worlds: Mapping[str, Verdicts]) -> Figure:
    """The lead of every arm with a verdict at equal seconds, and that of exact values at equal
    updates; shaded: differences that do not matter.
    """
    first = next(iter(worlds.values()))
    arms = [q.arm for q in QUESTIONS if q.budget == PER_SECOND and q.arm in first.arms]
    arms += [q.arm for q in CONTROLS if q.than == UNIFORM and q.arm in first.arms]
    arms.sort(key=lambda arm: -first.lead(arm, UNIFORM, PER_SECOND).value)
    rows = [EXACT, *arms]
    figure = Figure(figsize=(3.2 + 3.2 * len(worlds), 1.6 + 0.3 * len(rows)), layout="constrained")
    (panels,) = figure.subplots(1, len(worlds), squeeze=False, sharex=True, sharey=True)
    for axes, (name, verdicts) in zip(panels, worlds.items(), strict=True):
        tasks = len(verdicts.pairs)
        title = f"{PANELS[name]}, {tasks} tasks, {verdicts.seeds} seeds"
        _draw(axes, verdicts, rows, title)
    figure.suptitle(f"Lead over Flow-GRPO at equal cost ({STATED_NAME}), %", fontsize=12)
    marks = [
        *(
            Line2D([], [], color=shade, marker="o", linewidth=2, label=label)
            for label, shade in MARKS.items()
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


def _question(budget: str, comparison: Comparison, arm: str, than: str) -> list[str]:
    lead, adjusted = comparison.estimate, comparison.adjusted or (1.0, 1.0)
    numbers = [f"{100 * n:+.1f}" for n in (lead.value, lead.low, lead.high)]
    return [
        f"{named(arm)} against {named(than)}",
        BUDGETS[budget],
        f"{numbers[0]} [{numbers[1]}, {numbers[2]}]",
        *(f"{p:.4f}" for p in adjusted),
        f"{100 * (comparison.won or 0):.0f}%",
        comparison.verdict if lead.p == lead.p else "no verdict: too few seeds",
    ]


def controls_table(verdicts: Verdicts) -> Table:
    """The secondary questions."""
    head = ["question", "at equal", "lead, %", "seeds won"]
    rows = [_question(q.budget, c, q.arm, q.than) for q, c in verdicts.controls()]
    return Table(head, [[*row[:3], row[5]] for row in rows], ("question",))


def answers_table(verdicts: Verdicts) -> Table:
    """The questions with a verdict."""
    head = ["question", "at equal", "lead, %", "p, difference", "p, margin", "seeds won", "verdict"]
    rows = [_question(q.budget, c, q.arm, q.than) for q, c in verdicts.answers()]
    return Table(head, rows, ("question", "verdict"))


def arms_table(verdicts: Verdicts, tasks: Sequence[str] = ()) -> Table:
    """All arms, averaged over tasks, or in some."""
    head = ["arm", "mean", "final", "collapsed", "cost", f"cost as {STATED_NAME}"]
    head += [f"lead per {words}, %" for words in BUDGETS.values()]
    rows = []
    for name in verdicts.arms:
        arm = verdicts.arm(name, tasks)
        leads = [
            f"{100 * lead.value:+.1f} [{100 * lead.low:+.1f}, {100 * lead.high:+.1f}]"
            for lead in arm.leads.values()
        ]
        rows.append(
            [
                named(name),
                f"{arm.mean:.3f}",
                f"{arm.final:.3f}",
                f"{arm.collapses} of {arm.runs}",
                *(f"{cost:.2f}" for cost in arm.costs.values()),
                *(["-"] * len(BUDGETS) if name == UNIFORM else leads),
            ]
        )
    return Table(head, rows)


def details(worlds: Mapping[str, tuple[Verdicts, HeadroomStudy]], command: str) -> Document:
    """Every number of the comparison."""
    page = Document(TITLE)
    page.text(
        "Outcomes are differences of two arms in the mean held-out reward over training, up to the"
        " budget that both have spent, in percent of what can be gained in a task: the highest mean"
        " final reward of an arm minus the reward before training. They are averaged over the"
        f" tasks within each seed; intervals (95%) are over seeds. Differences below {MARGIN:.0%}"
        " do not matter. The questions were fixed before the runs; Holm's correction covers both"
        " p-values of all questions of a world at a level of 0.025 ([rules](../verdicts.md))."
    )
    page.blocks.append(
        Image("leads", leads_figure({name: both[0] for name, both in worlds.items()}), ALT)
    )
    for name, (verdicts, study) in worlds.items():
        campaign = CAMPAIGNS[name]
        page.heading(campaign.label[0].upper() + campaign.label[1:])
        page.text(
            f"{verdicts.seeds} seeds from {campaign.size.first_seed}; tasks:"
            f" {', '.join(task.label for task in campaign.tasks.values())}. Every arm was tuned with"
            f" {campaign.size.budget} runs{' per task' if name == 'points' else ''}."
        )
        page.heading("Questions", 3)
        page.blocks.append(answers_table(verdicts))
        page.heading("Controls", 3)
        page.text(
            "Without verdicts; all but the last were asked after the first runs in two dimensions"
            " had been seen. At equal seconds an arm with cheap updates makes more of them. Flow-GRPO"
            " with 8 prompts per update instead of 16 has updates about as cheap as BranchGRPO's, with"
            " 10 as TreeGRPO's, with 6 as TempFlow-GRPO's and RSM's; with more samples per prompt they"
            " cost about as much as TP-GRPO's."
        )
        page.blocks.append(controls_table(verdicts))
        page.heading("All arms, averaged over tasks", 3)
        page.blocks.append(arms_table(verdicts))
        for task in verdicts.pairs:
            page.heading(f"Task {task}", 3)
            page.text(f"What can be gained: {verdicts.gains[task]:.3f}.")
            page.blocks.append(arms_table(verdicts, (task,)))
        page.heading("Chosen settings", 3)
        chosen = {(task, named(arm)): values for (task, arm), values in study.values().items()}
        page.blocks.append(chosen_settings(chosen))
    page.text(
        f"A run collapsed if it ends more than {COLLAPSE} below its best reward, or more than"
        f" {BELOW_START} below its first. The cost of a run is in forward equivalents of its"
        f" network, and in those of {STATED_NAME} ({STATED.source}, PickScore), as a multiple of"
        " that of Flow-GRPO. What exact values cost counts in their row and not in their question."
        " With noise on the score, exact values are those of scores without noise, so their lead"
        " includes what the noise costs. A run that diverged has rewards of 0 from there on."
        f" *{named('turning points at random steps')}* changes the credit less than TP-GRPO"
        " ([by how much](../verdict.md#the-questions))."
    )
    page.text(f"Made by `{command}`.")
    return page


def summary(worlds: Mapping[str, tuple[Verdicts, HeadroomStudy]]) -> str:
    """A line per question."""
    lines = []
    for name, (verdicts, _) in worlds.items():
        for question, answer in verdicts.answers():
            cells = _question(question.budget, answer, question.arm, question.than)
            lines.append(
                f"{CAMPAIGNS[name].label}: {cells[0]}, per {cells[1]}: {cells[2]}; {cells[-1]}"
            )
    return "\n".join(lines)
