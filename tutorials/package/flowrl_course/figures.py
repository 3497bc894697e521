"""Figures that several lessons use; colours are those of `flowrl.plots.style`."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.plots.style import COLOURS, INK, OTHERS, clean

NOISE = "#5B5B5B"
"""The colour of noise (t = 1)."""
DATA = "#0072B2"
"""The colour of data (t = 0), and of what a policy makes."""
ACCENT = "#D55E00"
"""What the reader should look at."""

__all__ = ["ACCENT", "COLOURS", "DATA", "INK", "NOISE", "OTHERS", "animation", "clean", "panels", "plane", "show_pictures"]


def panels(columns: int = 1, rows: int = 1, width: float = 3.2, height: float = 3.0, **options: Any) -> tuple[Figure, Any]:
    """A figure of rows x columns axes of that size in inches; one axes, a list, or a list of lists."""
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained", **options)
    return figure, axes


def plane(axes: Axes, title: str = "", extent: float = 3.4) -> Axes:
    """Axes of the 2-D world: equal scales, no ticks."""
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title)
    for spine in axes.spines.values():
        spine.set_color("#d5d8dd")
    return axes


def show_pictures(
    images: Tensor,
    captions: Sequence[str] = (),
    columns: int = 8,
    title: str = "",
    size: float = 1.25,
    labels: Sequence[str] = (),
) -> Figure:
    """Pictures [sample, channel, height, width] in [0, 1] in rows of `columns`; a caption under each, a label over each row."""
    rows = -(-len(images) // columns)
    height = size + 0.3 * bool(captions) + 0.25 * bool(labels)
    figure, axes = plt.subplots(rows, columns, figsize=(size * columns, height * rows), layout="constrained", squeeze=False)
    for cell in axes.flat:
        cell.axis("off")
    for i, image in enumerate(images):
        cell = axes.flat[i]
        cell.imshow(image.detach().permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        if captions:
            cell.set_title(captions[i], fontsize=8, y=-0.22, color=INK)
    for row, label in enumerate(labels):
        axes[row, 0].set_title(label, loc="left", fontsize=9, color=INK)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def animation(figure: Figure, draw: Callable[[int], object], frames: int, seconds: float = 4.0, dpi: int = 70) -> Any:
    """A GIF that loops, to be the last expression of a cell: `draw(frame)` changes the artists of `figure`. Closes the figure."""
    from IPython.display import Image

    def update(frame: int) -> list[Artist]:
        draw(frame)
        return []

    figure.set_layout_engine("none")
    moving = FuncAnimation(figure, update, frames=frames, blit=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moving.gif"
        moving.save(str(path), writer=PillowWriter(fps=max(1, round(frames / seconds))), dpi=dpi)
        plt.close(figure)
        return Image(data=path.read_bytes(), format="gif")
