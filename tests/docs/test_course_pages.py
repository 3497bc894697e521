"""The pages of the course: what is folded, and the links to the other versions of a lesson."""

from pathlib import Path

import nbformat
import pytest
from loading import ROOT, load

course_pages = load("docs/course_pages.py")

STORED = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.ipynb"))


def markdown(text: str, *tags: str):
    return nbformat.v4.new_markdown_cell(text, metadata={"tags": list(tags)})


def test_hint_solution_and_explanation_are_folded() -> None:
    solution = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["solution"]})
    cells = [
        markdown("# Title"),
        markdown("**Hint.** One.", "hint"),
        solution,
        markdown("**Why.** $1$.", "explanation"),
    ]
    found = course_pages.page(
        nbformat.v4.new_notebook(cells=cells), "01_a.ipynb", "https://example.org/a"
    ).cells
    assert (
        found[2].source == '<details class="course"><summary>Hint</summary>\n\nOne.\n\n</details>'
    )
    assert "hide-input" in found[3].metadata["tags"]
    assert found[3].metadata["mystnb"]["code_prompt_show"] == "Solution"
    assert (
        found[4].source
        == '<details class="course"><summary>Explanation</summary>\n\n$1$.\n\n</details>'
    )


@pytest.mark.parametrize(
    "address",
    [
        "https://github.com/some/name",
        "https://github.com/some/name.git",
        "https://github.com/some/name/",
    ],
)
def test_colab_and_binder_open_the_repository(address: str) -> None:
    found = course_pages.links("01_a.ipynb", address)
    assert (
        "(https://colab.research.google.com/github/some/name/blob/HEAD/tutorials/colab/01_a.ipynb)"
        in found
    )
    assert (
        "(https://mybinder.org/v2/gh/some/name/HEAD?labpath=tutorials/student/01_a.ipynb)" in found
    )


@pytest.mark.parametrize(
    "address",
    [
        "https://example.org/flowrl",
        "https://github.com/some",
        "https://github.com.evil.org/some/name",
    ],
)
def test_other_addresses_have_no_links_to_colab_and_binder(address: str) -> None:
    found = course_pages.links("01_a.ipynb", address)
    assert "colab" not in found.lower()
    assert "binder" not in found.lower()
    assert "student/01_a.ipynb" in found


def test_alternative_texts_come_from_the_labels_of_the_figure() -> None:
    code = (
        'axes.set_title("gains $A_i$")\naxes.set(xlabel="step",'
        ' ylabel=name)\naxes.set(xlabel="step")'
    )
    made = course_pages.alternative
    assert made(code, "", "Exercise 1") == "Figure: gains A_i; x axis: step (Exercise 1)"
    assert (
        made("show()", "First. The *figure* has two groups. Last.", "Two")
        == "Figure: The figure has two groups. (Two)"
    )
    assert (
        made("show()", "", r"The $\beta$ of NFT")
        == "Figure made by the code of the section: The beta of NFT"
    )


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_figures_of_a_lesson_have_alternative_texts(path: Path) -> None:
    cells = course_pages.page(
        nbformat.read(path, as_version=4), path.name, "https://example.org/a"
    ).cells
    texts = [
        cell.metadata["mystnb"]["image"]["alt"] for cell in cells if course_pages.has_figure(cell)
    ]
    assert texts
    assert all(len(text.split()) >= 5 for text in texts)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_solution_of_a_lesson_is_folded(path: Path) -> None:
    for cell in course_pages.page(
        nbformat.read(path, as_version=4), path.name, "https://example.org/a"
    ).cells:
        tags = cell.metadata.get("tags", [])
        assert "solution" not in tags or "hide-input" in tags
        assert not {"hint", "explanation"} & set(tags) or cell.source.startswith("<details")


def test_an_unchanged_page_keeps_its_time(tmp_path: Path) -> None:
    """Sphinx makes a page again if its file is newer."""
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tutorials" / STORED[0].name).write_text(STORED[0].read_text())
    course_pages.write_course(tmp_path / "docs")
    written = tmp_path / "docs" / "course" / STORED[0].name
    before = written.stat().st_mtime_ns
    course_pages.write_course(tmp_path / "docs")
    assert written.stat().st_mtime_ns == before
    (tmp_path / "tutorials" / STORED[0].name).unlink()
    course_pages.write_course(tmp_path / "docs")
    assert not written.exists()
