"""The microscope's page: a figure per question, and tables of all numbers, from the rows of `run_microscope`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowrl.plots.style import INK, clean, spread_labels
from flowrl_bench.microscope import EQUAL_NFE
from flowrl_bench.page import Document, Image, Table, dot_plot_axes

Row = dict[str, Any]
Shades = dict[str, str]

TITLE = "The microscope: credit and gradients compared with the ground truth"
LINES = (
    "#009E73", "#D55E00", "#E69F00", "#8C6D1F", "#CC79A7", "#7A5195", "#0B7285", "#56B4E9", "#8a8f98", "#0072B2", "#4C6EF5",
    "#5B5B5B",
)  # fmt: skip
TITLES = {
    "credit": "Agreement of the credit with the true advantage of a step",
    "steps": "Agreement by step",
    "gradient": "Direction and signal-to-noise ratio of the policy gradient",
    "training": "Changes during training",
    "noise": "Effect of reward noise",
}
"""Titles of the figures by name."""
EXPLANATIONS = {
    "credit": "The true advantage of a step is V(x_{i+1}) - V(x_i), where V is the expected final reward if the stochastic "
    "sampler continues. V is estimated by Monte Carlo continuation. The correlation is corrected for the noise of this "
    "estimate, and signs are counted only if the true one is more than two standard errors from 0. Bars are 95% intervals "
    "(bootstrap over groups).",
    "steps": "The same correlation for each step.",
    "gradient": "The true gradient is the pathwise one through the stochastic steps. The signal-to-noise ratio is that of one "
    "batch; at equal NFE, cheap rules average more batches. NFE counts all evaluations of a batch: sampling, the rule's probes, "
    "and the update (one per trajectory and stochastic step, the same for all rules).",
    "training": "The policy is trained with uniform credit, and all rules are applied to the same policies.",
    "noise": "The rules see rewards with noise on every score; the truth uses the reward without noise.",
}


def microscope_page(rows: Sequence[Row], stage: int, made: Mapping[str, Any]) -> Document:
    """The page: a figure per question, then all numbers. `stage` is the iteration of figures that show only one.

    `made` is what the results file says of the rows: "command", "seconds", "cpu_seconds", "seed", and their provenance
    ("commit", "versions", "hardware", "code").
    """
    page = Document(TITLE)
    page.text(
        "Two-dimensional world. The rule *true advantage (16 continuations)* estimates V itself, from 16 continuations per node; "
        "their noise is the reason why its correlation is below 1."
    )
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    page.text(
        f"Made in {made['seconds']:.0f} seconds ({made['cpu_seconds']:.0f} of processor time) by `{made['command']}`, seed "
        f"{made['seed']}; commit {made['commit']}; {versions}; {made['hardware']}; code `{made['code']}`."
    )
    for name, figure in figures(rows, stage).items():
        page.heading(TITLES[name])
        page.text(EXPLANATIONS[name])
        page.blocks.append(Image(name, figure, TITLES[name]))
    page.heading("All numbers")
    page.text("NFE per trajectory are those of sampling and the rule's probes; those of the update are the same for all rules.")
    page.blocks += [credit_table(rows), gradient_table(rows)]
    return page


def credit_table(rows: Sequence[Row]) -> Table:
    """All credit rows with intervals."""
    head = ("rule", "iterations", "noise", "correlation", "right sign", "bias", "NFE per trajectory")
    found = []
    for row in rows:
        if row["kind"] == "credit":
            measured = [row[name] for name in ("correlation", "sign", "bias")]
            cells = [f"{m['value']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" for m in measured]
            found.append((*_setting(row), *cells, f"{row['nfe_per_trajectory']:.1f}"))
    return Table(head, found)


def gradient_table(rows: Sequence[Row]) -> Table:
    """All gradient rows with intervals."""
    head = ("rule", "iterations", "noise", "cosine", "relative bias", "signal to noise of a batch", "at equal NFE")
    found = []
    for row in rows:
        if row["kind"] == "gradient":
            low, high = row["cosine_interval"]
            known = (f"{row['cosine']:.2f} [{low:.2f}, {high:.2f}]", f"{row['relative_bias']:.2f}")
            ratios = (f"{row['signal_to_noise']:.2f}", f"{row['signal_to_noise_at_equal_nfe']:.2f}")
            found.append((*_setting(row), *(known if row["detected"] else ("no signal found", "-")), *ratios))
    return Table(head, found)


def _setting(row: Row) -> tuple[str, str, str]:
    return row["rule"], str(row["iteration"]), f"{row['noise']:g}"


def figures(rows: Sequence[Row], stage: int) -> dict[str, Figure]:
    """All figures by name; `stage` is the iteration of figures that show only one."""
    credit = [row for row in rows if row["kind"] == "credit"]
    gradient = [row for row in rows if row["kind"] == "gradient"]
    shades = {name: LINES[place % len(LINES)] for place, name in enumerate(_names(rows))}
    drawn = {
        "credit": _credit(_at(credit, stage), stage, shades),
        "steps": _steps(_at(credit, stage), stage),
    }
    if gradient:
        drawn["gradient"] = _gradient(_at(gradient, stage), stage, shades)
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
    """A dot with its interval per rule."""
    for place, (value, (low, high)) in enumerate(zip(values, spans, strict=True)):
        if math.isnan(value):
            axes.text(axes.get_xlim()[0], place, " no signal found", va="center", fontsize=8, color="#8a8f98")
            continue
        shade = shades[names[place]]
        axes.plot([low, high], [place, place], color=shade, linewidth=2.2, solid_capstyle="round", alpha=0.55)
        axes.plot([value], [place], "o", color=shade, markersize=7)
    dot_plot_axes(axes, names, title)


def _credit(rows: Sequence[Row], stage: int, shades: Shades) -> Figure:
    figure = Figure(figsize=(11, 1.3 + 0.34 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    names = _names(rows)
    for axes, key, title, ideal in (
        (left, "correlation", "correlation with the true advantage\n(corrected for Monte Carlo noise)", 1.0),
        (middle, "sign", "fraction of steps with the right sign\n(of those whose true sign is known)", 0.5),
        (right, "bias", "mean credit of a step\n(stds of the credit; truth 0)", 0.0),
    ):
        _dots(axes, names, shades, [r[key]["value"] for r in rows], [(r[key]["low"], r[key]["high"]) for r in rows], title)
        axes.axvline(ideal, color=INK, linewidth=0.8, linestyle=":")
    left.set_xlim(-0.12, 1.06)
    middle.set_xlim(0.45, 1.02)
    right.set_xlim(left=-0.02)
    figure.suptitle(f"{TITLES['credit']} after {stage} iterations", x=0.01, ha="left", fontsize=12)
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
    figure.suptitle(f"{TITLES['steps']}: correlation after {stage} iterations", x=0.01, ha="left", fontsize=12)
    return figure


def _cosine(row: Row) -> float:
    """Within [-1, 1]; NaN if the mean gradient was not detected above its noise."""
    return max(-1.0, min(1.0, row["cosine"])) if row["detected"] else math.nan


def _gradient(rows: Sequence[Row], stage: int, shades: Shades) -> Figure:
    figure = Figure(figsize=(11, 1.3 + 0.34 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    names = _names(rows)
    spans = [(max(-1.0, r["cosine_interval"][0]), min(1.0, r["cosine_interval"][1])) for r in rows]
    lowest = min([low for r, (low, _) in zip(rows, spans, strict=True) if r["detected"]], default=0.0)
    left.set_xlim(max(-1.0, lowest - 0.03), 1.01)
    _dots(left, names, shades, [_cosine(r) for r in rows], spans, "cosine of its mean gradient\nto the true one")
    left.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    for axes, key, title in (
        (middle, "signal_to_noise", "signal to noise of one batch\n(the same number of trajectories)"),
        (right, "signal_to_noise_at_equal_nfe", f"signal to noise of as many batches\nas {EQUAL_NFE:,} evaluations allow"),
    ):
        _dots(axes, names, shades, [r[key] for r in rows], [(0.0, r[key]) for r in rows], title)
        axes.set_xlim(left=0)
    figure.suptitle(f"{TITLES['gradient']} after {stage} iterations", x=0.01, ha="left", fontsize=12)
    return figure


def _change(rows: Sequence[Row], key: str, label: str, shades: Shades) -> Figure:
    """Correlation, cosine and signal-to-noise at equal NFE along `key`, a line per rule, labelled at its right end."""
    kinds: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
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
    figure.suptitle(TITLES["training" if key == "iteration" else "noise"], x=0.01, ha="left", fontsize=12)
    return figure
