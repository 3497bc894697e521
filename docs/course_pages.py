"""The pages of the course: notebooks with solutions, in which hints, solutions and explanations are
folded, with links and with alternative texts of figures.
"""

import re
import tomllib
from pathlib import Path

import nbformat

Notebook = nbformat.NotebookNode
FOLDED = {"hint": ("Hint", "Hint"), "explanation": ("Explanation", "Why")}
"""Tag of a Markdown cell: the title of the folded text, and the word that the cell begins with."""


def repository(root: Path) -> str:
    """The repository's address, from pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def links(name: str, address: str) -> str:
    """A line of links to the other versions of a lesson; Colab and Binder only if the address is on
    GitHub.
    """
    files = "../../tutorials"
    versions = [
        f"{{download}}`Notebook for students <{files}/student/{name}>`",
        f"{{download}}`Notebook with solutions <{files}/{name}>`",
    ]
    if on_github := re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address):
        place = on_github[1]
        versions += [
            f"[Open in Colab](https://colab.research.google.com/github/{place}/blob/HEAD/tutorials/colab/{name})",
            f"[Open in Binder](https://mybinder.org/v2/gh/{place}/HEAD?labpath=tutorials/student/{name})",
        ]
    return " · ".join(versions)


def alternative(before: str, heading: str) -> str:
    """Alternative text of the figures of a code cell: the last sentence of the text before that
    announces a figure, or the heading of the section.
    """
    heading = re.sub(r"[$\\]", "", heading)
    text = re.sub(r"[*`$\\]", "", " ".join(before.split()))
    sentences = re.split(r"(?<=[.:?]) ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    figures = [part for part in sentences if re.search(r"\b(figure|animation|images)\b", part)]
    return f"Figure: {(figures or ['made by the code of the section'])[-1]} ({heading})"


def has_figure(cell: Notebook) -> bool:
    """Whether the outputs of a code cell contain an image."""
    return any(
        kind.startswith("image/")
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    )


def page(notebook: Notebook, name: str, address: str) -> Notebook:
    """The notebook with folded hints, solutions and explanations, alternative texts, and the links
    below the opening text.
    """
    cells, heading, before = [], "", ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            before = cell.source
            heading = (re.findall(r"^#+ (.*)", before, re.MULTILINE) or [heading])[-1]
        elif has_figure(cell):
            cell.metadata["mystnb"] = {"image": {"alt": alternative(before, heading)}}
        tags = cell.metadata.get("tags", [])
        title, word = next((FOLDED[tag] for tag in tags if tag in FOLDED), ("", ""))
        if title:
            text = re.sub(rf"^\*\*{word}\.\*\*\s*", "", cell.source)
            cell.source = (
                f'<details class="course"><summary>{title}</summary>\n\n{text}\n\n</details>'
            )
        elif "solution" in tags:
            cell.metadata["tags"] = [*tags, "hide-input"]
            cell.metadata.setdefault("mystnb", {}).update(
                code_prompt_show="Solution", code_prompt_hide="Solution"
            )
        cells.append(cell)
    versions = nbformat.v4.new_markdown_cell(links(name, address), id=f"{name[:2]}-links")
    notebook.cells = [*cells[:1], versions, *cells[1:]]
    return notebook


def write_course(docs: Path) -> None:
    """Write docs/course/NN_name.ipynb for every lesson; a page whose content is unchanged keeps its
    time.
    """
    root, target = docs.parent, docs / "course"
    target.mkdir(exist_ok=True)
    stored = {path.name: path for path in (root / "tutorials").glob("[0-9][0-9]_*.ipynb")}
    for old in target.glob("*.ipynb"):
        if old.name not in stored:
            old.unlink()
    for name, path in stored.items():
        text = nbformat.writes(page(nbformat.read(path, as_version=4), name, repository(root)))
        written = target / name
        if not written.is_file() or written.read_text() != text:
            written.write_text(text)
