"""The line of progress of a long cell."""

from types import SimpleNamespace

import pytest
from flowrl_course import progress


@pytest.fixture
def notebook(monkeypatch):
    """The functions that the helper registers in IPython, by event, and a clock that it reads."""
    hooks, clock = {}, [100.0]
    shell = SimpleNamespace(events=SimpleNamespace(register=hooks.__setitem__))
    monkeypatch.setitem(progress.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "_state", {"hooked": False, "last": 0.0, "visible": False})
    return hooks, clock


def test_a_line_every_few_seconds_that_is_gone_after_the_cell(notebook, capsys):
    hooks, clock = notebook
    for _ in progress.progress(range(6), "rule"):
        clock[0] += 2
    shown = capsys.readouterr()
    lines = [line.strip() for line in shown.err.split("\r") if line]
    assert lines == ["rule 3 of 6", "rule 5 of 6"] and not shown.out
    hooks["post_run_cell"](None)
    assert capsys.readouterr().err == "\r" + " " * progress.WIDTH + "\r"
    hooks["pre_run_cell"](None)
    progress.tick("too early")
    hooks["post_run_cell"](None)
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_outside_a_notebook(notebook, capsys, monkeypatch):
    monkeypatch.delitem(progress.sys.modules, "IPython")
    notebook[1][0] += 100
    assert list(progress.progress("abc", "letter")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
