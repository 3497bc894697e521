"""Translated clips and KL weights: known shares and ratios of the grids, the rules, and the preset
that has the numbers.
"""

import pytest
import torch
import translation
from flowrl_testing.tiny import (
    tiny_flux_policy,
    tiny_qwen_image_policy,
    tiny_sd3_policy,
    tiny_wan_policy,
)
from translation import (
    CLIPPED,
    WAN_ELEMENTS,
    clipped,
    exact_clip,
    exact_kl_weight,
    flux_grid,
    qwen_grid,
    sd3_grid,
    steps_of,
)

from flowrl.samplers import CPS, FlowSDE
from flowrl.training.config import preset

FLOW, CPS_SD3, CPS_FLUX = (
    steps_of(FlowSDE(0.7), sd3_grid()),
    steps_of(CPS(0.7), sd3_grid()),
    steps_of(CPS(0.7), flux_grid()),
)
CPS_WAN = steps_of(CPS(0.7), sd3_grid(20))
CPS_QWEN = steps_of(CPS(0.7), qwen_grid())


def test_shares_and_ratios_of_the_published_grids():
    """Found by executing the released codes: where the gradient is, and how much larger the exact
    KL is.
    """
    assert CPS_SD3.shares(range(9))[8] == pytest.approx(0.9985, abs=5e-5)
    assert CPS_SD3.shares(range(9), released=True)[8] == pytest.approx(1e-4, abs=5e-5)
    assert [float(CPS_FLUX.shares(range(5), form)[4]) for form in (False, True)] == pytest.approx(
        [0.71, 0.10], abs=5e-3
    )
    assert FLOW.shares(range(10))[9] == pytest.approx(0.476, abs=5e-4)
    assert [1 / float(FLOW.delta[step]) for step in (0, 8)] == pytest.approx([25, 3.7], rel=0.01)
    assert 0.04 / exact_kl_weight(FLOW, 0.04, range(9), range(9), released=True) == pytest.approx(
        4.39, abs=5e-3
    )


def test_grids_are_those_of_the_families():
    """What a pipeline with these schedulers gives; FLUX's and Qwen-Image's depend on the number of
    image tokens.
    """
    flux, qwen = tiny_flux_policy(), tiny_qwen_image_policy()
    assert torch.equal(sd3_grid().times, tiny_sd3_policy().schedule(10).times)
    assert torch.equal(sd3_grid(20).times, tiny_wan_policy().schedule(20).times)
    assert torch.equal(qwen_grid(10, qwen.latent_shape[0]).times, qwen.schedule(10).times)
    assert torch.equal(flux_grid(6, flux.latent_shape[0]).times, flux.schedule(6).times)


def test_a_translated_clip_cuts_the_same_share():
    for steps, trained in ((CPS_SD3, range(8)), (CPS_FLUX, range(5)), (CPS_QWEN, range(8))):
        clip = exact_clip(steps, 1e-5, trained)
        change = translation.bisect(
            lambda u, s=steps, t=trained: sum(clipped(s, t, u, 1e-5, True)) / len(t), CLIPPED
        )
        assert sum(clipped(steps, trained, change, clip, False)) / len(trained) == pytest.approx(
            CLIPPED, abs=1e-6
        )
        assert exact_clip(steps, 1e-5, trained, 0.05) > clip > exact_clip(steps, 1e-5, trained, 0.5)


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
