"""Text functions: edit distance and quoted text."""

import re

QUOTED = re.compile(r'"([^"]+)"|„([^“”]+)[“”]|“([^”]+)”|«([^»]+)»|「([^」]+)」')


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance of `a` and `b`: insertions, deletions and substitutions cost 1."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def quoted_text(prompt: str, first: bool = False) -> str:
    """The text in quotation marks ("...", “...”, „...“, «...», 「...」) in `prompt`: the `first`, or all joined by spaces; else
    ""."""
    found = [next(group for group in match.groups() if group) for match in QUOTED.finditer(prompt)]
    return " ".join(found[:1] if first else found)
