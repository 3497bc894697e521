"""Figures of the claims: learning curves with intervals, performance profiles, and effects side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from flowrl.plots.style import INK, OTHERS, clean, spread_labels

SHADES = ("#0072B2", "#D55E00", "#009E73", "#7A5195", "#8C6D1F", *OTHERS)


@dataclass(frozen=True)
class Band:
    """A curve with its interval."""

    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Effect:
    """A number with its interval and how it is to be read: good, bad or open. `mark`: the number it is to stay below."""

    text: str
    value: float
    low: float
    high: float
    tone: str
    mark: float | None = None


TONES = {"good": "#009E73", "bad": "#D55E00", "open": "#8a8f98"}


def bands(panels: Mapping[str, Mapping[str, Band]], x: str, y: str) -> Figure:
    """A panel per setting, two in a row; a band per arm, named where it ends."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns + 0.6, 3.8 * rows), layout="constrained")
    names = list(dict.fromkeys(name for arms in panels.values() for name in arms))
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in cells[len(panels) :]:
        empty.set_axis_off()
    for axes, (title, arms) in zip(cells, panels.items(), strict=False):
        for name, band in arms.items():
            shade = SHADES[names.index(name) % len(SHADES)]
            axes.fill_between(band.x, band.low, band.high, color=shade, alpha=0.18, linewidth=0)
            axes.plot(band.x, band.middle, color=shade, linewidth=2)
        low, high = axes.get_ylim()
        heights = spread_labels([band.middle[-1] for band in arms.values()], low, high, (high - low) / 15)
        end = max(band.x[-1] for band in arms.values())
        for name, height in zip(arms, heights, strict=True):
            shade = SHADES[names.index(name) % len(SHADES)]
            axes.annotate(f" {name}", (end, height), color=shade, fontsize=9, va="center", annotation_clip=False)
        axes.set_xlim(0, end * 1.42)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
        axes.set_xlabel(x, loc="left")
        axes.set_ylabel(y)
        axes.set_title(title, loc="left", fontsize=10)
        clean(axes)
    return figure


def effects(groups: Mapping[str, Sequence[Effect]]) -> Figure:
    """Numbers with intervals, a group per unit of measurement, green where it holds and orange where it does not."""
    groups = {title: rows for title, rows in groups.items() if rows}
    sizes = [len(rows) for rows in groups.values()]
    figure = Figure(figsize=(11, 1.0 + 0.9 * len(groups) + 0.27 * sum(sizes)), layout="constrained")
    parts = figure.subplots(len(groups), 1, height_ratios=[size + 1.2 for size in sizes], squeeze=False)[:, 0]
    for axes, (title, rows) in zip(parts, groups.items(), strict=True):
        for place, row in enumerate(rows):
            shade = TONES[row.tone]
            axes.plot([row.low, row.high], [place, place], color=shade, linewidth=2.4, alpha=0.6, solid_capstyle="round")
            axes.plot([row.value], [place], "o", color=shade, markersize=6)
            if row.mark is not None:
                axes.plot([row.mark, row.mark], [place - 0.35, place + 0.35], color=INK, linewidth=1.6)
        same = 1 if "share" in title else 0
        axes.axvline(same, color=INK, linewidth=0.8, linestyle=":")
        if same:
            axes.set_xlim(left=0)
        axes.set_yticks(range(len(rows)), [row.text for row in rows], fontsize=8.5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def profiles(levels: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], x: str) -> Figure:
    """Performance profiles, a panel per world: the share of runs that reach a level, where that is not 0 or 1."""
    panels = {title: arms for title, arms in panels.items() if arms}
    figure = Figure(figsize=(5.8 * len(panels) + 0.4, 3.8), layout="constrained")
    for axes, (title, arms) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        told = [level for i, level in enumerate(levels) if any(0 < shares[i] < 1 for shares in arms.values())]
        for place, (name, shares) in enumerate(arms.items()):
            axes.step(levels, shares, where="post", color=SHADES[place % len(SHADES)], linewidth=2, label=name)
        if told:
            space = 0.05 * (told[-1] - told[0]) + 0.01
            axes.set_xlim(told[0] - space, told[-1] + space)
        axes.legend(frameon=False, fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(x, loc="left")
        axes.set_ylabel("share of runs at or above")
        axes.set_ylim(-0.03, 1.03)
        clean(axes)
    return figure
