"""The build of the lessons: how outputs are compared, and that the committed notebooks match their
sources.
"""

import nbformat
import pytest
from loading import ROOT, load

build = load("tutorials/build.py")
SOURCES = build.sources([])

HEADER = """\
# %% [markdown]
# # A lesson

"""
EXPECTED = """\
# %% [markdown] tags=["expected"]
# reward 0.75..0.90, ratio 1.00

"""
TRAINED = '# %%\nprint("reward 0.83, ratio 1.00")\n\n' + EXPECTED


def lesson(folder, text, name="01_trial.py"):
    path = folder / name
    path.write_text(HEADER + text)
    return path


def executed(source, *texts):
    """The version with solutions, as if its code cells had printed `texts`."""
    notebook = build.solved(source)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, text in zip(cells, texts, strict=True):
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    return notebook


def stored(folder, notebook):
    path = folder / "01_trial.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize(
    ("expected", "equal", "different"),
    [
        ("reward 0.75..0.90", "reward 0.75", "reward 0.74"),
        ("reward 0.75..0.90", "reward  0.9\n", "reward -0.80"),
        ("clipped 15..30%", "clipped 30%", "clipped 31%"),
        ("after 40,000..50,000 passes", "after 41,656 passes", "after 39,999 passes"),
        ("difference -0.07..+0.03", "difference -0.019", "difference -0.071"),
        ("rounding 1e-7..1e-4", "rounding 3e-05", "rounding 3e-04"),
        # without a range integers are equal; other numbers and percentages may differ by 2%, or by
        # a unit of the last printed digit
        ("4,000 evaluations", "4,000 evaluations", "4,001 evaluations"),
        ("0.43 of all", "0.42 of all", "0.41 of all"),
        ("17.4 steps", "17.7 steps", "17.8 steps"),
        ("5% of all", "6% of all", "7% of all"),
        ("reward 0.80", "reward 0.80", "return 0.80"),
        ("reward 0.80", "reward 0.80", "reward 0.80 0.80"),
        ("reward 0.80", "reward 0.80", "reward 0.80%"),
    ],
)
def test_outputs_are_compared_number_by_number(expected, equal, different):
    assert build.differs(expected, equal) is None
    assert build.differs(expected, different) is not None


def test_an_expected_output_is_in_neither_version(tmp_path):
    source = lesson(tmp_path, TRAINED)
    assert build.expected_outputs(source) == [None, "reward 0.75..0.90, ratio 1.00"]
    for notebook in (build.solved(source), build.student(source)):
        assert "0.75..0.90" not in nbformat.writes(notebook)


def test_check_compares_trained_cells_with_their_ranges(tmp_path):
    """The stored and the fresh output may differ inside the range; each must be inside."""
    source = lesson(tmp_path, TRAINED)
    expected = build.expected_outputs(source)
    inside, other, outside = (
        executed(source, f"reward {value}, ratio 1.00") for value in (0.76, 0.89, 0.91)
    )
    assert build.stale(stored(tmp_path, inside), other, expected) == []
    (problem,) = build.unexpected("01_trial.py", outside, expected)
    assert "0.91 instead of 0.75..0.90 in the line 'reward 0.91, ratio 1.00'" in problem
    assert build.stale(stored(tmp_path, outside), inside, expected)


