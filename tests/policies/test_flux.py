"""What is particular to FLUX: a distilled guidance, and a grid that is shifted by the number of
tokens, or not.
"""

from dataclasses import replace

import pytest
import torch
from family_cases import CASES, draw, noise_of, velocity

from flowrl.core.errors import ConfigError
from flowrl.policies import Flux
from flowrl.testing.tiny import tiny_flux

FLUX = CASES["flux"]


def test_the_grid_of_flux_schnell_is_the_pipelines_own():
    pipe = tiny_flux()
    pipe.scheduler = type(pipe.scheduler)(use_dynamic_shifting=False, shift=1.0)
    policy = FLUX.policy(pipe, height=64, width=32)
    schedule = policy.schedule(28)
    FLUX.picture(pipe, noise_of(policy), steps=28, height=64, width=32)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_the_distilled_guidance_is_told_to_the_network(scale):
    policy = replace(FLUX, family=Flux(distilled_guidance=scale)).policy()
    near, other = (
        FLUX.picture(tiny_flux(), noise_of(policy), guidance_scale=value)
        for value in (scale, scale + 1)
    )
    torch.testing.assert_close(draw(policy), near, atol=2e-6, rtol=0)
    assert (draw(policy) - other).abs().max() > 1e-4


def test_models_without_distilled_guidance_are_not_told_any():
    families = [replace(FLUX, family=Flux(distilled_guidance=scale)) for scale in (1.0, 7.0)]
    assert torch.equal(
        *(velocity(family.policy(tiny_flux(distilled=False))) for family in families)
    )
    with pytest.raises(ConfigError, match="distilled_guidance = -1"):
        Flux(distilled_guidance=-1.0)
