"""The documentation site: `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

import html
import os
import re
import sys
from pathlib import Path, PurePosixPath

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from course_pages import write_course  # noqa: E402
from docutils import nodes  # noqa: E402
from formulas import with_formula  # noqa: E402
from reference_pages import write_reference  # noqa: E402
from sphinx.ext import napoleon  # noqa: E402

from flowrl import __version__  # noqa: E402
from flowrl.run.parts.coverage import LEGEND, coverage  # noqa: E402

project = "flowrl"
author = "the flowrl developers"
copyright = "2026, the flowrl developers"
release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_math_renderer = "katex"
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks hold their outputs; tutorials/build.py executes them
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
exclude_patterns = ["_build"]
# names of axes in shapes look like references
suppress_warnings = ["mystnb.unknown_mime_type", "ref.python"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = "flowrl"
html_static_path = ["_static", "../flowrl/bench/templates/sort.js"]
templates_path = ["_templates"]
# Lessons from number 5 on had the number before; their old addresses lead to the new ones.
MOVED = {
    f"course/{int(path.stem[:2]) - 1:02d}{path.stem[2:]}": f"course/{path.stem}"
    for path in (HERE.parent / "tutorials").glob("[0-9][0-9]_*.ipynb")
    if path.stem >= "05"
}
html_additional_pages = {**dict.fromkeys(MOVED, "moved.html"), "404": "404.html"}
html_favicon = "_static/favicon.svg"
html_context = {"moved": MOVED}
html_js_files = [("sort.js", {"defer": "defer"})]
html_css_files = ["flowrl.css"]
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0072B2"},
}


SYMBOL = r"(?<![\w.])[A-Za-z]_(?:\{[^{}]+\}|[A-Za-z0-9])(?!\w)"
SYMBOLS = rf"{SYMBOL}(?: [-+=] {SYMBOL})*"
"""Letters with a subscript, such as R_T or g_i = R_{i+1} - R_i."""


def typeset(text: str) -> str:
    """`text`, which is no code, in reStructuredText: symbols as formulas, signs that mean something
    there escaped.
    """
    if re.fullmatch(SYMBOLS, text):
        return rf"\ :math:`{text}`\ "
    words = re.split(r"((?<![\w*])\*\w+\*(?![\w*]))", text)  # *emphasis* of a word remains
    return "".join(
        word if k % 2 else re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", word)
        for k, word in enumerate(words)
    )


def plain(
    app: object, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Our docstrings are plain text with `code`; see `typeset`."""
    in_table = in_block = False
    for number, line in enumerate(lines):
        if set(line) == {"=", " "} or (line and set(line) == {"="}):
            in_table = True
        in_block = in_block and (line == "" or line.startswith(" "))
        if not in_table and not in_block:
            parts = re.split(rf"(``.*?``|`[^`]*`|{SYMBOLS})", line)
            lines[number] = "".join(
                part if part.startswith("`") else typeset(part) for part in parts
            )
        if line.rstrip().endswith("::"):
            in_block = True
        if line == "":
            in_table = False
    if what in (
        "function",
        "method",
        "class",
    ):  # sections such as Args; napoleon's own hook would read "type: text" in others
        lines[:] = napoleon.GoogleDocstring(
            lines, napoleon.Config(napoleon_use_rtype=False), what=what
        ).lines()
    with_formula(name, lines)


def skip(
    app: object, what: str, name: str, thing: object, skipped: bool, options: object
) -> bool | None:
    """Decorators that a module only borrows are not its members."""
    return True if name == "promise" else None


def formula(writer: object, node: object) -> None:
    """A formula as LaTeX. _static/formulas.js draws it in the browser with a copy of KaTeX, without
    a network.
    """
    tag = "div" if node.tagname == "math_block" else "span"
    writer.body.append(f'<{tag} class="math notranslate">{html.escape(node.astext())}</{tag}>')
    raise nodes.SkipNode


def add_katex(app: object, page: str, template: str, context: object, tree: object) -> None:
    """KaTeX on the pages that have a formula."""
    if tree is not None and any(
        True for _ in tree.findall(lambda node: isinstance(node, nodes.math | nodes.math_block))
    ):
        app.add_css_file("katex/katex.min.css")
        for name in ("katex/katex.min.js", "formulas.js"):
            app.add_js_file(name, loading_method="defer")


def describe(app: object, page: str, template: str, context: dict, tree: object) -> None:
    """The page's first paragraph as its description for search engines."""
    paragraphs = () if tree is None else tree.findall(nodes.paragraph)
    text = " ".join(next((p.astext() for p in paragraphs if len(p.astext()) > 40), "").split())
    if text:
        short = html.escape(text if len(text) <= 160 else text[:157].rpartition(" ")[0] + " ...")
        context["metatags"] = (
            f'{context.get("metatags", "")}<meta name="description" content="{short}">'
        )


LONG = 45
"""Characters in a cell from which its column gets a least width."""
WIDE = 1.7
"""Width over height from which a figure of a lesson has several panels; it then keeps a legible
size on a phone and scrolls.
"""
INTERVAL = re.compile(r"(\[[-+.\d]+,) (?=[-+.\d]+\])")


