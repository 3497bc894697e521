"""A page as a list of blocks, written as Markdown and as one self-contained HTML file, and its general figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowrl.io import require_new_file, write_bytes
from flowrl.plots.pages import render
from flowrl.plots.style import INK, OTHERS, clean, is_own, png, spread_labels

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#7A5195", "#8C6D1F", *OTHERS)
TONES = {"good": "#009E73", "bad": "#D55E00", "open": "#8a8f98"}


@dataclass(frozen=True)
class Heading:
    """A section's heading."""

    text: str
    kind: ClassVar[str] = "heading"

    def markdown(self, images: str) -> str:
        """The block as Markdown."""
        return f"## {self.text}"


@dataclass(frozen=True)
class Text:
    """A paragraph, with `code` and *emphasis*."""

    text: str
    kind: ClassVar[str] = "text"

    def markdown(self, images: str) -> str:
        """The block as Markdown."""
        return self.text


@dataclass(frozen=True)
class Table:
    """A table of texts. Columns in `wrapped` may break lines; a cell whose text is in `tones` is shown as a coloured label."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    wrapped: tuple[str, ...] = ()
    tones: dict[str, str] = field(default_factory=dict)
    kind: ClassVar[str] = "table"

    def markdown(self, images: str) -> str:
        """The block as Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Image:
    """A figure, the name of its file, and a text alternative."""

    name: str
    figure: Figure
    alt: str
    kind: ClassVar[str] = "image"

    def markdown(self, images: str) -> str:
        """The block as Markdown; `images` is the folder of the images."""
        return f"![{self.alt}]({images + '/' if images else ''}{self.name}.png)"


def require_page(folder: Path, name: str, title: str) -> None:
    """Raise `ConfigError` unless `name`.md and `name`.html in `folder` are new, or pages whose title ends in `title`."""
    heading, tag = f"{title}\n".encode(), f"{escape(title)}</title>".encode()
    require_new_file(folder / f"{name}.md", lambda data: data.startswith(b"# ") and heading in data[:1000], "page")
    require_new_file(folder / f"{name}.html", lambda data: tag in data[:1000], "page")


@dataclass
class Document:
    """A title and blocks in order. `kind`: the end of the title that all pages of this kind share; default: the whole title."""

    title: str
    blocks: list[Heading | Text | Table | Image] = field(default_factory=list)
    kind: str = ""

    def heading(self, words: str) -> None:
        """Begin a section."""
        self.blocks.append(Heading(words))

    def text(self, words: str) -> None:
        """Add a paragraph."""
        self.blocks.append(Text(words))

    def write(self, folder: Path, name: str, images: str = "") -> list[Path]:
        """Write `name`.md and `name`.html in `folder`, and the figures as PNG in its folder `images`.

        Raises `ConfigError`, before anything is written, for files of these names that are neither of an earlier page of this
        kind nor figures of flowrl.
        """
        require_page(folder, name, self.kind or self.title)
        old = folder / f"{name}.md"
        shown = old.read_text(encoding="utf-8", errors="replace") if old.exists() else ""
        for block in self.blocks:
            if isinstance(block, Image):
                known = block.markdown(images).partition("](")[2] in shown
                path = folder / images / f"{block.name}.png"
                require_new_file(path, lambda data, known=known: known or is_own(data), "page")
        files = {block.name: png(block.figure) for block in self.blocks if isinstance(block, Image)}
        for image, data in files.items():
            write_bytes(folder / images / f"{image}.png", data)
        write_bytes(folder / f"{name}.md", self.markdown(images).encode())
        write_bytes(folder / f"{name}.html", self.html(files).encode())
        return [folder / f"{name}.md", folder / f"{name}.html"]

    def markdown(self, images: str = "") -> str:
        """The page as Markdown; `images` is the folder of the images."""
        return "\n\n".join([f"# {self.title}", *(block.markdown(images) for block in self.blocks)]) + "\n"

    def html(self, files: Mapping[str, bytes]) -> str:
        """The page as HTML with the images (PNG files by name) inside."""
        return render("page.html.j2", package="flowrl_bench", title=self.title, blocks=self.blocks, files=files)


@dataclass(frozen=True)
class Band:
    """A curve with its interval."""

    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Effect:
    """A number with its interval, and how it is coloured (see `TONES`). `mark`: the largest value that a claim allows."""

    text: str
    value: float
    low: float
    high: float
    tone: str
    mark: float | None = None


def dot_plot_axes(axes: Axes, labels: Sequence[str], title: str, size: float | None = None) -> None:
    """Style of a plot with one horizontal row per label."""
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def bands(panels: Mapping[str, Mapping[str, Band]], x: str, y: str) -> Figure:
    """A panel per setting, two in a row; a band per arm, labelled at its end."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns + 0.6, 3.8 * rows), layout="constrained")
    names = list(dict.fromkeys(name for arms in panels.values() for name in arms))
    shades = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in cells[len(panels) :]:
        empty.set_axis_off()
    for axes, (title, arms) in zip(cells, panels.items(), strict=False):
        for name, band in arms.items():
            axes.fill_between(band.x, band.low, band.high, color=shades[name], alpha=0.18, linewidth=0)
            axes.plot(band.x, band.middle, color=shades[name], linewidth=2)
        low, high = axes.get_ylim()
        heights = spread_labels([band.middle[-1] for band in arms.values()], low, high, (high - low) / 15)
        end = max(band.x[-1] for band in arms.values())
        for name, height in zip(arms, heights, strict=True):
            axes.annotate(f" {name}", (end, height), color=shades[name], fontsize=9, va="center", annotation_clip=False)
        axes.set_xlim(0, end * 1.42)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
        axes.set_xlabel(x, loc="left")
        axes.set_ylabel(y)
        axes.set_title(title, loc="left", fontsize=10)
        clean(axes)
    return figure


def effects(groups: Mapping[str, Sequence[Effect]], reference: Mapping[str, float]) -> Figure:
    """Numbers with intervals, a panel per group, with a dotted line at the group's `reference` (0 by default)."""
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
        axes.axvline(reference.get(title, 0), color=INK, linewidth=0.8, linestyle=":")
        if reference.get(title, 0) > 0:
            axes.set_xlim(left=0)
        dot_plot_axes(axes, [row.text for row in rows], title, 8.5)
    return figure


def profiles(levels: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], x: str) -> Figure:
    """Performance profiles, a panel per world: the fraction of runs that reach a level, where it is not 0 or 1."""
    panels = {title: arms for title, arms in panels.items() if arms}
    figure = Figure(figsize=(5.8 * len(panels) + 0.4, 3.8), layout="constrained")
    for axes, (title, arms) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        shown = [level for i, level in enumerate(levels) if any(0 < fractions[i] < 1 for fractions in arms.values())]
        for place, (name, fractions) in enumerate(arms.items()):
            axes.step(levels, fractions, where="post", color=COLOURS[place % len(COLOURS)], linewidth=2, label=name)
        if shown:
            space = 0.05 * (shown[-1] - shown[0]) + 0.01
            axes.set_xlim(shown[0] - space, shown[-1] + space)
        axes.legend(frameon=False, fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(x, loc="left")
        axes.set_ylabel("fraction of runs at or above")
        axes.set_ylim(-0.03, 1.03)
        clean(axes)
    return figure
