"""The lessons' figures of recorded runs: their numbers are those of the table of coverage."""

import matplotlib.pyplot as plt
import pytest
from flowrl_course import recorded

from flowrl.parts.coverage import coverage


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("final reward", lambda: recorded.measured("train-short", 1)),
        ("images: better,", lambda: recorded.measured("stepwise-updates", 0, "shapes")),
        ("ratio of updates", lambda: recorded.measured("tp-beats-uniform", 1)),
        ("without it", lambda: recorded.cosine("TurningPoint, no first step")),
    ],
)
def test_a_number_is_that_of_the_table(before, value):
    results = [row.result for paper in coverage().values() for row in paper.rows]
    assert any(f"{before} {value()}" in result for result in results)


def test_figures_have_a_line_per_arm_and_a_dot_per_setting():
    recorded.curves({"steps": ("train-short", "forwards")})
    assert [line.get_label() for line in plt.gca().get_lines()] == ["10 steps", "40 steps"]
    recorded.dots({"noise": ("tp-noise", "area")})
    assert [text.get_text() for text in plt.gca().get_yticklabels()][:2] == [
        "noise 0.7",
        "noise 0.4",
    ]
    assert len(plt.gca().get_lines()) == 10  # an interval and a dot each
    recorded.search("uniform")
    assert [cell.get_title() for cell in plt.gcf().get_axes()] == ["Search, 2-D", "Search, images"]
