"""The page of the headroom: the map, the table, and the table as CSV."""

import math
from collections.abc import Sequence

from flowrl_compare.costs import STATED, STATED_NAME
from flowrl_compare.paper import csv_text
from flowrl_compare.statistics import BELOW_START, COLLAPSE
from flowrl_compare.style import COLOURS, INK, SOFT
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flowrl_bench.headroom import CANNOT, MARGIN, TELLS, UNCLEAR, Row, Size
from flowrl_bench.page import Document, Image, Table, dot_plot_axes
from flowrl_bench.tune import chosen_settings

TITLE = "Headroom of credit"
SHADES = {TELLS: COLOURS["tp-grpo"], UNCLEAR: SOFT, CANNOT: COLOURS["stepwise-flow-grpo"]}
ALT = "Per task the lead of the oracle over uniform credit, in percent of what can be gained"
SETS = {
    "published": "published methods",
    "values": "cheap values",
    **dict.fromkeys(("verdict", "images"), "main comparison"),
}
"""The sets of further arms in words."""
COLUMNS = ("task", "uniform", "oracle", "start", "best", "margin", "headroom", "low", "high")


def headroom_map(rows: Sequence[Row]) -> Figure:
    """Tasks by headroom, with 95% intervals, in percent of what can be gained; open circles are
    bounds by Monte Carlo. Lines: the margin and twice the margin.
    """
    figure = Figure(figsize=(8.2, 1.7 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        scale, shade = 100 / max(row.gain, 1e-9), SHADES[row.label]
        ends = [scale * row.headroom.low, scale * row.headroom.high]
        if all(map(math.isfinite, ends)):
            axes.plot(ends, [place, place], color=shade, linewidth=2, solid_capstyle="round")
        face = shade if row.task.is_exact else "white"
        value = [scale * row.headroom.value]
        axes.plot(value, [place], "o", color=shade, markerfacecolor=face, markeredgewidth=1.6)
    dot_plot_axes(axes, [row.task.label for row in rows], "")
    for factor, style in ((0, "-"), (1, ":"), (2, "--")):
        axes.axvline(100 * factor * MARGIN, color=INK, linewidth=1, linestyle=style, zorder=0)
    axes.set_xlabel("Headroom, % of what can be gained in the task")
    marks = [
        *(
            Line2D([], [], color=shade, marker="o", linewidth=2, label=label)
            for label, shade in SHADES.items()
        ),
        Line2D([], [], color=INK, linestyle=":", label="margin"),
        Line2D([], [], color=INK, linestyle="--", label="twice the margin"),
    ]
    if not all(row.task.is_exact for row in rows):
        known = "best known, at least"
        marks.append(Line2D([], [], color=SOFT, marker="o", mfc="white", ls="", label=known))
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def leads_figure(rows: Sequence[Row]) -> Figure:
    """The lead of every arm over uniform credit, a panel per task: mean over training, with 95%
    intervals. Lines: no lead, and the margin. Random credit is not drawn.
    """
    names = [name for name in rows[0].arms if name not in ("uniform", "random credit")]
    size = 1.8 + 2.0 * len(rows), 1.1 + 0.3 * len(names)
    figure = Figure(figsize=size, layout="constrained")
    (panels,) = figure.subplots(1, len(rows), squeeze=False, sharey=True)
    for axes, row in zip(panels, rows, strict=True):
        for place, name in enumerate(names):
            lead, shade = row.arms[name].lead, INK if name == "oracle" else SHADES[TELLS]
            axes.plot([lead.low, lead.high], [place, place], color=shade, linewidth=2)
            axes.plot(lead.value, place, "D" if name == "oracle" else "o", color=shade)
        dot_plot_axes(axes, names, row.name)
        for height, style in ((0, "-"), (row.margin, ":")):
            axes.axvline(height, color=INK, linewidth=1, linestyle=style, zorder=0)
    figure.supxlabel("Lead over uniform credit in mean held-out reward over training", fontsize=10)
    return figure


def sentence(row: Row) -> str:
    """The verdict on a task."""
    kind = "" if row.task.is_exact else " (best known, at least)"
    numbers = f"headroom {row.headroom.text(sign=True)}{kind}, margin {row.margin:.3f}"
    return f"{row.name}: {row.label}; {numbers}"


def opening(rows: Sequence[Row]) -> str:
    """What perfect credit gains in the tasks, in words."""
    shares = {row.task.label: 100 * row.headroom.value / max(row.gain, 1e-9) for row in rows}
    counts = {verdict: sum(row.label == verdict for row in rows) for verdict in SHADES}
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return (
        f"With perfect credit instead of uniform credit, training gains {shares[least]:.0f}% of what"
        f" can be gained in one task ({least}) and {shares[most]:.0f}% in another ({most}). In"
        f" {counts[TELLS]} of {len(rows)} tasks this headroom is large enough to compare credit"
        f" rules, in {counts[CANNOT]} it is too small, and in {counts[UNCLEAR]} the runs do not"
        " decide it."
    )


def summary(rows: Sequence[Row]) -> str:
    """A line per task."""
    return "\n".join(map(sentence, rows))


def _numbers(row: Row) -> list[float]:
    lead = row.headroom
    return [
        *(row.uniform, row.oracle, row.start, row.best, row.margin),
        *(lead.value, lead.low, lead.high),
    ]


def table(rows: Sequence[Row]) -> str:
    """The results as CSV."""
    lines = []
    for row in rows:
        numbers = [f"{number:.5g}" for number in _numbers(row)]
        kind = "exact" if row.task.is_exact else "best known, at least"
        end = {"seeds": row.seeds, "verdict": row.label, "values of the oracle": kind}
        lines.append(dict(zip(COLUMNS, [row.name, *numbers], strict=True)) | end)
    return csv_text(lines)


def methods(rows: Sequence[Row]) -> Table:
    """All arms of the tasks that have more than two."""
    head = ["task", "arm", "mean over training", "lead", "final", "lead in the final"]
    head += ["collapsed", "cost", f"cost as {STATED_NAME}", "seconds"]
    cells = [
        [
            row.name,
            arm,
            f"{result.mean:.3f}",
            "-" if arm == "uniform" else result.lead.text(sign=True),
            f"{result.final:.3f}",
            "-" if arm == "uniform" else result.final_lead.text(sign=True),
            f"{result.collapses} of {row.seeds}",
            *(f"{cost:.2f}" for cost in result.costs.values()),
            f"{result.seconds:.1f}",
        ]
        for row in rows
        if len(row.arms) > 2
        for arm, result in row.arms.items()
    ]
    return Table(head, cells)


def headroom_page(rows: Sequence[Row], size: Size, command: str) -> Document:
    """The page."""
    sets = [SETS[name] for name in size.sets]
    page = Document(
        ": ".join([*filter(None, [" and ".join(sets).capitalize()]), TITLE]), kind=TITLE
    )
    page.text(opening(rows))
    page.text(
        "Headroom is the lead of an oracle, which credits every decision with its exact value, over"
        " uniform credit. It indicates how much a credit rule can gain in a task. Both arms have"
        " the same"
        " number of iterations and trajectories; the cost of the oracle's values does not count."
    )
    page.blocks.append(Image("headroom", headroom_map(rows), ALT))
    head = ["task", "uniform", "oracle", "before training", "best", "margin", "headroom", "verdict"]
    cells = [
        [
            row.task.label,
            *(f"{number:.3f}" for number in _numbers(row)[:5]),
            row.headroom.text(sign=True) + ("" if row.task.is_exact else " or more"),
            f"{row.label} ({row.headroom.value / max(row.margin, 1e-9):.1f} margins)",
        ]
        for row in rows
    ]
    page.text(
        f"Primary outcome: mean held-out reward over {size.iterations} iterations, in the trained"
        " form and without noise on the score; means over"
        f" {min(row.seeds for row in rows)} or more fresh seeds, paired by seed, with t intervals"
        " (95%). The margin is"
        f" {MARGIN:.0%} of what can be gained: the best held-out reward during training minus the"
        " reward before it. A task cannot tell rules apart if the upper bound is below the margin"
        " and an exact oracle never collapsed;"
        " it can if the headroom is twice the margin or more and its interval excludes 0."
    )
    page.blocks.append(Table(head, cells, ("task",)))
    page.text(
        f"Each arm was tuned with {size.budget} runs: half on a grid of clip range, learning rate"
        " and noise level, half further seeds of the best points. A run scores its mean held-out"
        " reward, or its last one if that is lower. Of the points with further seeds, the one with"
        " the highest mean or lower quartile over these, whichever is lower, is chosen."
    )
    page.text(
        "With noise on the score, the oracle is trained on the expected score. The headroom then"
        " includes the noise of the finished samples' scores, which a rule that observes"
        " them cannot"
        " remove completely: the part of it by which uniform credit is lower than without noise is"
        " lost to the noise, and the rest to credit. In more than two dimensions the values are"
        " means of 64 stochastic continuations: a better oracle may lead by more. Exact"
        " values exist in two dimensions"
        " only, because the trained policy may couple the coordinates that are independent before"
        " training."
    )
    page.text(
        "The oracle divides the gains of each decision by their spread over the group, as uniform"
        " credit does with rewards. It is no strict bound: where a window leaves steps without"
        " credit, training changes the network at these steps, too, and no credit corrects that."
        " `python benchmarks/exact.py` has the measurement."
    )
    if any(len(row.arms) > 2 for row in rows):
        page.heading("Arms at tuned settings")
        alt = "Per task the lead of every arm over uniform credit, with its interval"
        page.blocks.append(Image("leads", leads_figure(rows), alt))
        page.blocks.append(methods(rows))
        page.text(
            "Every arm has a search of its own, of the same number of runs. Leads over uniform"
            " credit are paired by seed, with t intervals (95%). A run collapsed if it ends more"
            f" than {COLLAPSE} below its best reward, or more than {BELOW_START} below its first."
            " The cost is in forward equivalents of the task's network, as a multiple of that of"
            " uniform credit; next to it is the cost of the same evaluations, decodes and reward"
            f" calls in {STATED_NAME} ({STATED.source}, PickScore). The leads are at equal updates,"
            " not at equal cost. Seconds are those of a processor core per run."
        )
    page.heading("Chosen settings")
    chosen = {(row.name, arm): values for row in rows for arm, values in row.values.items()}
    page.blocks.append(chosen_settings(chosen))
    page.text(f"Made by `{command}`.")
    return page
