"""Style of all figures (colour-blind safe colours, axes, label positions), and saving them."""

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flowrl.core.errors import require
from flowrl.run.io import refused, require_new_file, write_bytes

COLOURS = {
    "flow-grpo": "#0072B2",
    "stepwise-flow-grpo": "#D55E00",
    "tp-grpo": "#009E73",
    "dance-grpo": "#5B2A86",
    "noise-weighted": "#5E3A00",
}
OTHERS = ("#CC79A7", "#56B4E9", "#5B5B5B", "#E69F00")
INK = "#22252b"
SOFT = "#555b66"
PALE = "#c9ccd3"
MARKERS = "osD^vP*X"
"""Markers of the methods in their order, so that curves differ in more than their colour."""
MADE = {"Software": "flowrl"}
"""Metadata of the PNG files of this package."""
VECTOR: dict[str, dict[str, Any]] = {
    "pdf": {"Creator": "flowrl", "CreationDate": None},
    "svg": {"Date": None},
}
"""Metadata of vector graphics by format: no date, so that equal figures are equal files."""

matplotlib.rcParams.update(
    {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.edgecolor": "#8a8f98",
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "svg.fonttype": "none",
        "svg.hashsalt": "flowrl",
        "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    }
)


def colour(arm: str, arms: Sequence[str]) -> str:
    """The arm's colour; those of `arms` without a fixed colour take those of `OTHERS` in order."""
    others = [name for name in arms if name not in COLOURS]
    return COLOURS.get(arm) or OTHERS[others.index(arm) % len(OTHERS)]


def marker(arm: str, arms: Sequence[str]) -> str:
    """The arm's marker, by its position in `arms`."""
    return MARKERS[list(arms).index(arm) % len(MARKERS)]


def clean(axes: Axes) -> None:
    """Remove the upper and right spines and add a light horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def spread_labels(values: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Heights of labels near `values`, at least `gap` apart if they fit, so that labels do not
    overlap.

    Args:
        values: preferred heights.
        low: lowest height.
        high: largest height.
        gap: distance of two labels.

    Returns:
        One height per value, within [low, high].
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    gap = min(gap, (high - low) / max(1, len(values) - 1))
    heights = [min(max(value, low), high) for value in values]
    for below, above in pairwise(order):
        heights[above] = max(heights[above], heights[below] + gap)
    # What was pushed above the top moves down again, and pushes its neighbours.
    ceiling = high
    for index in reversed(order):
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - gap
    return heights


def png(figure: Figure, dpi: int = 130) -> bytes:
    """The figure as a PNG file on white.

    Args:
        figure: the figure.
        dpi: dots per inch.

    Returns:
        The file's bytes.
    """
    buffer = io.BytesIO()
    figure.set(dpi=dpi, facecolor="white")
    # savefig draws twice: the same file for 1.3 times the time
    FigureCanvasAgg(figure).print_png(buffer, metadata=MADE)
    return buffer.getvalue()


def vector(figure: Figure, suffix: str) -> bytes:
    """The figure on white in a format of `VECTOR`; its text remains text."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, facecolor="white", metadata=VECTOR[suffix])
    return buffer.getvalue()


def require_figure(path: Path) -> None:
    """Raise `ConfigError` unless a figure can be written to `path`, which is new or a PNG of this
    package.
    """
    formats = FigureCanvasBase.get_supported_filetypes()
    allowed = f"a name that ends in .png or another of {', '.join(formats)}"
    require(path.suffix[1:].lower() in formats, "out", str(path), allowed)
    require_new_file(path, is_own)


def is_own(data: bytes) -> bool:
    """Whether `data` is a PNG or PDF file of this package."""
    return b"Software\0flowrl" in data[:4096] or b"/Creator (flowrl)" in data


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write the figure in the format of the file's extension.

    Args:
        figure: the figure.
        path: the file.
        dpi: dots per inch.

    Raises:
        ConfigError: the file cannot be written.
        DiskError: the disk is full.
    """
    buffer, suffix = io.BytesIO(), path.suffix[1:].lower() or "png"
    try:
        figure.savefig(buffer, format=suffix, dpi=dpi, metadata=MADE if suffix == "png" else None)
        write_bytes(path, buffer.getvalue())
    except (OSError, ValueError) as error:
        raise refused(error, f"out: {path} cannot be written: {error}") from error
