"""Some of the bad inputs of benchmarks/hostile.py, in processes of their own and in this one."""

import contextlib
import io

import pytest
from hostile import judged, snapshot, table, tried
from hostile_cases import all_cases
from hostile_mutants import mutants

CASES = all_cases()
QUICK = [case for case in CASES if case.family.startswith(("parts", "Python"))]
SLOWER = [
    case
    for case in CASES
    if case.family in ("command line", "outputs", "YAML: setting", "JSON: setting")
]


@pytest.mark.parametrize("part", range(8))
def test_calls_in_python_are_refused_by_name(part, tmp_path):
    for case in QUICK[part::8]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = case.run(tmp_path)
        assert not judged(case, code, said.getvalue(), {}, {}), (case.label, said.getvalue())


@pytest.mark.parametrize("case", SLOWER[:: len(SLOWER) // 19], ids=lambda case: case.label[:60])
def test_command_lines_are_refused_by_name(case):
    outcome = tried(case)
    assert not outcome.problem, outcome.output


MUTANTS = mutants()
FAMILIES = {case.family: case for case in MUTANTS}


def test_there_are_many_mutants():
    assert len(MUTANTS) >= 1500 and len(FAMILIES) == 10
    assert [case.label for case in mutants(1)] != [case.label for case in MUTANTS]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Python calls"])
def test_mutants_are_refused_by_name(family):
    outcome = tried(FAMILIES[family])
    assert not outcome.problem, (outcome.case.label, outcome.output)


def test_the_judge_sees_what_is_wrong(tmp_path):
    case = next(case for case in CASES if case.label == "flowrl sample --count 0")
    clear = "flowrl: error: count = 0 is not allowed; allowed: a whole number, 1 or more\n"
    assert judged(case, 2, clear, {}, {}) == ""
    for code, output, after, problem in (
        (None, "", {}, "hangs or starts work"),
        (0, "", {}, "accepted"),
        (1, clear, {}, "exit code 1"),
        (2, clear + "Traceback (most recent call last):", {}, "traceback"),
        (2, clear, {"new": "-"}, "leaves new"),
        (2, clear * 2, {}, "2 messages"),
        (2, "flowrl: error: no", {}, "does not name count"),
    ):
        assert judged(case, code, output, {}, after) == problem
    assert snapshot(tmp_path) == {} and table([]) == []
