"""Figures that several lessons use, with the colours of `flowrl.run.report.style`. They are on
white, so that they are readable on a dark page.
"""

import base64
import html
import json
import math
import os.path
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowrl import Prompt
from flowrl.run.report import style
from flowrl.run.report.style import INK, OTHERS, clean

matplotlib.rcParams.update(
    {name: "white" for name in ("figure.facecolor", "axes.facecolor", "savefig.facecolor")}
)

COLOURS = style.COLOURS | {
    "reward-to-go": "#E69F00",
    "estimate-gain": "#AA4499",
    "depth": "#6A51A3",
    "sibling": "#CC6677",
    "diffusion-nft": "#CC79A7",
    "awm": "#56B4E9",
    "dgpo": "#999933",
    "v-grpo": "#661100",
    "fdfo": "#44AA99",
    "step-nft": "#B15928",
    "calibrated": "#882255",
    "even-weight": "#3B7A9E",
}
"""One colour per rule or method, the same in all lessons."""

NOISE = "#5B5B5B"
"""The colour of noise (t = 1)."""
DATA = "#0072B2"
"""The colour of data (t = 0), and of a policy's samples."""
ACCENT = "#D55E00"
"""The colour that draws attention."""
SIGNED = "RdBu"
"""Colour map of signed values, with limits symmetric about 0: blue is positive, red negative."""

__all__ = [
    "ACCENT",
    "COLOURS",
    "DATA",
    "INK",
    "NOISE",
    "OTHERS",
    "SIGNED",
    "ImageRow",
    "animation",
    "clean",
    "interactive",
    "panels",
    "pixels",
    "plane",
    "show_images",
    "target",
]


def panels(
    columns: int = 1, rows: int = 1, width: float = 3.2, height: float = 3.0, **options: Any
) -> tuple[Figure, Any]:
    """A figure of rows x columns axes of that size in inches; one axes, a list, or a list of
    lists.
    """
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", **options
    )
    return figure, axes


def plane(axes: Axes, title: str = "", extent: float = 3.4) -> Axes:
    """Axes of the 2-D world: equal scales, no ticks."""
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title)
    for spine in axes.spines.values():
        spine.set_color("#d5d8dd")
    return axes


def target(prompt: Prompt) -> tuple[float, float]:
    """The point on the ring in the direction of a prompt of the 2-D world."""
    angle = math.radians(prompt.metadata["angle"])
    return 2 * math.cos(angle), 2 * math.sin(angle)


def pixels(image: Tensor) -> Any:
    """An image [channel, height, width] in [0, 1] as `Axes.imshow` takes it."""
    return image.detach().permute(1, 2, 0).clamp(0, 1).numpy()


@dataclass(frozen=True)
class ImageRow:
    """Images [sample, channel, height, width] in [0, 1], a caption under each (a text, or a score),
    and a label to their left.
    """

    images: Tensor
    captions: Sequence[str] | Tensor = ()
    label: str = ""


