"""The microscope's figures: correlations with their ceilings, and stages of training."""

import math
from collections.abc import Sequence

from flowrl_compare.style import COLOURS, INK, clean, spread_labels
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flowrl_bench.microscope import FORMS, METHODS
from flowrl_bench.microscope_numbers import Lines, ceiling_of, measurable, over_looks
from flowrl_bench.page import dot_plot_axes
from flowrl_bench.statistics import Estimate

GREY = "#6d737d"
SHADES = {
    "uniform": COLOURS["flow-grpo"],
    "stepwise gains": COLOURS["stepwise-flow-grpo"],
    "turning points": COLOURS["tp-grpo"],
}
"""Rules of the three methods have their method's colour; all others are grey."""
PLACES = {"mixture": "2-D world", "shapes": "images"}
SCORES = {"soft": "smooth reward", "strict": "0/1 reward"}
DASHED = "one-step gains"


def panels(lines: Lines) -> list[tuple[str, str, str]]:
    """(world, form, title) of every panel."""
    return [
        (world, form, f"{PLACES[world]}, {SCORES[form]}")
        for world in lines.worlds()
        for form in FORMS
    ]


def _interval(axes: Axes, estimate: Estimate, place: float, shade: str, filled: bool) -> None:
    low, high = (
        max(-1.0, min(1.0, end)) if math.isfinite(end) else estimate.value
        for end in (estimate.low, estimate.high)
    )
    axes.plot(
        [low, high], [place, place], color=shade, linewidth=1.8, solid_capstyle="round", alpha=0.55
    )
    face = shade if filled else "white"
    axes.plot(
        [estimate.value],
        [place],
        "o",
        color=shade,
        markerfacecolor=face,
        markersize=5.5,
        markeredgewidth=1.4,
    )


def correlations(lines: Lines) -> Figure:
    """Before training, per rule: filled, independent noise; open, shared noise; a tick, the ceiling
    with independent noise.
    """
    shown, rules = panels(lines), lines.rules()
    figure = Figure(figsize=(3.0 + 2.3 * len(shown), 1.9 + 0.42 * len(rules)), layout="constrained")
    for axes, (world, form, title) in zip(
        figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True
    ):
        for place, rule in enumerate(rules):
            shade = SHADES.get(rule, GREY)
            cells = {noise: lines.of(world, noise=noise) for noise in ("independent", "shared")}
            for noise, shift in (("independent", -0.14), ("shared", 0.18)):
                if cells[noise]:
                    _interval(
                        axes,
                        over_looks(cells[noise], form, rule),
                        place + shift,
                        shade,
                        noise == "independent",
                    )
            top = ceiling_of(cells["independent"], form, rule)
            if math.isfinite(top):
                axes.plot([top, top], [place - 0.38, place + 0.1], color=INK, linewidth=2)
        dot_plot_axes(axes, rules, title)
        axes.set_xlim(-0.15, 1.04)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    marks = [
        Line2D([], [], color=GREY, marker="o", linestyle="", label="independent noise"),
        Line2D(
            [],
            [],
            color=GREY,
            marker="o",
            markerfacecolor="white",
            linestyle="",
            label="shared noise",
        ),
        Line2D(
            [],
            [],
            color=INK,
            marker="|",
            markersize=12,
            markeredgewidth=2,
            linestyle="",
            label="ceiling: the rule on true values",
        ),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        "Correlation of credit with the true advantage, before training",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    return figure


def stages(lines: Lines) -> Figure:
    """Before, during and after training: a row per method of training, a panel per world and
    reward; four rules. A cell whose true advantages do not vary has no point.
    """
    shown = [
        panel
        for panel in panels(lines)
        if any(lines.of(panel[0], "after", method=method) for method in METHODS)
    ]
    methods = [
        method
        for method in METHODS
        if any(lines.of(world, "after", method=method) for world, _, _ in shown)
    ]
    figure = Figure(
        figsize=(2.0 + 2.6 * len(shown), 1.0 + 2.0 * len(methods)), layout="constrained"
    )
    grid = figure.subplots(len(methods), len(shown), sharex=True, sharey=True, squeeze=False)
    for row, method in enumerate(methods):
        for column, (world, form, title) in enumerate(shown):
            axes = grid[row][column]
            ends = _stage_lines(axes, lines, world, form, method)
            axes.set_ylim(-0.2, 1.02)
            axes.set_xlim(-0.15, 2.15)
            axes.set_xticks([0, 1, 2], ["before", "during", "after"])
            clean(axes)
            if row == 0:
                axes.set_title(title, loc="left", fontsize=10)
            if column == 0:
                axes.set_ylabel(f"trained with\n{method}", fontsize=9)
            if column == len(shown) - 1:
                _label(axes, ends)
    figure.suptitle(
        "Correlation of credit with the true advantage in training, independent noise",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    return figure


def _stage_lines(
    axes: Axes, lines: Lines, world: str, form: str, method: str
) -> list[tuple[str, float]]:
    cells = [
        lines.of(world),
        lines.of(world, "during", method=method),
        lines.of(world, "after", method=method),
    ]
    ends = list[tuple[str, float]]()
    for shift, rule in enumerate(rule for rule in (*SHADES, DASHED) if rule in lines.rules()):
        known = ((x, cell) for x, cell in enumerate(cells) if cell and measurable(cell, form))
        places = [(x + 0.03 * (shift - 1.5), over_looks(cell, form, rule)) for x, cell in known]
        shade, style = SHADES.get(rule, INK), "--" if rule == DASHED else "-"
        axes.plot(
            [x for x, _ in places],
            [estimate.value for _, estimate in places],
            style,
            color=shade,
            linewidth=1.6,
        )
        for x, estimate in places:
            if math.isfinite(estimate.low):
                axes.plot(
                    [x, x],
                    [max(-1, estimate.low), min(1, estimate.high)],
                    color=shade,
                    linewidth=1.2,
                    alpha=0.55,
                )
            axes.plot([x], [estimate.value], "o", color=shade, markersize=4)
        ends += [(rule, places[-1][1].value)] if places else []
    return ends


def _label(axes: Axes, ends: Sequence[tuple[str, float]]) -> None:
    heights = spread_labels([value for _, value in ends], -0.1, 1.0, 0.17)
    for (rule, _), height in zip(ends, heights, strict=True):
        shade = SHADES.get(rule, INK)
        axes.annotate(
            rule, (2.25, height), color=shade, fontsize=9, va="center", annotation_clip=False
        )
