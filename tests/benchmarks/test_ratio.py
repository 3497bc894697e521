"""The shares and clips on the page "Reading the ratio" are what the library's samplers, grids and
losses give.
"""

import json

import pytest
import ratio
from ratio_report import report

RECORD = json.loads(ratio.RESULTS.read_text())


def test_the_committed_shares_and_clips_are_the_present_ones():
    shares = ratio.all_shares()
    assert shares.keys() == RECORD["shares"].keys()
    for grid, values in shares.items():
        assert values["times"] == pytest.approx(RECORD["shares"][grid]["times"], abs=1e-6)
        for name, columns in values["samplers"].items():
            for form, numbers in columns.items():
                assert numbers == pytest.approx(
                    RECORD["shares"][grid]["samplers"][name][form], rel=1e-4, abs=1e-9
                )
    assert ratio.clips() == RECORD["clips"]
    assert ratio.RESULTS.with_suffix(".md").read_text() == report(RECORD)