def show_images(
    *rows: ImageRow, heads: Sequence[str] = (), title: str = "", size: float = 1.25
) -> Figure:
    """Rows of images of `size` inches; `heads` are the titles of the columns."""
    columns = max(len(row.images) for row in rows)
    left, above = 1.0 * any(row.label for row in rows), 0.35 * bool(heads) + 0.3 * bool(title)
    height = size + 0.25 * any(len(row.captions) for row in rows)
    figure, axes = plt.subplots(
        len(rows),
        columns,
        figsize=(left + size * columns, above + height * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for cells, row in zip(axes, rows, strict=True):
        captions = (
            [f"{score:.2f}" for score in row.captions.tolist()]
            if isinstance(row.captions, Tensor)
            else row.captions
        )
        for column, cell in enumerate(cells):
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_visible(False)
            if column < len(row.images):
                cell.imshow(pixels(row.images[column]), interpolation="nearest")
            if column < len(captions):
                cell.set_xlabel(captions[column], fontsize=8, color=INK, labelpad=2)
        cells[0].set_ylabel(
            fill(row.label, 16),
            fontsize=9,
            color=INK,
            rotation="horizontal",
            ha="right",
            va="center",
        )
    for cell, head in zip(axes[0], heads, strict=False):
        cell.set_title(fill(head, max(10, round(0.62 * len(head)))), fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def animation(
    figure: Figure, draw: Callable[[int], object], frames: int, seconds: float = 4.0, dpi: int = 70
) -> Any:
    """A GIF that loops, to be the last expression of a cell: `draw(frame)` changes the artists of
    `figure`. Closes the figure.
    """
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


def interactive(name: str, **start: Any) -> Any:
    """An interactive figure of the page docs/_static/figures, to be the last expression of a cell:
    a frame that holds the whole figure, above its picture for readers without scripts. `start` has
    first values of its controls, such as elements=128 for "ratio".

    Raises `ValueError` for an unknown name.
    """
    return InteractiveFigure(name, start)


class InteractiveFigure:
    """One section of docs/_static/figures/index.html, as HTML and as a picture."""

    def __init__(self, name: str, start: dict[str, Any]) -> None:
        here = Path(__file__).parent  # in the wheel, or in the repository
        places = (here / "static", here.parents[2] / "docs" / "_static")
        self._folder = next(place for place in places if place.is_dir()) / "figures"
        self._name, self._start = name, start
        self._index = (self._folder / "index.html").read_text(encoding="utf-8")
        names = re.findall(r'<section class="fl-figure" id="(.*?)"', self._index)
        if name not in names:
            raise ValueError(f"no interactive figure {name!r}; there are {', '.join(names)}")

    def _text(self, path: str) -> str:
        """A file that the page names, without indentation and comments of a whole line."""
        file = Path(os.path.normpath(self._folder / path))
        lines = map(str.strip, file.read_text(encoding="utf-8").splitlines())
        text = "\n".join(line for line in lines if line and not line.startswith("// "))
        text = re.sub(r"^/\*\* .*\*/\n", "", text, flags=re.MULTILINE)
        return re.sub(r"^/\*.*?\*/\n", "", text, flags=re.DOTALL | re.MULTILINE)

    def page(self) -> str:
        """The figure with its styles and scripts, as one HTML file without a network."""
        section = re.search(
            rf'<section class="fl-figure" id="{self._name}".*?</section>', self._index, re.DOTALL
        )
        scripts = re.findall(r'<script defer src="(.*?)"', self._index)
        own = f"{self._name}.js"
        world = "../first-look/credit.js"
        unused = {world} if "flowrlCredit" not in self._text(own) else set()
        needed = [path for path in scripts if path == own or ("/" in path and path not in unused)]
        sheets = re.findall(r'<link rel="stylesheet" href="(.*?)"', self._index)
        styles = "\n".join(self._text(path) for path in sheets)
        figure = re.sub(r"<noscript>.*?</noscript>", "", section[0] if section else "")
        if self._start:
            start = html.escape(json.dumps(self._start))
            figure = figure.replace("<div data-figure", f'<div data-start="{start}" data-figure')
        # without scripts the frame is empty, and the picture below it is seen
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><style>{styles}</style>'
            "<noscript><style>html, body { background: none !important; }</style></noscript>"
            f'<body class="fl-framed"><div class="first-look">{figure}</div>'
            + "".join(f"<script>{self._text(path)}</script>" for path in needed)
            + "<script>flowrlDraw.inFrame();</script></body></html>"
        )

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        picture = base64.b64encode((self._folder / f"{self._name}.png").read_bytes()).decode()
        page = self.page().replace("&", "&amp;").replace("'", "&#39;")
        frame = "position: absolute; inset: 0; width: 100%; height: 100%; border: 0"
        shown = (
            '<div style="position: relative; max-width: 48rem; overflow: hidden">'
            f'<img src="data:image/png;base64,{picture}"'
            f' alt="Interactive figure: {self._name}. Run the cell to see it."'
            ' style="width: 100%; display: block">'
            f"<iframe title='Interactive figure: {self._name}' style='{frame}' srcdoc='{page}'>"
            "</iframe></div>"
        )
        return {"text/html": shown, "text/plain": f"Interactive figure: {self._name}"}
