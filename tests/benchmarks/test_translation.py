"""Translated clips and KL weights: known shares and ratios of the grids, the rules, and the preset
that has the numbers.
"""

import pytest
from translation import (
    WAN_ELEMENTS,
    exact_clip,
    exact_kl_weight,
    flux_grid,
    qwen_grid,
    sd3_grid,
    steps_of,
)

from flowrl.samplers import CPS, FlowSDE
from flowrl.training.config import preset

FLOW = steps_of(FlowSDE(0.7), sd3_grid())
GRIDS = sd3_grid(), flux_grid(), sd3_grid(20), qwen_grid()
CPS_SD3, CPS_FLUX, CPS_WAN, CPS_QWEN = (steps_of(CPS(0.7), grid) for grid in GRIDS)
FLOW_KL = {
    published: exact_kl_weight(FLOW, published, range(9), range(9), released=True)
    for published in (0.04, 0.01)
}


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        *[
            (f"sd3.5-medium,{method},{task}", "kl_weight", FLOW_KL[published])
            for task, published in (("ocr", 0.04), ("geneval", 0.04), ("pickscore", 0.01))
            for method in ("flow-grpo", "stepwise-flow-grpo")
        ],
        *[
            (f"{model},tp-grpo,ocr", "kl_weight", exact_kl_weight(steps, 1e-4, *ranges, False))
            for model, steps, ranges in (
                ("sd3.5-medium", CPS_SD3, (range(9), range(8))),
                ("qwen-image", CPS_QWEN, (range(9), range(8))),
                ("wan2.1-t2v-1.3b", CPS_WAN, (range(19), range(18))),
            )
        ],
        ("flux.1-dev,tp-grpo,ocr", "kl_weight", 1e-4),
        ("sd3.5-medium,tp-grpo,ocr", "clip_range", exact_clip(CPS_SD3, 1e-5, range(8))),
        ("flux.1-dev,tp-grpo,ocr", "clip_range", exact_clip(CPS_FLUX, 1e-5, range(5))),
        ("qwen-image,tp-grpo,ocr", "clip_range", exact_clip(CPS_QWEN, 1e-5, range(8))),
        (
            "wan2.1-t2v-1.3b,tp-grpo,ocr",
            "clip_range",
            exact_clip(CPS_WAN, 1e-5, range(18), elements=WAN_ELEMENTS),
        ),
    ],
)
def test_the_preset_has_these_numbers(name, setting, expected):
    """To two digits, as the script prints them."""
    assert preset(f"{name},exact").changes[setting] == float(f"{expected:.2g}")
