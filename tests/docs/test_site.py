"""The site: alternative texts of figures, pages of papers, tables, and the contents."""

import ast
import re

import pytest
from flowrl_bench.command import Rule
from loading import ROOT

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


@pytest.mark.parametrize("name", IDS)
def test_a_count_of_code_is_beside_the_command_that_prints_it(name):
    for paragraph in TEXTS[name].split("\n\n"):
        counted = re.search(r"(?<![-\w.])\d[\d,]* (functions|files|modules|tests)\b", paragraph)
        command = re.search(r"`(python|flowrl|nox|pytest|wc) ", paragraph)
        assert not counted or command, counted[0]


def test_the_method_in_one_file_is_as_short_as_the_pages_say():
    lines = len((ROOT / "tutorials" / "nano_flow_grpo.py").read_text().splitlines())
    for text in ((ROOT / "README.md").read_text(), TEXTS["index.md"]):
        (said,) = re.findall(r"nano_flow_grpo.*?(\d+) lines", text)
        assert lines == pytest.approx(int(said), abs=5)


def test_no_page_or_help_has_a_duration_of_bench_rule():
    """It depends on the machine, and the command prints the time left."""
    for text in (*TEXTS.values(), (ROOT / "README.md").read_text(), Rule.__doc__ or ""):
        assert not re.search(r"bench rule .*#.*\bminutes|^Tune .*\bminutes", text)
