"""The entries of benchmarks/planted_bugs."""

import pytest
from planted_bugs import copies, load, mistakes, try_bug, unplantable

BUG = {
    "room": "credit",
    "id": "zero-gain",
    "meaning": "Every gain is zero.",
    "source": "",
    "file": "flowrl/credit/stepwise.py",
    "find": "increments = gains(values)",
    "replace": "increments = 0 * gains(values)",
    "tests": ["tests/credit/test_credit.py::test_worked_examples"],
}


def test_the_committed_bugs_can_be_planted():
    bugs = load()
    assert bugs and not mistakes(bugs)
    assert not [(bug["id"], reason) for bug in bugs if (reason := unplantable(bug))]


def test_missing_keys_repeated_ids_and_texts_that_do_not_occur_once_are_named():
    short = {key: value for key, value in BUG.items() if key != "find"}
    assert mistakes([short]) == ["credit: zero-gain: missing key find"]
    assert mistakes([BUG, BUG]) == ["credit: zero-gain: id is not unique"] * 2
    assert not unplantable(BUG)
    assert "occurs 0 times" in unplantable(BUG | {"find": "increment = gains(value)"})


@pytest.mark.slow
def test_a_bug_is_killed_and_an_equivalent_change_survives():
    changes = [BUG, BUG | {"replace": "increments = 1 * gains(values)"}]
    with copies(1) as pool:
        assert [outcome for outcome, _ in pool.map(try_bug, changes)] == ["killed", "survived"]
