"""Formulas of the site and of the lessons: KaTeX, whose copy in docs/_static draws them, knows
every command that they use.
"""

import importlib
import json
import re
import runpy

import pytest
from loading import ROOT

KATEX = ROOT / "docs" / "_static" / "katex"
MADE = {"_build", "course", "api"}
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not MADE & set(path.relative_to(ROOT / "docs").parts)
]
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
