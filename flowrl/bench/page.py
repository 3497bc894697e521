"""A page as a list of blocks, written as Markdown and as one self-contained HTML file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import escape
from matplotlib.figure import Figure

from flowrl.compare.paper import Columns, write_paper
from flowrl.run.io import require_new_file, write_bytes
from flowrl.run.reading import read_bytes
from flowrl.run.report.pages import render
from flowrl.run.report.style import is_own, png


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    text: str
    kind: ClassVar[str] = "heading"

    def markdown(self) -> str:
        """The block as Markdown."""
        return f"## {self.text}"

    @property
    def anchor(self) -> str:
        """The name by which links find it."""
        return re.sub(r"[^\w-]", "", self.text.lower().replace(" ", "-"))


@dataclass(frozen=True)
class Text:
    """A paragraph, with `code` and *emphasis*."""

    text: str
    kind: ClassVar[str] = "text"

    def markdown(self) -> str:
        """The block as Markdown."""
        return self.text


@dataclass(frozen=True)
class Table:
    """A table of texts. A click on a column's head sorts the rows (sort.js)."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: ClassVar[str] = "table"

    def markdown(self) -> str:
        """The block as Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines
        )


@dataclass(frozen=True)
class Image:
    """A figure, the name of its file, and a text alternative."""

    name: str
    figure: Figure
    alt: str
    kind: ClassVar[str] = "image"

    def markdown(self) -> str:
        """The block as Markdown."""
        return f"![{self.alt}]({self.name}.png)"


def require_page(folder: Path, name: str, title: str, option: str = "page") -> None:
    """Raise `ConfigError`, which names the `option`, unless `name`.md and `name`.html in `folder`
    are new, or pages whose title ends in `title`.
    """
    heading, tag = f"{title}\n".encode(), f"{escape(title)}</title>".encode()
    require_new_file(
        folder / f"{name}.md",
        lambda data: data.startswith(b"# ") and heading in data[:1000],
        option,
    )
    require_new_file(folder / f"{name}.html", lambda data: tag in data[:1000], option)


@dataclass
class Document:
    """A title and blocks in order. `kind`: the end of the title that all pages of this kind share;
    default: the whole title.
    """

    title: str
    blocks: list[Heading | Text | Table | Image] = field(default_factory=list)
    kind: str = ""

    def heading(self, words: str) -> None:
        """Begin a section."""
        self.blocks.append(Heading(words))

    def text(self, words: str) -> None:
        """Add a paragraph."""
        self.blocks.append(Text(words))

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write `name`.md, `name`.html and the figures as PNG in `folder`.

        Raises `ConfigError`, before anything is written, for files of these names that are neither
        of an earlier page of this kind nor figures of flowrl.
        """
        require_page(folder, name, self.kind or self.title)
        old = folder / f"{name}.md"
        shown = read_bytes(old).decode(errors="replace") if old.exists() else ""
        for block in self.blocks:
            if isinstance(block, Image):
                known = block.markdown().partition("](")[2] in shown
                path = folder / f"{block.name}.png"
                require_new_file(path, lambda data, known=known: known or is_own(data), "page")
        files = {block.name: png(block.figure) for block in self.blocks if isinstance(block, Image)}
        for image, data in files.items():
            write_bytes(folder / f"{image}.png", data)
        write_bytes(folder / f"{name}.md", self.markdown().encode())
        write_bytes(folder / f"{name}.html", self.html(files).encode())
        return [folder / f"{name}.md", folder / f"{name}.html"]

    def for_paper(
        self,
        folder: Path,
        results: Sequence[Mapping[str, Any]],
        settings: Iterable[Mapping[str, Any]],
        command: str,
    ) -> list[Path]:
        """Write the page's tables and figures, the rows `results` and the references of runs with
        these `settings` to a folder (`flowrl.compare.paper.write_paper`).
        """
        section, tables = self.title, dict[str, Columns]()
        figures = {block.name: block.figure for block in self.blocks if isinstance(block, Image)}
        for block in self.blocks:
            if isinstance(block, Heading):
                section = block.text
            elif isinstance(block, Table):
                caption = f"{section} ({len(tables) + 1})"
                tables[caption] = [
                    (name, [row[place] for row in block.rows])
                    for place, name in enumerate(block.head)
                ]
        return write_paper(folder, results, tables, figures, settings, command, "page")

    def markdown(self) -> str:
        """The page as Markdown."""
        return "\n\n".join([f"# {self.title}", *(b.markdown() for b in self.blocks)]) + "\n"

    def html(self, files: Mapping[str, bytes]) -> str:
        """The page as HTML with the images (PNG files by name) inside."""
        return render(
            "page.html.j2",
            package="flowrl.bench",
            title=self.title,
            blocks=self.blocks,
            files=files,
        )
