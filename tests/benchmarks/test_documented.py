"""The numbers on the pages about papers: benchmarks/documented.py finds every one of them, and
changes nothing else.
"""

import re
from dataclasses import fields

import documented
import pytest
from flowrl_compare.results import ArmSummary, Mean

from flowrl.methods import METHODS


def summary(method: str, **known) -> ArmSummary:
    """Results with these values; the others are 0."""
    zeros = {
        entry.name: Mean(0.0, 0.0) if entry.name in ("base", "final", "lead", "final_strict") else 0
        for entry in fields(ArmSummary)
        if entry.name not in ("cost", "priced")
    }
    return ArmSummary(**{**zeros, "arm": method, "heldout": {}, "settings": {}, **known})  # pyright: ignore[reportArgumentType]


def test_every_method_with_a_page_has_a_command_and_a_result():
    methods = documented.papers()
    assert set(methods.values()) == set(METHODS) - {"noise-weighted", "value-grpo"}
    for page, method in methods.items():
        assert page.stem == method
        assert len(documented.SENTENCE.findall(page.read_text())) == 1, page


@pytest.mark.parametrize("name", ["papers/tp-grpo.md", "start/first-result.md"])
def test_only_the_results_change(name):
    page = documented.DOCS / name
    methods = {*documented.papers().values()}
    pages = documented.renewed(
        {method: summary(method, seeds=3, lead=Mean(0.25, 0.125)) for method in methods}
    )
    before, after = page.read_text().splitlines(), pages[page].splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert 1 <= len(changed) <= 3
    assert all(
        "0.000" in new or "0.0 network evaluations" in new or "+0.250 ± 0.125" in new
        for _, new in changed
    )
    assert all(re.match(r"This command|with |\| [\w-]+ \| ", old) for old, _ in changed)
