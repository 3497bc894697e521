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


def test_a_share_is_that_of_the_loss_itself():
    """A batch of one pair per step, whose noise has the same length: shares of the library's
    gradients.
    """
    import torch

    from flowrl.core.types import Gaussian, LossBatch
    from flowrl.losses import ClippedLoss, GRPOGuard
    from flowrl.rollout.metrics import step_gradients
    from flowrl.samplers import CPS

    schedule, sampler, step = ratio.grids()["SD3, 10 steps"], CPS(0.7), torch.arange(10)
    for form, loss in (
        ("exact", ClippedLoss()),
        ("released", ClippedLoss(log_prob="released_cps")),
        ("guard", GRPOGuard()),
    ):
        velocity = torch.zeros(10, 64, requires_grad=True)
        new = sampler.transition(torch.zeros(10, 64), velocity, schedule, step)
        old = Gaussian(new.mean.detach(), new.std)
        taken = old.mean + old.std[:, None]
        weight, ones = (new.std > 0).float(), torch.ones(10)
        batch = LossBatch(
            new,
            old,
            taken,
            ones,
            weight,
            schedule.deltas,
            step,
            step,
            step,
            schedule.times[:-1],
            velocity=velocity,
        )
        gradients = step_gradients(loss.loss(batch), batch, step, 10)
        assert (gradients / gradients.sum()).tolist() == pytest.approx(
            ratio.shares(sampler, schedule, form), rel=1e-4
        )
