"""A picture of what a credit rule does with one reward table."""

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowrl.diagnostics.explain import Explanation
from flowrl.plots.style import INK, clean, spread_labels

LINES = ("#0072B2", "#D55E00", "#009E73", "#7A5195", "#8C6D1F", "#CC79A7", "#56B4E9", "#5B5B5B")


def explanation(shown: Explanation, prompt: int = 0) -> Figure:
    """One prompt's rewards with turning points, and below them gains and advantages [member, step] as tables of colour."""
    members, nodes = shown.rewards.shape[1:]
    figure = Figure(figsize=(max(7.0, 1.5 + 0.9 * nodes), 3.4 + 0.5 * members * 2), layout="constrained")
    parts = figure.subplots(3, 1, height_ratios=[3.2, 0.45 * members, 0.45 * members])
    _rewards(parts[0], shown, prompt)
    limit = float(shown.gains[prompt].abs().max())
    _cells(parts[1], shown, prompt, shown.gains[prompt], limit, "gain of the step", "{:+.2f}")
    largest = float(shown.advantages[prompt].abs().max())
    _cells(parts[2], shown, prompt, shown.advantages[prompt], largest, f"advantage: {shown.rule}", "{:+.2f}")
    parts[2].set_xlabel("node (0 = noise, last = image); step i lies between node i and node i+1")
    return figure


def _rewards(axes: Axes, shown: Explanation, prompt: int) -> None:
    rewards = shown.rewards[prompt]
    nodes = rewards.shape[-1]
    low, high = float(rewards.min()), float(rewards.max())
    heights = spread_labels(rewards[:, -1].tolist(), low, high, 0.08 * max(high - low, 1e-6))
    for member, row in enumerate(rewards):
        shade = LINES[member % len(LINES)]
        axes.plot(range(nodes), row, color=shade, marker="o", markersize=4, linewidth=2)
        name = shown.names.members[prompt][member]
        axes.annotate(
            name, (nodes - 1 + 0.12, heights[member]), color=shade, va="center", fontweight="bold", annotation_clip=False
        )
        for step in range(nodes - 1):
            here = (prompt, member, step)
            if bool(shown.plain[here]) or bool(shown.consistent[here]):
                style = "-" if bool(shown.consistent[here]) else ":"
                ring = {"facecolors": "none", "edgecolors": shade, "linewidths": 2.4, "linestyle": style}
                axes.scatter([step], [float(row[step])], s=200, zorder=5, **ring)
    axes.set_ylabel("estimated final reward")
    axes.set_title(
        f"{shown.names.prompts[prompt]}: rings mark turning points, dotted where only the plain rule sees one",
        fontsize=10,
        loc="left",
    )
    axes.set_xticks(range(nodes))
    axes.set_xlim(-0.4, nodes - 0.6)
    clean(axes)


def _cells(axes: Axes, shown: Explanation, prompt: int, values: torch.Tensor, limit: float, title: str, form: str) -> None:
    members, steps = values.shape
    shades = matplotlib.colormaps["PuOr_r"]
    limit = limit or 1.0
    for member in range(members):
        for step in range(steps):
            value = float(values[member, step])
            axes.barh(member, 1.0, left=step, height=1.0, color=shades(0.5 + 0.27 * value / limit), edgecolor="white")
            axes.text(step + 0.5, member, form.format(value), ha="center", va="center", fontsize=9, color=INK)
            if shown.selected is not None and bool(shown.selected[prompt, member, step]):
                axes.barh(member, 0.94, left=step + 0.03, height=0.88, facecolor="none", edgecolor=INK, linewidth=2, zorder=4)
    axes.set_yticks(range(members), shown.names.members[prompt])
    axes.invert_yaxis()
    axes.set_xlim(-0.4, steps + 0.4)
    axes.set_xticks(range(steps + 1))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    marked = "; framed: R_T - R_i paid" if shown.selected is not None else ""
    axes.set_title(title + marked, fontsize=10, loc="left")
