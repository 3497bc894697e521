"""A page as blocks, written as Markdown and as one self-contained HTML file."""

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from flowrl.io import write_bytes
from flowrl.plots.report import STYLE

PILLS = """
main{max-width:1400px}figure img{width:auto;max-width:100%;min-width:0}th.words{text-align:left}
.pill{display:inline-block;border-radius:999px;padding:.1em .7em;font-size:.85rem;white-space:nowrap;border:1px solid var(--line)}
.good{background:#d9f2e6;color:#0a5c3c}.bad{background:#fbe0d6;color:#8a2f0c}.open{background:#eceef2;color:#4a5160}
td.words{white-space:normal;min-width:13em;text-align:left;color:var(--ink)}td{vertical-align:top}th{vertical-align:bottom}
"""


@dataclass(frozen=True)
class Table:
    """A table of plain texts; columns named in `words` may break their lines, cells of `pills` columns are shown as labels."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: tuple[str, ...] = ()
    pills: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A figure with the words that stand for it."""

    name: str
    figure: Figure
    alt: str


@dataclass
class Document:
    """A title and blocks in order: ("heading" or "text", words), tables and pictures."""

    title: str
    blocks: list[tuple[str, str] | Table | Picture] = field(default_factory=list)

    def heading(self, words: str) -> None:
        """A section's heading."""
        self.blocks.append(("heading", words))

    def text(self, words: str) -> None:
        """A paragraph; `code` in back-quotes."""
        self.blocks.append(("text", words))

    def write(self, folder: Path, name: str, pictures: str = "") -> list[Path]:
        """`name`.md and `name`.html in `folder`, and the figures as PNG in the folder `pictures` beside them."""
        shots: dict[str, bytes] = {}
        for block in self.blocks:
            if isinstance(block, Picture):
                buffer = io.BytesIO()
                block.figure.savefig(buffer, format="png", dpi=130, facecolor="white")
                shots[block.name] = buffer.getvalue()
                write_bytes(folder / pictures / f"{block.name}.png", shots[block.name])
        write_bytes(folder / f"{name}.md", self.markdown(pictures).encode())
        write_bytes(folder / f"{name}.html", self.html(shots).encode())
        return [folder / f"{name}.md", folder / f"{name}.html"]

    def markdown(self, pictures: str = "") -> str:
        """The page as Markdown."""
        parts = [f"# {self.title}"]
        for block in self.blocks:
            if isinstance(block, Table):
                lines = [block.head, ["---"] * len(block.head), *block.rows]
                parts.append("\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines))
            elif isinstance(block, Picture):
                parts.append(f"![{block.alt}]({pictures + '/' if pictures else ''}{block.name}.png)")
            else:
                parts.append(f"## {block[1]}" if block[0] == "heading" else block[1])
        return "\n\n".join(parts) + "\n"

    def html(self, shots: dict[str, bytes]) -> str:
        """The page as HTML, figures inside."""
        body, opened = [], False
        for block in self.blocks:
            if isinstance(block, Table):
                body.append(_table(block))
            elif isinstance(block, Picture):
                data = base64.b64encode(shots[block.name]).decode()
                picture = f'<img alt="{html.escape(block.alt)}" src="data:image/png;base64,{data}">'
                body.append(f'<div class="scroll"><figure>{picture}</figure></div>')
            elif block[0] == "heading":
                body.append(f"{'</section>' if opened else ''}<section><h2>{_inline(block[1])}</h2>")
                opened = True
            else:
                body.append(f'<p class="{"note" if opened else "lead"}">{_inline(block[1])}</p>')
        head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        return (
            f"{head}<title>{html.escape(self.title)}</title><style>{STYLE}{PILLS}</style></head><body><main>"
            f"<h1>{html.escape(self.title)}</h1>{''.join(body)}{'</section>' if opened else ''}</main></body></html>\n"
        )


def _inline(words: str) -> str:
    """`code` and *stress*, as in Markdown."""
    stressed = re.sub(r"(?<![\w*])\*(\w[^*`]*\w)\*(?![\w*])", r"<em>\1</em>", html.escape(words, quote=False))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", stressed)


def _table(table: Table) -> str:
    head = "".join(f"<th{' class=words' * (name in table.words)}>{_inline(name)}</th>" for name in table.head)
    rows = []
    for row in table.rows:
        cells = []
        for name, cell in zip(table.head, row, strict=True):
            shown = _inline(cell)
            if cell in table.pills:
                shown = f'<span class="pill {table.pills[cell]}">{shown}</span>'
            cells.append(f'<td class="words">{shown}</td>' if name in table.words else f"<td>{shown}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
