"""Write the references of CITATION.cff: the papers that the documentation of the methods names,
with the titles and authors of flowrl/compare/references.bib.

    python .ci/citation.py
"""

import re
from pathlib import Path
from typing import Any

import yaml

from flowrl.compare.paper import ARXIV, bibliography
from flowrl.methods import METHODS

CITATION = Path(__file__).parents[1] / "CITATION.cff"


def reference(identifier: str) -> dict[str, Any]:
    """An entry of references.bib in the Citation File Format 1.2.0."""
    entry = bibliography()[identifier].replace(r"$\pi$", "π")
    title, authors = (
        re.findall(rf"  {key} = {{(.*)}},\n", entry)[0].strip("{}") for key in ("title", "author")
    )
    keys = ("family-names", "given-names")
    names = [name.replace("{", "").replace("}", "").split(", ") for name in authors.split(" and ")]
    assert "\\" not in title + authors, entry  # LaTeX that is not translated above
    return {
        "type": "article",
        "title": title,
        "authors": [dict(zip(keys, name, strict=True)) for name in names],
        "year": int(re.findall(r"year = {(\d+)}", entry)[0]),
        "doi": f"10.48550/arXiv.{identifier}",
        "url": f"https://arxiv.org/abs/{identifier}",
    }


def citation() -> str:
    """CITATION.cff with the references of today's methods."""
    papers = {paper for compose in METHODS.values() for paper in ARXIV.findall(compose.__doc__)}
    references = yaml.safe_dump(
        {"references": [reference(paper) for paper in sorted(papers)]},
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    return CITATION.read_text(encoding="utf-8").partition("references:\n")[0] + references


if __name__ == "__main__":
    CITATION.write_text(citation(), encoding="utf-8")