def mark_tables(app: object, tree: object, page: str) -> None:
    """Classes for flowrl.css: `long` on the cells of columns with long texts, `two` on tables with
    two columns, `many` on those with three or more. Intervals such as [0.1, 0.2] stay in one line.
    """
    for table in tree.findall(nodes.table):
        rows = [
            [cell for cell in row if isinstance(cell, nodes.entry)]
            for row in table.findall(nodes.row)
        ]
        count = max(map(len, rows))
        table["classes"] += ["two"] * (count == 2) + ["many"] * (count >= 3)
        for column in range(count):
            cells = [row[column] for row in rows if column < len(row)]
            if max(len(cell.astext()) for cell in cells) >= LONG:
                for cell in cells:
                    cell["classes"].append("long")
        for text in list(table.findall(nodes.Text)):
            if INTERVAL.search(text) and not isinstance(
                text.parent, nodes.math | nodes.math_block | nodes.literal
            ):
                text.parent.replace(text, nodes.Text(INTERVAL.sub("\\1\u00a0", text)))


def add_coverage(app: object, page: str, source: list[str]) -> None:
    """In place of the line `{coverage}`: how to read the rows, and a section with a table for every
    method of flowrl/data/coverage.yaml. Names of flowrl and of pages become links.
    """
    text = [LEGEND, ""]
    for method, paper in coverage().items():
        name, _, where = paper.title.partition(", ")
        own = f", [its page]({method}.md)" if (HERE / "papers" / f"{method}.md").exists() else ""
        text += [f"## {name}", "", f"{where}, `--method {method}`{own}", ""]
        text += ["| item | published | in flowrl | result here |", "|---|---|---|---|"]
        rows = ((row.item, row.published, row.flowrl, row.result) for row in paper.rows)
        text += [*(f"| {' | '.join(cell or '-' for cell in cells)} |" for cells in rows), ""]
    made = re.sub(r"`(flowrl(?:\.\w+)+)`", r"{py:obj}`~\1`", "\n".join(text))
    made = re.sub(r"`docs/((?:[\w-]+/)*([\w-]+))\.md`", r"[\2](../\1.md)", made)
    source[0] = re.sub(r"^\{coverage\}$", lambda _: made, source[0], flags=re.MULTILINE)


INTERACTIVE = ("first-look", "figures")
"""Pages whose content is that of _static/PAGE/index.html."""


def content(page: str) -> tuple[str, list[str], list[str]]:
    """What is within main in _static/PAGE/index.html, and its style sheets and scripts as paths
    within _static.
    """
    text = (HERE / "_static" / page / "index.html").read_text()
    (main,) = re.findall(r"<main>\n(.*?)</main>", text, re.DOTALL)
    files = [
        [str(PurePosixPath(os.path.normpath(f"{page}/{name}"))) for name in re.findall(kind, text)]
        for kind in (r'<link rel="stylesheet" href="(.*?)"', r'<script defer src="(.*?)"')
    ]
    return re.sub(r'<img src="', f'<img src="_static/{page}/', main), *files


def add_figures(app: object, page: str, source: list[str]) -> None:
    """In place of the line `{PAGE}`: the content of _static/PAGE/index.html, which is also a page
    of its own, for readers of a clone without the built site.
    """
    if page in INTERACTIVE:
        app.env.note_dependency(str(HERE / "_static" / page / "index.html"))
        main = re.sub(r"\n\n+", "\n", content(page)[0])
        source[0] = source[0].replace(f"{{{page}}}", f"```{{raw}} html\n{main}```")


def add_figures_scripts(app: object, page: str, template: str, context: dict, tree: object) -> None:
    """The files of the interactive figures."""
    if page in INTERACTIVE:
        _, styles, scripts = content(page)
        for name in styles:
            app.add_css_file(name)
        for name in scripts:
            app.add_js_file(name, loading_method="defer")


def mark_wide_figures(app: object, tree: object, page: str) -> None:
    """The class `wide` on PNG files with several panels."""
    for image in tree.findall(nodes.image):
        for folder in (app.srcdir, app.outdir, Path(app.outdir).parent):
            file = Path(folder) / image["uri"]
            if file.suffix == ".png" and file.is_file():
                start = file.read_bytes()[16:24]  # width and height, from the header of the format
                width, height = (int.from_bytes(start[k : k + 4], "big") for k in (0, 4))
                several = (
                    width > 1100
                    if not page.startswith("course/")
                    else width > 700 and width >= WIDE * height
                )
                image["classes"] += (
                    ["tall" if file.name == "report.png" else "wide"] if several else []
                )
                break


def setup(app: object) -> None:
    """Called by Sphinx."""
    write_course(HERE)
    write_reference(HERE)
    app.connect("source-read", add_coverage)  # type: ignore[attr-defined]
    app.connect("source-read", add_figures)  # type: ignore[attr-defined]
    app.connect("html-page-context", add_figures_scripts)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", plain)  # type: ignore[attr-defined]
    app.add_html_math_renderer("katex", (formula, None), (formula, None))  # type: ignore[attr-defined]
    for mark in (mark_tables, mark_wide_figures):
        app.connect("doctree-resolved", mark)  # type: ignore[attr-defined]
    app.connect("html-page-context", describe)  # type: ignore[attr-defined]
    app.connect("html-page-context", add_katex)  # type: ignore[attr-defined]
    app.connect("autodoc-skip-member", skip)  # type: ignore[attr-defined]
