"""The figure of `flowrl explain`: values with turning points, gains and advantages."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.bench.explain import Explanation
from flowrl.run.report.style import COLOURS, INK, OTHERS, clean, spread_labels


def explanation(shown: Explanation, prompt: int = 0) -> Figure:
    """One prompt's values, with the turning points if the rule selects some; below, gains and
    advantages [member, decision].
    """
    members, columns = shown.values.shape[1:]
    figure = Figure(
        figsize=(max(7.0, 1.5 + 0.9 * columns), 3.4 + 0.5 * members * 2), layout="constrained"
    )
    parts = figure.subplots(3, 1, height_ratios=[3.2, 0.45 * members, 0.45 * members])
    _values(parts[0], shown, prompt)
    _cells(parts[1], shown, prompt, shown.gains[prompt], "gain of the decision")
    _cells(parts[2], shown, prompt, shown.advantages[prompt], f"advantage: {shown.rule}")
    parts[2].set_xlabel(
        "state before each decision, then the image; decision k leads from k to k + 1"
    )
    return figure


def _values(axes: Axes, shown: Explanation, prompt: int) -> None:
    values, shades = shown.values[prompt], (*COLOURS.values(), *OTHERS)
    columns = values.shape[-1]
    low, high = float(values.min()), float(values.max())
    heights = spread_labels(values[:, -1].tolist(), low, high, 0.08 * max(high - low, 1e-6))
    for member, (row, name) in enumerate(zip(values, shown.names.members[prompt], strict=True)):
        shade = shades[member % len(shades)]
        axes.plot(range(columns), row, color=shade, marker="o", markersize=4, linewidth=2)
        place = (columns - 0.88, heights[member])
        axes.annotate(
            name, place, color=shade, va="center", fontweight="bold", annotation_clip=False
        )
        for step in range(columns - 1) if shown.selected is not None else ():
            consistent = bool(shown.consistent[prompt, member, step])
            if consistent or bool(shown.plain[prompt, member, step]):
                ring = {
                    "facecolors": "none",
                    "edgecolors": shade,
                    "linewidths": 2.4,
                    "linestyle": "-" if consistent else ":",
                }
                axes.scatter([step], [float(row[step])], s=200, zorder=5, **ring)
    rings = ": rings mark consistent turning points, dotted rings those of the plain rule only"
    axes.set_title(
        shown.names.prompts[prompt] + (rings if shown.selected is not None else ""),
        fontsize=10,
        loc="left",
    )
    axes.set_ylabel("estimated final reward")
    axes.set_xticks(range(columns))
    axes.set_xlim(-0.4, columns - 0.6)
    clean(axes)


def _cells(axes: Axes, shown: Explanation, prompt: int, values: Tensor, title: str) -> None:
    """A table of colours; frames mark the decisions that receive the long-term reward."""
    members, steps = values.shape
    shades, limit = matplotlib.colormaps["RdBu"], float(values.abs().max()) or 1.0
    for member in range(members):
        for step in range(steps):
            value = float(values[member, step])
            axes.barh(
                member,
                1.0,
                left=step,
                height=1.0,
                color=shades(0.5 + 0.27 * value / limit),
                edgecolor="white",
            )
            axes.text(
                step + 0.5, member, f"{value:+.2f}", ha="center", va="center", fontsize=9, color=INK
            )
            if shown.selected is not None and bool(shown.selected[prompt, member, step]):
                axes.barh(
                    member,
                    0.94,
                    left=step + 0.03,
                    height=0.88,
                    facecolor="none",
                    edgecolor=INK,
                    linewidth=2,
                    zorder=4,
                )
    axes.set_yticks(range(members), shown.names.members[prompt])
    axes.invert_yaxis()
    axes.set_xlim(-0.4, steps + 0.4)
    axes.set_xticks(range(steps + 1))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        title + ("; framed: the long-term reward R - V" if shown.selected is not None else ""),
        fontsize=10,
        loc="left",
    )
