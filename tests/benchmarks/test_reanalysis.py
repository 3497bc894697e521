"""The published comparison agrees with an analysis that shares no code with it, and its inputs are
what the pages say.
"""

import re

import numpy as np
import pytest
import reanalysis
import reanalysis_verdict
import verdict_controls
from reanalysis_robustness import cheaper, sign_flip
from reanalysis_statistics import FORWARDS, Run

RESULTS, DOCS = reanalysis.ROOT / "benchmarks/results", reanalysis.ROOT / "docs"


def test_the_published_pages_agree_with_the_second_analysis():
    rows = reanalysis.all_rows(RESULTS / "claims.jsonl", DOCS)
    assert [row for row in rows if not row.agrees] == []
    places = {row.place for row in rows}
    assert {
        "lead-turning-points",
        "random-points",
        "stepwise-updates",
        "main comparison, 2-D world",
    } <= places


@pytest.mark.skipif(not reanalysis_verdict.PAGE.exists(), reason="the results are not there yet")
def test_the_main_comparison_agrees_with_the_second_analysis():
    rows = reanalysis_verdict.all_rows()
    assert [row.what for row in rows if not row.agrees] == []
    assert {"2-d world, questions", "2-d world, Task strict"} <= {row.place for row in rows}


def test_robustness():
    assert sign_flip(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)  # all signs equal
    assert sign_flip(np.array([1.0, -1.0])) == pytest.approx(1.0)
    curve = np.zeros((2, 10))
    curve[1, :3] = 1, 45.0 * 24, 5.0 * 24
    settings = {"iterations": 1, "groups": 2, "group_size": 12, "loss": "clipped"}
    run = Run(
        "mixture",
        (0, "direction"),
        {**settings, "kl_weight": 0.0, "gradient_checkpointing": False},
        curve,
        24.0,
    )
    assert cheaper(run).budgets(FORWARDS)[-1] == pytest.approx((45 - 16 + 3 * 5) * 24)
    # decoding and scoring count .54 forwards, one of two evaluations of the update has a gradient
    dearer = run._replace(
        world="shapes", settings={**run.settings, "kl_weight": 0.1, "gradient_checkpointing": True}
    )
    known = 45 + 4_511_744 / 8_396_800 + 5 * (4 + 1) / 2
    assert dearer.budgets(FORWARDS)[-1] == pytest.approx(known * 24)


def test_the_front_page_has_the_numbers_of_the_details() -> None:
    """Its leads, with or without signs."""
    lead = re.compile(r"[-+]?\d+\.\d \[[-+]?\d+\.\d, [-+]?\d+\.\d\]")
    shown, known = (
        {found.replace("+", "") for found in lead.findall((DOCS / name).read_text())}
        for name in ("verdict.md", "verdict/details.md")
    )
    assert len(shown) > 40 and shown <= known


def test_the_controls_on_the_front_page_are_those_that_the_command_prints(capsys) -> None:
    verdict_controls.main()
    printed = capsys.readouterr().out
    shown = re.findall(r"([\d.]+)% \(([\d.]+) to ([\d.]+)\)", (DOCS / "verdict.md").read_text())
    assert len(shown) == 5
    for lead, low, high in shown:
        assert f"+{lead} [+{low}, +{high}]" in printed
