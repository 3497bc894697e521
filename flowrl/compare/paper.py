"""Files for a paper: results as CSV, tables in LaTeX, figures as PDF and SVG, and the references of
the methods that ran.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS
from flowrl.run.io import require_new_file, write_bytes
from flowrl.run.parts.registry import find_maker
from flowrl.run.parts.specs import parse_spec
from flowrl.run.report.style import VECTOR, vector

FOLDER = "paper"
MADE = "% made by flowrl"
"""Begins table.tex, which the next run of a command may replace."""
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
_SPECIAL = {
    **{character: "\\" + character for character in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"<": "$<$", ">": "$>$", "±": r"$\pm$", "▲": r"$\blacktriangle$", "○": r"$\circ$"},
    **{"▼": r"$\blacktriangledown$", "△": r"$\triangle$", "▽": r"$\triangledown$"},
}

Columns = Sequence[tuple[str, Sequence[str]]]
"""A table as pairs of a heading and its cells."""


def write_paper(
    folder: Path,
    results: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Columns],
    figures: Mapping[str, Figure],
    settings: Iterable[Mapping[str, Any]],
    command: str,
    option: str = "out",
) -> list[Path]:
    """Write results.csv, table.tex, references.bib and the figures (PDF and SVG) to a folder.

    Args:
        folder: the folder, made if it is missing.
        results: the rows of results.csv; its columns are the keys of all rows.
        tables: the tables of table.tex (packages booktabs and amssymb) by caption.
        figures: figures by file name.
        settings: the settings of the runs, whose methods and parts are cited.
        command: the command that made the results.
        option: the command's option for the folder, for the message of the error.

    Returns:
        The files.

    Raises:
        ConfigError: one of the files exists in a folder that this function has not made; nothing is
            written then.
    """
    tex = folder / "table.tex"
    contents = {
        tex: "\n".join(
            [MADE, *_comment(command), *map(booktabs, tables, tables.values())]
        ).encode(),
        folder / "results.csv": csv_text(results).encode(),
        folder / "references.bib": references(settings).encode(),
        **{
            folder / f"{name}.{suffix}": vector(figure, suffix)
            for name, figure in figures.items()
            for suffix in VECTOR
        },
    }
    require_new_file(tex, lambda data: data.startswith(MADE.encode()), option)
    made = tex.exists()
    for path in contents:
        require_new_file(path, lambda data: made, option)
    for path, content in contents.items():
        write_bytes(path, content)
    return list(contents)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV: a column per key, in the order of their first occurrence."""
    buffer = io.StringIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def booktabs(caption: str, columns: Columns) -> str:
    """A table in LaTeX with the rules of booktabs; the first column is aligned to the left."""
    lines = [[name for name, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    head, *rows = (" & ".join(map(latex, line)) + r" \\" for line in lines)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    body = [begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(["", *_comment(caption), *body, ""])


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _comment(text: str) -> list[str]:
    return [f"% {line}" for line in text.splitlines()]


def references(settings: Iterable[Mapping[str, Any]]) -> str:
    """The entries of the papers that the documentation of methods and parts names, in BibTeX.

    Args:
        settings: the settings of runs by name, whose `method`, `sampler`, `credit` and `loss` are
            read.
    """
    kinds = ("method", "credit", "loss", "sampler")
    texts = {tuple(str(run.get(kind) or "") for kind in kinds): None for run in settings}
    cited = {paper for run in texts for paper in _papers(dict(zip(kinds, run, strict=True)))}
    known = bibliography()
    return "\n".join([known["flowrl"], *(known[key] for key in sorted(cited & known.keys()))])


def _papers(parts: dict[str, str]) -> list[str]:
    """The arXiv identifiers of a method and of the parts that replace its own."""
    compose = METHODS.get(parts.pop("method"))
    texts = [compose.__doc__ or ""] if compose else []
    if compose and not ARXIV.search(texts[0]):  # not published as a whole
        method = compose()
        texts += [type(part).__doc__ or "" for part in (method.credit, method.sampler)]
    waiting = [(kind, spec) for kind, spec in parts.items() if spec]
    while waiting:
        kind, text = waiting.pop()
        with suppress(ConfigError):  # a part of the user has no paper here
            spec = parse_spec(text, kind)
            waiting += spec.nested()
            texts.append(find_maker(kind, spec).__doc__ or "")
    return [paper for text in texts for paper in ARXIV.findall(text)]


@cache
def bibliography() -> dict[str, str]:
    """The known entries in BibTeX by arXiv identifier; "flowrl": the library's."""
    text = files("flowrl.compare").joinpath("references.bib").read_text(encoding="utf-8")
    entry = re.compile(r"@\w+\{(?:arxiv-)?([^,]+),.*?\n\}\n", flags=re.DOTALL)
    return {match[1]: match[0] for match in entry.finditer(text)}
