"""The pages of the course: what is folded, and the links to the other versions of a lesson."""

import nbformat
import pytest
from loading import load

course_pages = load("docs/course_pages.py")


def markdown(text, *tags):
    return nbformat.v4.new_markdown_cell(text, metadata={"tags": list(tags)})


def page_cells(notebook, name="01_a.ipynb"):
    return course_pages.page(notebook, name, "https://example.org/a").cells


def test_hint_solution_and_explanation_are_folded():
    solution = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["solution"]})
    hint, why = markdown("**Hint.** One.", "hint"), markdown("**Why.** $1$.", "explanation")
    cells = page_cells(nbformat.v4.new_notebook(cells=[markdown("# T"), hint, solution, why]))
    fold = '<details class="course"><summary>{}</summary>\n\n{}\n\n</details>'
    assert cells[2].source == fold.format("Hint", "One.")
    assert "hide-input" in cells[3].metadata["tags"]
    assert cells[3].metadata["mystnb"]["code_prompt_show"] == "Solution"
    assert cells[4].source == fold.format("Explanation", "$1$.")


@pytest.mark.parametrize(
    ("address", "opened"),
    [
        ("https://github.com/some/name", True),
        ("https://github.com/some/name.git", True),
        ("https://example.org/flowrl", False),
        ("https://github.com.evil.org/some/name", False),
    ],
)
def test_colab_and_binder_open_repositories_on_github(address, opened):
    links = course_pages.links("01_a.ipynb", address)
    colab = "colab.research.google.com/github/some/name/blob/HEAD/tutorials/colab/01_a.ipynb"
    binder = "mybinder.org/v2/gh/some/name/HEAD?labpath=tutorials/student/01_a.ipynb"
    for link, site in ((colab, "colab"), (binder, "binder")):
        assert f"(https://{link})" in links if opened else site not in links.lower()
    assert opened or "student/01_a.ipynb" in links


def test_alternative_texts_are_the_sentence_that_announces_the_figure():
    text = "First. The *figure* has two groups. Last."
    assert course_pages.alternative(text, "Two") == "Figure: The figure has two groups. (Two)"
