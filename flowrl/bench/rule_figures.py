"""The figures of a rule's page: learning curves at equal budgets, and the searches."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.bench.evidence import Line, curve, spent
from flowrl.bench.rule_headroom import EXACT, UNIFORM
from flowrl.bench.statistics import Curve
from flowrl.bench.tune import Tried, level
from flowrl.compare.bounds import Bound
from flowrl.run.costs import STATED_NAME
from flowrl.run.report.style import COLOURS, INK, OTHERS, SOFT, clean, marker
from flowrl.run.statistics import mean

METHOD_COLOURS = {
    "uniform": COLOURS["flow-grpo"],
    "stepwise gains": COLOURS["stepwise-flow-grpo"],
    "turning points": COLOURS["tp-grpo"],
}
"""By baseline."""
AXES = {
    "updates": ("updates", 1.0, "updates"),
    "evaluations": ("forwards", 1e3, "forward equivalents (thousands)"),
    "stated seconds": ("stated seconds", 3600.0, f"hours of {STATED_NAME}, by FLOPs"),
}
"""Budgets by name: the axis of `evidence.spent`, its unit, and its label."""


def curves_figure(arms: Mapping[str, Sequence[Line]], bound: Bound | None = None) -> Figure:
    """Mean learning curves with their 95% intervals, a panel per budget; dashed: exact credit."""
    figure, names = Figure(figsize=(12.5, 4.2), layout="constrained"), list(arms)
    for axes, (budget, (axis, unit, label)) in zip(
        figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True
    ):
        for arm, lines in arms.items():
            x, table = _common([curve(line, axis) for line in lines])
            means = [mean(column) for column in table.T]
            shade, middle = METHOD_COLOURS.get(arm, OTHERS[1]), [e.value for e in means]
            axes.plot(
                x / unit,
                middle,
                color=shade,
                linewidth=2,
                marker=marker(arm, names),
                markevery=8,
                markersize=5,
                label=arm,
            )
            low, high = (np.clip([getattr(e, end) for e in means], 0, 1) for end in ("low", "high"))
            if len(table) > 1:
                axes.fill_between(x / unit, low, high, color=shade, alpha=0.15, linewidth=0)
        if bound is not None and UNIFORM in arms:
            costs = _costs(arms[UNIFORM], axis, bound.iterations)
            axes.plot(costs / unit, np.mean(bound.curves, 0), "--", color=INK, label=EXACT)
        axes.set_xlabel(label)
        axes.set_title(f"equal {budget}", loc="left", fontsize=10)
        axes.set_xlim(0, axes.dataLim.x1)
        clean(axes)
        if axis == "updates":
            axes.set_ylabel("held-out reward")
            figure.legend(
                *axes.get_legend_handles_labels(),
                loc="outside upper left",
                ncols=5,
                frameon=False,
                fontsize=9,
            )
    return figure


def _common(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Budgets up to the smallest total of a run, and the rewards of all runs at them, [run,
    budget].
    """
    x = np.linspace(0.0, min(run.budgets[-1] for run in curves), 41)
    return x, np.array([np.interp(x, run.budgets, run.rewards) for run in curves])


def _costs(lines: Sequence[Line], axis: str, iterations: Sequence[float]) -> np.ndarray:
    """The mean cost of these runs up to each of `iterations`."""
    costs = [np.interp(iterations, spent(line, "updates"), spent(line, axis)) for line in lines]
    return np.mean(costs, 0)


def _dots(scores: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return [*scores], [*scores.values()]


def search_figure(searches: Mapping[str, Sequence[Tried]]) -> Figure:
    """The scores of the runs of each arm's search, in order, and the chosen setting."""
    figure = Figure(figsize=(12.5, 3.4), layout="constrained")
    panels = figure.subplots(1, len(searches), sharey=True, squeeze=False)[0]
    for axes, (arm, settings) in zip(panels, searches.items(), strict=True):
        shade = METHOD_COLOURS.get(arm, OTHERS[1])
        for trial in sorted(settings, key=lambda trial: trial.chosen):
            colour = shade if trial.chosen else SOFT
            axes.plot(*_dots(trial.first), "o", mfc="white", mec=colour, mew=1.6)
            axes.plot(*_dots(trial.further), "o", color=colour)
            if trial.chosen:
                score = level([*(trial.further or trial.first).values()])
                axes.axhline(score, color=shade, linewidth=1.2, linestyle=":")
        axes.set_title(arm, loc="left", fontsize=10)
        axes.set_xlabel("run of the search")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        clean(axes)
    panels[0].set_ylabel("score")
    return figure
