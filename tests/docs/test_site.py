"""The site: alternative texts of figures, pages of papers, tables, the contents, the course, and
formulas.
"""

import ast
import importlib
import json
import re
import runpy
import tomllib

import nbformat
import pytest
from loading import ROOT, load

DOCS = ROOT / "docs"
MADE = {"_build", "course", "api"}
PAGES = [
    path for path in sorted(DOCS.rglob("*.md")) if not MADE & set(path.relative_to(DOCS).parts)
]
IDS = [path.relative_to(DOCS).as_posix() for path in PAGES]
TEXTS = {name: path.read_text() for name, path in zip(IDS, PAGES, strict=True)}


@pytest.mark.parametrize("name", IDS)
def test_rows_of_a_table_have_the_cells_of_its_head(name):
    """A bar within a formula ends its cell: formulas in tables have \\lvert and \\rvert."""
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    for head, rows in re.findall(r"^(\|.*)\n\|[-:| ]+\|\n((?:\|.*\n?)*)", prose, re.MULTILINE):
        for row in rows.splitlines():
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", head)), row


def printed():
    """The texts in the code of the packages, except for docstrings; an f-string in pieces."""
    for folder in ("flowrl", "packages", "benchmarks/package"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.Constant) and id(node) not in docstrings:
                    yield " ".join(str(node.value).split())


def test_quoted_messages_are_in_the_code():
    """Everything between the values, which are `...`, numbers, quoted names and settings."""
    page, texts = TEXTS["start/troubleshooting.md"], "\n".join(printed())
    quoted = [text.replace("\n> ", " ") for text in re.findall(r"^> (.*(?:\n> .*)*)", page, re.M)]
    quoted += re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    value = r"\w*\(?\.\.\.\)?|'[^']*'|\bnan\b|\b\d[\d.]*(?:\+cpu)?|[A-Z]+_[A-Z_]+"
    parts = [
        part.strip(" .:")
        for message in quoted
        for part in re.split(rf"{value}|\w+ = | is not allowed; allowed: |[,;()]", message)
    ]
    assert not [part for part in parts if " " in part and part not in texts]


def test_the_method_in_one_file_is_as_short_as_the_pages_say():
    lines = len((ROOT / "tutorials" / "nano_flow_grpo.py").read_text().splitlines())
    for text in ((ROOT / "README.md").read_text(), TEXTS["index.md"], TEXTS["course.md"]):
        (said,) = re.findall(r"nano_flow_grpo.*?(\d+) lines", text, re.DOTALL)
        assert lines == pytest.approx(int(said), abs=5)


PAGE = (ROOT / "docs" / "design.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_import_order_is_that_of_the_linter():
    layers = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = re.findall(r"^\| \d+ \| (.*) \|$", PAGE, re.MULTILINE)
    documented = [
        {name.removeprefix("flowrl.") for name in re.findall(r"`([\w.]+)`", row)} for row in rows
    ]
    assert documented == [
        {name.strip().removeprefix("flowrl.") for name in re.split(r"[|:]", layer)}
        for layer in reversed(layers)
    ]


# The pages of the course

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


# Formulas: KaTeX, whose copy in docs/_static draws them, knows every command that they use

KATEX = DOCS / "_static" / "katex"
LESSONS = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.ipynb"))


def formulas(text):
    """The LaTeX of a page in Markdown, without its code."""
    text = re.sub(r"^(```+|:::+\{code).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    blocks = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    inline = re.findall(
        r"(?<![\\$])\$(?!\s)([^$\n]+(?:\n[^$\n]+)*?)(?<![\s\\])\$(?!\d)",
        re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL),
    )
    return [*blocks, *inline]


def all_formulas():
    """By file; lessons' texts are Markdown cells."""
    by_file = {path.relative_to(ROOT).as_posix(): formulas(path.read_text()) for path in PAGES}
    for path in LESSONS:
        cells = [
            cell
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "markdown"
        ]
        by_file[path.name] = [
            formula for cell in cells for formula in formulas("".join(cell["source"]))
        ]
    by_file["docs/formulas.py"] = list(REFERENCE.values())
    return {name: texts for name, texts in by_file.items() if texts}


REFERENCE = runpy.run_path(str(ROOT / "docs" / "formulas.py"))["FORMULAS"]
FORMULAS = all_formulas()


def unknown_commands(text, known):
    return {
        name
        for name in re.findall(r"\\([A-Za-z]+)", text)
        if f'"{name}"' not in known and f'"\\\\{name}"' not in known
    }


@pytest.fixture(scope="module")
def katex():
    return (KATEX / "katex.min.js").read_text()


def test_formulas_of_the_reference_belong_to_public_parts():
    for name in REFERENCE:
        module, _, part = name.rpartition(".")
        assert part in importlib.import_module(module).__all__, name
        assert getattr(importlib.import_module(module), part).__doc__, name


def test_formulas_and_misspelt_commands_are_seen(katex):
    assert formulas("a $x_t$ and\n$$\\sqrt{t}$$ `$no$`\n```\n$no$\n```\n") == ["\\sqrt{t}", "x_t"]
    assert sum(map(len, FORMULAS.values())) > 300
    assert unknown_commands(r"\sqrt{\epsilom}", katex) == {"epsilom"}


@pytest.mark.parametrize("name", FORMULAS)
def test_commands_are_known_to_katex(name, katex):
    for text in FORMULAS[name]:
        assert not unknown_commands(text, katex), text
        assert text.replace("\\{", "").count("{") == text.replace("\\}", "").count("}"), text
        begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", text) for word in ("begin", "end"))
        assert sorted(begun) == sorted(ended), text
