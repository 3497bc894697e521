"""What lessons say about their measurements is in the stored outputs."""

import re

import nbformat
import pytest
from loading import ROOT

NUMBER = r"([-+]?\d+\.?\d*)"


def printed(lesson, line, count):
    """The first `count` numbers after `line` in each line of the stored outputs that has it."""
    (path,) = (ROOT / "tutorials").glob(f"{lesson}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    texts = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text" in output
    ]
    found = re.findall(re.escape(line) + r"(.*)", "\n".join(texts))
    assert found, f"lesson {lesson} does not print {line!r}"
    return [[float(number) for number in re.findall(NUMBER, rest)[:count]] for rest in found]


@pytest.mark.parametrize(
    ("lesson", "lines", "holds", "statement"),
    [
        (
            "10",
            ("\nV*  ", "\nODE completion  ", "\none-step estimate  "),
            lambda exact, ode, estimate: ode[0][1] > 2 * exact[0][1] > 2 * estimate[0][1] > 0,
            "from decision 1 on its reward varies nearly as much as final rewards do",
        ),
        (
            "12",
            ("  all, with the mean of the others: ",),
            lambda tables: all(tables[0][k] > tables[1][k] for k in (0, 2)),
            "only because it measures half of the advantage",
        ),
        (
            "12",
            tuple(
                f"clip 0.020  {name} reward after 15,000 forward passes: "
                for name in ("uniform ", "depth   ", "sibling ")
            ),
            lambda uniform, depth, sibling: sum(uniform[0]) < sum(depth[0]) < sum(sibling[0]),
            "the sibling rule has the highest mean of the three seeds",
        ),
        (
            "12",
            (
                "splits in two at decisions 2, 3, 4: 16 leaves, ",
                "splits in two at decisions 0, 3, 4: 16 leaves, ",
            ),
            lambda late, early: (late[0][0], early[0][0]) == (98, 102),
            "With a split at decision 0 instead of decision 2 the limit is exceeded",
        ),
        (
            "13",
            ("signal/noise on the same states, AWM over Flow-GRPO: ",),
            lambda ratio: 3.5 < ratio[0][0] < 4.5 and round(ratio[0][1]) == 16,
            "Flow-GRPO would need about 16 times as many",
        ),
        (
            "14",
            ("one pair, h without the common part: variance ",),
            lambda row: row[0] == [0.204, 0.258],
            "It is then below the shared one, 0.204 against 0.258.",
        ),
        (
            "15",
            (
                "mean value of the noise of 2,000 trajectories, 10 steps backwards: ",
                "their mean reward: ",
            ),
            lambda value, reward: abs(value[0][0] - reward[0][0]) < 3 * reward[0][1],
            "its mean over the noise of 2,000 trajectories with their mean reward",
        ),
        (
            "15",
            ("after 8 iterations, V* at node 3: states of the first group ",),
            lambda row: row[0][0] > 0.75 and row[0][2] < 0.35,
            "Far from the target the value is still low",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_stored_outputs_agree_with_the_text(lesson, lines, holds, statement):
    (source,) = (ROOT / "tutorials/source").glob(f"{lesson}_*.py")
    assert statement in source.read_text()
    assert holds(*(printed(lesson, line, 10) for line in lines))
