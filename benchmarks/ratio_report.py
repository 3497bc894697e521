"""Figures and tables of `ratio.py`, from its record."""

import statistics
from typing import Any

from flowrl_compare.style import COLOURS, INK, OTHERS, clean
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FORMS = {"exact": "exact density", "released": "released CPS form", "guard": "GRPO-Guard"}
SHADES = {
    "exact": COLOURS["flow-grpo"],
    "released": COLOURS["stepwise-flow-grpo"],
    "guard": OTHERS[1],
}
PRECISIONS = {
    "bfloat16": COLOURS["stepwise-flow-grpo"],
    "float16": COLOURS["flow-grpo"],
    "float32": OTHERS[2],
}


def shares_figure(shares: dict[str, Any]) -> Figure:
    """A row per grid, a column per sampler; bars by step."""
    rows = [name for name in shares if not name.startswith("2-D")]
    chosen = [
        name
        for name in shares[rows[0]]["samplers"]
        if name not in ("CPS 0.8", "Flow-SDE 0.7, all but last")
    ]
    drawn = Figure(figsize=(13, 2.5 * len(rows) + 0.8), layout="constrained")
    grid: Any = drawn.subplots(len(rows), len(chosen), sharey=True, squeeze=False)
    for row, name in enumerate(rows):
        for column, sampler in enumerate(chosen):
            axes, values = grid[row, column], shares[name]["samplers"][sampler]
            forms = [form for form in FORMS if form in values]
            count, width = len(values["std"]), 0.8 / len(forms)
            for k, form in enumerate(forms):
                places = [i - 0.4 + (k + 0.5) * width for i in range(count)]
                axes.bar(places, values[form], width, color=SHADES[form], label=FORMS[form])
            top = max(range(count), key=lambda i: values["exact"][i])
            place, label = (
                (top - 0.4 + width / 2, values["exact"][top]),
                percent(values["exact"][top]),
            )
            axes.annotate(label, place, (0, 3), textcoords="offset points", ha="center", fontsize=9)
            axes.set(ylim=(0, 1.15), yticks=[0, 0.25, 0.5, 0.75, 1], xticks=range(count))
            axes.set_title("" if row else sampler)
            axes.set_xlabel("step" if row == len(rows) - 1 else "")
            clean(axes)
        grid[row, 0].set_ylabel(f"{name}\nshare of the step")
    handles, labels = grid[0][chosen.index("CPS 0.7")].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    return drawn


def rounding_figure(record: dict[str, Any]) -> Figure:
    """A panel per sampler and form: sizes of the on-policy log-ratio by step and precision at
    guidance 4.5, and the clip.
    """
    drawn = Figure(figsize=(13, 4.2), layout="constrained")
    panels: Any = drawn.subplots(1, len(record["published_clips"]), sharey=True)
    for axes, (name, clip) in zip(panels, record["published_clips"].items(), strict=True):
        for dtype, shade in PRECISIONS.items():
            rounded = record["rounding"][f"{dtype}, guidance 4.5"]
            _points(
                axes, rounded[name], [-mean for mean in rounded[f"{name}, predicted"]], shade, dtype
            )
        axes.axhline(clip, color=INK, linewidth=1.2, linestyle="--")
        axes.set(
            yscale="log",
            ylim=(1e-8, 2),
            title=f"{name} (clip {clip:.0e})",
            xlabel="step",
            xticks=range(9),
        )
        clean(axes)
    panels[0].set_ylabel("|log ratio| before any update")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return drawn


def _points(
    axes: Axes, ratios: list[list[float]], predicted: list[float], shade: str, label: str
) -> None:
    """Means over samples of |log ratio|, joined; filled where all samples are negative. A band up
    to the largest if they are the resolution of a float32 ratio.
    """
    sizes = [statistics.fmean(map(abs, values)) for values in ratios]
    if max(sizes) < 1e-6:
        axes.axhspan(
            1e-8, 1.2e-7, color=shade, alpha=0.25, linewidth=0, label=f"{label} (below 1.2e-7)"
        )
        return
    axes.plot(range(len(sizes)), sizes, color=shade, linewidth=1.2, label=label)
    axes.plot(range(len(sizes)), predicted, color=shade, linewidth=1.2, linestyle=":")
    for i, (size, values) in enumerate(zip(sizes, ratios, strict=True)):
        axes.plot(
            i,
            size,
            "o",
            color=shade,
            markerfacecolor=shade if max(values) < 0 else "white",
            markersize=6,
        )


def report(record: dict[str, Any]) -> str:
    """All numbers as Markdown."""
    lines = [
        "### Clips in other dimensions",
        "",
        "| latent | d | clip | K = c² d / 2 | log of the latent's density ratio, c d |",
    ]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {row['latent']} | {row['d']:,} | {row['clip']:.1e} | {row['kl']:.1e} |"
        f" {row['log_density']:.2g} |"
        for row in record["clips"]
    ]
    for grid, values_of_grid in record["shares"].items():
        count = len(values_of_grid["times"]) - 1
        lines += [
            "",
            f"### Shares: {grid}",
            "",
            f"Times {', '.join(f'{t:.4g}' for t in values_of_grid['times'])}.",
            "",
        ]
        lines += [
            f"| sampler | form | {' | '.join(map(str, range(count)))} |",
            "|---|---|" + "---|" * count,
        ]
        for sampler, values in values_of_grid["samplers"].items():
            lines += [f"| {sampler} | std | {' | '.join(f'{std:.3g}' for std in values['std'])} |"]
            for form in (form for form in FORMS if form in values):
                lines += [
                    f"| | {FORMS[form]} | {' | '.join(percent(share) for share in values[form])} |"
                ]
    lines += ["", "### Rounding: log-ratio before any update", ""]
    lines += [
        "Smallest and largest of all samples, in units of the clip named in the first column.",
        "",
    ]
    lines += [
        "| | precision, guidance | " + " | ".join(map(str, range(9))) + " |",
        "|---|---|" + "---|" * 9,
    ]
    for name, clip in record["published_clips"].items():
        for case, rounded in record["rounding"].items():
            cells = [
                f"{min(values) / clip:.2g} to {max(values) / clip:.2g}" for values in rounded[name]
            ]
            lines += [f"| {name}, {clip:.0e} | {case} | {' | '.join(cells)} |"]
    lines += [
        "",
        "Root mean square of the velocity, and of its difference between the kernels:",
        "",
    ]
    lines += [
        "| precision, guidance | " + " | ".join(map(str, range(9))) + " |",
        "|---|" + "---|" * 9,
    ]
    for case, rounded in record["rounding"].items():
        pairs = zip(rounded["velocity"], rounded["difference"], strict=True)
        lines += [f"| {case} | {' | '.join(f'{size:.2f}, {gap:.1e}' for size, gap in pairs)} |"]
    return "\n".join(lines) + "\n"


def percent(share: float) -> str:
    """In percent: two decimals near 0 and 100."""
    return (
        ""
        if share == 0
        else f"{100 * share:.2f}%"
        if share < 0.01 or share > 0.99
        else f"{100 * share:.1f}%"
    )
