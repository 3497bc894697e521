"""The checks of the course accept the solutions and name the likely mistakes; lessons have the
promised parts.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from flowrl_course.checking import Unsolved

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
LESSONS = sorted(p.stem for p in (ROOT / "tests" / "course").glob("lesson_[0-9][0-9].py"))
CASES = [case for name in LESSONS for case in importlib.import_module(f"tests.course.{name}").CASES]
RATINGS = (
    r"\*Difficulty: (?:easy|medium|harder|project) · importance: (?:essential|useful|optional) ·"
    r" time: \d+ minutes\*"
)
RATED = rf"[^*\n]+\n#\n# {RATINGS}"
SOURCES = sorted((ROOT / "tutorials" / "source").glob("[0-9][0-9]_*.py"))


def answers(value):
    return value if isinstance(value, tuple) else (value,)


def own_checks(module) -> set[str]:
    """The checks that a module defines itself."""
    return {
        name
        for name, value in vars(module).items()
        if name.startswith("check_") and value.__module__ == module.__name__
    }


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.check.__module__[-9:]}-{case.name}"
)
def test_solutions_are_accepted(case) -> None:
    case.check.__wrapped__(*answers(case.solution))
    assert case.check(*answers(case.solution)).passed


@pytest.mark.parametrize(
    ("case", "mistake", "message"),
    [(case, mistake, message) for case in CASES for mistake, message in case.mistakes],
    ids=lambda value: value[:40] if isinstance(value, str) else getattr(value, "name", ""),
)
def test_likely_mistakes_are_named(case, mistake, message: str) -> None:
    verdict = case.check(*answers(mistake))
    assert not verdict.passed, f"{case.name} accepts a mistake that it should call {message!r}"
    assert message in verdict.problem


@pytest.mark.slow
def test_every_check_has_three_mistakes_with_messages_of_their_own() -> None:
    for case in CASES:
        assert len(case.mistakes) >= 3, case.name
        told = [case.check(*answers(mistake)).problem for mistake, _ in case.mistakes]
        assert len(set(told)) == len(told), (case.name, told)


def test_every_check_of_a_lesson_is_tried() -> None:
    for name in LESSONS:
        module = importlib.import_module(f"flowrl_course.{name}")
        checks = own_checks(module)
        assert checks == {c.name for c in CASES if c.check.__module__ == module.__name__}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_lessons_have_their_parts(source: Path) -> None:
    """An opening, three exercises with difficulty and minutes, each checked, and checks that
    exist.
    """
    text = source.read_text()
    assert "**After this lesson you can**" in text
    assert "**Time**" in text
    exercises = re.findall(f"^# ### Exercise \\d+ · {RATED}$", text, re.MULTILINE)
    starts, solutions = text.count('tags=["exercise"]'), text.count('tags=["solution"]')
    explanations = text.count('tags=["explanation"]')
    assert len(exercises) == starts == explanations <= solutions
    assert len(exercises) >= 3
    used = set(re.findall(r"lesson\.(check_\w+)\(", text))
    assert text.count('tags=["hint"]') == len(exercises)
    assert "# ## Further reading" in text
    if exercises:
        module = importlib.import_module(f"flowrl_course.lesson_{source.stem[:2]}")
        assert used == own_checks(module)
        assert len(used) >= len(exercises)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_the_table_of_the_course_links_every_lesson_with_its_number_of_exercises(
    source: Path,
) -> None:
    table, text = (ROOT / "docs" / "course.md").read_text(), source.read_text()
    rows = re.findall(
        rf"^\| \[[^|]+\]\(course/{source.stem}\.ipynb\) \| [^|]+ \| (\d+) \|", table, re.MULTILINE
    )
    assert rows == [str(len(re.findall(r"^# ### Exercise \d+ · ", text, re.MULTILINE)))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_names_that_a_lesson_imports_exist(source: Path) -> None:
    """A lesson is executed rarely; a renamed function must not wait for it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowrl"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_a_failed_check_raises_where_lessons_are_built(monkeypatch) -> None:
    case = next(case for case in CASES if case.name == "check_interpolate")
    monkeypatch.setenv("FLOWRL_COURSE", "strict")
    with pytest.raises(Unsolved, match=r"Exercise 1: .*swapped"):
        case.check(case.mistakes[0][0])


def test_verdicts_read_well() -> None:
    case = next(case for case in CASES if case.name == "check_interpolate")
    assert repr(case.check(case.solution)) == "✓ Exercise 1: correct"
    wrong = case.check(lambda clean, noise, time: 1 / 0)
    assert "ZeroDivisionError" in repr(wrong)
    assert "✗ Exercise 1" in wrong._repr_html_()
    assert "not answered yet" in repr(case.check(...))
