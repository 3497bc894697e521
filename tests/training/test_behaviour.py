"""Copies of the weights: what they are after updates and iterations, when they are current, and
their checkpoints.
"""

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.forward import Decay, WeightCopy
from flowrl.training.behaviour import Behaviour
from flowrl.training.optim import weights_replaced
from flowrl.worlds.base import PolicyOptions, world


@pytest.fixture
def policy():
    return world("mixture").policy(PolicyOptions())


def made(policy, **declared):
    return Behaviour(WeightCopy(**declared), policy, policy.trainable())


def change(policy, by=0.5):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(by)


def values(tensors):
    return [float(tensor.flatten()[0]) for tensor in tensors]


def test_a_plain_copy_is_current_until_the_first_update(policy):
    copy = made(policy)
    assert copy.is_current
    before = [value.clone() for value in copy.values]
    change(policy)
    copy.after("update", 1)
    assert not copy.is_current and all(map(torch.equal, copy.values, before))
    copy.after("iteration", 1)
    assert copy.is_current and all(map(torch.equal, copy.values, copy.parameters))


@pytest.mark.parametrize("every", ["update", "iteration"])
def test_a_copy_follows_by_its_decay(policy, every):
    copy = made(policy, decay=Decay(1, 0.1, 0.3), every=every)
    start, expected = values(copy.values), values(copy.values)
    for steps in range(1, 7):
        change(policy)
        copy.after("update", steps)
        if steps % 2 == 0:
            copy.after("iteration", steps)
        if every == "update" or steps % 2 == 0:
            d = min(max(steps - 1, 0) * 0.1, 0.3)
            new = [value + 0.5 * steps for value in start]
            expected = [d * old + (1 - d) * one for old, one in zip(expected, new, strict=True)]
            assert copy.is_current == (d == 0)
        assert values(copy.values) == pytest.approx(expected, abs=1e-5)


def test_within_its_weights_the_policy_is_the_copy(policy):
    copy = made(policy, decay=Decay(0, 0.5, 0.5))
    prompts = world("mixture").prompts("direction", "train")[:2]
    latent, timestep, condition = (
        torch.randn(2, *policy.latent_shape),
        torch.full((2,), 500.0),
        policy.encode(prompts),
    )

    def velocity():
        with torch.no_grad():
            return policy.velocity(latent, timestep, condition)

    first = velocity()
    change(policy)
    copy.after("update", 1)
    changed = velocity()
    with copy.weights():
        assert torch.equal(velocity(), first)
    assert torch.equal(velocity(), changed) and not torch.equal(changed, first)
    with pytest.raises(RuntimeError), copy.weights():
        raise RuntimeError
    assert torch.equal(velocity(), changed)
    copy.after("iteration", 1)
    with weights_replaced(policy, copy.parameters, copy.values):
        halfway = velocity()
    with copy.weights():
        assert torch.equal(velocity(), halfway) and not torch.equal(halfway, first)


@pytest.mark.parametrize(
    ("begin", "expected"), [(None, [False] * 3), (0, [True] * 3), (200, [False, True, True])]
)
def test_when_a_copy_samples(policy, begin, expected):
    copy = made(policy, sample_from=begin)
    assert [copy.samples(steps) for steps in (199, 200, 201)] == expected


@pytest.mark.parametrize(
    "bad", [dict(start=-1), dict(rate=-0.1), dict(cap=1.0), dict(rate=float("inf"))]
)
def test_decays_out_of_range_are_named(bad):
    with pytest.raises(ConfigError, match=rf"Decay.{next(iter(bad))} = .* is not allowed"):
        Decay(**bad)
