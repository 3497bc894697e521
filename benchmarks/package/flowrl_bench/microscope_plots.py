"""The microscope's figures: one per question, from the rows of `flowrl_bench.inspection.inspect`."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowrl.plots.style import INK, clean, spread_labels

Row = dict[str, Any]
Shades = dict[str, str]

LINES = (
    "#009E73",
    "#D55E00",
    "#E69F00",
    "#8C6D1F",
    "#CC79A7",
    "#7A5195",
    "#0B7285",
    "#56B4E9",
    "#8a8f98",
    "#0072B2",
    "#4C6EF5",
    "#5B5B5B",
)
QUESTIONS = {
    "credit": "How close is the credit to the true advantage of the step?",
    "steps": "At which steps is it close?",
    "gradient": "Does its gradient point along the true one, and how loud is it?",
    "training": "Does that change while the policy learns?",
    "noise": "And with a noisy reward?",
}
"""What the figures answer, by name."""


def figures(rows: Sequence[Row], stage: int, equal_nfe: int) -> dict[str, Figure]:
    """All figures by name; `stage` is the iteration shown where there is room for one only."""
    credit = [row for row in rows if row["kind"] == "credit"]
    gradient = [row for row in rows if row["kind"] == "gradient"]
    shades = {name: LINES[place % len(LINES)] for place, name in enumerate(_names(rows))}
    drawn = {
        "credit": _credit(_at(credit, stage), stage, shades),
        "num_steps": _steps(_at(credit, stage), stage),
    }
    if gradient:
        drawn["gradient"] = _gradient(_at(gradient, stage), stage, equal_nfe, shades)
    if len({row["iteration"] for row in rows}) > 1:
        clear = [row for row in rows if row["noise"] == 0]
        drawn["training"] = _change(clear, "iteration", "iterations of training", shades)
    if len({row["noise"] for row in rows}) > 1:
        noisy = [row for row in rows if row["iteration"] == stage]
        drawn["noise"] = _change(noisy, "noise", "std of the noise on every score", shades)
    return drawn


def _at(rows: Sequence[Row], stage: int) -> list[Row]:
    return [row for row in rows if row["iteration"] == stage and row["noise"] == 0]


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["rule"] for row in rows))


def _dots(
    axes: Axes, names: Sequence[str], shades: Shades, values: Sequence[float], spans: Sequence[tuple[float, float]], title: str
) -> None:
    """A dot per rule, and the span that belongs to it."""
    for place, (value, (low, high)) in enumerate(zip(values, spans, strict=True)):
        if math.isnan(value):
            axes.text(axes.get_xlim()[0], place, " no signal found", va="center", fontsize=8, color="#8a8f98")
            continue
        shade = shades[names[place]]
        axes.plot([low, high], [place, place], color=shade, linewidth=2.2, solid_capstyle="round", alpha=0.55)
        axes.plot([value], [place], "o", color=shade, markersize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def _credit(rows: Sequence[Row], stage: int, shades: Shades) -> Figure:
    figure = Figure(figsize=(11, 1.3 + 0.34 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    names = _names(rows)
    for axes, key, title, ideal in (
        (left, "correlation", "correlation with the true advantage\n(Monte Carlo noise taken out)", 1.0),
        (middle, "sign", "share of steps with the right sign\n(of those whose sign is known)", 0.5),
        (right, "bias", "pay that a step gets whatever\nhappens (stds of the credit; truth 0)", 0.0),
    ):
        _dots(axes, names, shades, [r[key]["value"] for r in rows], [(r[key]["low"], r[key]["high"]) for r in rows], title)
        axes.axvline(ideal, color=INK, linewidth=0.8, linestyle=":")
    left.set_xlim(-0.12, 1.06)
    middle.set_xlim(0.45, 1.02)
    right.set_xlim(left=-0.02)
    figure.suptitle(f"{QUESTIONS['credit']} After {stage} iterations", x=0.01, ha="left", fontsize=12)
    return figure


def _steps(rows: Sequence[Row], stage: int) -> Figure:
    steps = rows[0]["steps"]
    figure = Figure(figsize=(4.2 + 0.62 * len(steps), 1.4 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    blues = matplotlib.colormaps["Blues"]
    for place, row in enumerate(rows):
        for column, step in enumerate(row["per_step"]):
            value = step["correlation"]["value"]
            axes.barh(place, 0.96, left=column, height=0.92, color=blues(max(0.0, min(1.0, value)) * 0.75))
            shade = "white" if value > 0.8 else INK
            axes.text(column + 0.48, place, f"{value:.2f}", ha="center", va="center", fontsize=9, color=shade)
    axes.set_yticks(range(len(rows)), [row["rule"] for row in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xticks([i + 0.48 for i in range(len(steps))], [str(s) for s in steps])
    axes.set_xlim(-0.05, len(steps))
    axes.set_xlabel("stochastic step (0 = first, from pure noise)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.suptitle(f"{QUESTIONS['steps']} Correlation per step, after {stage} iterations", x=0.01, ha="left", fontsize=12)
    return figure


def _cosine(row: Row) -> float:
    """Within [-1, 1]; NaN where the mean gradient was not heard over its noise."""
    return max(-1.0, min(1.0, row["cosine"])) if row["heard"] else math.nan


def _gradient(rows: Sequence[Row], stage: int, equal_nfe: int, shades: Shades) -> Figure:
    figure = Figure(figsize=(11, 1.3 + 0.34 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    names = _names(rows)
    spans = [(max(-1.0, r["cosine_interval"][0]), min(1.0, r["cosine_interval"][1])) for r in rows]
    lowest = min([low for r, (low, _) in zip(rows, spans, strict=True) if r["heard"]], default=0.0)
    left.set_xlim(max(-1.0, lowest - 0.03), 1.01)
    _dots(left, names, shades, [_cosine(r) for r in rows], spans, "cosine of its mean gradient\nto the true one")
    left.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    for axes, key, title in (
        (middle, "signal_to_noise", "signal to noise of one batch\n(the same number of trajectories)"),
        (right, "signal_to_noise_at_equal_nfe", f"signal to noise of as many batches\nas {equal_nfe:,} evaluations pay for"),
    ):
        _dots(axes, names, shades, [r[key] for r in rows], [(0.0, r[key]) for r in rows], title)
        axes.set_xlim(left=0)
    figure.suptitle(f"{QUESTIONS['gradient']} After {stage} iterations", x=0.01, ha="left", fontsize=12)
    return figure


def _change(rows: Sequence[Row], key: str, label: str, shades: Shades) -> Figure:
    """Correlation, cosine and signal-to-noise at equal NFE along `key`, a line per rule, named at its right end."""
    kinds = (
        ("credit", "correlation with the true advantage", lambda r: r["correlation"]["value"]),
        ("gradient", "cosine to the true gradient", _cosine),
        ("gradient", "signal to noise at equal NFE", lambda r: r["signal_to_noise_at_equal_nfe"]),
    )
    shown = [kind for kind in kinds if any(row["kind"] == kind[0] for row in rows)]
    figure = Figure(figsize=(14 * len(shown) / 3, 5.2), layout="constrained")
    for axes, (kind, title, value) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        ends: list[tuple[str, float]] = []
        last = 0
        for name in _names(rows):
            mine = sorted((r for r in rows if r["rule"] == name and r["kind"] == kind), key=lambda r: r[key])
            if not mine or math.isnan(value(mine[-1])):
                continue
            last = len(mine) - 1
            axes.plot(range(len(mine)), [value(r) for r in mine], color=shades[name], marker="o", markersize=4, linewidth=1.8)
            axes.set_xticks(range(len(mine)), [f"{r[key]:g}" for r in mine])
            ends.append((name, value(mine[-1])))
        if value is _cosine:
            axes.set_ylim(min(0.9, axes.get_ylim()[0]), 1.01)
        low, high = axes.get_ylim()
        heights = spread_labels([end for _, end in ends], low, high, (high - low) / 22)
        for (name, _), height in zip(ends, heights, strict=True):
            axes.annotate(name, (last + 0.06, height), color=shades[name], fontsize=8, va="center", annotation_clip=False)
        axes.set_xlim(-0.1, last * 1.75 + 0.1)
        axes.set_xlabel(label, loc="left")
        axes.set_title(title, loc="left", fontsize=10)
        clean(axes)
    figure.suptitle(QUESTIONS["training" if key == "iteration" else "noise"], x=0.01, ha="left", fontsize=12)
    return figure


def table(rows: Sequence[Row]) -> str:
    """All rows as two Markdown tables, with intervals."""
    lines = [
        "| rule | iterations | noise | correlation | right sign | bias | NFE per trajectory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == "credit":
            cells = [
                f"{row[k]['value']:.2f} [{row[k]['low']:.2f}, {row[k]['high']:.2f}]" for k in ("correlation", "sign", "bias")
            ]
            head = f"| {row['rule']} | {row['iteration']} | {row['noise']:g} | "
            lines.append(head + " | ".join(cells) + f" | {row['nfe_per_trajectory']:.1f} |")
    lines += ["", "| rule | iterations | noise | cosine | relative bias | signal to noise of a batch | at equal NFE |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["kind"] == "gradient":
            low, high = row["cosine_interval"]
            known = f"{row['cosine']:.2f} [{low:.2f}, {high:.2f}] | {row['relative_bias']:.2f}"
            lines.append(
                f"| {row['rule']} | {row['iteration']} | {row['noise']:g} | {known if row['heard'] else 'no signal found | -'} | "
                f"{row['signal_to_noise']:.2f} | {row['signal_to_noise_at_equal_nfe']:.2f} |"
            )
    return "\n".join(lines)
