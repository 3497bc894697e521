"""Attention backends: images and gradients are the same up to rounding, and a name that cannot be
used is refused with those that can.
"""

import pytest
import torch
from device_cases import PROMPTS, flat, model_policy
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.core.errors import ConfigError
from flowrl.policies import pipeline
from flowrl.rollout import initial_noise, sample_images


class Kernels(TorchDispatchMode):
    """The names of the attention kernels that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.__name__ and "backward" not in func.__name__:
            self.seen.add(func.__name__.removeprefix("_scaled_dot_product_").partition(".")[0])
        return func(*args, **(kwargs or {}))


def images_and_gradient(policy, device):
    """Sampled images, a gradient of the trained weights, and the kernels of both."""
    noise = initial_noise(policy, len(PROMPTS))
    images = torch.cat([batch.images for batch in sample_images(policy, PROMPTS, noise, 2)])
    timestep = policy.schedule(2).network_timesteps[0].expand(len(noise))
    given = noise.to(device), timestep, policy.encode(PROMPTS)
    with Kernels() as kernels:
        policy.velocity(*given).square().mean().backward()
    gradients = flat(p.grad for p in policy.trainable().values() if p.grad is not None)
    return images, gradients, kernels.seen


OPTIONS = [{}, {"gradient_checkpointing": True}, {"tuning": "full"}]
COMPILED = {"compile": True}


@pytest.mark.parametrize("backend", ["native", "_native_math"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, more) for name in ("sd3", "flux") for more in OPTIONS),
        *(pytest.param(name, COMPILED, marks=pytest.mark.slow) for name in ("sd3", "flux")),
        ("qwen-image", {}),
        ("wan", {}),
    ],
    ids=str,
)
def test_images_and_gradients_agree_within_rounding(name, backend, options, device, monkeypatch):
    monkeypatch.setattr(pipeline, "COMPILER", "aot_eager")
    plain, plain_gradient, _ = images_and_gradient(model_policy(name, device, **options), device)
    images, gradient, kernels = images_and_gradient(
        model_policy(name, device, attention_backend=backend, **options), device
    )
    torch.testing.assert_close(images, plain, atol=1e-4, rtol=0)
    assert (gradient - plain_gradient).norm() / plain_gradient.norm() < 1e-3
    # the other kernels are products of matrices
    if device == "cpu" and name in ("sd3", "flux") and not options.get("compile"):
        assert any("flash" in kernel for kernel in kernels) == (backend == "native"), kernels


@pytest.mark.parametrize("backend", ["fastest", "flash", "sage", "flash_hub", "_native_cudnn"])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_what_cannot_be_used_is_refused_with_the_names_that_can(name, backend):
    words = rf"attention_backend = '{backend}' .*native, .*_native_math.* on cpu in torch.float32"
    with pytest.raises(ConfigError, match=words):
        model_policy(name, "cpu", attention_backend=backend)


def test_the_backend_of_one_policy_is_not_that_of_others():
    before = _AttentionBackendRegistry._active_backend
    model_policy("flux", "cpu", attention_backend="_native_math")
    assert _AttentionBackendRegistry._active_backend == before
