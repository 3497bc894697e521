"""What is particular to FLUX: packed latents, a distilled guidance, and a grid shifted by the number of tokens."""

from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.policies.flux import Flux
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.rollout import Usage, integrate
from flowrl.testing.tiny import TINY, tiny_flux, tiny_flux_policy
from flowrl.types import Prompt

DOG = [Prompt("a dog")]


def noise_of(policy, count=1):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def call(pipe, **settings):
    pipe.set_progress_bar_config(disable=True)
    return pipe("a dog", max_sequence_length=TINY.max_sequence_length, **settings)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("height", "width", "steps"), [(16, 16, 6), (64, 32, 28), (128, 128, 5)])
def test_the_grid_is_the_pipelines_own(dynamic, height, width, steps):
    pipe = tiny_flux()
    if not dynamic:  # FLUX.1-schnell
        pipe.scheduler = type(pipe.scheduler)(use_dynamic_shifting=False, shift=1.0)
    policy = PipelinePolicy(pipe, Flux(), replace(TINY, height=height, width=width))
    schedule = policy.schedule(steps)
    call(pipe, height=height, width=width, num_inference_steps=steps, output_type="latent")
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)


def test_larger_pictures_spend_more_steps_at_high_noise():
    grids = [tiny_flux_policy(replace(TINY, height=size, width=size)).schedule(10).times for size in (16, 256)]
    assert bool((grids[1][1:-1] > grids[0][1:-1]).all())


def test_latents_are_packed_as_the_pipeline_packs_them():
    policy = tiny_flux_policy(replace(TINY, height=32, width=16))
    pipe = policy.pipe
    assert policy.latent_shape == (32, 16)
    noise = noise_of(policy)
    plain = call(pipe, height=32, width=16, num_inference_steps=3, latents=noise, output_type="pt").images
    ours = policy.decode(integrate(policy, policy.schedule(3), policy.encode(DOG), noise, Usage()))
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"height = 18 .* a multiple of 4"):
        tiny_flux_policy(replace(TINY, height=18))


@pytest.mark.parametrize("scale", [1.0, 3.5, 7.0])
def test_the_distilled_guidance_is_told_to_the_network(scale):
    policy = PipelinePolicy(tiny_flux(), Flux(distilled_guidance=scale), TINY)
    noise = noise_of(policy)
    ours = integrate(policy, policy.schedule(3), policy.encode(DOG), noise, Usage())
    size = dict(height=16, width=16, num_inference_steps=3, latents=noise, output_type="latent")
    torch.testing.assert_close(ours, call(tiny_flux(), guidance_scale=scale, **size).images, atol=2e-6, rtol=0)
    other = call(tiny_flux(), guidance_scale=scale + 1, **size).images
    assert (ours - other).abs().max() > 1e-4


def test_models_without_distilled_guidance_are_not_told_any():
    velocities = []
    for scale in (1.0, 7.0):
        policy = PipelinePolicy(tiny_flux(distilled=False), Flux(distilled_guidance=scale), TINY)
        with torch.no_grad():
            velocities.append(policy.velocity(noise_of(policy), torch.tensor([500.0]), policy.encode(DOG)))
    assert torch.equal(*velocities)
    with pytest.raises(ConfigError, match="distilled_guidance = -1"):
        Flux(distilled_guidance=-1.0)