def test_check_compares_other_cells_with_their_stored_output(tmp_path):
    source = lesson(
        tmp_path, '# %%\nprint("mean 0.50")\n\n# %% tags=["varies"]\nprint("9 seconds")\n\n'
    )
    expected = build.expected_outputs(source)
    path = stored(tmp_path, executed(source, "mean 0.50", "9 seconds"))
    assert build.stale(path, executed(source, "mean 0.51", "3 seconds"), expected) == []
    assert build.stale(path, executed(source, "mean 0.52", "9 seconds"), expected)
    changed = lesson(tmp_path, '# %%\nprint("mean")\n\n# %%\nprint("seconds")\n\n', "02_changed.py")
    assert (
        "not built from the present source"
        in build.stale(path, executed(changed, "mean", "seconds"), [None] * 3)[0]
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_committed_notebooks_match_their_source(source):
    notebook = nbformat.read(ROOT / "tutorials" / f"{source.stem}.ipynb", as_version=4)
    assert [cell.source for cell in notebook.cells] == [
        cell.source for cell in build.solved(source).cells
    ]
    assert build.unexpected(source.name, notebook, build.expected_outputs(source)) == []
    assert build.stale_beginnings(source) == []


EXERCISE = """\
# %% [markdown]
# ### Exercise 1 · double
#
# *Difficulty: easy · importance: useful · time: 3 minutes*

# %% tags=["exercise"]
answer = ...

# %% [markdown] tags=["hint"]
# **Hint.** Twice one.

# %% tags=["solution"]
answer = 2

# %%
check(answer)

# %% [markdown] tags=["explanation"]
# **Why.** 2 = 1 + 1.
"""


def test_hint_and_solution_are_folded_after_the_check(tmp_path):
    """The student meets the check's message first, then the hint, then the solution."""
    source = lesson(tmp_path, EXERCISE)
    starting, check, hint, solution = [cell.source for cell in build.student(source).cells][2:]
    assert (starting, check) == ("answer = ...", "check(answer)")
    assert hint == "<details><summary><b>Hint</b></summary>\n\nTwice one.\n\n</details>"
    assert solution == (
        "<details><summary><b>Solution</b></summary>\n\n"
        "```python\nanswer = 2\n```\n\n2 = 1 + 1.\n\n</details>"
    )
    assert [cell.source for cell in build.solved(source).cells][2:] == [
        "**Hint.** Twice one.",
        "answer = 2",
        "check(answer)",
        "**Why.** 2 = 1 + 1.",
    ]


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("Twice one.", "Twice one.\n#\n# ## The next section"),
        ("2 = 1 + 1.", "2 = 1 + 1.\n#\n# ### Exercise 2 · treble"),
    ],
)
def test_a_heading_in_a_folded_cell_is_refused(tmp_path, find, replace):
    """It would be hidden with the hint or the solution, with everything after it."""
    source = lesson(tmp_path, EXERCISE.replace(find, replace))
    with pytest.raises(SystemExit, match=r"heading in a folded cell.*\n##"):
        build.student(source)


def test_only_the_colab_version_installs(tmp_path):
    """It installs from the address in pyproject.toml, and is the student's version otherwise."""
    source = lesson(tmp_path, EXERCISE)
    student, colab = build.student(source), build.colab(source)
    installing = colab.cells.pop(1)
    assert f"git+{build.address()}" in installing.source
    assert [cell.source for cell in colab.cells] == [cell.source for cell in student.cells]
    for notebook in (student, build.solved(source)):
        assert "pip install" not in nbformat.writes(notebook)


def test_students_see_the_outputs_of_cells_that_are_no_exercises(tmp_path, monkeypatch):
    """Before anything has run; not of checks, and not of cells that changed since."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    code = '# %%\nprint("mean 0.50")\n\n'
    text = EXERCISE.replace("# %%\ncheck(answer)", "# %%\nlesson.check_double(answer)")
    source = lesson(tmp_path, f"{code}{text}")
    stored(tmp_path, executed(source, "mean 0.50", "2", "right"))
    shown = [build.text_of(cell) for cell in build.with_outputs(source).cells]
    assert [text for text in shown if text] == ["mean 0.50"]
    changed = lesson(tmp_path, f"{code}{text}".replace("0.50", "0.60"))
    assert not any(build.text_of(cell) for cell in build.with_outputs(changed).cells)


def test_what_is_to_be_predicted_is_not_shown(tmp_path, monkeypatch):
    """The outputs after a prediction, up to the next heading."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    after = '# %%\nprint("so it was")\n\n# %% [markdown]\n# ## Next\n\n# %%\nprint("next")\n'
    text = EXERCISE.replace("# %%\ncheck(answer)", "# %%\nlesson.check_double(answer)")
    for kind, shown in (("prediction", ["next"]), ("code", ["so it was", "next"])):
        source = lesson(tmp_path, text.replace("importance", f"kind: {kind} · importance") + after)
        stored(tmp_path, executed(source, "2", "right", "so it was", "next"))
        found = [build.text_of(cell) for cell in build.with_outputs(source).cells]
        assert [text for text in found if text] == shown


def test_text_keeps_the_outputs_unless_code_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "BEGINNINGS", {"student": build.student})
    code = '# %%\nprint("mean 0.50")\n\n'
    old = lesson(tmp_path, f"{code}# %% [markdown]\n# Old.\n")
    stored(tmp_path, executed(old, "mean 0.50"))
    build.retext(lesson(tmp_path, f"{code}# %% [markdown]\n# New.\n"))
    kept = nbformat.read(tmp_path / "01_trial.ipynb", as_version=4)
    assert [build.text_of(cell) for cell in kept.cells] == ["", "mean 0.50", ""]
    assert kept.cells[2].source == "New."
    with pytest.raises(SystemExit, match="a code cell changed"):
        build.retext(lesson(tmp_path, code.replace("0.50", "0.60")))
