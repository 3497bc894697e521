"""The pages of the course: what is folded, and the links to the other versions of a lesson."""

import nbformat
import pytest
from loading import load

course_pages = load("docs/course_pages.py")


def test_solutions_are_folded():
    title = nbformat.v4.new_markdown_cell("# T")
    solution = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["solution"]})
    notebook = nbformat.v4.new_notebook(cells=[title, solution])
    cell = course_pages.page(notebook, "01_a.ipynb", "https://example.org/a").cells[-1]
    assert "hide-input" in cell.metadata["tags"]


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
