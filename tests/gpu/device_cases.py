"""Trainers of small models on any device, for tests whose bodies run on the CPU and on a GPU."""

import torch
from family_cases import CASES as MODELS
from family_cases import REDNESS
from seeded import seeded
from small_run import trainer_of

from flowrl.core.types import Prompt
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import preset

PROMPTS = [Prompt(text) for text in ("three red circles", "a dog", "a small house")]
SMALL = dict(
    groups=2,
    group_size=3,
    num_steps=4,
    minibatches=2,
    micro_batch=5,
    learning_rate=1e-3,
    window=":-1",
)


def model_policy(name, device, **options):
    """The tiny pipeline `name` on `device`, with an adapter that is not zero."""
    policy = MODELS[name].policy(device=device, **options)
    generator = seeded(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(device))
    return policy


def model_trainer(
    name, device, dtype="float32", guidance_scale=1.0, options=(), reward=REDNESS, **changes
):
    """A trainer of the tiny pipeline `name`."""
    config = preset("tiny").apply(dtype=dtype, **{**SMALL, **changes})
    policy = model_policy(name, device, dtype=dtype, guidance_scale=guidance_scale, **dict(options))
    return build_trainer(config, policy, make_method(config), reward, PROMPTS)


def world_trainer(name, device, **changes):
    """A trainer of a built-in world."""
    return trainer_of(preset("tiny").apply(world=name, device=device, **{**SMALL, **changes}))


def any_trainer(name, device, **changes):
    """By the name of a model or a world."""
    return (model_trainer if name in MODELS else world_trainer)(name, device, **changes)


def flat(tensors):
    """All values in one vector, in main memory."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def assert_same(tensors, expected, device):
    """Equal on the CPU; on a GPU equal up to 5% of the norm, because some of its sums have no fixed
    order and Adam enlarges small gradients.
    """
    if device == "cpu":
        assert torch.equal(tensors, expected)
    else:
        assert (tensors - expected).norm() / expected.norm() < 0.05
