"""Figures of the claims' pages: leads, learning curves, survival and the frontier of reward and
closeness to the data.

Colours belong to methods; verdicts have symbols. Every panel has few lines, so that labels do not
collide.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from flowrl_compare.statistics import mean
from flowrl_compare.style import COLOURS, INK, OTHERS, clean
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowrl_bench.claims import KL_WEIGHTS, MADE
from flowrl_bench.evidence import Line, column, curve
from flowrl_bench.leads import UNIFORM
from flowrl_bench.main_comparison import BUDGETS, SECONDS, Arm
from flowrl_bench.page import Band, dot_plot_axes
from flowrl_bench.statistics import REACHED, survival
from flowrl_bench.tables import SYMBOLS, WORLD_NAMES, Judged
from flowrl_bench.verdicts import by_seed

_FAMILIES = {
    COLOURS["flow-grpo"]: ("uniform",),
    COLOURS["stepwise-flow-grpo"]: (
        "stepwise gains",
        "gains over a moving average",
        "gains, one-step estimate",
        "stepwise",
    ),
    COLOURS["tp-grpo"]: ("turning points", "turning points at random steps", "increments alone"),
    OTHERS[1]: ("branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"),
    COLOURS["noise-weighted"]: ("noise-weighted",),
    OTHERS[0]: ("diffusion-nft", "awm", "dgpo"),
}
METHOD_COLOURS = {name: colour for colour, names in _FAMILIES.items() for name in names}
"""By arm: those of one method, or one kind of methods, share a colour; controls that are no
method's variant are grey.
"""
GREY = OTHERS[2]
PANELS = 5
"""Panels in a row of small multiples."""
SHOWN = 0.25
"""The largest lead that its figure shows in its place; larger ones are numbers at the edge."""
LINES = ("-", "--", ":")


def colour(arm: str) -> str:
    """The colour of an arm."""
    return METHOD_COLOURS.get(arm, METHOD_COLOURS["uniform"] if arm.startswith(UNIFORM) else GREY)


def band(runs: Sequence[Line]) -> Band:
    """The learning curve of several seeds with its interval."""
    table = np.array([column(run, "soft") for run in runs])
    estimates = [mean(values) for values in table.T]
    middle = [estimate.value for estimate in estimates]
    low = [e.low if math.isfinite(e.low) else m for e, m in zip(estimates, middle, strict=True)]
    high = [e.high if math.isfinite(e.high) else m for e, m in zip(estimates, middle, strict=True)]
    return Band(
        column(runs[0], "iteration"),
        middle,
        np.clip(low, 0, 1).tolist(),
        np.clip(high, 0, 1).tolist(),
    )


def leads(arms: Mapping[str, Arm], world: str) -> Figure:
    """Leads over uniform credit with intervals, a column per budget and a row per arm, with the
    symbol of the verdict, if it has one.
    """
    rows = [arm for name, arm in arms.items() if name != UNIFORM]
    estimates = [
        one.estimate
        for arm in rows
        for measure in BUDGETS.values()
        if (one := arm.lead(measure)) is not None
    ]
    outer = [
        abs(end)
        for estimate in estimates
        for end in (estimate.low, estimate.high)
        if math.isfinite(end)
    ]
    shown = min(SHOWN, 1.1 * max(outer, default=SHOWN))
    figure = Figure(figsize=(9.2, 1.1 + 0.29 * len(rows)), layout="constrained")
    cells = figure.subplots(1, len(BUDGETS), sharey=True, sharex=True, squeeze=False)[0]
    for place, (axes, (words, measure)) in enumerate(zip(cells, BUDGETS.items(), strict=True)):
        axes.axvline(0, color=INK, linewidth=0.9)
        for row, arm in enumerate(rows):
            lead = arm.lead(measure)
            if lead is None:
                continue
            estimate, shade = lead.estimate, colour(arm.name)
            if math.isfinite(estimate.high):
                ends = np.clip([estimate.low, estimate.high], -shown, shown)
                axes.plot(
                    ends, [row, row], color=shade, linewidth=2.4, alpha=0.65, solid_capstyle="butt"
                )
            if abs(estimate.value) <= shown:
                axes.plot([estimate.value], [row], "o", color=shade, markersize=6)
            else:
                side = math.copysign(1, estimate.value)
                axes.plot(
                    [side * shown], [row], "<" if side < 0 else ">", color=shade, markersize=7
                )
                where = {
                    "ha": "left" if side < 0 else "right",
                    "va": "center",
                    "fontsize": 8.5,
                    "color": shade,
                }
                axes.annotate(f"  {estimate.value:+.2f}  ", (side * shown, row), **where)
            axes.annotate(
                SYMBOLS.get(lead.verdict, ""),
                (1.0, row),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                fontsize=11,
            )
        title = words.replace("second", SECONDS[world])
        dot_plot_axes(axes, [_label(arm) for arm in rows], title, 9)
        if place:
            axes.tick_params(labelleft=False)
    cells[0].set_xlim(-1.1 * shown, 1.4 * shown)  # room for the symbols
    figure.supxlabel(f"mean reward minus uniform credit's, {WORLD_NAMES[world]}", fontsize=10)
    return figure


def _label(arm: Arm) -> str:
    return MADE[arm.name].label if arm.name in MADE else arm.name


def _grid(names: Sequence[str], height: float = 2.0) -> tuple[Figure, list[Axes]]:
    """A panel per name, with common axes."""
    columns = min(PANELS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.5 * columns + 0.5, height * rows + 0.5), layout="constrained")
    cells = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(cells, names, strict=False):
        axes.set_title(name, loc="left", fontsize=8.5)
        clean(axes)
    for empty in cells[len(names) :]:
        empty.set_axis_off()
    return figure, list(cells[: len(names)])


def _runs(arm: Arm, name: str) -> list[Line]:
    return [line for lines in arm.evidence.runs[name].values() for line in lines]


def _each(
    arms: Mapping[str, Arm], draw: Callable[[Axes, Arm, str, bool], None], x: str, y: str
) -> Figure:
    """A panel per arm: uniform credit of the same seeds behind, the arm in its colour."""
    others = {name: arm for name, arm in arms.items() if name != UNIFORM}
    figure, cells = _grid([_label(arm) for arm in others.values()])
    for axes, (name, arm) in zip(cells, others.items(), strict=True):
        draw(axes, arm, UNIFORM, True)
        draw(axes, arm, name, False)
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)
    return figure


def curves(arms: Mapping[str, Arm]) -> Figure:
    """Learning curves with intervals (means over seeds and tasks), a panel per arm, uniform credit
    dashed.
    """

    def draw(axes: Axes, arm: Arm, name: str, behind: bool) -> None:
        arm_band = band(_runs(arm, name))
        shade = colour(name)
        axes.fill_between(
            arm_band.x,
            arm_band.low,
            arm_band.high,
            color=shade,
            alpha=0.12 if behind else 0.25,
            linewidth=0,
        )
        axes.plot(
            arm_band.x,
            arm_band.middle,
            "--" if behind else "-",
            color=shade,
            linewidth=1.2 if behind else 1.8,
        )

    return _each(arms, draw, "updates (iterations); uniform credit dashed", "held-out reward")


def survival_levels(arms: Mapping[str, Arm]) -> list[float]:
    """Rewards at 0.5, 0.7 and 0.9 of the way from the start to the best mean final reward of an
    arm.
    """
    ends = [float(by_seed(arm.evidence.values(name, "final")).mean()) for name, arm in arms.items()]
    starts = [column(line, "soft")[0] for line in _runs(arms[UNIFORM], UNIFORM)]
    start = float(np.mean(starts))
    return [round(start + fraction * (max(ends) - start), 2) for fraction in REACHED]


def survivals(arms: Mapping[str, Arm]) -> Figure:
    """Fraction of runs that have reached each level by an update, a panel per arm, uniform credit
    thin.
    """
    levels = survival_levels(arms)

    def draw(axes: Axes, arm: Arm, name: str, behind: bool) -> None:
        runs = [curve(line) for line in _runs(arm, name)]
        end = runs[0].budgets[-1]
        for style, part in zip(LINES, survival(runs, levels), strict=True):
            times = [runs[0].budgets[0] + 1e-3, *part.budgets, end]
            shares = [part.fraction(at) for at in times]
            axes.step(
                times,
                shares,
                style,
                where="post",
                color=colour(name),
                linewidth=0.8 if behind else 2,
            )
        axes.set_xscale("log")
        axes.set_xticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"], minor=False)
        axes.minorticks_off()
        axes.set_xlim(0.9 * runs[0].budgets[1], end)
        axes.set_ylim(-0.03, 1.03)

    words = ", ".join(
        f"{level:.2f} {mark}"
        for level, mark in zip(levels, ("solid", "dashed", "dotted"), strict=True)
    )
    return _each(
        arms, draw, f"updates until a reward of {words}; uniform credit thin", "fraction of runs"
    )


def frontier(judged: Mapping[str, Judged]) -> Figure | None:
    """Final reward against log-density under the data, and against diversity, for every weight of
    the KL; a line per method.

    `judged`: the questions kl-frontier-* by the name of their arm. None if none has runs.
    """
    shown = {name: one.evidence for name, one in judged.items() if one.evidence is not None}
    if not shown:
        return None
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    labels = {
        "quality": "log-density of samples under the data",
        "diversity": "distance between samples of a prompt",
    }
    for axes, (measure, words) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for name, evidence in shown.items():
            order = [("no KL", 0.0), *((f"KL {weight:g}", weight) for weight in KL_WEIGHTS)]
            points = [
                (evidence.values(arm, "final").mean(), evidence.values(arm, measure).mean(), w)
                for arm, w in order
            ]
            xs, ys, weights = zip(*points, strict=True)
            axes.plot(xs, ys, "-", color=colour(name), linewidth=1.4, label=name)
            for x, y, weight in zip(xs, ys, weights, strict=True):
                size = 5 + 12 * math.sqrt(weight)
                axes.plot([x], [y], "o", color=colour(name), markersize=size, alpha=0.85)
        axes.set_xlabel("final held-out reward")
        axes.set_title(words, loc="left", fontsize=10)
        clean(axes)
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure
