"""The table of what the papers report: every method has rows, and what they name exists."""

import re
from pkgutil import resolve_name

import pytest
from loading import ROOT

from flowrl.methods import METHODS
from flowrl.run.config import RunConfig
from flowrl.run.parts.coverage import coverage
from flowrl.run.presets import combine

CELLS = [f"{row.flowrl} {row.result}" for paper in coverage().values() for row in paper.rows]


def test_the_methods_with_rows_are_those_of_the_registry():
    assert list(coverage()) == list(METHODS)
    assert all(paper.rows for paper in coverage().values())


@pytest.mark.parametrize("method", METHODS)
def test_a_title_has_the_paper_of_the_method(method):
    for paper in re.findall(r"arXiv (\d{4}\.\d{5})", METHODS[method].__doc__ or ""):
        assert paper in coverage()[method].title


def test_items_of_a_method_differ():
    for paper in coverage().values():
        items = [row.item for row in paper.rows]
        assert len(set(items)) == len(items)


def test_what_rows_name_exists():
    text = "\n".join(CELLS)
    names, files = re.findall(r"`(flowrl(?:\.\w+)+)`", text), re.findall(r"`(\w+/[\w./-]+)`", text)
    presets = re.findall(r"--preset ([\w.,-]+)", text)
    assert min(len(names), len(files), len(presets)) > 5
    assert all(resolve_name(name) for name in names)
    assert all((ROOT / file).exists() for file in files)
    assert all(combine(preset, RunConfig).settings for preset in presets)
